"""State in 8 bits of rules that have none yet, since a hyperparameter is 0, for tensors whose last group is not whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catalog import registry, required

import compiled_optim as co

KINDS = [kind for kind in registry() if kind._granularity == "element" and kind._declaration.structural_hypers]


def _trained(kind: Any, dtype: torch.dtype, size: int, **options: Any) -> torch.Tensor:
    param = torch.nn.Parameter(torch.linspace(-1, 1, size).to(dtype))
    hypers = kind._declaration.structural_hypers
    options |= {name: 0.0 for name in hypers}
    optimizer = kind([("p", param)], **{**required(kind), **options}, state_dtype="int8")
    for value in (0.0, 0.75):  # the buffer comes without a recompilation
        optimizer.param_groups[0] |= dict.fromkeys(hypers, value)
        for _ in range(2):
            param.grad = param.detach().cos()
            if value:
                with co.no_recompiles():
                    optimizer.step()
            else:
                optimizer.step()
    return param.detach()


def test_kinds_are_some() -> None:
    assert {k.__name__ for k in KINDS} >= {"SGD", "RMSprop"}


@pytest.mark.parametrize("size", [4159, 4112])
@pytest.mark.parametrize(("dtype", "weights"), [(torch.bfloat16, "stochastic"), (torch.float32, None)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_inductor_steps_as_torch_does(kind: Any, dtype: torch.dtype, weights: Any, size: int) -> None:
    found = _trained(kind, dtype, size, lowering="inductor", weights=weights)
    torch.testing.assert_close(found, _trained(kind, dtype, size, lowering="eager", weights=weights), rtol=0.01, atol=0.01)
