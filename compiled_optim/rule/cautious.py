"""Cautious steps, for any elementwise rule."""

from __future__ import annotations

import dataclasses
from typing import Any

from compiled_optim.rule.fields import Static
from compiled_optim.rule.rule import Rule, mean
from compiled_optim.rule.vocabulary import maximum, sign, where

LEAST = 1e-3  # the least share of a tensor's elements to which the whole step is given


def cautious(rule: Rule) -> Rule:
    """``rule`` with the choice ``cautious``: only elements that a step takes down their gradient move (arXiv:2411.16085).

    Their steps are divided by the share of the tensor's elements that move, or by :data:`LEAST` if that is more. Weight
    decay apart from the step stays, and so do the buffers. The gradient is the one that ``rule`` gets. All this is as in the
    authors' C-AdamW. Algorithm 1 of the paper adds a small number to the share instead of bounding it, and the authors'
    C-Lion adds 1 to the number of elements that move. It is not for a rule with views, whose parameter follows its state.
    """
    if rule.views:
        return rule

    def reduce(**values: Any) -> dict[str, Any]:
        return {"moving": mean(where(_goes_down(rule.returned(values), values), 1.0, 0.0))} if values["cautious"] else {}

    def update(**values: Any) -> dict[str, Any]:
        returned = rule.returned(values)
        if not values["cautious"]:
            return returned
        growth = 1 / maximum(values["c"].moving, LEAST)
        return {**returned, "step": where(_goes_down(returned, values), growth, 0.0) * returned["step"]}

    choice = Static(default=False, kw_only=True, name="cautious")
    statics, added = (*rule.statics, choice), (*rule.added, choice.name)
    return dataclasses.replace(rule, statics=statics, reductions=(*rule.reductions, reduce), update=update, added=added)


def _goes_down(returned: dict[str, Any], values: dict[str, Any]) -> Any:
    """Whether the step that was ``returned`` goes against the gradient; the signs' product does not underflow."""
    return sign(returned["step"]) * sign(values["grad"]) > 0
