"""A negative learning rate that was written to a group: the steps with it warn once, and are steps of rate 0."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import simulated_graph
import torch
from catalog import registry, relative_error, wide_scalars
from round_trips import copied
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import compiled_optim as co

RATE, NEGATIVE = 0.03, -1e-3
SAID = r"Invalid learning rate: -0.001\d* \(lr of param_groups\[0\] must be >= 0 and < inf\); steps take 0 in its place"


@pytest.fixture(autouse=True)
def traced_backward() -> Iterator[None]:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def _by_scheduler(group: dict[str, Any], optimizer: Optimizer) -> None:
    group["initial_lr"] = RATE
    LambdaLR(optimizer, lambda t: NEGATIVE / RATE)


def _after_others(group: dict[str, Any], optimizer: Optimizer) -> None:
    for value in (-0.0015, 0.5, NEGATIVE):
        group["lr"] = value


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "assigned": lambda group, _: group.update(lr=NEGATIVE),
    "subtracted": lambda group, _: group.__setitem__("lr", group["lr"] - (group["lr"] - NEGATIVE)),
    "a dict": lambda group, _: group.__ior__({"lr": NEGATIVE}),
    "NumPy's": lambda group, _: group.__setitem__("lr", np.float64(NEGATIVE)),
    "a tensor": lambda group, _: group.__setitem__("lr", torch.tensor(NEGATIVE, dtype=torch.float64)),
    "past the class": lambda group, _: (dict.__setitem__(group, "lr", NEGATIVE), group["lr"]),
    "of a tensor that others have": lambda group, optimizer: (optimizer.hyperparameter("lr"), group.update(lr=NEGATIVE)),
    "after others": _after_others,
    "a scheduler's": _by_scheduler,
}


def _called(optimizer: Any, model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _compiled(optimizer: Any, model: nn.Module, x: torch.Tensor) -> None:
    torch.compile(_called, backend="eager", fullgraph=True)(optimizer, model, x)


def _captured(optimizer: Any, model: nn.Module, x: torch.Tensor) -> None:
    if not hasattr(model, "runner"):
        model.runner = co.CUDAGraphRunner(lambda x: _called(optimizer, model, x), optimizers=optimizer, warmup=1)
    model.runner(x)


RUNS: dict[str, tuple[Any, Callable[..., None]]] = {
    "called": ("auto", _called),
    "called, Inductor": ("inductor", _called),
    "called, eager": ("eager", _called),
    "compiled": ("auto", _compiled),
    "inlined": ("inductor", _compiled),
    "captured": ("auto", _captured),
}
SHARED = [cls for cls in registry() if hasattr(torch.optim, cls.__name__) and cls not in (co.LBFGS, co.SparseAdam, co.Muon)]
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def _pair(cls: type[co.CompiledOptimizer], lowering: Any, **options: Any) -> list[tuple[nn.Module, Any]]:
    """A model and its optimizer, of this package and of torch."""
    made = []
    for kind, own in ((cls, {"lowering": lowering}), (getattr(torch.optim, cls.__name__), {})):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        made.append((model, kind(model.parameters(), lr=RATE, **own, **options)))
    return made


def _near(one: nn.Module, two: nn.Module) -> None:
    assert relative_error([*one.parameters()], [*two.parameters()]) < 1e-12


def _check(cls: type[co.CompiledOptimizer], write: str, run: str) -> None:
    lowering, train = RUNS[run]
    (ours, mine), (theirs, reference) = _pair(cls, lowering)
    traces = None
    with warnings.catch_warnings(record=True) as caught, wide_scalars():
        warnings.simplefilter("always")
        for rate in (None, RATE, NEGATIVE, 0.01, NEGATIVE):
            if rate is not None:
                group = reference.param_groups[0]
                group["lr"] = max(rate, 0)
                if rate == NEGATIVE:
                    WRITES[write](mine.param_groups[0], mine)
                    assert write == "a tensor" or mine.param_groups[0]["lr"] == pytest.approx(NEGATIVE, rel=1e-12)
                    assert mine.state_dict()["param_groups"][0]["lr"] == pytest.approx(NEGATIVE, rel=1e-12)
                else:
                    mine.param_groups[0]["lr"] = rate
            for _ in range(2):
                train(mine, ours, X)
                _called(reference, theirs, X)
                _near(ours, theirs)
                traces = counters["stats"]["unique_graphs"] if traces is None else traces
    said = [each for each in caught if "learning rate" in str(each.message)]
    assert len(said) == 1
    assert said[0].category is UserWarning
    assert re.fullmatch(SAID, str(said[0].message))
    assert train is not _compiled or counters["stats"]["unique_graphs"] == traces


@pytest.mark.parametrize(("write", "run"), [(write, "called") for write in WRITES] + [("assigned", run) for run in RUNS])
def test_ways_to_write(write: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if run == "captured":
        simulated_graph.install(monkeypatch)
    _check(co.AdamW, write, run)


@pytest.mark.parametrize("run", ["called", "called, eager", "compiled", "inlined"])
@pytest.mark.parametrize("cls", SHARED)
def test_every_class_that_torch_has(cls: type[co.CompiledOptimizer], run: str) -> None:
    _check(cls, "assigned", run)


@copied
def test_a_copy_does_as_the_optimizer_does(copied: Callable[[Any], Any]) -> None:
    made = co.SGD([nn.Parameter(torch.ones(2))], lr=RATE, momentum=0.5)
    made.param_groups[0]["lr"] = NEGATIVE
    for optimizer in (made, copied(made)):
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.ones(2)
        with pytest.warns(UserWarning, match=SAID):
            optimizer.step()
        optimizer.step()
        assert torch.equal(param, torch.ones(2))
        assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.full((2,), 1.5))


@pytest.mark.parametrize("adopted", [False, True], ids=["a number", "a tensor"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_one_of_a_checkpoint_is_refused(named: bool, strict: bool, adopted: bool) -> None:
    """It is kept until something else is written."""
    rate: Any = torch.tensor(RATE, dtype=torch.float64) if adopted else RATE
    param = nn.Parameter(torch.ones(2))
    optimizer = co.SGD([("weight", param)], lr=rate)
    if named:
        saved = co.named_state_dict(optimizer)
        saved["param_groups"][0]["lr"] = NEGATIVE
        co.load_named_state_dict(optimizer, saved, strict=strict)
    else:
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = NEGATIVE
        optimizer.load_state_dict(saved, strict=strict)
    param.grad = torch.ones(2)
    for _ in range(2):
        assert optimizer.param_groups[0]["lr"] == NEGATIVE
        with pytest.raises(ValueError, match=r"Invalid learning rate: -0\.001"):
            optimizer.step()
    optimizer.param_groups[0]["lr"] = NEGATIVE
    with pytest.warns(UserWarning, match=SAID):
        optimizer.step()
    assert torch.equal(param, torch.ones(2))
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert torch.equal(param, torch.full((2,), 0.5))
