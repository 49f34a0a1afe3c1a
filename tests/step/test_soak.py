"""The soak and its walks, in a short form."""

from __future__ import annotations

import pytest
from soak import EVENTS, OPTIMIZERS, soak
from walks import walk


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_stay_right(name: str) -> None:
    happened = soak(name, steps=250, seed=1)
    assert happened["step"] == 250
    assert len(happened) > len(set(EVENTS)) - 3


@pytest.mark.full
@pytest.mark.parametrize("lowering", ["inductor", "eager"])
@pytest.mark.parametrize("name", ["AdamW", "SparseAdam"])
def test_steps_of_other_lowerings_stay_right(name: str, lowering: str) -> None:
    soak(name, steps=100, seed=2, lowering=lowering)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(8))
def test_ways_to_step_stay_equal(seed: int) -> None:
    """Always the same walks, so that one which fails does so for the change at hand; ``tools/soak --walks`` goes others."""
    walk(seed)
