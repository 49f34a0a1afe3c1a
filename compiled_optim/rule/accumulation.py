"""State that takes several gradients before the parameter moves, for rules whose steps read gradients through it alone."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from compiled_optim.rule.rule import Rule
from compiled_optim.rule.vocabulary import floor, where

GOES_ON, STAYS = 0.25, 0.5
"""What is added to a parameter's step count before a gradient: where it is not the first of its step, and not the last."""


@dataclass(frozen=True)
class Accumulation:
    """That a rule's step depends on gradients through its buffers alone, each of which is an average of them.

    ``kept`` are the numbers of ``coefficients`` with which a step multiplies what it finds in a buffer. ``unless`` names the
    choices with which it is not so.
    """

    kept: tuple[str, ...]
    unless: tuple[str, ...] = ()


@functools.cache
def accumulating(rule: Rule, accumulation: Accumulation) -> Rule:
    """``rule``, of which a step may consist of several gradients.

    Its step count is that of the step before, plus :data:`GOES_ON` where a gradient of this step came before, and
    :data:`STAYS` where another one follows. With the first gradient, buffers decay; every gradient is added with its weight.
    With the last one the parameter moves, and decays: into this gradient, where decay goes into gradients. A step of one
    gradient is as in ``rule``.
    """

    def coefficients(**values: Any) -> dict[str, Any]:
        step = floor(values["step"])
        part = values["step"] - step
        stays = part >= STAYS
        goes_on = where(stays, part - STAYS, part) >= GOES_ON
        still: dict[str, Any] = {name: where(stays, 0.0, values[name]) for name in ("lr", "weight_decay") if name in values}
        numbers = rule.evaluated({**values, **still, "step": step})
        return {name: where(goes_on, 1.0, n) if name in accumulation.kept else n for name, n in numbers.items()}

    made = dataclasses.replace(rule, coefficients=coefficients)
    made.check()
    return made
