"""Learning rates that differ from parameter to parameter, for any rule."""

from __future__ import annotations

import dataclasses
from typing import Any

from compiled_optim.rule.fields import Scale
from compiled_optim.rule.rule import Rule


def lr_scaled(rule: Rule) -> Rule:
    """``rule`` with the choice ``lr_scale``: a number per parameter, by which ``coefficients`` finds ``lr`` multiplied.

    ``max_lr``, to which others compare ``lr``, is multiplied too. A rule without ``lr`` stays as it is.
    """
    rates = {h.name for h in rule.hypers} & {"lr", "max_lr"}
    if "lr" not in rates:
        return rule

    def coefficients(**values: Any) -> dict[str, Any]:
        scale = values["lr_scale"]
        scaled = {} if scale is None else {name: values[name] * scale for name in rates & values.keys()}
        return rule.evaluated(values | scaled)

    choice = Scale(default=None, name="lr_scale")
    return dataclasses.replace(rule, scales=(*rule.scales, choice), coefficients=coefficients)
