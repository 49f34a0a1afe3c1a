"""optimi's checkpoints of parameters in bfloat16, with what rounding took from them, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co

optimi = pytest.importorskip("optimi")

LOOPS = {"foreach": False, "triton": False}
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01},
    "SGD momentum": {"lr": 0.01, "momentum": 0.8},
    **{kind: {"lr": 1e-3} for kind in ("Adam", "AdamW", "RAdam", "Lion", "StableAdamW", "Ranger")},
    "Adan": {"lr": 1e-3, "weight_decay": 0.0, "kahan_sum": True},  # by default it has none
}
PARTS = {"kahan": "kahan_comp", "split8": "remainder", "split16": "remainder", "master": "master_param"}


def _ours(case: str) -> dict[str, Any]:
    return {name: value for name, value in KINDS[case].items() if name != "kahan_sum"}


def _params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((1 + torch.rand(shape, generator=generator)).bfloat16()) for shape in ((80, 64), (4111,))]


def _train(optimizer: Any, params: list[nn.Parameter], steps: int = 3) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        optimizer.step()


def _twins(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def _exact(param: Tensor, state: dict[str, Any]) -> Tensor:
    """A weight between 1 and 2 with its part, in float64."""
    value = param.detach().double()
    if "kahan_comp" in state:
        return value + state["kahan_comp"].double()
    if "remainder" in state:  # of parts of 2**-7, the distance of numbers between 1 and 2
        return value + state["remainder"].double() * (2.0**-15 if state["remainder"].dtype == torch.int8 else 2.0**-23)
    return state["master_param"].double()


@pytest.mark.parametrize("weights", PARTS)
@pytest.mark.parametrize("case", KINDS)
def test_ours_goes_on_from_optimis(case: str, weights: str) -> None:
    kind, params = case.split()[0], _params()
    theirs = getattr(optimi, kind)(params, **KINDS[case], **LOOPS)
    _train(theirs, params)
    twins = _twins(params)
    ours = getattr(co, kind)(twins, **_ours(case), weights=weights, lowering="eager")
    ours.load_state_dict(theirs.state_dict())
    bound = {"kahan": 0.0, "split8": 2.0**-15, "split16": 2.0**-23, "master": 2.0**-23}[weights]
    for param, twin in zip(params, twins, strict=True):
        exact = _exact(param, {"kahan_comp": theirs.state[param]["kahan_comp"]})
        inside = (param >= 1 + 2.0**-6) & (param < 2)  # the others have units of another size
        torch.testing.assert_close(_exact(twin, ours.state[twin])[inside], exact[inside], rtol=0, atol=bound)
        assert (exact - param.detach().double()).abs().max() > 2.0**-9
    _train(ours, twins, 1)
    plain = getattr(co, kind)(_twins(params), **_ours(case), lowering="eager")
    with pytest.raises(ValueError, match="the optimizer has no kahan_comp for it"):
        plain.load_state_dict(theirs.state_dict())
    for param in params:
        theirs.state[param]["kahan_comp"].zero_()
    plain.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("weights", PARTS)
@pytest.mark.parametrize("case", KINDS)
def test_optimis_goes_on_from_ours(case: str, weights: str) -> None:
    kind, params = case.split()[0], _params()
    ours = getattr(co, kind)(params, **_ours(case), state_dtype="int8", weights=weights, lowering="eager")
    _train(ours, params)
    saved = co.optimi_state_dict(ours)
    twins = _twins(params)
    theirs = getattr(optimi, kind)(twins, **KINDS[case], **LOOPS)
    theirs.load_state_dict(saved)
    for param, twin in zip(params, twins, strict=True):
        comp = theirs.state[twin]["kahan_comp"]
        assert comp.dtype == torch.bfloat16
        inside = (param >= 1 + 2.0**-6) & (param < 2)
        exact = _exact(param, ours.state[param])
        bound = 0.0 if weights == "kahan" else 2.0**-17  # a compensation has 8 bits
        torch.testing.assert_close((twin.double() + comp.double())[inside], exact[inside], rtol=0, atol=bound)
        for entry, value in theirs.state[twin].items():
            assert value is None or value.is_floating_point(), entry
    before = [twin.detach().clone() for twin in twins]
    _train(theirs, twins, 1)
    assert not any(torch.equal(a, b) for a, b in zip(before, twins, strict=True))
    assert theirs.param_groups[0]["kahan_sum"] is True
    assert not {"weights", "state_dtype"} & set(theirs.param_groups[0])


def test_random_rounding_has_no_counterpart() -> None:
    ours = co.AdamW(_params(), weights="stochastic", lowering="eager")
    with pytest.raises(ValueError, match=r"param_groups\[0\] has weights='stochastic', which has no counterpart in optimi"):
        co.optimi_state_dict(ours)
