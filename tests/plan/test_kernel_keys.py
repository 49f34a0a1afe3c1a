"""What an optimizer keeps of kernels that parameters used, where groups come and go under new names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_optim as co


def _named(name: str) -> Any:
    param = torch.nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones_like(param)
    return name, param


@pytest.mark.parametrize("kind", [co.AdamW, co.Muon])
def test_keys_of_parameters_that_are_gone_are_dropped(kind: Any) -> None:
    optimizer = kind([_named("stays")], lr=0.01, lowering="multi_tensor")
    for i in range(5):
        optimizer.add_param_group({"params": [_named(f"comes.{i}")]})
        optimizer.step()
        assert {name for name, _ in optimizer._engine.log.keys} == {"stays", f"comes.{i}"}
        del optimizer.param_groups[1]
