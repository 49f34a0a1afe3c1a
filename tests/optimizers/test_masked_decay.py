"""Decay by the square of the rate, and of some elements; the catalogue has a case of every optimizer that decays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from catalog import give_gradients, reference_of, registry, relative_error, required, ruled, wide_scalars
from reference.decay import IN_GRADIENT, decoupled
from torch.nn import Parameter

import compiled_optim as co
from compiled_optim.rule import Number, hyper
from compiled_optim.rule.symbols import PLAIN
from compiled_optim.rule.transforms import cautiously_decayed, corrected

LOWERINGS = ["multi_tensor", "eager"]
DECAYING = [c for c in registry() if "corrected_weight_decay" in c._all_fields]
CHOICES = [("corrected_weight_decay",), ("cautious_weight_decay",), ("corrected_weight_decay", "cautious_weight_decay")]
FAR: dict[str, Any] = {"betas": (0.6, 0.8), "eps": 0.03, "momentum": 0.7, "rho": 0.6, "alpha": 0.7}
FAR |= {"weight_decay": 0.4, "lr_decay": 0.1, "momentum_decay": 0.5, "gamma": 0.3}
OWN: dict[str, dict[str, Any]] = {
    "Adafactor": {"eps": (0.02, 0.3), "beta2_decay": -0.5, "d": 1.3},
    "Adan": {"betas": (0.6, 0.7, 0.8)},
    "AdEMAMix": {"betas": (0.6, 0.8, 0.97), "alpha": 2.3, "t_alpha": 5.5, "t_beta3": 6.5},
    "ASGD": {"lambd": 0.3, "alpha": 0.4, "t0": 2.5},
    "Prodigy": {"d0": 0.02, "d_coef": 1.2},
    "Ranger": {"k": 3.3, "alpha": 0.3},
}
OTHERS = (co.ADOPT, co.ASGD, co.Adan, co.AdamWScheduleFree, co.LAMB, co.Prodigy, co.Ranger, co.StableAdamW)
"""Those that do not take ``lr * weight_decay`` away, before all else, in each step."""


def rate(step: int) -> float:
    """A schedule from 0 up to 0.3 and down again."""
    return 0.3 * (1 - abs(step - 20) / 30) * (step > 0)


def arguments_of(kind: type[co.CompiledOptimizer], **more: Any) -> dict[str, Any]:
    """Numbers far from the defaults, and decay apart from the gradient."""
    known = {**FAR, **OWN.get(kind.__name__, {})}
    known |= {"decouple_wd": True, **({"max_lr": 0.3} if "corrected_weight_decay" in more else {})}
    return {**required(kind), **{n: v for n, v in known.items() if n in kind._all_fields}, "lr": 0.1, **more}


def tensors() -> list[Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((6, 11), (40, 130))]


def asked(kind: type[co.CompiledOptimizer], chosen: tuple[str, ...]) -> bool:
    return all(name in kind._all_fields for name in chosen)


CASES = [(kind, chosen, low) for kind in DECAYING for chosen in CHOICES if asked(kind, chosen) for low in LOWERINGS]
CASES += [(kind, CHOICES[2], "inductor") for kind in (co.AdamW, co.LAMB, co.Muon)]


@pytest.mark.parametrize(("kind", "chosen", "lowering"), CASES, ids=str)
def test_fifty_steps(kind: type[co.CompiledOptimizer], chosen: tuple[str, ...], lowering: str) -> None:
    """The plain optimizer makes a step without decay, and Algorithm 1 of arXiv:2510.12402 decays.

    Of optimizers that decay by another number or at another place, references of the whole step do.
    """
    on = dict.fromkeys(chosen, True)
    ours, twins = tensors(), tensors()
    optimizer = kind(ours, lowering=lowering, **arguments_of(kind, **on))
    if is_other := kind in OTHERS:
        with wide_scalars():
            reference = decoupled(reference_of(kind), kind.__name__)(twins, **arguments_of(kind, **on))
    else:
        reference = kind(twins, lowering=lowering, **{**arguments_of(kind), "weight_decay": 0.0})
    kept = 0
    for step in range(50):
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = lr = rate(step)
        give_gradients(ours, twins, step)
        optimizer.step()
        before = [twin.detach().clone() for twin in twins]
        with wide_scalars():
            reference.step()
        for x, twin in () if is_other else zip(before, twins, strict=True):
            share = 0.4 * (lr**2 / 0.3 if "corrected_weight_decay" in chosen else lr)
            keeps = ((x - twin) * x < 0) & ("cautious_weight_decay" in chosen)
            kept += keeps.sum().item()
            twin.data -= torch.where(keeps, 0.0, share * x)
    assert relative_error(ours, twins) < 1e-12
    assert is_other or bool(kept) == ("cautious_weight_decay" in chosen)
    plain = tensors()
    optimizer = kind(plain, **arguments_of(kind))
    for step in range(50):
        optimizer.param_groups[0]["lr"] = rate(step)
        give_gradients(plain, plain, step)
        optimizer.step()
    assert relative_error(ours, plain) > 1e-3  # what both have in common without the choices


STORED: list[tuple[type[co.CompiledOptimizer], dict[str, Any]]] = [
    *((kind, {}) for kind in (co.AdamW, co.SGD, co.Muon, co.Adafactor, co.Prodigy)),
    (co.AdamW, {"weights": "kahan", "state_dtype": "int8"}),
    (co.Lion, {"weights": "split8"}),
    (co.NorMuon, {"weights": "split16"}),
]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("kind", "more"), STORED, ids=str)
def test_resumed_steps_are_equal_bit_for_bit(kind: type[co.CompiledOptimizer], more: dict[str, Any], lowering: str) -> None:
    """The checkpoint brings the choices. One of this package without them ends them, and torch.optim's leaves them."""
    dtype = torch.bfloat16 if more else torch.float32
    made = [[Parameter(p.detach().to(dtype)) for p in tensors()] for _ in range(2)]
    whole = kind(made[0], lowering=lowering, **arguments_of(kind, **more, **dict.fromkeys(CHOICES[2], True)))
    resumed = kind(made[1], lowering=lowering, **arguments_of(kind, **more))
    for step in range(8):
        if step == 4:
            for param, other in zip(made[1], made[0], strict=True):
                param.data.copy_(other.data)
            report = resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
            assert len(report.changed) == 2
            assert resumed.param_groups[0]["max_lr"] == 0.3
        whole.param_groups[0]["lr"] = resumed.param_groups[0]["lr"] = rate(5 * step)
        give_gradients(*made, step)
        whole.step()
        resumed.step()
        assert step < 4 or all(map(torch.equal, *made))
    without = kind([Parameter(p.detach()) for p in made[0]], **required(kind)).state_dict()
    for group in without["param_groups"]:
        assert not {"cautious_weight_decay", "corrected_weight_decay", "max_lr"} & group.keys()
    if "decouple_wd" not in kind._all_fields:
        theirs = kind is co.AdamW and not more
        whole.load_state_dict(torch.optim.AdamW(made[0]).state_dict() if theirs else without, strict=False)
        assert whole.param_groups[0]["cautious_weight_decay"] is whole.param_groups[0]["corrected_weight_decay"] is theirs


@pytest.mark.parametrize("kind", [co.AdamW, co.LAMB, co.Adafactor, co.Muon], ids=lambda c: c.__name__)
def test_compiled_steps_are_the_same(kind: type[co.CompiledOptimizer]) -> None:
    """In a function that the user compiles, as the step's own operations and as one operator."""
    made = [tensors() for _ in range(3)]
    arguments = arguments_of(kind, **dict.fromkeys(CHOICES[2], True))
    sides = [kind(p, lowering=low, **arguments) for p, low in zip(made, ("eager", "inductor", "multi_tensor"), strict=True)]
    runs = [sides[0].step, *(torch.compile(side.step, backend="eager", fullgraph=True) for side in sides[1:])]
    for step in range(4):
        give_gradients(made[0], made[1], step)
        give_gradients(made[0], made[2], step)
        for side, run in zip(sides, runs, strict=True):
            side.param_groups[0]["lr"] = rate(10 * step)
            run()
    # Lowerings add up products in bfloat16 in another order, which turns the sign of a small element of a step.
    assert max(relative_error(p, made[0]) for p in made[1:]) < (2e-2 if kind is co.Muon else 1e-13)


@pytest.mark.parametrize("kind", ruled(), ids=lambda c: c.__name__)
def test_without_the_choices_the_code_is_the_same(kind: type[co.CompiledOptimizer]) -> None:
    """With them it has no stage more, each of which is a launch."""
    others = tuple(t for t in kind._transforms if t not in (corrected, cautiously_decayed))
    less = type(kind.__name__, (kind,), {"_transforms": others})._rule
    for chosen in ({}, {"decouple_wd": True}, {"decouple_lr": True}):
        if chosen.keys() <= kind._all_fields.keys():
            statics = {**next(less._situations()), **chosen, "cautious": False}
            off = {"cautious_weight_decay": False, "corrected_weight_decay": False}
            assert less.written_in_full(statics, PLAIN) == kind._rule.written_in_full({**statics, **off}, PLAIN)
            on = dict.fromkeys(off, True)
            assert kind._rule.stages({**statics, **on}).keys() == less.stages(statics).keys()


def test_signs_are_of_the_step_before_caution() -> None:
    """Number by number: a cautious step of AdamW is 0 where the average goes up the gradient, and decay is as without."""
    param = Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64))
    options = {"betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4, "cautious": True, "cautious_weight_decay": True}
    optimizer = co.AdamW([param], lr=0.07, **options)
    x, m, v = param.detach().clone(), torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    differs = 0
    for t in range(1, 9):
        g = param.grad = torch.randn(12, dtype=torch.float64)
        optimizer.step()
        m, v = 0.6 * m + 0.4 * g, 0.8 * v + 0.2 * g**2
        u = m / (1 - 0.6**t) / ((v / (1 - 0.8**t)).sqrt() + 0.03)
        moves = (u * g > 0).double()
        differs += ((moves == 0) & (u * x < 0)).sum().item()
        x = x - 0.07 * (moves / moves.mean() * u + torch.where(u * x >= 0, 0.4 * x, 0.0))
    assert differs
    assert relative_error([param], [x]) < 1e-14


@pytest.mark.parametrize("lowering", [*LOWERINGS, "inductor"])
def test_zeros_decay_and_a_rate_of_0_does_not(lowering: str) -> None:
    """A step of 0 has no sign, so that the weight decays; where ``max_lr`` is 0, nothing does."""
    params = [Parameter(torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64)) for _ in range(2)]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "max_lr": 0.0}]
    both = {"cautious_weight_decay": True, "corrected_weight_decay": True}
    optimizer = co.SGD(groups, lr=0.1, weight_decay=0.5, max_lr=0.2, decouple_wd=True, lowering=lowering, **both)
    for param in params:
        param.grad = torch.tensor([0.0, 1.0, -4.0], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(params[0].tolist(), [-2 * (1 - 0.1**2 / 0.2 * 0.5), -0.1, 2.4])
    torch.testing.assert_close(params[1].tolist(), [-2.0, -0.1, 2.4])


def test_each_parameters_own_rate() -> None:
    """Both learning rates are scaled: a parameter decays by the square of its own over its own largest."""
    params = [Parameter(torch.full((3,), 2.0, dtype=torch.float64)) for _ in range(2)]
    named = list(zip("ab", params, strict=True))
    optimizer = co.Lion(named, lr=0.2, weight_decay=0.5, corrected_weight_decay=True, lr_scale={"b": 0.5})
    optimizer.param_groups[0]["lr"] = 0.1
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert params[0].tolist() == pytest.approx([2 * (1 - 0.1**2 / 0.2 * 0.5)] * 3, rel=1e-15)
    assert params[1].tolist() == pytest.approx([2 * (1 - 0.05**2 / 0.1 * 0.5)] * 3, rel=1e-15)


@pytest.mark.parametrize("choice", ["cautious_weight_decay", "corrected_weight_decay"])
class TestRefusals:
    @pytest.mark.parametrize("name", [*IN_GRADIENT.split(), "ADOPT"])
    def test_decay_in_the_gradient(self, name: str, choice: str) -> None:
        params, said = [Parameter(torch.ones(2, 2))], f"{choice}=True does not go with weight decay in the gradient; "
        with pytest.raises(ValueError, match=said + "pass decouple_wd=True as well"):
            getattr(co, name)(params, **{choice: True})
        optimizer = getattr(co, name)(params, decouple_wd=True, **{choice: True})
        with pytest.raises(ValueError, match=said):
            optimizer.param_groups[0]["decouple_wd"] = False
        assert optimizer.param_groups[0]["decouple_wd"] is True
        assert choice in repr(optimizer)
        assert choice not in repr(getattr(co, name)(params))
        torch.optim.SGD(params).load_state_dict(co.SGD(params, decouple_wd=True, **{choice: True}).state_dict())

    def test_ranger_without_its_default(self, choice: str) -> None:
        with pytest.raises(ValueError, match=f"{choice}=True does not go with weight decay in the gradient"):
            co.Ranger([Parameter(torch.ones(2))], lr=0.1, decouple_wd=False, **{choice: True})

    def test_a_number(self, choice: str) -> None:
        with pytest.raises(TypeError, match=f"{choice} must be a bool, got 1"):
            co.AdamW([Parameter(torch.ones(2))], **{choice: 1})

    @pytest.mark.parametrize("name", ["Rprop", "SparseAdam", "LBFGS"])
    def test_who_does_not_decay(self, name: str, choice: str) -> None:
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{choice}'"):
            getattr(co, name)([Parameter(torch.ones(2, 2))], **{choice: True})


class InStep(co.CompiledOptimizer, granularity="tensor"):
    """A toy that decays in its step, where nothing tells decay and step apart."""

    lr: Number = hyper(ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)

    @staticmethod
    def coefficients(lr, weight_decay):
        return dict(lr=lr, weight_decay=weight_decay)

    @staticmethod
    def update(param, grad, c):
        return dict(step=c.lr * (grad + c.weight_decay * param))


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_rule_on_tensors_that_decays_in_its_step(lowering: str) -> None:
    param = Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    InStep([param], lr=0.1, weight_decay=0.5, lowering=lowering).step()
    with pytest.raises(TypeError, match="returns no decayed param; cautious_weight_decay is for"):
        InStep([param], lr=0.1, cautious_weight_decay=True, lowering=lowering).step()


def test_averaged_steps_have_no_signs() -> None:
    with pytest.raises(TypeError, match=r"AdamWScheduleFree\(\) got an unexpected keyword argument 'cautious_weight_decay'"):
        co.AdamWScheduleFree([Parameter(torch.ones(2))], cautious_weight_decay=True)


def test_a_schedule_that_begins_with_0() -> None:
    with pytest.warns(UserWarning, match="max_lr, which corrected_weight_decay divides by, is the group's first lr, 0"):
        co.AdamW([Parameter(torch.ones(2))], lr=0.0, corrected_weight_decay=True)


def test_max_lr_appears_and_stays_with_either_choice() -> None:
    optimizer = co.AdamW([Parameter(torch.ones(2))], lr=0.1)
    group = optimizer.param_groups[0]
    group["lr"] = 0.02
    group["corrected_weight_decay"] = True
    assert group["max_lr"] == 0.1
    with pytest.raises(ValueError, match=r"max_lr of .* cannot be removed: corrected_weight_decay=True reads it"):
        del group["max_lr"]
