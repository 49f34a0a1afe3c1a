"""What users meet on an optimizer: torch.optim's names, and as few others as there are reasons for."""

from __future__ import annotations

import pytest
import torch
from catalog import registry, required
from torch import nn

import compiled_optim as co

READ = "what users read and write between steps, as README.md says"
DECLARED = "what the body or the statement of a class declares, for whoever writes an optimizer"

BEYOND_TORCH = {
    "grad_norm": READ,
    "hyperparameter": READ,
    "hyperparameters": READ,
    "max_grad_norm": READ,
    "schedule": READ,
    "skip_nonfinite": READ,
    "skipped_steps": READ,
    "advice": DECLARED,
    "check": DECLARED,
    "coefficients": DECLARED,
    "declaration": DECLARED,
    "declared": DECLARED,
    "fields": DECLARED,
    "fields_of": DECLARED,
    "gradients": DECLARED,
    "granularity": DECLARED,
    "group_flags": DECLARED,
    "implied_state": DECLARED,
    "rule": DECLARED,
    "transforms": DECLARED,
    "update": DECLARED,
}
"""The public attributes that torch.optim's optimizers lack, and why they are there."""


def _public(optimizer: torch.optim.Optimizer) -> set[str]:
    return {name for name in dir(optimizer) if not name.startswith("_")}


def _made(kind: type[co.CompiledOptimizer]) -> co.CompiledOptimizer:
    return kind([nn.Parameter(torch.ones(2, 2))], **required(kind))


def test_nothing_without_a_reason() -> None:
    ours = _public(_made(co.AdamW))
    theirs = _public(torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))]))
    assert theirs <= ours
    assert ours - theirs == set(BEYOND_TORCH)


@pytest.mark.parametrize("kind", registry(), ids=lambda c: c.__name__)
def test_no_optimizer_has_more(kind: type[co.CompiledOptimizer]) -> None:
    assert _public(_made(kind)) <= _public(_made(co.AdamW))


def test_nothing_appears_with_use() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = co.AdamW([param], max_grad_norm=1.0)
    before = _public(optimizer)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    co.compile_report(optimizer)
    assert _public(optimizer) == before
