"""The same promises on a GPU, with real CUDA graphs. Skipped where there is none.

``pytest tests/capture/test_cuda.py --cuda-on-cpu`` tries the tests themselves, without a GPU: see ``cuda_on_cpu``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_scenarios import (
    IN_16_BITS,
    KINDS,
    LOW_PRECISION,
    SCENARIOS,
    Scenario,
    Side,
    assert_equal,
    every_hyperparameter,
    give,
    kind_name,
    make,
    make_tables,
    overflow,
    recaptures_of,
    train_by_closure,
    unchanged,
)
from catalog import cases, copies, high_precision, relative_error, stacked_cases, wide_scalars
from cuda_device import DEVICE, capturing, in_new_process, needs_cuda, no_host_waits
from default_device import WITHOUT
from new_process import ROOT
from simulated_graph import install
from stored_cases import CASES, MINIMUM
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import compiled_optim as co
from compiled_optim.lowering.kernels import symmetric
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import storage

pytestmark = needs_cuda()

STEPS = 24


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """One order of every sum, so that equal steps are equal bit for bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if DEVICE == "cpu":
        install(monkeypatch)


def batch(i: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 + i), device="cpu").to(DEVICE)


def train(side: Side, x: Tensor) -> Tensor:
    side.optimizer.zero_grad()
    loss = side.model(x.to(side.model.outer.weight.dtype)).square().mean()
    loss.backward()
    side.optimizer.step()
    return loss


def pair(**kwargs: Any) -> tuple[Side, Side]:
    return make(device=DEVICE, **kwargs), make(device=DEVICE, **kwargs)


def run_steps(scenario: Scenario, steps: int, absent: int = 0, **kwargs: Any) -> co.CompileReport:
    ours, twin = pair(**kwargs)
    with co.CUDAGraphRunner(ours.optimizer) as runner:
        for i in range(steps):
            for side in (ours, twin):
                scenario(side, i)
                give(side, i, absent=absent)
            runner.step()
            twin.optimizer.step()
            assert_equal(ours, twin, i)
    return co.compile_report(ours.optimizer)


def run_training(scenario: Scenario, steps: int, function: Callable[..., Tensor] = train, **kwargs: Any) -> co.CompileReport:
    ours, twin = pair(**kwargs)
    step = functools.partial(function, ours)
    with co.CUDAGraphRunner(step, optimizers=ours.optimizer, modules=ours.model) as runner:
        for i in range(steps):
            for side in (ours, twin):
                scenario(side, i)
            loss, expected = runner(batch(i)), function(twin, batch(i))
            assert torch.equal(loss.nan_to_num(), expected.nan_to_num()), i
            assert_equal(ours, twin, i)
    assert engine_of(ours.optimizer).steps == engine_of(twin.optimizer).steps
    return co.compile_report(ours.optimizer)


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_step_equals_uncaptured(scenario: Scenario, kind: dict[str, Any]) -> None:
    report = run_steps(scenario, STEPS, absent=3, **kind)
    assert report.recaptures <= max(recaptures_of(scenario, kind), 1)
    assert report.replays >= STEPS - 3 - 2 * report.recaptures


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_training_step_equals_uncaptured(scenario: Scenario, kind: dict[str, Any]) -> None:
    report = run_training(scenario, STEPS, **kind)
    assert report.recaptures <= max(recaptures_of(scenario, kind), 2)
    assert report.replays >= STEPS - 3 - 2 * report.recaptures


@pytest.mark.parametrize("kind", LOW_PRECISION, ids=kind_name)
@pytest.mark.parametrize("scenario", IN_16_BITS, ids=lambda s: s.__name__)
def test_low_precision_equals_uncaptured(scenario: Scenario, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MINIMUM", 1)
    report = run_steps(scenario, STEPS, absent=3, **kind)
    assert report.replays >= STEPS - 3 - 2 * report.recaptures


@pytest.mark.parametrize("case", cases("dense"), ids=str)
def test_two_hundred_steps_of_every_optimizer(case: Any) -> None:
    assert run_steps(unchanged, 200, absent=5, optimizer=case.optimizer, **case.kwargs).replays == 197


@pytest.mark.parametrize("kind", KINDS[1:], ids=kind_name)
def test_two_hundred_steps_of_stacks(kind: dict[str, Any]) -> None:
    assert run_steps(unchanged, 200, absent=5, **kind).replays == 197


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("controls", [{}, {"max_grad_norm": 0.5}, {"skip_nonfinite": True}], ids=str)
def test_sparse_gradients(controls: dict[str, Any], alone: bool) -> None:
    """Rows that occur twice are added up in one order, so that equal steps are equal bit for bit."""
    ours, twin = make_tables(DEVICE, **controls), make_tables(DEVICE, **controls)

    def backward(side: Side, index: Tensor) -> None:
        side.optimizer.zero_grad()
        side.model(index).backward()

    def whole(index: Tensor) -> None:
        backward(ours, index)
        ours.optimizer.step()

    runner = co.CUDAGraphRunner(ours.optimizer) if alone else co.CUDAGraphRunner(whole, optimizers=ours.optimizer)
    for i in range(STEPS):
        index = torch.randint(0, 1000, (6,), generator=torch.Generator().manual_seed(i), device="cpu").to(DEVICE)
        for side in (ours, twin):
            side.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        if alone:
            backward(ours, index)
            runner.step()
        else:
            runner(index)
        backward(twin, index)
        twin.optimizer.step()
        assert_equal(ours, twin, i)
    assert co.compile_report(ours.optimizer).replays == STEPS - 3


def test_lbfgs_of_fixed_iterations() -> None:
    options = {"groups": 1, "lr": 0.1, "max_iter": 3, "history_size": 4, "fixed_iterations": True}
    report = run_training(every_hyperparameter, STEPS, train_by_closure, optimizer=co.LBFGS, **options)
    assert report.replays == STEPS - 3
    assert report.recaptures == 0


def test_two_hundred_training_steps_while_everything_moves() -> None:
    report = run_training(every_hyperparameter, 200, max_grad_norm=0.1, weight_decay=0.3, skip_nonfinite=True)
    assert report.replays == 197
    assert report.recaptures == 0


def test_capture_does_nothing_to_the_training() -> None:
    """The first replay is the first thing that happens after the warm-up."""
    ours, twin = pair()
    runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=1)
    for i in range(3):
        runner(batch(i))
        train(twin, batch(i))
        assert_equal(ours, twin, i)


def fail_to_capture() -> None:
    ours, twin = pair()
    fail = []

    def function(x: Tensor) -> Tensor:
        loss = train(ours, x)
        if fail:
            loss.item()
        return loss

    runner = co.CUDAGraphRunner(function, optimizers=ours.optimizer, warmup=1)
    for i in range(6):
        if i == 1:
            fail.append(1)
            with pytest.raises(RuntimeError):
                runner(batch(i))
            fail.clear()
        assert torch.equal(runner(batch(i)), train(twin, batch(i)))
        assert_equal(ours, twin, i)
    assert co.compile_report(ours.optimizer).replays == 4
    x, graph = batch(0), torch.cuda.CUDAGraph()
    with capturing(graph):
        doubled = x * 2
    graph.replay()
    assert torch.equal(doubled, x + x)


def test_a_failed_capture_leaves_nothing_to_replay() -> None:
    in_new_process(fail_to_capture)


def test_gradient_scaler_inside_the_graph() -> None:
    def scaled(side: Side, x: Tensor) -> Tensor:
        scaler = side.kept.setdefault("scaler", torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=3))
        side.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = side.model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(side.optimizer)
        scaler.update()
        return loss

    report = run_training(overflow, STEPS, scaled, max_grad_norm=0.5)
    assert report.recaptures == 0


def test_no_step_waits_for_the_device() -> None:
    ours = make(device=DEVICE, max_grad_norm=0.5, skip_nonfinite=True)
    runner = co.CUDAGraphRunner(ours.optimizer)
    whole = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer)
    x = batch(0)
    for i in range(6):
        give(ours, i)
        runner.step()
        whole(x)
    give(ours, 7)
    with no_host_waits():
        for i in range(4):
            ours.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            runner.step()
            whole(x)


def test_no_scheduler_waits_for_the_device() -> None:
    """One that assigns every beta anew."""
    ours, twin = pair()
    cycles = [OneCycleLR(side.optimizer, 0.1, total_steps=100, cycle_momentum=True) for side in (ours, twin)]
    runner = co.CUDAGraphRunner(ours.optimizer)

    def steps(count: int) -> None:
        for _ in range(count):
            runner.step()
            twin.optimizer.step()
            for cycle in cycles:
                cycle.step()

    for side in (ours, twin):
        give(side, 0)
    steps(6)
    with no_host_waits():
        steps(4)
    assert_equal(ours, twin, 10)
    assert co.compile_report(ours.optimizer).replays == 7


def test_replays_allocate_nothing() -> None:
    ours = make(device=DEVICE, max_grad_norm=0.5)
    runner = co.CUDAGraphRunner(ours.optimizer)
    grads = []
    for i in range(8):
        give(ours, i)
        grads.append([p.grad for p in ours.params])
        runner.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for held in grads:
        for p, grad in zip(ours.params, held, strict=True):
            p.grad = grad
        runner.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_graph_captured_by_hand() -> None:
    ours, twin = pair()
    for side in (ours, twin):
        give(side, 0)
        side.optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        ours.optimizer.step()
    grads = [p.grad for p in ours.params]
    for i in range(1, 10):
        for side in (ours, twin):
            if i % 2:
                side.optimizer.hyperparameter("lr").fill_(0.1 / i)
            else:
                side.optimizer.param_groups[0].update(lr=0.1 / i, betas=(0.5, 0.9))
            for p, grad in zip(side.params, grads, strict=True):
                p.grad = grad
        graph.replay()
        twin.optimizer.step()
        assert_equal(ours, twin, i)
        if i % 3 == 0:
            for side in (ours, twin):
                give(side, i)
                side.optimizer.step()


def test_a_capture_by_hand_after_an_assignment() -> None:
    """The number did not wait for the capture, whose replays would write it again."""
    ours, twin = pair()
    for side in (ours, twin):
        give(side, 0)
        side.optimizer.step()
        side.optimizer.param_groups[0]["lr"] = 0.5
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        ours.optimizer.step()
    for i in range(4):
        for side in (ours, twin):
            if i == 2:
                side.optimizer.param_groups[0]["lr"] = 0.25
        graph.replay()
        twin.optimizer.step()
        assert_equal(ours, twin, i)


def replay_after_a_group_was_added() -> None:
    """What the graph reads must not be given to others when the optimizer makes its tables anew."""
    ours, twin = pair(max_grad_norm=0.5)
    for side in (ours, twin):
        give(side, 0)
        side.optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        ours.optimizer.step()
    captured = [(p, p.grad, expected) for p, expected in zip(ours.params, twin.params, strict=True)]
    extra = nn.Parameter(torch.ones(3, 2, device=DEVICE))
    ours.optimizer.add_param_group({"params": [("extra", extra)]})
    give(ours, 1)
    extra.grad = None
    for p, expected in zip(ours.params, twin.params, strict=False):
        expected.grad = p.grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for side in (ours, twin):
            side.optimizer.step()
    others = [torch.full((count,), -1, dtype=torch.int64, device=DEVICE) for count in range(1, 1000)]
    for i in range(4):
        for _, grad, expected in captured:
            expected.grad = None if grad is None else grad.fill_(0.1 * i + 0.1)
        graph.replay()
        twin.optimizer.step()
        for p, _, expected in captured:
            assert torch.equal(p, expected), i
    assert all((x == -1).all() for x in others)


def test_a_graph_captured_by_hand_outlives_the_tables_of_its_step() -> None:
    in_new_process(replay_after_a_group_was_added)


def capture_while_a_loss_is_kept() -> None:
    ours, twin = pair()
    kept = train(ours, batch(0))
    runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=1)

    def calls() -> None:
        for i in range(3):
            runner(batch(i))

    with pytest.raises(RuntimeError, match="detach") as error:
        calls()
    assert "before you keep it" in str(error.value)
    assert any(f"'{name}'" in str(error.value) for name, _ in ours.model.named_parameters())
    del kept, error
    twin.model.load_state_dict(ours.model.state_dict())
    twin.optimizer.load_state_dict(ours.optimizer.state_dict())
    for i in range(4):
        assert torch.equal(runner(batch(i)), train(twin, batch(i)))
        assert_equal(ours, twin, i)
    assert co.compile_report(ours.optimizer).replays >= 2


def test_a_loss_that_is_kept_from_an_uncaptured_step_is_named() -> None:
    """Its autograd graph has nodes that belong to the stream of that step."""
    in_new_process(capture_while_a_loss_is_kept)


@pytest.mark.parametrize("way", ["uncaptured", "step", "training step"])
def test_steps_on_two_streams(way: str) -> None:
    """Each waits for the one before, as the steps of any optimizer must."""
    ours, twin = pair(max_grad_norm=0.5)
    whole = way == "training step"
    step: Callable[..., Any] = ours.optimizer.step
    if whole:
        step = co.CUDAGraphRunner(functools.partial(train, ours), ours.optimizer)
    elif way == "step":
        step = co.CUDAGraphRunner(ours.optimizer).step
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    main = torch.cuda.current_stream()
    for i in range(STEPS):
        for side in (ours, twin):
            side.optimizer.hyperparameter("lr").fill_(0.1 / (i + 1))
            give(side, i, absent=0 if whole else 3)
        stream = streams[i % 2]
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            step(batch(i)) if whole else step()
        main.wait_stream(stream)
        train(twin, batch(i)) if whole else twin.optimizer.step()
        assert_equal(ours, twin, i)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [*KINDS, {"optimizer": co.AdamW, "lowering": "inductor"}], ids=str)
def test_an_optimizer_on_each_of_two_devices(kind: dict[str, Any], first: int, fresh_kernels: None) -> None:
    """Kernels that were compiled for one run on the other, whichever is current."""
    sides = [make(device=f"cuda:{index}", **kind) for index in (first, 1 - first)]
    for i in range(4):
        for side in sides:
            give(side, i)
            side.optimizer.step()
        for a, b in zip(*(side.tensors() for side in sides), strict=True):
            torch.testing.assert_close(a.cpu(), b.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_muon_on_each_of_two_devices_is_the_one_of_the_cpu() -> None:
    sides = [make(device=device, optimizer=co.Muon) for device in ("cuda:0", "cuda:1", "cpu")]
    start = [t.clone() for t in sides[-1].tensors()]
    for i in range(4):
        for side in sides:
            give(side, i)
            side.optimizer.step()
    expected = sides[-1].tensors()
    for side in sides[:-1]:
        for ours, theirs, begin in zip(side.tensors(), expected, start, strict=True):
            assert (ours.cpu() - theirs).norm() <= 0.05 * (theirs - begin).norm() + 1e-6  # products in bfloat16


def test_first_step_in_a_graph_captured_by_hand_is_refused() -> None:
    ours = make(device=DEVICE)
    give(ours, 0)

    def capture() -> None:
        with capturing(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=DEVICE)  # an empty capture ends with a warning
            ours.optimizer.step()

    with pytest.raises(RuntimeError, match="take one step before capturing"):
        capture()
    ours.optimizer.step()


def test_step_beside_make_graphed_callables() -> None:
    """Forward and backward replayed by torch, which leaves gradients in its own memory; the step follows them."""
    ours, twin = pair()
    for side in (ours, twin):
        side.optimizer.zero_grad()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(ours.model), (batch(0),), allow_unused_input=True)
    optimizer = co.AdamW(graphed.named_parameters(), lr=0.01)
    expected = co.AdamW(twin.model.named_parameters(), lr=0.01)
    for i in range(8):
        for model, steps in ((graphed, optimizer), (twin.model, expected)):
            steps.zero_grad()
            model(batch(i)).square().mean().backward()
            steps.step()
        for a, b in zip(graphed.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores .* not enabled:UserWarning")
@WITHOUT  # where there is one, Dynamo traces no backward
def test_reduce_overhead_holds_the_step_in_its_one_graph() -> None:
    from torch._dynamo.utils import counters

    ours, twin = pair()
    counters["inductor"].clear()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return train(ours, x).detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for i in range(12):
            for side in (ours, twin):
                side.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(batch(i)).clone(), train(twin, batch(i)), rtol=1e-4, atol=1e-5)
    assert all(s["step"] == 12 for s in ours.optimizer.state.values() if s["step"] > 0)
    assert DEVICE == "cpu" or counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores .* not enabled:UserWarning")
@pytest.mark.parametrize("change", ["a group is added", "a parameter moves", "clipping", "a state tensor", "a step outside"])
@WITHOUT
def test_reduce_overhead_follows_changes(change: str) -> None:
    torch._dynamo.reset()  # its limit is for all cases together
    ours, twin = pair()
    compiled = torch.compile(lambda x: train(ours, x).detach(), mode="reduce-overhead", fullgraph=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for i in range(14):
            for side in (ours, twin) if i in (5, 9) else ():
                optimizer = side.optimizer
                param = optimizer.param_groups[0]["params"][0]
                if change == "a group is added":
                    optimizer.add_param_group({"params": [(f"late{i}", nn.Parameter(torch.ones(2, device=DEVICE)))]})
                elif change == "a parameter moves":
                    param.data = param.data.clone()
                elif change == "clipping":
                    optimizer.max_grad_norm = 0.01 * i if i == 5 else None
                elif change == "a state tensor":
                    optimizer.state[param]["exp_avg"] = torch.full_like(param, 0.1)
                else:
                    train(side, batch(i))
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(batch(i)).clone(), train(twin, batch(i)), rtol=1e-4, atol=1e-5)


def _deep() -> Side:
    """Linear layers whose weight gradients are sums of so many products that cuBLAS splits them, in memory of its own."""
    torch.manual_seed(1)
    width = 256 if DEVICE == "cuda" else 8
    layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
    return Side(model, co.AdamW(model.named_parameters(), lr=1e-3))


def _train_deep(side: Side, x: Tensor) -> Tensor:
    side.optimizer.zero_grad()
    loss = side.model(x).float().square().mean()
    loss.backward()
    side.optimizer.step()
    return loss


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores .* not enabled:UserWarning")
@pytest.mark.parametrize("by", ["torch.compile", "hand"])
def test_a_graph_of_others_takes_nothing_from_ours(by: str) -> None:
    """torch.compile frees what cuBLAS took, and whatever is cached, before it captures; others get it, and keep it."""
    ours, twin = _deep(), _deep()
    runner = co.CUDAGraphRunner(functools.partial(_train_deep, ours), optimizers=ours.optimizer, modules=ours.model)
    compiled = torch.compile(nn.Linear(64, 64, device=DEVICE), mode="reduce-overhead")
    width, rows = ours.model[0].in_features, 16384 if DEVICE == "cuda" else 16
    others: list[Tensor] = []
    for i in range(10):
        if i in (5, 7):
            if by == "torch.compile":
                for _ in range(3):  # the second is captured
                    compiled(torch.ones(16, 64, device=DEVICE)).square().mean().backward()
            else:
                getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            sizes = [1, 2, 8, 16, 32, 33, 64] * 4 if DEVICE == "cuda" else []
            others += [torch.full((size << 20,), 255, dtype=torch.uint8, device=DEVICE) for size in sizes]
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(i), device="cpu").to(DEVICE, torch.bfloat16)
        assert torch.equal(runner(x), _train_deep(twin, x)), i
        assert_equal(ours, twin, i)
    assert sum(int((x != 255).sum()) for x in others) == 0, "bytes that the graph wrote into memory of others"
    assert co.compile_report(ours.optimizer).replays == 7


class _Trainer:
    """Somebody's own training loop, with the graph that torch's documentation has: warm-up aside, one capture, replays."""

    def __init__(self, side: Side) -> None:
        self.side, self.x, self.stream = side, torch.zeros(4, 5, device=DEVICE), torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    def work(self, optimizer: torch.optim.Optimizer) -> None:
        self.loss = self.side.model(self.x).square().mean()
        self.loss.backward()
        optimizer.step()

    def warm_up(self, optimizer: torch.optim.Optimizer, steps: range) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for i in steps:
                self.x.copy_(batch(i))
                optimizer.zero_grad()
                self.work(optimizer)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.loss = torch.zeros((), device=DEVICE)  # a kept one has a graph of autograd's that belongs to that stream

    def record(self) -> None:
        torch.cuda.synchronize()
        self.side.optimizer.zero_grad()
        with capturing(self.graph):
            self.work(self.side.optimizer)

    def replay(self, i: int) -> None:
        self.x.copy_(batch(i))
        self.graph.replay()


def record_after_steps(optimizer: type[co.CompiledOptimizer], other: Any, steps: int, **kwargs: Any) -> None:
    ours, twin = pair(optimizer=optimizer, **kwargs)
    trainer, follower = _Trainer(ours), _Trainer(twin)
    for each in (trainer, follower):
        each.warm_up(other(each.side.params, lr=0.1), range(3))
        each.warm_up(each.side.optimizer, range(3, 3 + steps))
    if steps == 0:
        with pytest.raises(RuntimeError, match=r"take one step before capturing, or let co\.CUDAGraphRunner do so"):
            trainer.record()
        assert_equal(ours, twin, 0)
        trainer.graph = torch.cuda.CUDAGraph()
        for each in (trainer, follower):
            each.warm_up(each.side.optimizer, range(3, 4))
    trainer.record()
    for i in range(8, 16):
        for side in (ours, twin):
            every_hyperparameter(side, i)
            if i == 12:  # which replays write too
                side.optimizer.load_state_dict(side.optimizer.state_dict())
        trainer.replay(i)
        follower.warm_up(twin.optimizer, range(i, i + 1))
        assert_equal(ours, twin, i)
    for each in (trainer, follower):
        each.warm_up(each.side.optimizer, range(16, 17))
    assert_equal(ours, twin, 16)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("other", [torch.optim.SGD, co.Lion], ids=lambda kind: kind.__module__.partition(".")[0])
@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_a_trainer_of_others_records_the_step_after_anothers_warm_up(kind: dict[str, Any], other: Any, steps: int) -> None:
    """Replays follow hyperparameters, gradients and loads."""
    record_after_steps(**{"optimizer": co.AdamW, **kind}, other=other, steps=steps)


def record_the_first_step() -> None:
    for optimizer in (co.AdamW, co.Muon, co.Adafactor):
        record_after_steps(optimizer, torch.optim.SGD, 0)


def test_a_trainer_of_others_that_records_the_first_step_is_told_what_to_do() -> None:
    """And may do it: nothing has changed."""
    in_new_process(record_the_first_step)


def _on_device(case: Any, dtype: torch.dtype, **options: Any) -> float:
    """How far the optimizer on the device is from torch.optim's in float64 on the CPU, after steps with absent gradients."""
    matrices = case.optimizer._granularity == "matrix"
    source = [p for p in case.parameters(dtype) if p.numel() and (not matrices or p.dim() == 2)]
    params = [nn.Parameter(p.detach().to(DEVICE, copy=True)) for p in source]
    twins = copies(source, high_precision(dtype))
    with wide_scalars():
        optimizer, reference = case.optimizer(params, **options, **case.kwargs), case.reference(twins, **case.kwargs)
        for step in range(4):
            case.give_gradients(source, twins, step, absent=3)
            for param, given in zip(params, source, strict=True):
                param.grad = None if given.grad is None else given.grad.to(DEVICE, copy=True)
            optimizer.step()
            reference.step()
    return relative_error([p.detach().cpu() for p in params], twins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("case", [c for c in cases() if c.arguments], ids=str)
def test_catalogue(case: Any, dtype: torch.dtype) -> None:
    if dtype.is_complex and not case.takes_complex:
        return
    assert _on_device(case, dtype) < {torch.float64: 1e-12, torch.bfloat16: 5e-2}.get(dtype, 1e-6)


@pytest.mark.parametrize("lowering", ["inductor", "eager"])
@pytest.mark.parametrize("case", [c for c in cases() if c.arguments], ids=str)
def test_other_lowerings(case: Any, lowering: str) -> None:
    assert _on_device(case, torch.float32, lowering=lowering) < 1e-6


@pytest.mark.parametrize("lowering", ["auto", "eager"])
@pytest.mark.parametrize("case", [c for c in stacked_cases() if c.arguments], ids=str)
def test_stacked_catalogue(case: Any, lowering: str) -> None:
    # products of matrices are in bfloat16
    limit = 1e-5 if case.optimizer._granularity == "tensor" else 0.05
    assert _on_device(case, torch.float64, lowering=lowering) < limit


@pytest.mark.parametrize("name", CASES)
def test_what_is_stored_in_few_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are those of the CPU, but for some in which the last bit of a result decides how they are rounded."""
    monkeypatch.setattr(storage, "MINIMUM", MINIMUM)
    ours, wanted = CASES[name].run("auto", DEVICE), CASES[name].run("eager")
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in wanted.items()}
    for entry in (n for n in wanted if n.endswith(" param")):
        found, value = ours[entry].cpu().float(), wanted[entry].float()
        torch.testing.assert_close(found, value, rtol=2**-6, atol=2**-8, equal_nan=True)
        differs = (found != value) & ~value.isnan()
        assert differs.double().mean() < 0.02 or wanted[entry].dtype == torch.float32, entry


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's kernels need a GPU")
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(("rows", "columns"), [(768, 768), (768, 3072), (1000, 1096), (1032, 776)])
def test_symmetric_products(rows: int, columns: int, transposed: bool) -> None:
    """Against float64, with the tiles of this GPU; on one that has none, those of an H100."""
    pytest.importorskip("triton")
    from interpreted_symmetric import matrices, wrong

    tiling = symmetric.TILINGS.get(torch.cuda.get_device_capability(), symmetric.TILINGS[9, 0])
    x = matrices((3, 2, rows), columns, transposed=transposed).to(DEVICE)
    assert wrong(x, (), tiling) == []
    if rows == columns:
        each = torch.linspace(0.5, 2.0, 9, device=DEVICE).view(3, 3).unbind()
        factor = x[..., :64] / 8
        for numbers in ((3.4445, -4.775, 2.0315), each):
            assert wrong(factor @ factor.mT, numbers, tiling) == []


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("optimizer", [co.Muon, co.NorMuon])
def test_large_matrices(optimizer: type[co.CompiledOptimizer], split: bool) -> None:
    """Those whose symmetric products a kernel of ours computes: near the ones of torch, and captured bit for bit."""
    shapes = [(768, 768), (768, 3072), (3072, 768), (2, 800, 904)] if DEVICE == "cuda" else [(24, 16)]
    options: dict[str, Any] = {"stacks": ["p3"]} if DEVICE == "cuda" else {}
    if split:
        options["split"] = {"p0": 3, "p2": (1536, 768, 768)} if DEVICE == "cuda" else {"p0": (12, 6, 6)}
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, device="cpu").to(DEVICE) / 8 for shape in shapes]
    sides = [[nn.Parameter(p.clone()) for p in start] for _ in range(3)]
    called, captured, eager = (
        optimizer(
            [(f"p{i}", p) for i, p in enumerate(side)],
            lr=0.02,
            weight_decay=0.1,
            lowering=lowering,
            **options,
        )
        for side, lowering in zip(sides, ("auto", "auto", "eager"), strict=True)
    )
    runner = co.CUDAGraphRunner(captured)
    for i in range(6):
        for params in zip(*sides, strict=True):
            grad = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(i), device="cpu").to(DEVICE)
            for param in params:
                param.grad = grad.clone()
        called.step()
        runner.step()
        eager.step()
        for ours, replayed, wanted, begin in zip(*sides, start, strict=True):
            assert torch.equal(ours, replayed), i
            assert (ours - wanted).norm() < 0.02 * (wanted - begin).norm(), i  # products in bfloat16
    assert co.compile_report(captured).replays == 3


def test_gradients_that_come_after_the_capture() -> None:
    """Of a stack that had none when it was captured."""
    ours, twin = pair(optimizer=co.Muon, ns_steps=1)
    runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
    for i in range(8):
        for side in (ours, twin):
            give(side, i)
            for param in side.params[: len(side.params) - 1] if i < 4 else ():
                param.grad = None
        runner.step()
        twin.optimizer.step()
        assert_equal(ours, twin, i)


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(x)))


def test_two_rules_in_one_graph_are_two_optimizers() -> None:
    torch.manual_seed(0)
    model = _Words().to(DEVICE)
    twin = copy.deepcopy(model)
    both = co.MuonAdamW(model, lr=0.02)
    hidden = [("hidden.weight", twin.hidden.weight)]
    others = [(name, p) for name, p in twin.named_parameters() if name != "hidden.weight"]
    two = [co.Muon(hidden, lr=0.02), co.AdamW(others)]
    for optimizer, name in zip(two, ("hidden.weight", "head.weight"), strict=True):
        group = next(g for g in both.param_groups if any(p is model.get_parameter(name) for p in g["params"]))
        optimizer.param_groups[0].update({key: group[key] for key in optimizer.defaults.keys() & group.keys()})
    runner = co.CUDAGraphRunner(both)
    for i in range(8):
        words = torch.randint(50, (4, 5), generator=torch.Generator().manual_seed(i), device="cpu").to(DEVICE)
        for m, optimizers in ((model, [both]), (twin, two)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            m(words).square().mean().backward()
        runner.step()
        for optimizer in two:
            optimizer.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b), i


@pytest.mark.parametrize("captured", [False, True], ids=["called", "captured"])
def test_watched_steps_do_not_wait_and_find_by_name(captured: bool) -> None:
    ours, twin = pair()
    ours.optimizer.watch_health()
    step = co.CUDAGraphRunner(ours.optimizer).step if captured else ours.optimizer.step
    dead = ours.params[0]
    for i in range(8):
        for side in (ours, twin):
            give(side, i)
            side.params[0].grad = torch.zeros_like(side.params[0])
        with no_host_waits() if i > 4 else contextlib.nullcontext():
            step()
        twin.optimizer.step()
        assert_equal(ours, twin, i)
    report = co.health(ours.optimizer)
    name = next(n for n, p in ours.model.named_parameters() if p is dead)
    assert ("zero gradient", (name,)) in {(finding.name, finding.params) for finding in report.findings}


_WITH_NCCL = """
import sys
import torch
import torch.distributed as dist
import compiled_optim as co

dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(64, 64).cuda()
optimizer = co.AdamW(model.named_parameters(), max_grad_norm=1.0)

def train(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()
    return loss

runner = co.CUDAGraphRunner(train, optimizers=optimizer)
for _ in range(6):
    loss = runner(torch.randn(8, 64, device="cuda"))
assert co.compile_report(optimizer).replays == 3
print(float(loss))
"""


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing stands in for NCCL")
def test_a_process_with_nccl_in_its_graph_ends(tmp_path: Path) -> None:
    """Without releasing the runner, and without destroying the process group."""
    command = [sys.executable, "-c", _WITH_NCCL, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("cap", [0.0, None])
def test_gradient_release(cap: float | None, captured: bool) -> None:
    """Hooks run on another thread, on the stream of their gradients."""
    ours, twin = pair()
    co.prepare_for_gradient_release(ours.model, ours.optimizer, bucket_cap_mb=cap)

    def step(x: Tensor) -> Tensor:
        loss = ours.model(x).square().mean()
        loss.backward()
        assert all(p.grad is None for p in ours.model.parameters())
        ours.optimizer.step()
        return loss

    runner = co.CUDAGraphRunner(step, optimizers=ours.optimizer, modules=ours.model, warmup=2) if captured else step
    for i in range(STEPS):
        for side in (ours, twin):
            side.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        with torch.cuda.stream(torch.cuda.Stream() if not captured and DEVICE == "cuda" else None):
            runner(batch(i))
            torch.cuda.synchronize()
        train(twin, batch(i))
        twin.optimizer.zero_grad()
        assert_equal(ours, twin, i)
    assert co.compile_report(ours.optimizer).replays == (STEPS - 2 if captured else 0)
