"""A step that ends in the middle, wherever that is: later steps use what is there then, and nothing from before."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulated_graph
import torch
from interruptions import Interruption, interrupted_steps
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

LOWERINGS = ["multi_tensor", "inductor", "eager"]
POINTS = 60  # of a step, at least, whatever their number
EVERY = 7  # points between two interruptions of a replay

KINDS: dict[str, tuple[type[CompiledOptimizer], dict[str, Any]]] = {
    "elementwise": (co.AdamW, {"lr": 0.07, "betas": (0.6, 0.81), "weight_decay": 0.3}),
    "stacks": (co.Adafactor, {"lr": 0.07, "weight_decay": 0.3}),
    "rows": (co.SparseAdam, {"lr": 0.07, "betas": (0.6, 0.81)}),
}


class Side:
    """An optimizer, its parameters, and every gradient that they ever had."""

    def __init__(self, kind: str, lowering: str, values: list[Tensor], **kwargs: Any) -> None:
        self.kind, self.lowering = kind, lowering
        self.params = [nn.Parameter(v.clone()) for v in values]
        cls, options = KINDS[kind]
        self.optimizer = cls(self.params, **{**options, **kwargs}, lowering=lowering)
        self.kept: list[Tensor] = []

    def give(self, seed: int) -> None:
        """New gradients at new places; the old ones stay, with the values they had."""
        for i, param in enumerate(self.params):
            generator = torch.Generator().manual_seed(1000 * seed + i)
            grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            if self.kind == "rows":
                grad = torch.sparse_coo_tensor([[0, 2, 2]], grad[:3], param.shape, check_invariants=True)
            param.grad = grad
            self.kept.append(grad)

    def change_gradients(self) -> None:
        """Other values in the same memory."""
        for param in self.params:
            if param.grad is not None:
                (param.grad._values() if param.grad.is_sparse else param.grad).mul_(-1.25)

    def twin(self) -> Side:
        """One that never took a step, with equal values everywhere."""
        other = Side(self.kind, self.lowering, [p.detach() for p in self.params])
        other.optimizer.max_grad_norm = self.optimizer.max_grad_norm
        for own, group in zip(self.optimizer.hyperparameters(), other.optimizer.param_groups, strict=True):
            group.update(own)
        for mine, theirs in zip(self.params, other.params, strict=True):
            state = self.optimizer.state[mine]
            other.optimizer.state[theirs] = {k: v.clone(memory_format=torch.preserve_format) for k, v in state.items()}
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        return other

    def values(self) -> list[Tensor]:
        states = [v for p in self.params for _, v in sorted(self.optimizer.state[p].items())]
        return [p.detach() for p in self.params] + states


def _drop(side: Side, seed: int) -> None:
    side.params[seed % 3].grad = None


def _assign(side: Side, seed: int) -> None:
    side.optimizer.param_groups[0]["lr"] = 0.01 + 0.001 * (seed % 7)


def _clip(side: Side, seed: int) -> None:
    side.optimizer.max_grad_norm = (None, 0.5, 0.25)[seed % 3]


def _move(side: Side, seed: int) -> None:
    side.params[1].data = side.params[1].data.clone()


def _move_state(side: Side, seed: int) -> None:
    for value in side.optimizer.state[side.params[1]].values():
        value.data = value.data.clone()


def _replace_state(side: Side, seed: int) -> None:
    state = side.optimizer.state[side.params[1]]
    for name in list(state):
        state[name] = state[name].clone()


def _nothing(side: Side, seed: int) -> None:
    pass


CHANGES = [_nothing, _drop, _assign, _clip, _move, _move_state, _replace_state]


def _values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5, 4), (3, 4))]


def _agree(side: Side, where: object) -> None:
    """Three steps from here on are those of an optimizer that knows nothing of the past."""
    twin = side.twin()
    for _ in range(3):
        for each in (side, twin):
            each.change_gradients()
            each.optimizer.step()
        for own, other in zip(side.values(), twin.values(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12, msg=lambda m: f"{where}: {m}")


def _points(side: Side, prepare: Callable[[int], None], every: int) -> Iterator[int]:
    """Interrupt a step at each of its points, or at every so many of them; the points.

    A change comes in three kinds by turns, whose steps differ in length: a point is tried until three steps end before it.
    """
    point = ended = 0
    for index in itertools.count():
        side.give(index)
        prepare(index)
        if Interruption(point).run(side.optimizer.step):
            yield point
            point, ended = point + every, 0
        else:
            ended += 1
            if ended == 3:
                return


def _count(side: Side, prepare: Callable[[int], None]) -> int:
    """How many points a step has, with some to spare."""
    point = 1
    ended = 0
    for index in itertools.count():
        side.give(index)
        prepare(index)
        if Interruption(point).run(side.optimizer.step):
            ended = 0
            point *= 2
        else:
            ended += 1
            if ended == 3:
                return point
    raise AssertionError


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__.strip("_"))
def test_a_step_that_is_interrupted_anywhere(change: Callable[[Side, int], None], kind: str, lowering: str) -> None:
    side = Side(kind, lowering, _values())
    for seed in range(2):
        side.give(seed)
        side.optimizer.step()

    def prepare(index: int) -> None:
        change(side, index)

    every = max(1, _count(side, prepare) // POINTS)
    points = 0
    for point in _points(side, prepare, every):
        _agree(side, point)
        points += 1
    assert points > POINTS // 3


@pytest.mark.full
@pytest.mark.parametrize(("count", "size", "signals"), [(148, 2048, 150), (3000, 64, 20)])
def test_a_step_that_real_signals_interrupt(count: int, size: int, signals: int) -> None:
    interrupted_steps(count, size, signals)


def test_clipping_that_reads_as_assigned_is_in_use() -> None:
    """An interrupt at any point of an assignment."""
    for point in itertools.count():
        param = nn.Parameter(torch.zeros(3))
        optimizer, param.grad = co.SGD([param], lr=1.0), torch.tensor([0.0, 3.0, 4.0])
        optimizer.step()
        before = param.detach().clone()
        was_interrupted = Interruption(point).run(functools.partial(setattr, optimizer, "max_grad_norm", 0.5))
        optimizer.step()
        norm = (param.detach() - before).norm().item()
        assert norm == pytest.approx(optimizer.max_grad_norm or 5.0, rel=1e-4), point
        if not was_interrupted:
            break


@pytest.mark.parametrize("way", ["called", "inlined"])
def test_an_assignment_of_clipping_that_was_interrupted(way: str) -> None:
    """Steps clip to the bound that reads as assigned, wherever the assignment ended."""
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([0.0, 3.0, 4.0])
    optimizer = co.SGD([param], lr=1.0, lowering="auto" if way == "called" else "inductor", max_grad_norm=2.0)
    step = optimizer.step if way == "called" else torch.compile(lambda: optimizer.step(), backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1000):
        step()
        for point in itertools.count(0, 1 if way == "called" else 9):  # it is traced again after most interrupts
            optimizer.max_grad_norm = 2.0
            step()
            before = param.detach().clone()
            was_interrupted = Interruption(point).run(functools.partial(setattr, optimizer, "max_grad_norm", 0.5))
            step()
            bound = optimizer.max_grad_norm
            assert bound in (0.5, 2.0)
            assert (param.detach() - before).norm().item() == pytest.approx(bound, rel=1e-4), point
            if not was_interrupted:
                break


def test_a_load_after_a_write_that_was_interrupted() -> None:
    """It writes the checkpoint's numbers, wherever the write ended."""
    for point in itertools.count():
        param = nn.Parameter(torch.zeros(3))
        optimizer = co.AdamW([param], lr=0.5, betas=(0.6, 0.7))
        for _ in range(2):  # the second write takes the way of all later ones
            optimizer.param_groups[0].update(lr=0.1, betas=(0.8, 0.9))
        saved = optimizer.state_dict()

        def write(group: dict[str, Any] = optimizer.param_groups[0]) -> None:
            group["lr"], group["betas"] = 0.2, (0.5, 0.75)

        was_interrupted = Interruption(point).run(write)
        optimizer.load_state_dict(saved)
        live = [optimizer.hyperparameter("lr"), *optimizer.hyperparameter("betas")]
        assert [tensor.item() for tensor in live] == [0.1, 0.8, 0.9], point
        if not was_interrupted:
            break


class Runner(Side):
    """A side whose steps a runner replays, alone or in a whole training step."""

    def __init__(self, whole: bool, values: list[Tensor]) -> None:
        super().__init__("elementwise", "multi_tensor", values)
        self.whole = whole

        def train(x: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = sum((p * x).square().sum() for p in self.params)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.train = train
        if whole:
            self.runner = co.CUDAGraphRunner(train, optimizers=self.optimizer, warmup=1, recaptures=100_000)
        else:
            self.runner = co.CUDAGraphRunner(self.optimizer, warmup=1, recaptures=100_000)

    def run(self, seed: int) -> None:
        if self.whole:
            self.runner(torch.full((), 1.0 + 0.01 * seed, dtype=torch.float64))
        else:
            self.runner.step()


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True], ids=["step", "training step"])
@pytest.mark.parametrize("change", [_nothing, _assign, _move], ids=lambda c: c.__name__.strip("_"))
def test_a_replay_that_is_interrupted_anywhere(
    change: Callable[[Side, int], None], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_graph.install(monkeypatch)
    side = Runner(whole, _values())
    for seed in range(4):
        side.give(seed)
        side.run(seed)
    point = points = 0
    for index in itertools.count():
        side.give(index)
        change(side, index)
        if not Interruption(point).run(functools.partial(side.run, index)):
            break
        twin = side.twin()
        for seed in range(3):
            if whole:
                side.run(seed)
                _train(twin, 1.0 + 0.01 * seed)
            else:
                for each in (side, twin):
                    each.change_gradients()
                side.runner.step()
                twin.optimizer.step()
            for own, other in zip(side.values(), twin.values(), strict=True):
                assert torch.allclose(own, other, rtol=1e-12, atol=1e-12), point
        point, points = point + EVERY, points + 1
    assert points > POINTS // 3


def _train(side: Side, x: float) -> None:
    side.optimizer.zero_grad()
    sum((p * x).square().sum() for p in side.params).backward()
    side.optimizer.step()
