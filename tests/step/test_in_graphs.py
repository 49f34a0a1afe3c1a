"""Steps in the CUDA graphs of torch.compile: in one graph with all else, and never stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulated_graph
import torch
from simulated_graph import SimulatedGraph
from simulated_trees import SimulatedTrees
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import compiled_optim as co

X = torch.linspace(-1, 1, 24).view(6, 4)
Y = X.sum(1, keepdim=True)


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedTrees]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield SimulatedTrees(monkeypatch)
    torch._dynamo.reset()


class Side:
    """A model and its training, compiled or not."""

    def __init__(self, optimizer: Callable[..., co.CompiledOptimizer], trees: SimulatedTrees | None = None) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        first, second = ([*self.model[i].named_parameters(f"model.{i}")] for i in (0, 2))
        self.optimizer = optimizer([{"params": first}, {"params": second, "lr": 0.02}])
        self.frozen = False
        run = self._train
        self.train = run if trees is None else torch.compile(run, backend=trees, fullgraph=True)

    def _train(self, x: Tensor) -> Tensor:
        loss = (self.model(x) - Y).square().mean()
        loss.backward()
        if self.frozen:
            self.model[0].weight.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def equal_parameters(first: Side, second: Side) -> None:
    assert all(map(torch.equal, *(side.model.parameters() for side in (first, second))))


def equal(first: Side, second: Side) -> None:
    equal_parameters(first, second)
    states = [s for side in (first, second) for s in [side.optimizer.state_dict()["state"]]]
    for ours, theirs in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def adamw(groups: Any, **options: Any) -> co.AdamW:
    return co.AdamW(groups, lr=0.05, weight_decay=0.3, **options)


def test_one_recording_while_hyperparameters_move_and_checkpoints_are_loaded(trees: SimulatedTrees) -> None:
    ours, twin = Side(adamw, trees), Side(adamw)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.9) for side in (ours, twin)]
    saved = ours.optimizer.state_dict()
    for i in range(12):
        for side, scheduler in zip((ours, twin), schedulers, strict=True):
            side.train(X * (1 + i))
            scheduler.step()
            side.optimizer.param_groups[0].update(betas=(0.5 + 0.01 * i, 0.9), eps=0.01 * i)
            if i % 4 == 3:
                side.optimizer.load_state_dict(saved)
        equal(ours, twin)
    assert (trees.compiled, trees.warm_ups, trees.recordings, trees.replays, trees.left) == (1, 1, 1, 11, 0)
    assert trees.copied == [[(6, 4), (6, 1)]]  # x and Y: parameters are where they are


def test_the_number_of_clipping_is_data(trees: SimulatedTrees) -> None:
    ours, twin = (Side(lambda groups: adamw(groups, max_grad_norm=0.5), t) for t in (trees, None))
    for i in range(8):
        for side in (ours, twin):
            side.optimizer.max_grad_norm = 0.5 / (1 + i) if i % 4 else torch.tensor(0.3)
            side.train(X * (1 + i))
        equal(ours, twin)
        if i > 2:
            with pytest.raises(ValueError, match="max_grad_norm must be >= 0, got -1"):
                ours.optimizer.max_grad_norm = -1.0
    assert (trees.compiled, trees.recordings) == (1, 1)


def test_state_with_other_memory_is_seen_by_the_next_step_outside(trees: SimulatedTrees) -> None:
    """Until then replays go on with the memory that it had, which is not freed."""
    ours, twin = Side(adamw, trees), Side(adamw)
    entry = ours.optimizer.state[ours.model[0].weight]["exp_avg"]
    twin.optimizer.state  # noqa: B018
    for i in range(9):
        if i == 4:
            memory = StorageWeakRef(entry.untyped_storage())
            entry.data = torch.full_like(entry, 1e9)
        if i == 6:
            entry.data = entry.data / 1e9
            assert not memory.expired()
            twin.optimizer.state[twin.model[0].weight]["exp_avg"].fill_(1.0)
            ours._train(X)
            twin._train(X)
        ours.train(X * (1 + i))
        twin.train(X * (1 + i))
        equal_parameters(ours, twin)
    assert trees.compiled == 2
    equal(ours, twin)


def test_two_steps_in_one_recording(trees: SimulatedTrees) -> None:
    ours, twin = Side(adamw), Side(adamw)
    compiled = torch.compile(lambda x: ours._train(x) + ours._train(x), backend=trees, fullgraph=True)
    for i in range(5):
        compiled(X * (1 + i))
        for _ in range(2):
            twin.train(X * (1 + i))
        equal(ours, twin)
    assert (trees.compiled, trees.recordings, trees.replays) == (1, 1, 4)


class TestOtherGraphs:
    """A compiled step in graphs that are not the compiler's."""

    @pytest.fixture(autouse=True)
    def simulated(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        torch._dynamo.reset()
        simulated_graph.install(monkeypatch)
        with torch._dynamo.config.patch(trace_autograd_ops=True), torch.set_grad_enabled(True):
            yield  # an error leaves gradients switched off by compiled code
        torch._dynamo.reset()

    def sides(self) -> tuple[Side, Side, Callable[[Tensor], Tensor]]:
        ours = Side(adamw)
        return ours, Side(adamw), torch.compile(ours._train, backend="eager", fullgraph=True)

    def test_a_runner(self) -> None:
        ours, twin, compiled = self.sides()
        with co.CUDAGraphRunner(compiled, optimizers=ours.optimizer) as runner:
            for i in range(9):
                if i == 5:
                    for side in (ours, twin):
                        side.optimizer.param_groups[0]["lr"] = 0.5
                runner(X * (1 + i))
                twin.train(X * (1 + i))
                equal(ours, twin)

    def test_a_runner_that_was_not_told_of_the_optimizer(self) -> None:
        _, twin, compiled = self.sides()
        runner = co.CUDAGraphRunner(lambda x: (compiled(x), twin._train(x)), optimizers=twin.optimizer, warmup=1)
        runner(X)
        with runner, pytest.raises(RuntimeError, match="AdamW is stepped in a function that a CUDAGraphRunner captures"):
            runner(X)

    def test_a_capture_by_hand(self) -> None:
        ours, twin, compiled = self.sides()
        graph = SimulatedGraph(torch.device("cpu"))
        compiled(X)
        with graph.capturing():
            compiled(X)
        twin.train(X)
        for i in range(5):
            for side in (ours, twin):
                side.optimizer.param_groups[1]["betas"] = (0.1 * i, 0.5)
            graph.replay()
            twin.train(X)
            equal(ours, twin)
        with pytest.warns(RuntimeWarning, match="changed after step\\(\\) was captured"):
            ours.optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(2)))]})

    def test_a_capture_by_hand_that_comes_too_early(self) -> None:
        ours, _, compiled = self.sides()
        compiled(X)
        ours.model[0].weight.data = ours.model[0].weight.data.clone()
        graph = SimulatedGraph(torch.device("cpu"))
        with pytest.raises(RuntimeError, match=r"cannot be captured .* now: 'model.0.weight' moved"), graph.capturing():
            compiled(X)


def test_a_change_that_traces_the_step_again_is_reported(trees: SimulatedTrees) -> None:
    ours = Side(adamw, trees)
    for _ in range(3):
        ours.train(X)
    with co.no_recompiles():
        ours.optimizer.param_groups[0]["lr"] = 0.3
        ours.train(X)
    ours.optimizer.state[ours.model[0].weight]["exp_avg"] = torch.ones(8, 4)
    with pytest.raises(co.RecompileError), co.no_recompiles():
        ours.train(X)
    ours.train(X)
    report = co.compile_report(ours.optimizer)
    assert report.captures[0] == ""
    assert report.captures[1] == "state 'exp_avg' of a parameter was written, and compiled code holds the step"
    assert len(report.captures) == 2
