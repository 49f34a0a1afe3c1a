"""The norm of all gradients, and what is decided by it, for gradients of every size: the same in every lowering."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catalog import LOWERINGS
from gradients_of_any_size import SCALES, SIZES, exact_norm, gradients, outcomes
from in_triton import interpret

import compiled_optim as co


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    pytest.importorskip("triton")
    found: dict[str, Any] = interpret("gradients_of_any_size")
    return found


@pytest.mark.full
@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("lowering", [*LOWERINGS, "inlined", "triton"])
def test_gradients_of_every_size(lowering: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Norms are exact, and a step is skipped if their square overflows, whatever they are clipped to."""
    if lowering == "triton":
        found = request.getfixturevalue("interpreted")[str(dtype)]
    else:
        compiled = lowering == "inlined"
        found = outcomes(dtype, "inductor" if compiled else lowering, compiled=compiled)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    cases = [
        (clip, grads, scale)
        for clip in (1.0, math.inf)
        for size in SIZES[dtype]
        for grads in gradients(dtype, size)
        for scale in SCALES
    ]
    for (clip, grads, scale), (norm, skipped, ends) in zip(cases, found, strict=True):
        expected = exact_norm(grads, scale)
        where = f"norm {expected} clipped to {clip}, scale {scale}"
        assert norm == pytest.approx(expected, rel=1e-6, abs=0, nan_ok=True), where
        factor = min(1.0, clip / (expected + 1e-6)) if expected < math.inf else math.nan
        square = torch.tensor(expected, dtype=computed).square()
        assert skipped == (not square.isfinite()), where
        for end, grad, i in zip(ends, grads, (0, 4999, 2), strict=True):
            due = 0.0 if skipped else -factor * grad[i].item() / scale
            # Factors below 1e-38, and steps that the dtype cannot hold, have fewer digits.
            assert end == pytest.approx(due, rel=max(1e-4, torch.finfo(dtype).eps), abs=torch.finfo(dtype).tiny), where


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("optimizer", [co.Adafactor, co.Muon, co.SparseAdam], ids=lambda c: c.__name__)
def test_stacks_and_rows_are_measured_alike(optimizer: type[co.CompiledOptimizer], lowering: str) -> None:
    param = torch.nn.Parameter(torch.zeros(6, 5))
    made = optimizer([param], skip_nonfinite=True, lowering=lowering)
    for size in (1e-40, 1e-30, 1.0, 1e18, 1e20, 3e38):
        grad = torch.full((6, 5), size)
        param.grad = grad.to_sparse(1) if optimizer is co.SparseAdam else grad
        skipped = made.skipped_steps.item()
        made.step()
        assert made.grad_norm is not None
        assert made.grad_norm.item() == pytest.approx(exact_norm([grad.flatten()], 1.0), rel=1e-6, abs=0)
        assert (made.skipped_steps > skipped) == (size > 1e19)
    assert all(value.isfinite().all() for value in made.state[param].values())


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_huge_gradient_leaves_no_infinite_state(lowering: str) -> None:
    """An average of squares that is infinite would hold its element for ever."""
    param = torch.nn.Parameter(torch.zeros(5000))
    optimizer = co.AdamW([param], lr=0.1, skip_nonfinite=True, weight_decay=0.0, lowering=lowering)
    for value in (1.0, 1e25, 1.0):
        param.grad = torch.full((5000,), value)
        optimizer.step()
    assert optimizer.skipped_steps.item() == 1
    torch.testing.assert_close(param, torch.full((5000,), -0.2), rtol=1e-6, atol=0)


def test_a_parameter_of_fewer_bits_sets_the_limit() -> None:
    """Of all parameters together, whenever they are added."""
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float64, torch.float32)]
    optimizer = co.SGD(params[:1], lr=1e-30, skip_nonfinite=True)
    params[0].grad = torch.full((2,), 1e30, dtype=torch.float64)
    for expected in (0, 1):
        optimizer.step()
        assert optimizer.skipped_steps.item() == expected
        if expected == 0:
            optimizer.add_param_group({"params": params[1:]})
