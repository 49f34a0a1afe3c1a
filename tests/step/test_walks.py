"""Whatever a user does between two steps: parameters, state, step counts and groups stay those of torch.optim in float64."""

from __future__ import annotations

from collections import Counter

import pytest
from torch_walks import ACTIONS, CALLED, GRADIENT_ACTIONS, WAYS, walk

PER_PART, PARTS = 10, 5
"""500 walks in all."""


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
def test_a_few_walks(way: str) -> None:
    for seed in range(1000, 1006 if way in CALLED else 1003):  # a compiled one takes seconds
        walk(way, seed)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", WAYS)
def test_walks(way: str, part: int) -> None:
    """Always the same ones, so that one which fails does so for the change at hand."""
    steps = ends = 0
    for seed in range(part * PER_PART, (part + 1) * PER_PART):
        happened = walk(way, seed)
        steps += happened["step"]
        ends += happened["torch.optim fails"]
    assert ends <= 2
    assert steps >= 6 * (PER_PART - ends)


@pytest.mark.full
def test_nearly_everything_happens() -> None:
    happened = sum((walk("called", seed) for seed in range(200)), Counter[str]())
    rare = {"forget_momentum", "delete_an_own_key"}  # which need a state of things that is rare
    assert {a.__name__ for a in ACTIONS if not happened[a.__name__]} <= rare
    assert not [a.__name__ for a in GRADIENT_ACTIONS if not happened[f"{a.__name__} after the backward"]]
