"""The optimizers that optimi has too, against optimi's plain loops, every argument far from its default.

optimi's Adam, RAdam and SGD have other forms of ``eps`` and decay than torch's, which ours follow; with the arguments here
both forms are one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from catalog import required
from reference import naive
from torch.nn import Parameter

import compiled_optim as co

optimi = pytest.importorskip("optimi")

SHAPES = [(5, 7), (3,), (), (150, 130)]
ADAM = {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [  # the name; what both, we, and optimi get
    ("Adan", {**ADAM, "betas": (0.6, 0.7, 0.8), "weight_decay": 0.4}, {}, {}),
    ("Adan", {**ADAM, "betas": (0.0, 0.95, 0.3), "weight_decay": 0.0}, {}, {}),
    ("Adan", {**ADAM, "betas": (0.95, 0.0, 0.99), "eps": 0.7, "weight_decay": 2.0}, {}, {}),
    ("StableAdamW", {**ADAM, "weight_decay": 0.4}, {}, {}),
    ("StableAdamW", {**ADAM, "betas": (0.9, 0.0), "eps": 0.7, "weight_decay": 2.0}, {}, {}),
    ("StableAdamW", {**ADAM, "betas": (0.0, 0.99), "eps": 1e-4, "weight_decay": 0.0}, {}, {}),
    ("Ranger", {**ADAM, "betas": (0.6, 0.95), "weight_decay": 0.4, "k": 4, "alpha": 0.3}, {}, {}),
    ("Ranger", {**ADAM, "betas": (0.6, 0.95), "weight_decay": 0.4, "k": 1, "alpha": 0.9, "decouple_wd": False}, {}, {}),
    ("Ranger", {**ADAM, "betas": (0.0, 0.6), "weight_decay": 2.0, "k": 5, "alpha": 1.0}, {}, {}),  # never rectified
    ("Ranger", {**ADAM, "betas": (0.9, 0.99), "eps": 0.7, "k": 3, "alpha": 0.0}, {}, {}),
    ("Lion", {"lr": 0.07, "betas": (0.6, 0.8), "weight_decay": 0.4}, {}, {}),
    ("AdamW", {**ADAM, "weight_decay": 0.4}, {}, {}),
    ("Adam", {**ADAM, "weight_decay": 0.4}, {}, {}),
    ("Adam", {**ADAM, "weight_decay": 0.4}, {"decoupled_weight_decay": True}, {"decouple_wd": True}),
    ("SGD", {"lr": 0.07, "momentum": 0.8, "weight_decay": 0.4}, {}, {}),
    ("SGD", {"lr": 0.07, "momentum": 0.8}, {"dampening": 0.8}, {"dampening": True, "torch_init": True}),
]
FIRST = {name: both for name, both, _, _ in reversed(CASES)}
NEW = ["Adan", "StableAdamW", "Ranger"]


def _pair(
    name: str, dtype: torch.dtype, both: dict[str, Any], own: dict[str, Any], theirs: dict[str, Any], **options: Any
) -> tuple[list[Parameter], torch.optim.Optimizer, list[Parameter], torch.optim.Optimizer]:
    """Ours, in two groups with unlike values, and optimi's in float64."""
    generator = torch.Generator().manual_seed(0)
    ours = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    twins = [Parameter(p.detach().to(torch.float64, copy=True)) for p in ours]

    def groups(params: list[Parameter]) -> list[dict[str, Any]]:
        decay = {"weight_decay": 0.5 * both["weight_decay"]} if "weight_decay" in both else {}
        return [{"params": params[:2]}, {"params": params[2:], "lr": 0.3 * both["lr"], **decay}]

    optimizer = getattr(co, name)(groups(ours), **both, **own, **options)
    return ours, optimizer, twins, getattr(optimi, name)(groups(twins), **both, **theirs, foreach=False, triton=False)


def _give(ours: list[Parameter], twins: list[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param, twin in zip(ours, twins, strict=True):
        param.grad = (torch.randn(param.shape, generator=generator) * (1 + 3 * (step == 5))).to(param.dtype)
        twin.grad = param.grad.to(torch.float64, copy=True)  # optimi writes into gradients


def _assert_near(ours: list[Parameter], twins: list[Parameter], tolerance: float) -> None:
    for param, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(param.double(), twin.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "both", "own", "theirs"), CASES)
def test_equals_optimi(
    name: str, both: dict[str, Any], own: dict[str, Any], theirs: dict[str, Any], dtype: torch.dtype, lowering: str
) -> None:
    ours, optimizer, twins, reference = _pair(name, dtype, both, own, theirs, lowering=lowering)
    for step in range(13):
        for side in (optimizer, reference):
            for group, rate in zip(side.param_groups, (0.07, 0.02), strict=True):
                group["lr"] = rate / (1 + step % 5)
        _give(ours, twins, step)
        optimizer.step()
        reference.step()
    _assert_near(ours, twins, 1e-13 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("name", NEW)
def test_absent_gradients(name: str) -> None:
    """Each parameter as if it were alone. optimi counts the steps of a group, also those of parameters without gradients."""
    both = FIRST[name]
    ours, _, twins, _ = _pair(name, torch.float64, both, {}, {})
    optimizer, together = getattr(co, name)(ours, **both), getattr(optimi, name)(twins, **both, foreach=False, triton=False)
    alone = [Parameter(p.detach().clone()) for p in twins]
    each = [getattr(optimi, name)([p], **both, foreach=False, triton=False) for p in alone]
    for step in range(13):
        _give(ours, twins, step)
        for i, (param, twin, single) in enumerate(zip(ours, twins, alone, strict=True)):
            if step < 3 * i or (step + i) % 4 == 0:  # some get their first gradient late
                param.grad = twin.grad = None
                with torch.no_grad():  # and move before it, as with a value that is loaded: Ranger's slow copy begins there
                    for value in (param, twin, single):
                        value.mul_(0.9)
                continue
            single.grad = twin.grad.clone()
            each[i].step()
        optimizer.step()
        together.step()
        if step == 6:  # a checkpoint, before the last parameter's first gradient
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = getattr(co, name)(ours, lr=9.0)
            optimizer.load_state_dict(saved)
    _assert_near(ours, alone, 1e-13)
    with pytest.raises(AssertionError):
        _assert_near(ours, twins, 1e-3)


@pytest.mark.parametrize("name", NEW)
def test_bfloat16_without_decay(name: str) -> None:
    """As near to optimi in float64 as optimi's loop in bfloat16 is, which rounds after each operation, or nearer."""
    both = {**FIRST[name], "weight_decay": 0.0}
    ours, optimizer, exact, reference = _pair(name, torch.bfloat16, both, {}, {})
    rounded = [Parameter(p.detach().clone()) for p in ours]
    halves = zip(reference.param_groups, (rounded[:2], rounded[2:]), strict=True)
    groups = [{**group, "params": part, "kahan_sum": False} for group, part in halves]
    narrow = type(reference)(groups, **both, foreach=False, triton=False)
    for step in range(13):
        _give(ours, exact, step)
        for param, like in zip(rounded, ours, strict=True):
            param.grad = like.grad.clone()
        for each in (optimizer, reference, narrow):
            each.step()

    def error(params: list[Parameter]) -> float:
        return sum((p.double() - e).square().sum().item() for p, e in zip(params, exact, strict=True)) ** 0.5

    assert error(ours) < 1.01 * error(rounded)
    _assert_near(ours, exact, 0.05)


@pytest.mark.parametrize("name", [*NEW, "AdamW", "Lion"])
def test_a_step_in_bfloat16_is_rounded_once(name: str) -> None:
    """A decay and a step too small to be seen alone. optimi rounds after each, and its sums in two parts leave decay out."""
    arguments = {"lr": 1.5e-3, "weight_decay": 0.8}  # near 1 numbers of bfloat16 are 0.004 apart
    ours, exact, theirs = (
        Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64, torch.bfloat16)
    )
    optimizers = [
        getattr(co, name)([ours], **arguments),
        naive(getattr(co, name))([exact], **arguments),
        getattr(optimi, name)([theirs], **arguments, foreach=False, triton=False),
    ]
    for param, optimizer in zip((ours, exact, theirs), optimizers, strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(ours, exact.bfloat16())
    assert (ours < 1).all()
    assert (theirs == 1).all()


def test_the_other_decay_of_adan_has_no_effect_in_optimi() -> None:
    results = []
    for package, adam_wd in ((co, True), (co, False), (optimi, True), (optimi, False)):
        param = Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        options = {} if package is co else {"foreach": False, "triton": False}
        optimizer = package.Adan([param], lr=0.1, weight_decay=2.0, adam_wd=adam_wd, **options)
        for step in range(3):
            param.grad = torch.linspace(step, 2, 5, dtype=torch.float64)
            optimizer.step()
        results.append(param.detach())
    ours, ours_after, theirs, theirs_after = results
    assert torch.equal(theirs, theirs_after)
    torch.testing.assert_close(ours_after, theirs_after, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(ours, ours_after, rtol=1e-2)


@pytest.mark.parametrize("name", NEW)
def test_arguments_are_optimis(name: str) -> None:
    """With the same defaults, and what is required; by position the learning rate, the betas and the decay."""
    params = [Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    for param, package in zip(params, (co, optimi), strict=True):
        kind = getattr(package, name)
        with pytest.raises(TypeError, match="lr"):
            kind([param])
        loops = {} if package is co else {"foreach": False, "triton": False}
        optimizer = kind([param], 0.1, (0.5, 0.6, 0.7)[: 3 if name == "Adan" else 2], 0.3, **loops)
        for step in range(1, 8):
            param.grad = torch.full_like(param, step)
            optimizer.step()
    torch.testing.assert_close(*params, rtol=1e-13, atol=1e-13)
    assert required(getattr(co, name)) == {"lr": 1e-3}
