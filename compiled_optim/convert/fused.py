"""State dicts of the FusedAdam of apex and TransformerEngine, which count steps by group.

A ``master_param`` of 16-bit integers is TransformerEngine's ``store_param_remainders``: the lower half of a float32 whose
upper half, rounded, is the bfloat16 parameter. The ``remainder`` of our ``weights="split16"`` has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import refuse_foreign
from compiled_optim.convert.forms import by_parameter, count, group_for, in_float32, indexed
from compiled_optim.convert.whole import Keep

_FORM = "FusedAdam"


def matches(state_dict: Mapping[str, Any]) -> bool:
    """Return whether FusedAdam saved ``state_dict``."""
    return any("bias_correction" in group for group in state_dict["param_groups"])


def decode(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert FusedAdam's state dict to this package's, with a step count for each parameter."""
    return by_parameter(state_dict, _decoded_options, _decoded_entries)


def _decoded_options(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    if group.get("bias_correction") is not True and group.get("bias_correction") != 1:
        raise ValueError(f"{where} has bias_correction={group.get('bias_correction')}, without which no Adam here runs")
    if others := [key for key in ("grad_averaging", "max_grad_norm", "norm_type") if key in group]:
        raise ValueError(f"{where} has {', '.join(others)}, which are not FusedAdam's")
    return {"amsgrad": False, **{key: value for key, value in group.items() if key not in ("bias_correction", "step")}}


def _decoded_entries(entries: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "step" not in group:
        raise ValueError(f"{where} exists, but its group has no step")
    master = entries.get("master_param")
    is_half = isinstance(master, Tensor) and master.dtype == torch.int16
    return {"step": group["step"], **{"remainder" if k == "master_param" and is_half else k: v for k, v in entries.items()}}


def encode(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Convert a state dict to FusedAdam's, indexed. ``adam_w_mode`` is not in it: the constructor sets that."""
    refuse_foreign(state_dict, _FORM)
    content = indexed(state_dict)
    result = by_parameter(content, partial(_encoded_options, content["state"]), partial(_encoded_entries, keep))
    return {"state": result["state"], "param_groups": result["param_groups"]}


def _encoded_options(states: Mapping[Any, Mapping[str, Any]], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    options = group_for(group, ("lr", "betas", "eps", "weight_decay"), where, _FORM, "decoupled_weight_decay")
    steps = {count(states[p].get("step"), f"the step of {p!r}", 2**31) for p in group["params"] if states.get(p)}
    if len(steps) > 1:
        raise ValueError(f"parameters of {where} took {min(steps):.0f} to {max(steps):.0f} steps; {_FORM} counts by group")
    return {**options, "bias_correction": True, **({"step": int(steps.pop())} if steps else {})}


def _encoded_entries(keep: Keep, entries: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    result: dict[str, Tensor] = {}
    for key, value in entries.items():
        if key == "remainder" and isinstance(value, Tensor) and value.dtype == torch.int16:
            result["master_param"] = value
        elif key in ("exp_avg", "exp_avg_sq", "master_param"):
            result[key] = in_float32(value, f"{key} in {where}", _FORM, keep)
        elif key != "step":
            raise ValueError(f"{where} has {key!r}, unsupported by {_FORM}")
    return result
