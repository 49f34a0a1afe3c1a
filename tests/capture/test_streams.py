"""Work on several streams, on a device that finds what is not ordered; and that the device does find it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulated_device
import torch
from capture_scenarios import Side, assert_equal, give, make
from simulated_device import Fault, SimulatedDevice, Stream
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    with simulated_device.simulated_device(monkeypatch) as device:
        yield device


class TestDevice:
    """Each kind of fault is found where somebody makes it, and only there."""

    @pytest.mark.parametrize("waits", [False, True])
    def test_reading_what_another_stream_writes(self, waits: bool, device: SimulatedDevice) -> None:
        x, stream = torch.ones(3), Stream(CPU)
        x.add_(1)
        if waits:
            stream.wait_stream(device.current_stream(x.device))
        with device.stream(stream):
            self.expect(lambda: x * 2, None if waits else "reads what another stream writes")

    @pytest.mark.parametrize("waits", [False, True])
    def test_writing_what_another_stream_reads(self, waits: bool, device: SimulatedDevice) -> None:
        main, stream = device.current_stream(CPU), Stream(CPU)
        x = torch.ones(3)
        stream.wait_stream(main)
        with device.stream(stream):
            x * 2
        if waits:
            main.wait_stream(stream)
        self.expect(lambda: x.add_(1), None if waits else "writes what another stream uses")

    def test_waiting_passes_on_what_was_waited_for(self, device: SimulatedDevice) -> None:
        x, first, second = torch.ones(3), Stream(CPU), Stream(CPU)
        first.wait_stream(device.current_stream(x.device))
        second.wait_stream(first)
        with device.stream(second):
            x.add_(1)

    @pytest.mark.parametrize("waits", ["", "stream", "host"])
    def test_memory_that_is_freed_while_another_stream_reads_it(self, waits: str, device: SimulatedDevice) -> None:
        main, stream = device.current_stream(CPU), Stream(CPU)
        x = torch.ones(3)
        stream.wait_stream(main)
        with device.stream(stream):
            x * 2
        del x
        if waits == "stream":
            main.wait_stream(stream)
        elif waits == "host":
            device.synchronize()
        self.expect(lambda: torch.ones(3), None if waits else "is given memory that another stream uses")

    def test_a_kernel_that_reads_an_address_of_freed_memory(self, device: SimulatedDevice) -> None:
        ours = stepped()
        state = next(iter(ours.optimizer.state.values()))
        state["exp_avg"].data = state["exp_avg"].clone()  # behind the table's back
        (lowering,) = engine_of(ours.optimizer).step.lowerings
        self.expect(lowering.launch, "uses memory that was freed")

    def test_work_on_another_device_than_its_memory(self, device: SimulatedDevice) -> None:
        ours = stepped()
        (lowering,) = engine_of(ours.optimizer).step.lowerings
        (table,) = lowering.tables

        def launch() -> None:
            table.kernel.step(table, lowering.coefficients.table)

        with device.device(0):
            self.expect(launch, "work on device 0 with memory of device 1")
        with device.device(CPU):
            launch()

    @pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize()])
    def test_a_host_that_waits_in_a_capture(self, wait: Callable[[Tensor], Any], device: SimulatedDevice) -> None:
        x = torch.ones(3)

        def capture() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=Stream(CPU)):
                wait(x)

        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            capture()

    @pytest.mark.parametrize("waits", [False, True])
    def test_a_graph_that_is_freed_while_it_runs(self, waits: bool, device: SimulatedDevice) -> None:
        x, graph = torch.ones(3), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=Stream(CPU)):
            x.add_(1)
        graph.replay()
        if waits:
            torch.cuda.synchronize()
        self.expect(graph.reset, None if waits else "freed while a replay of it may be running")

    def test_a_replay_is_work_of_the_stream_that_is_current(self, device: SimulatedDevice) -> None:
        x, graph = torch.ones(3), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=Stream(CPU)):
            x.add_(1)
        stream = Stream(CPU)
        stream.wait_stream(device.current_stream(CPU))
        with device.stream(stream):
            graph.replay()
        self.expect(lambda: x * 2, "reads what another stream writes")

    def expect(self, work: Callable[[], Any], fault: str | None) -> None:
        if fault is None:
            work()
        else:
            with pytest.raises(Fault, match=fault):
                work()


def stepped() -> Side:
    ours = make(groups=1)
    give(ours, 0)
    ours.optimizer.step()
    return ours


def train(side: Side, x: Tensor) -> Tensor:
    side.optimizer.zero_grad()
    loss = side.model(x).square().mean()
    loss.backward()
    side.optimizer.step()
    return loss


class Training:
    """A model that is trained in many ways by turns, a twin that is trained in one, and one with graphs captured by hand."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ours, self.twin, self.by_hand = self.sides = [make(max_grad_norm=0.5) for _ in range(3)]
        self.graphs: list[tuple[torch.cuda.CUDAGraph, list[Tensor | None]]] = []
        self.calls = 0
        self.runners: list[co.CUDAGraphRunner] = []
        self.renew()

    def renew(self) -> None:
        """New runners; the old ones are released."""
        optimizer = self.ours.optimizer
        for runner in self.runners:
            runner.release()
        self.step = co.CUDAGraphRunner(optimizer, warmup=1, recaptures=1000)
        self.whole = co.CUDAGraphRunner(
            functools.partial(train, self.ours), optimizer, warmup=1, recaptures=1000, modules=self.ours.model
        )
        self.runners = [self.step, self.whole]

    def steps(self) -> None:
        for side in (self.ours, self.twin):
            give(side, self.calls, absent=3)
        self.step.step()
        self.twin.optimizer.step()

    def uncaptured(self) -> None:
        for side in (self.ours, self.twin):
            train(side, self.batch())

    def trains(self) -> None:
        self.whole(self.batch())
        train(self.twin, self.batch())

    def captures(self) -> None:
        optimizer, graph = self.by_hand.optimizer, torch.cuda.CUDAGraph()
        give(self.by_hand, self.calls)
        optimizer.step()
        with torch.cuda.graph(graph, stream=Stream(CPU)):
            optimizer.step()
        self.graphs.append((graph, [p.grad for p in self.by_hand.params]))

    def replays(self) -> None:
        if self.graphs:
            self.random.choice(self.graphs)[0].replay()

    def batch(self) -> Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(self.calls))

    def assigns(self) -> None:
        value = self.random.uniform(0.01, 0.2)
        for side in self.sides:
            side.optimizer.param_groups[0]["lr"] = value
            side.optimizer.param_groups[1]["betas"] = (0.5, 1 - value)

    def clips(self) -> None:
        value = self.random.choice([None, 0.3, 0.5])
        for side in self.sides:
            side.optimizer.max_grad_norm = value

    def rebuilds(self) -> None:
        for side in self.sides:
            extra = nn.Parameter(torch.full((3, 2), 0.5))
            side.optimizer.add_param_group({"params": [(f"extra{self.calls}", extra)]})

    WAYS = (*[steps, trains] * 3, *[captures, replays] * 2, uncaptured, assigns, clips, rebuilds, renew)


@pytest.mark.filterwarnings("ignore:.* captured in a CUDA graph:RuntimeWarning")
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_done_on_whatever_stream_is_ordered(seed: int, device: SimulatedDevice) -> None:
    """If every piece waits for the one before, as it must with any optimizer."""
    training = Training(seed)
    streams = [device.current_stream(CPU), Stream(CPU), Stream(CPU)]
    before = streams[0]
    for _ in range(60):
        training.calls += 1
        stream = training.random.choice(streams)
        stream.wait_stream(before)
        before = stream
        with device.stream(stream):
            training.random.choice(Training.WAYS)(training)
            assert_equal(training.ours, training.twin, training.calls)
    training.renew()
    assert co.compile_report(training.ours.optimizer).replays > 5


def test_a_runner_works_on_the_stream_that_it_is_given(device: SimulatedDevice) -> None:
    """And orders it with the current one, on which it replays."""
    ours, stream, seen = make(), Stream(CPU), []

    def function(x: Tensor) -> Tensor:
        seen.append(device.current_stream(CPU))
        return train(ours, x).detach()

    x = torch.ones(4, 5)
    with co.CUDAGraphRunner(function, ours.optimizer, 2, modules=ours.model, stream=stream) as runner:
        for _ in range(4):
            assert runner(x).isfinite()
    assert seen == [stream] * 3


def test_a_warm_up_that_does_not_wait_would_be_found(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(0)
    monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: None)
    with pytest.raises(Fault):
        training.trains()
    monkeypatch.undo()
