"""A report says that all is compiled only where it is."""

from typing import Any

import pytest
import torch
from catalog import registry

import compiled_optim as co

KINDS = [kind for kind in [*registry(), co.MuonAdamW] if kind not in (co.LBFGS, co.SparseAdam)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_is_said_to_be_compiled_of_an_eager_step(kind: Any) -> None:
    param = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = kind([("w", param)], lr=0.1, lowering="eager")
    param.grad = torch.randn(6, 4)
    optimizer.step()
    assert "Nothing is compiled" in str(co.compile_report(optimizer))


def test_a_step_that_is_compiled_in_part_is_said_to_be_that() -> None:
    params = [torch.nn.Parameter(torch.ones(6, 4, device=device)) for device in ("cpu", "meta")]
    optimizer = co.SGD([{"params": [param]} for param in params], lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert "Not all is compiled" in str(co.compile_report(optimizer))
