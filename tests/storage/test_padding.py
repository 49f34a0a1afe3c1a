"""The last group of a parameter is seldom whole: what a printer fills it up with is in no result."""

from __future__ import annotations

import overflows
import pytest
import torch
from in_triton import interpret
from torch import nn

import compiled_optim as co

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("storage", overflows.STORAGE)
@pytest.mark.parametrize("kind", overflows.KINDS)
def test_eager_agrees_with_kernels_that_fill_up_nothing(kind: str, storage: str) -> None:
    assert overflows.disagreements(kind, storage, "multi_tensor", "eager") == []


@pytest.mark.full
@pytest.mark.parametrize(("kind", "storage"), overflows.COMPILED)
def test_inductor_agrees(kind: str, storage: str) -> None:
    assert overflows.disagreements(kind, storage, "multi_tensor", "inductor") == []


@pytest.mark.full
def test_triton_agrees() -> None:
    pytest.importorskip("triton")
    found = interpret("overflows")
    assert found == {kind: [] for kind, _ in overflows.COMPILED}


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [co.AdamW, co.LAMB])
def test_an_overflow_reaches_no_weight_that_it_spares_with_float32_state(kind: type, lowering: str) -> None:
    """A whole group behaves like that; the end of a group of 23 must, too."""
    weights = {}
    for stored in ("int8", torch.float32):
        param = nn.Parameter(torch.randn(4119, generator=torch.Generator().manual_seed(0)))
        optimizer = kind([param], lr=0.01, state_dtype=stored, lowering=lowering)
        for step in range(5):
            param.grad = torch.randn(4119, generator=torch.Generator().manual_seed(1 + step))
            if step == 0:
                param.grad[4117] = 3e38
            optimizer.step()
        weights[stored] = param.detach()
    assert weights[torch.float32].isfinite().all()
    assert weights["int8"].isfinite().all()
