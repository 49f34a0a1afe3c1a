"""Whether a checkpoint's weight decay means the same in the groups that would take it over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compiled_optim.checkpoint.matching import Pairs
from compiled_optim.checkpoint.saved_values import as_number, is_set
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.rule.decay import is_decoupled
from compiled_optim.rule.rule import Declaration

DECOUPLED = ("decoupled_weight_decay", "decouple_wd")  # torch.optim's name and optimi's
_BY_LR = "decouple_lr"


def decay_conflicts(
    declaration: Declaration, groups: Sequence[ParamGroup], pairs: Pairs, saved_groups: Sequence[Mapping[str, Any]]
) -> dict[int, list[str]]:
    """Where ``groups`` decay weights in another way than the saved groups that they are loaded from, by index.

    These choices stay the optimizer's own, and the ``weight_decay`` that is loaded would mean something else. Without any
    decay on both sides nothing differs.
    """
    defaults = {s.name: s.default for s in declaration.statics}
    found: dict[int, list[str]] = {}
    for index, saved_index in dict.fromkeys((ours.group, theirs.group) for ours, theirs in pairs):
        group, saved = groups[index], saved_groups[saved_index]
        if _decays(saved, group.label) or group.floats().get("weight_decay"):
            for choice, value in _differing(group, saved, defaults):
                found.setdefault(index, []).append(
                    f"{group.label}: {choice} is {value} in the checkpoint, whose weight_decay has another meaning; "
                    'hyperparameters="keep" keeps the optimizer\'s'
                )
    return {index: list(dict.fromkeys(problems)) for index, problems in found.items()}


def _decays(saved: Mapping[str, Any], label: str) -> bool:
    return "weight_decay" in saved and as_number(saved["weight_decay"], f"weight_decay of {label}", finite=False) != 0


def _differing(group: ParamGroup, saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """The choices of decay that ``saved`` made in another way than ``group``, and what it chose."""
    if _BY_LR not in defaults:
        return
    choices: dict[str, Any] = {_BY_LR: is_set(saved, _BY_LR, group.label)}
    for name in DECOUPLED:
        choices[name] = defaults.get(name) if saved.get(name) is None else is_set(saved, name, group.label)
    if choices[_BY_LR] != bool(group.get(_BY_LR)):
        yield _BY_LR, choices[_BY_LR]
    torchs, wd = DECOUPLED
    is_unknown = torchs in defaults and not saved.keys() & {*DECOUPLED}  # torch.optim did not always note it
    if wd in defaults and not is_unknown and is_decoupled(choices) != is_decoupled(group):
        yield wd, is_decoupled(choices)
