"""Buffers that begin as the parameter, for any elementwise rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from compiled_optim.rule.rule import Rule
from compiled_optim.rule.vocabulary import where

PARAM = "param"  # what ``init`` of such a buffer says
_STARTS = "first_step"  # the coefficient that is not 0 in the first step of a parameter


def started(rule: Rule) -> Rule:
    """``rule`` whose first step finds the parameter, with all its bits, in the buffers that begin as it."""
    names = [b.name for b in rule.buffers if b.init == PARAM]
    if not names:
        return rule
    if rule.granularity != "element" or rule.gradients != "dense":
        raise TypeError(f"{rule.name}.{names[0]}: init={PARAM!r} is for an elementwise update with dense gradients")

    if _STARTS in rule.coefficient_names():
        raise TypeError(f"{rule.name}.coefficients returns {_STARTS}, which is what a buffer with init={PARAM!r} needs")

    def coefficients(**values: Any) -> dict[str, Any]:
        return {**rule.evaluated(values), _STARTS: where(values["step"] == 1, 1.0, 0.0)}

    def seen(values: Mapping[str, Any]) -> dict[str, Any]:
        begins = values["c"].first_step > 0
        own = {name: where(begins, values[PARAM], values[name]) for name in names if values.get(name) is not None}
        return {**values, **own}

    def update(**values: Any) -> dict[str, Any]:
        return rule.returned(seen(values))

    buffers = tuple(dataclasses.replace(b, init=0.0) if b.init == PARAM else b for b in rule.buffers)
    reductions = rule.reductions_of(seen)
    return dataclasses.replace(rule, buffers=buffers, coefficients=coefficients, reductions=reductions, update=update)
