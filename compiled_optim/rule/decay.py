"""Weight decay apart from the gradient, and apart from the learning rate, for any rule that decays weights."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from compiled_optim.rule.fields import Hyper, Static
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.vocabulary import where

_TORCHS = "decoupled_weight_decay"  # what torch.optim calls the choice, where an optimizer of it has one
_WD = Static(default=None, optional=True, kw_only=True, name="decouple_wd")
_LR = Static(default=False, kw_only=True, name="decouple_lr")
LARGEST = 5e-3  # as in optimi: the weight decay with decouple_lr above which there is a warning
_MAX_LR = Hyper(default=None, ge=0, when=_LR.name, like="lr", name="max_lr")


def decay(rule: Rule) -> Rule:
    """``rule`` with ``decouple_lr`` and ``max_lr`` and, where it decays weights by the gradient, with ``decouple_wd``.

    With ``decouple_lr`` the rule gets ``weight_decay / max_lr`` for ``weight_decay``, and 0 where ``max_lr`` is 0. Where
    weights decay apart from the gradient, they then shrink by ``weight_decay * lr / max_lr`` in a step. With ``decouple_wd``
    a parameter is multiplied by ``1 - lr * weight_decay`` before the step, as in AdamW, and the rule decays no more itself;
    None is True with ``decouple_lr``. A rule that has such a choice of its own keeps it.

    A rule without ``lr`` or ``weight_decay``, or with names of these, stays as it is.
    """
    names = {f.name for f in (*rule.hypers, *rule.statics)}
    if not {"lr", "weight_decay"} <= names or names & {_LR.name, _MAX_LR.name}:
        return rule
    adds_wd = rule.decays == "gradient" and _WD.name not in names
    scales = adds_wd and _TORCHS not in names  # whether parameters are multiplied here, and not by the rule

    def coefficients(**values: Any) -> dict[str, Any]:
        if values[_LR.name]:
            values["weight_decay"] = _over(values["weight_decay"], values[_MAX_LR.name])
        numbers = rule.evaluated(values)
        if scales and is_decoupled(values):
            numbers["weight_decay"] = 1 - values["lr"] * values["weight_decay"]
        return numbers

    def seen(values: dict[str, Any]) -> dict[str, Any]:
        """What the rule finds in place of ``values``: its own choice made, or a parameter that has decayed."""
        if not (adds_wd and is_decoupled(values)):
            return values
        if not scales:
            return {**values, _TORCHS: True}
        numbers = values["c"]
        return {**values, "param": numbers.weight_decay * values["param"], "c": numbers._replace(weight_decay=0.0)}

    def update(**values: Any) -> dict[str, Any]:
        found = seen(values)
        return {"param": found["param"], **rule.returned(found)}

    choices = (_WD, _LR) if adds_wd else (_LR,)
    return dataclasses.replace(
        rule,
        hypers=(*rule.hypers, _MAX_LR),
        statics=(*rule.statics, *choices),
        coefficients=coefficients,
        reductions=rule.reductions_of(seen),
        update=update,
        added=(*rule.added, *(s.name for s in choices)),
    )


def check_decay(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where one of a group's choices decouples weight decay and the other forbids it.

    Warn where ``max_lr`` is about to become 0 unasked, by which weights would never decay; where weights would decay by
    more than :data:`LARGEST` in a step; and where ``decouple_wd=False`` means other than in optimi, which ignores it there.
    """
    if group.get(_TORCHS) and group.get(_WD.name) is False:
        raise ValueError(f"{_WD.name}=False does not go with {_TORCHS}=True")
    if not group.get(_LR.name):
        return
    if group.get(_WD.name) is False:
        message = f"{_WD.name}=False with {_LR.name}=True adds weight_decay / max_lr times the parameter to the gradient"
        warnings.warn(f"{message}; leave {_WD.name} out to shrink parameters, as optimi does", UserWarning, stacklevel=2)
    if isinstance(wd := group["weight_decay"], (int, float)) and wd > LARGEST:
        message = f"with {_LR.name}=True a step at max_lr takes {wd:g} of a parameter away, whatever the learning rate"
        warnings.warn(f"{message}; usual values of weight_decay are then 1e-6 to 1e-4", UserWarning, stacklevel=2)
    is_open = group.get(_MAX_LR.name) is None
    if is_open and _is_known_0(group["lr"]) and not _is_known_0(group["weight_decay"]):
        message = "weights will not decay: max_lr, which decouple_lr divides weight_decay by, is the group's first lr, 0"
        warnings.warn(f"{message}; pass the learning rate that a schedule reaches as max_lr", UserWarning, stacklevel=2)


def _is_known_0(number: Any) -> bool:
    """Whether ``number`` is 0; a tensor is not read, since that may wait for a device."""
    return isinstance(number, (int, float)) and number == 0


def is_decoupled(choices: Mapping[str, Any]) -> bool:
    """Whether weights decay apart from the gradient, where that is a choice."""
    asked = choices.get(_WD.name)
    return bool(choices.get(_TORCHS) or (choices.get(_LR.name) if asked is None else asked))


def _over(weight_decay: Any, max_lr: Any) -> Any:
    """``weight_decay / max_lr``, and 0 where that would be a division by 0."""
    zero = max_lr == 0
    return where(zero, 0.0, weight_decay / where(zero, 1.0, max_lr))
