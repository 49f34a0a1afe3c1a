"""An optimizer that torch.optim lacks, made outside of the package: with rule, import line and reference it has all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import readme
import torch
from catalog import LOWERINGS, cases, configurations, reference_of, registry
from test_reference import TOLERANCE, _compare
from torch import Tensor

import compiled_optim as co
from compiled_optim.rule import Number, absolute, buffer, hyper, sign, sqrt, static, where
from perf import competitors
from perf.lowering.report import Workload, elementwise, lower


class Toy(co.CompiledOptimizer):
    """Toy: the root of a momentum, with its sign."""

    lr: Number = hyper(ge=0)
    momentum: Number = hyper(default=0.9, ge=0, lt=1)
    rooted: bool = static(default=True)
    average = buffer()

    @staticmethod
    def coefficients(lr, momentum):
        return dict(momentum=momentum, weight=1 - momentum, lr=lr)

    @staticmethod
    def update(param, grad, c, average, rooted):
        average = c.momentum * average + c.weight * grad
        direction = where(average != 0, sign(average) * sqrt(absolute(average)), 0.0) if rooted else average
        return dict(average=average, step=c.lr * direction)


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {"average": torch.zeros_like(param)}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    average = state["average"]
    average.lerp_(-grad if h.maximize else grad, 1 - h.momentum)
    param -= h.lr * (average.sign() * average.abs() ** 0.5 if h.rooted else average)


FAR = [{"lr": 0.07}, {"lr": 0.3, "momentum": 0.5, "maximize": True}, {"lr": 0.3, "rooted": False}]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import line."""
    monkeypatch.setattr(co, "Toy", Toy, raising=False)
    monkeypatch.setattr(co, "__all__", [*co.__all__, "Toy"])


@pytest.fixture
def added(exported: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference, too."""
    module = ModuleType("reference.toy")
    vars(module).update(start=start, step=step, FAR=FAR)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return None


@pytest.mark.usefixtures("exported")
def test_a_missing_reference_is_named() -> None:
    sentence = "torch.optim has no Toy: add tests/reference/toy.py, with start, step and FAR as in lion.py"
    for function in (cases, lambda: reference_of(Toy)):
        with pytest.raises(LookupError, match=f"^{sentence}$"):
            function()


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_catalogue_tries_it(lowering: str) -> None:
    assert Toy in registry()
    assert [case for case in cases() if case.optimizer is Toy] == configurations(Toy)
    for case in configurations(Toy):
        for dtype in [torch.float32] if lowering == "inductor" else TOLERANCE:  # what Inductor compiles takes seconds each
            _compare(case, dtype, lowering, absent=3)


@pytest.mark.usefixtures("added")
def test_the_reference_finds_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["reference.toy"], "step", lambda param, grad, state, t, h: param.sub_(h.lr * grad))
    with pytest.raises(AssertionError):
        _compare(configurations(Toy)[0], torch.float64, "eager", absent=3)


@pytest.mark.usefixtures("added")
def test_benchmark_report_and_readme_have_it() -> None:
    ours = [competitors.OURS, f"{competitors.OURS}[inductor]", competitors.WATCHED]
    assert [c.name for c in competitors.entered("toy")[0]] == ours
    assert competitors.entered("toy", ["torch fused"])[1] == {"torch fused": "torch.optim has no toy"}
    pytest.importorskip("triton")
    assert "toy" in elementwise()
    report = lower("multi_tensor", Workload("toy", 10), 90)
    assert (report.launches, report.bytes_per_param) == (2, 20.0)
    row = "| `Toy`: the root of a momentum, with its sign. | `lr`, `momentum=0.9`, `rooted=True` | `average` |"
    assert row in readme.optimizers_table().splitlines()
