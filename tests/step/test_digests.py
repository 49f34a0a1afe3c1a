"""The digest of an inlined step, by which torch's caches tell the code of one from another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import cases, wide_scalars
from torch import nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import Number, buffer, hyper, scalar


def _digest(make: Callable[[Any], co.CompiledOptimizer]) -> str:
    forms = [((3, 4), torch.float32), ((5,), torch.float64), ((2,), torch.float32)]
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in forms]
    engine = engine_of(make([(f"p{i}", param) for i, param in enumerate(params)]))
    assert engine.inline(range(len(engine.params))) == ""
    assert engine.inlined is not None
    return engine.inlined.digest()


def _in_lists(**options: Any) -> Callable[[Any], co.CompiledOptimizer]:
    return lambda params: co.AdamW(params, lowering="inductor", **options)


def _of_user(factor: float, power: float) -> Callable[[Any], co.CompiledOptimizer]:
    """An optimizer whose functions read variables of a module; all else is equal."""
    return _of_variables({"factor": factor, "power": power})


def _of_variables(variables: dict[str, float]) -> Callable[[Any], co.CompiledOptimizer]:

    class OfUser(co.CompiledOptimizer):
        """A rule of a user (none)."""

        lr: Number = hyper(ge=0)
        average = buffer()

        @staticmethod
        def coefficients(lr: Any) -> dict[str, Any]:
            return {"lr": lr * variables["factor"]}

        @staticmethod
        def update(param: Any, grad: Any, c: Any, average: Any) -> dict[str, Any]:
            return {"step": c.lr * (average + grad), "average": average * variables["power"] + grad}

    return lambda params: OfUser(params, lr=0.1, lowering="inductor")


def _of_one_name(*, maximize: bool) -> Callable[[Any], co.CompiledOptimizer]:
    def make(params: Any) -> co.CompiledOptimizer:
        first, *others = [("same", param) for _, param in params]
        return co.AdamW([{"params": [first], "maximize": maximize}, {"params": others}], lowering="inductor")

    return make


pytestmark = pytest.mark.filterwarnings("ignore:two parameters are named:UserWarning")

OTHERS: dict[str, Callable[[Any], co.CompiledOptimizer]] = {
    "": _in_lists(),
    "clipped": _in_lists(max_grad_norm=1.0),
    "skips": _in_lists(skip_nonfinite=True),
    "maximized": _in_lists(maximize=True),
    "amsgrad": _in_lists(amsgrad=True),
    "without decay": _in_lists(weight_decay=0.0),
    "scaled": _in_lists(lr_scale={"p0": 0.5}),
    "fewer": lambda params: co.AdamW(params[:2], lowering="inductor"),
    "other names": lambda params: co.AdamW([(f"other.{name}", p) for name, p in params], lowering="inductor"),
    "in two groups": lambda params: co.AdamW([{"params": params[:1]}, {"params": params[1:]}], lowering="inductor"),
    "in two others": lambda params: co.AdamW([{"params": params[:2]}, {"params": params[2:]}], lowering="inductor"),
    "of one name": _of_one_name(maximize=False),
    "of one name, one maximized": _of_one_name(maximize=True),
    "one maximized": lambda params: co.AdamW(
        [{"params": params[:1], "maximize": True}, {"params": params[1:]}], lowering="inductor"
    ),
    "of a user": _of_user(1.0, 0.5),
    "of a user, another coefficient": _of_user(2.0, 0.5),
    "of a user, another update": _of_user(1.0, 0.25),
}
"""Optimizers whose inlined steps take other operations, though one may be told from another by nothing else."""
EQUAL = [["", "without decay"], ["clipped", "skips"]]
"""Those that take the same operations: their numbers are data."""


def test_steps_of_other_operations_have_other_digests() -> None:
    by_digest: dict[str, list[str]] = {}
    for name, make in OTHERS.items():
        by_digest.setdefault(_digest(make), []).append(name)
    assert [names for names in by_digest.values() if len(names) > 1] == EQUAL


def test_every_static_choice_is_in_the_digest() -> None:
    """Of every rule: configurations with one digest have the same choices."""
    choices: dict[str, set[str]] = {}
    for case in [case for case in cases("dense") if not case.optimizer._rule.has_totals()]:
        made: list[co.CompiledOptimizer] = []

        def make(params: Any, case: Any = case, made: Any = made) -> co.CompiledOptimizer:
            made.append(case.optimizer(params, **case.kwargs, lowering="inductor"))
            return made[0]

        digest = _digest(make)
        step = engine_of(made[0]).step
        assert step is not None
        statics = str([lowering.plan.statics for lowering in step.lowerings])  # type: ignore[attr-defined]
        choices.setdefault(digest, set()).add(f"{case.optimizer.__name__} {statics}")
    assert {len(each) for each in choices.values()} == {1}
    assert len(choices) > 40


@pytest.mark.parametrize("name", OTHERS)
def test_equal_steps_have_equal_digests(name: str) -> None:
    assert _digest(OTHERS[name]) == _digest(OTHERS[name])


def test_numbers_are_data() -> None:
    assert _digest(_in_lists(lr=0.1, betas=(0.5, 0.6), eps=1e-3)) == _digest(_in_lists())


def test_it_follows_no_variables_since_operations_follow_none() -> None:
    """A rule keeps the operations of its class statement, in each way to run a step."""
    variables = {"factor": 1.0, "power": 0.5}
    make = _of_variables(variables)
    first = _digest(make)
    variables["factor"] = 2.0
    assert _digest(make) == first != _digest(_of_user(2.0, 0.5))
    variables |= {"factor": 1.0, "power": 0.25}
    assert _digest(make) == first


def _with_scalars(*names: str) -> Callable[[Any], co.CompiledOptimizer]:
    """An optimizer with scalars of these names, of which ``larger`` grows faster."""
    fields = {name: scalar(init=1.0) for name in names}

    class OfUser(co.CompiledOptimizer):
        """A rule of a user (none)."""

        lr: Number = hyper(ge=0)
        locals().update(fields)

        @staticmethod
        def coefficients(lr: Any, **values: Any) -> dict[str, Any]:
            first, second = (values[name] for name in names)
            return {"lr": lr, "smaller": first * 2, "larger": second * 3}

        @staticmethod
        def update(grad: Any, c: Any) -> dict[str, Any]:
            return {"step": c.lr * grad}

    return lambda params: OfUser(params, lr=0.1, lowering="inductor")


def test_the_order_of_scalars_is_in_it() -> None:
    assert _digest(_with_scalars("smaller", "larger")) != _digest(_with_scalars("larger", "smaller"))


def test_the_default_dtype_is_in_the_digest() -> None:
    """Numbers that a rule chooses between have it."""
    before = _digest(_in_lists())
    with wide_scalars():
        assert _digest(_in_lists()) != before


def test_a_schedule_is_found_by_no_other_process() -> None:
    def scheduled(params: Any) -> co.CompiledOptimizer:
        optimizer = co.AdamW(params, lowering="inductor")
        optimizer.schedule(lr=lambda step: 0.1 / step)
        return optimizer

    assert _digest(scheduled) != _digest(scheduled)


def test_nor_by_a_later_trace_of_its_own() -> None:
    """The variables that a schedule reads may have changed since."""
    optimizer = co.AdamW([nn.Parameter(torch.ones(2))], lowering="inductor")
    optimizer.schedule(lr=lambda step: 0.1 / step)
    engine = engine_of(optimizer)
    assert engine.inline([0]) == ""
    assert engine.inlined is not None
    assert engine.inlined.digest() != engine.inlined.digest()
