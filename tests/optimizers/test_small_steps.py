"""Steps below the resolution of 16 bits: every way to store parameters but rounding takes them all in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from catalog import ruled
from torch import Tensor
from torch.nn import Parameter

import compiled_optim as co
from compiled_optim.rule.storage import MODES

SIZE = 4096  # elements; fewer are stored in full anyway
ULP = 2.0**-7  # of bfloat16 from 1 to 2
EVERY_MODE = (co.AdamW, co.SGD, co.Ranger)  # the others in the two that differ most: modes are one transform of all rules


def trained(optimizer: type[co.CompiledOptimizer], modes: tuple[str | None, ...], steps: int, grad: float, **options: Any):
    """What became of ones in bfloat16 in each of ``modes``, by mode, and of ones in float32."""
    params = [Parameter(torch.ones(SIZE, dtype=torch.bfloat16)) for _ in modes]
    exact = Parameter(torch.ones(SIZE))
    groups: list[dict[str, Any]] = [{"params": [p], "weights": m} for p, m in zip(params, modes, strict=True)]
    made = optimizer([*groups, {"params": [exact]}], **options)
    for param in (*params, exact):
        param.grad = torch.full_like(param, grad)
    for _ in range(steps):
        made.step()
    return {m: p.detach().double() for m, p in zip(modes, params, strict=True)}, exact.detach().double()


def assert_unbiased(found: Tensor, expected: Tensor) -> None:
    errors = found - expected
    assert errors.mean().abs() <= 3 * errors.std() / math.sqrt(SIZE)


# LAMB's decay is part of a direction whose length does not matter, Prodigy's goes by its estimate, Schedule-Free's into an
# average.
OTHERS = (co.LAMB, co.Prodigy, co.AdamWScheduleFree)
DECAYING = [c for c in ruled("dense") if "weight_decay" in c._all_fields and c not in OTHERS]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", DECAYING, ids=lambda c: c.__name__)
def test_decay_arrives(optimizer: type[co.CompiledOptimizer]) -> None:
    """2000 times 1e-4 of the parameter, without gradients. Lookahead takes half of it back."""
    options = {"decouple_wd": True} if "decouple_wd" in optimizer._all_fields else {}
    options |= {"lambd": 0.0} if optimizer is co.ASGD else {}  # which would decay as well
    modes = MODES if optimizer in EVERY_MODE else ("stochastic", "split8")
    found, exact = trained(optimizer, modes, 2000, 0.0, lr=1e-2, weight_decay=1e-2, **options)
    assert exact.mean().item() == pytest.approx(0.905 if optimizer is co.Ranger else 0.819, rel=1e-3)
    for mode, param in found.items():
        assert param.mean().item() == pytest.approx(exact.mean().item(), rel=0.01), mode


def test_without_a_mode_decay_is_lost_as_in_torch() -> None:
    found, _ = trained(co.AdamW, (None,), 100, 0.0, lr=1e-2, weight_decay=1e-2)
    theirs = Parameter(torch.ones(SIZE, dtype=torch.bfloat16))
    other = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=1e-2)
    theirs.grad = torch.zeros_like(theirs)
    for _ in range(100):
        other.step()
    assert torch.equal(found[None], theirs.detach().double())
    assert (theirs == 1).all()


@pytest.mark.full
@pytest.mark.parametrize("grad", [1.0, -0.5])
def test_many_small_updates_add_up(grad: float) -> None:
    """10,000 of 1e-4: from 1 to nearly 0 and to 1.5."""
    found, exact = trained(co.SGD, MODES, 10_000, grad, lr=1e-4)
    assert_unbiased(found.pop("stochastic"), exact)
    for mode, param in found.items():
        assert (param - exact).abs().max() <= ULP, mode


def test_decay_of_stochastic_weights_has_no_bias() -> None:
    found, exact = trained(co.SGD, ("stochastic",), 2000, 0.0, lr=1e-2, weight_decay=1e-2, decouple_wd=True)
    assert_unbiased(found["stochastic"], exact)
