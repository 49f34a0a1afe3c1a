"""Decay apart from the gradient and from the learning rate; the catalogue has a case of every optimizer that decays."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from catalog import copies, give_gradients, high_precision, parameters, reference_of, registry, relative_error, wide_scalars
from reference.cautious import cautious
from reference.decay import IN_GRADIENT, decoupled
from torch import Tensor
from torch.nn import Parameter

import compiled_optim as co

LOWERINGS = ["multi_tensor", "eager", "inductor"]
DECAYING = [c for c in registry() if "weight_decay" in c._all_fields]
SHAPES = [(5, 7), (3,), (), (150, 130)]
ADAM = {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4}
RADAM = {**ADAM, "betas": (0.6, 0.95), "eps": 1e-30}  # optimi's eps has another place
BOTH = {"decouple_lr": True, "max_lr": 0.2}

OPTIMI: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.07, "momentum": 0.8, "weight_decay": 0.4, "decouple_wd": True}),
    ("SGD", {"lr": 0.07, "momentum": 0.8, "weight_decay": 0.4, **BOTH}),
    ("Adam", {**ADAM, "decouple_wd": True}),
    ("Adam", {**ADAM, **BOTH}),
    ("AdamW", {**ADAM, **BOTH}),
    ("Adan", {**ADAM, "betas": (0.6, 0.7, 0.8), **BOTH}),
    ("Lion", {"lr": 0.07, "betas": (0.6, 0.8), "weight_decay": 0.4, **BOTH}),
    ("Lion", {"lr": 0.07, "betas": (0.6, 0.8), "weight_decay": 0.4, "decouple_lr": True}),
    ("RAdam", {**RADAM, "decouple_wd": True}),
    ("RAdam", {**RADAM, **BOTH}),
    ("Ranger", {**RADAM, "k": 4, "alpha": 0.3, **BOTH}),
    ("StableAdamW", {**ADAM, **BOTH}),
]

OF_OPTIMI = pytest.mark.filterwarnings("ignore:You are using weight_decay up to")


@OF_OPTIMI
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "arguments"), OPTIMI)
def test_equals_optimi(name: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """One group, since optimi divides all groups by the constructor's learning rate."""
    optimi = pytest.importorskip("optimi")
    for lowering in LOWERINGS if name == "SGD" and dtype == torch.float32 else LOWERINGS[:2]:
        generator = torch.Generator().manual_seed(0)
        ours = [Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in SHAPES]
        twins = copies(ours, torch.float64)
        optimizer = getattr(co, name)(ours, **arguments, lowering=lowering)
        reference = getattr(optimi, name)(twins, **arguments, foreach=False, triton=False)
        for step in range(11):
            for side in (optimizer, reference):
                side.param_groups[0]["lr"] = 0.07 / (1 + step % 5)
            give_gradients(ours, twins, step)
            optimizer.step()
            reference.step()
        assert relative_error(ours, twins) < (1e-13 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("optimizer", DECAYING, ids=lambda c: c.__name__)
def test_groups_of_their_own_rates(optimizer: type[co.CompiledOptimizer]) -> None:
    """Each group decays by its own rates, whatever the others', under a schedule from 0 and back to it."""
    params = [Parameter(torch.randn(4, 6, dtype=torch.float64)) for _ in range(4)]
    twins = copies(params, torch.float64)
    groups = [{}, {"lr": 3e-3}, {"lr": 3e-3, "max_lr": 0.5}, {"decouple_lr": False}]
    sides = []
    for make, tensors in ((optimizer, params), (decoupled(reference_of(optimizer), optimizer.__name__), twins)):
        own = [{"params": [tensor], **group} for tensor, group in zip(tensors, groups, strict=True)]
        with wide_scalars():
            sides.append(make(own, lr=0.05, weight_decay=0.4, decouple_lr=True))
    rates = [0.05, 3e-3, 3e-3, 0.05]
    for step in range(6):
        for side in sides:
            for group, rate in zip(side.param_groups, rates, strict=True):
                group["lr"] = rate * step * (5 - step) / 6
        give_gradients(params, twins, step)
        for side in sides:
            with wide_scalars():
                side.step()
    assert relative_error(params, twins) < (1e-2 if optimizer._granularity == "matrix" else 1e-14)


# LAMB's decay is part of a direction whose length does not matter, Prodigy's goes by its estimate, Schedule-Free's into an
# average.
OTHERS = (co.LAMB, co.Prodigy, co.AdamWScheduleFree)


@pytest.mark.parametrize("optimizer", [c for c in DECAYING if c not in OTHERS], ids=lambda c: c.__name__)
def test_how_much_is_left_without_gradients(optimizer: type[co.CompiledOptimizer]) -> None:
    """By hand: of each group ``1 - lr / max_lr * weight_decay`` is left, and nothing goes where ``max_lr`` is 0."""
    params = [Parameter(torch.full((2, 3), 2.0, dtype=torch.float64)) for _ in range(4)]
    groups = [{}, {"lr": 0.01}, {"lr": 0.0}, {"max_lr": 0.0}]
    own = [{"params": [param], **group} for param, group in zip(params, groups, strict=True)]
    options = {"lr": 0.1, "weight_decay": 0.25, "decouple_lr": True, **({"lambd": 0.0} if optimizer is co.ASGD else {})}
    with pytest.warns(UserWarning, match="weights will not decay: max_lr, .*, is the group's first lr, 0; pass") as warned:
        made = optimizer(own, **options)
    assert sum("will not decay" in str(w.message) for w in warned) == 1
    for param in params:
        param.grad = torch.zeros_like(param)
    for _ in range(3 if optimizer is co.ADOPT else 2):  # whose first step changes no parameter
        made.step()
    left = 1 / 1.25 if optimizer is co.Adan else 0.75
    for param, factor in zip(params, (left, left, 1.0, 1.0), strict=True):
        torch.testing.assert_close(param.detach(), torch.full_like(param, 2 * factor**2), rtol=1e-14, atol=0)


@pytest.mark.parametrize("optimizer", DECAYING, ids=lambda c: c.__name__)
@pytest.mark.parametrize(("weight_decay", "warns"), [(4e-3, False), (6e-3, True)])
def test_a_weight_decay_that_is_large_whatever_the_rate(
    optimizer: type[co.CompiledOptimizer], weight_decay: float, warns: bool
) -> None:
    """The constructor's, and that of a group; without ``decouple_lr`` it is multiplied by the rate."""
    kwargs = {"lr": 1e-3, "weight_decay": weight_decay}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer([Parameter(torch.ones(2, 3))], **kwargs)
        assert not caught
        optimizer([Parameter(torch.ones(2, 3))], decouple_lr=True, **kwargs)
        optimizer([{"params": [Parameter(torch.ones(2, 3))], **kwargs}], lr=1.0, weight_decay=0.0, decouple_lr=True)
    assert [str(w.message).split(",")[0] for w in caught] == [
        "with decouple_lr=True a step at max_lr takes 0.006 of a parameter away"
    ] * (2 * warns)


def test_a_choice_of_optimis_that_means_other_than_there() -> None:
    made = {"lr": 0.1, "weight_decay": 1e-3, "decouple_lr": True}
    with pytest.warns(UserWarning, match="decouple_wd=False with decouple_lr=True adds .* leave decouple_wd out"):
        co.SGD([Parameter(torch.ones(3))], **made, decouple_wd=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        co.SGD([Parameter(torch.ones(3))], **made)
        co.SGD([Parameter(torch.ones(3))], **made, decouple_wd=True)
        co.mup.SGD([Parameter(torch.ones(3))], lr=0.1, weight_decay=1e-3, allow_non_unit_scaling_params=True)


@OF_OPTIMI
@pytest.mark.parametrize("name", ["SGD", "AdamW", "StableAdamW"])
def test_optimi_decays_groups_by_the_constructors_rate(name: str) -> None:
    """The difference from optimi: a group with a hundredth of the rate decays there by a hundredth of what was asked."""
    optimi = pytest.importorskip("optimi")
    left = {}
    for package, options in ((co, {}), (optimi, {"triton": False, "foreach": False})):
        params = [Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 1e-4}]
        made = getattr(package, name)(groups, lr=1e-2, weight_decay=1e-3, decouple_lr=True, **options)
        for param in params:
            param.grad = torch.zeros_like(param)
        made.step()
        left[package] = [1 - param[0].item() for param in params]
    assert left[co] == pytest.approx([1e-3, 1e-3])
    assert left[optimi] == pytest.approx([1e-3, 1e-5])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("optimizer", [co.SGD, co.Adagrad, co.RMSprop], ids=lambda c: c.__name__)
def test_other_dtypes_maximized(optimizer: type[co.CompiledOptimizer], dtype: torch.dtype) -> None:
    ours = parameters(dtype)
    twins = copies(ours, high_precision(dtype))
    arguments = {"lr": 0.07, "weight_decay": 0.4, "maximize": True, "max_lr": 0.2, "decouple_lr": True}
    made = optimizer(ours, **arguments)
    reference = decoupled(getattr(torch.optim, optimizer.__name__), optimizer.__name__)(twins, **arguments)
    for step in range(6):
        give_gradients(ours, twins, step, absent=3)
        made.step()
        reference.step()
    assert relative_error(ours, twins) < (5e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_cautious_steps_leave_decay_alone(name: str) -> None:
    ours = parameters(torch.float64)
    twins = copies(ours, torch.float64)
    arguments = {"lr": 0.07, "weight_decay": 0.4, "decouple_wd": True, **({"momentum": 0.8} if name == "SGD" else {})}
    made = getattr(co, name)(ours, cautious=True, **arguments)
    reference = decoupled(cautious(getattr(torch.optim, name)), name)(twins, **arguments)
    for step in range(6):
        give_gradients(ours, twins, step, absent=3)
        made.step()
        with wide_scalars():
            reference.step()
    assert relative_error(ours, twins) < 1e-13


def test_gradients_flow_to_max_lr() -> None:
    max_lr = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    param = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True) * 1
    optimizer = co.SGD([param], lr=0.1, weight_decay=0.5, decouple_lr=True, max_lr=max_lr, differentiable=True)
    param.grad = torch.zeros(2, dtype=torch.float64)
    optimizer.step()
    (slope,) = torch.autograd.grad(param.sum(), max_lr)
    assert slope.item() == pytest.approx(2 * 3.0 * 0.1 * 0.5 / 0.2**2)


def _after_a_step(make: Any, **options: Any) -> Tensor:
    param = Parameter(torch.linspace(-1, 2, 7, dtype=torch.float64))
    made = make([param], lr=0.1, weight_decay=0.5, **options)
    param.grad = torch.linspace(1, -3, 7, dtype=torch.float64)
    made.step()
    return param.detach()


@pytest.mark.parametrize("name", IN_GRADIENT.split())
def test_the_forms_of_decay(name: str) -> None:
    """Which choices mean the same, and that decay in the gradient takes a number that is divided by ``max_lr``."""
    optimizer = getattr(co, name)
    plain, apart = _after_a_step(optimizer), _after_a_step(optimizer, decouple_wd=True)
    assert torch.equal(plain, _after_a_step(optimizer, decouple_wd=False))
    assert not torch.equal(plain, apart)
    assert torch.equal(apart, _after_a_step(optimizer, decouple_lr=True, max_lr=1.0))
    assert torch.equal(plain, _after_a_step(optimizer, decouple_lr=True, max_lr=1.0, decouple_wd=False))
    if "decoupled_weight_decay" in optimizer._all_fields:
        assert torch.equal(apart, _after_a_step(optimizer, decoupled_weight_decay=True))


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon", "Adafactor", "StableAdamW", "Adan"])
def test_who_always_decays_apart_has_no_choice(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'decouple_wd'"):
        getattr(co, name)([Parameter(torch.ones(2, 2))], lr=0.1, decouple_wd=True)


@pytest.mark.parametrize("name", ["Rprop", "SparseAdam", "LBFGS"])
def test_who_does_not_decay_has_none_of_it(name: str) -> None:
    for option in ("decouple_wd", "decouple_lr", "max_lr"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            getattr(co, name)([Parameter(torch.ones(2, 2))], **{option: True})
