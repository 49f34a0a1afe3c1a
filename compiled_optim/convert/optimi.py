"""State dicts of optimi, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from compiled_optim.checkpoint.optimi import from_optimi, to_optimi
from compiled_optim.checkpoint.read import foreign_state, group_names
from compiled_optim.convert.forms import indexed, optimizers
from compiled_optim.convert.whole import Keep
from compiled_optim.rule.transforms import DECOUPLED


def decode(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert optimi's state dict to this package's names and meaning."""
    return {**state_dict, **_converted(from_optimi, state_dict, keep)}


def encode(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Convert a state dict to optimi's, indexed. A group of Adam's must hold ``decoupled_weight_decay``."""
    for i, group in enumerate(state_dict["param_groups"]):
        if "amsgrad" in group and not group.keys() & {*DECOUPLED}:
            raise ValueError(
                f"param_groups[{i}] has decoupled_weight_decay=unknown: add it to the group, True for AdamW, False for Adam"
            )
    return _converted(lambda content: to_optimi(content, *optimizers()), indexed(state_dict), keep)


def _converted(
    function: Callable[[dict[str, Any]], dict[str, Any]], state_dict: Mapping[str, Any], keep: Keep
) -> dict[str, Any]:
    """Apply ``function`` to single elements, for the groups and for errors, then to each parameter, to save memory."""
    foreign = foreign_state(state_dict)
    first = {param: value if param in foreign else _first(value) for param, value in state_dict["state"].items()}
    result = function({**state_dict, "state": first})
    for group in state_dict["param_groups"]:
        names = group_names(group)
        for j, param in enumerate(group["params"]):
            if param in result["state"]:
                single = {**group, "params": [param], **({"param_names": [names[j]]} if names else {})}
                entries = function({"state": {param: state_dict["state"][param]}, "param_groups": [single]})["state"][param]
                result["state"][param] = {k: keep(v) if isinstance(v, Tensor) else v for k, v in entries.items()}
    return result


def _first(entries: Mapping[str, Any]) -> dict[str, Any]:
    large = [key for key, value in entries.items() if isinstance(value, Tensor) and key != "step"]
    return {**entries, **{key: entries[key][(slice(1),) * entries[key].dim()] for key in large}}
