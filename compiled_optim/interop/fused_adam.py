"""The FusedAdam of apex and TransformerEngine, and its state dicts, which count steps by group.

A ``master_param`` of 16-bit integers is TransformerEngine's ``store_param_remainders``: the lower half of a float32 whose
upper half, rounded, is the bfloat16 parameter. The ``remainder`` of our ``weights="split16"`` has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from compiled_optim.catalogue import named
from compiled_optim.checkpoint.read import Checkpoint
from compiled_optim.interop.forms import by_parameter, count, group_for, in_float32, indexed
from compiled_optim.interop.replace_files import Keep, in_memory
from compiled_optim.optimizer import CompiledOptimizer

_FORM = "FusedAdam"


def matches(state_dict: Mapping[str, Any]) -> bool:
    """Return whether FusedAdam saved ``state_dict``."""
    return any("bias_correction" in group for group in state_dict["param_groups"])


def decode(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert FusedAdam's state dict to this package's, with a step count for each parameter."""
    return by_parameter(state_dict, _decoded_options, _decoded_entries)


def from_optimizer(
    optimizer: Any, source: type[Optimizer], packed: dict[str, Any]
) -> tuple[type[CompiledOptimizer], dict[str, Any]]:
    """Return the class that continues ``optimizer``, and its state dict ``packed``, translated.

    Raises:
        ValueError: an option has no counterpart here, or master weights are elsewhere.
    """
    if (decays_weights := getattr(optimizer, "adam_w_mode", None)) is None:
        raise ValueError("it has no adam_w_mode, as apex's has, which says what weight_decay means")
    result = decode(packed, in_memory, lossy=False)
    has_masters = any(getattr(optimizer, name, False) for name in ("master_weights", "use_master"))
    if has_masters and not any({"master_param", "remainder"} & entries.keys() for entries in result["state"].values()):
        raise ValueError("its master weights are not in its state as master_param")
    return named("adamw" if decays_weights else "adam")[1], result


def _decoded_options(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    if group.get("bias_correction") is not True and group.get("bias_correction") != 1:
        raise ValueError(f"{where} has bias_correction={group.get('bias_correction')}, without which no Adam here runs")
    if others := [key for key in ("grad_averaging", "max_grad_norm", "norm_type") if key in group]:
        raise ValueError(f"{where} has {', '.join(others)}, which are not FusedAdam's")
    return {"amsgrad": False, **{key: value for key, value in group.items() if key not in ("bias_correction", "step")}}


def _decoded_entries(entries: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "step" not in group and "step" not in entries:
        raise ValueError(f"{where} exists, but its group has no step")
    master = entries.get("master_param")
    is_half = isinstance(master, Tensor) and master.dtype == torch.int16
    return {
        "step": group.get("step"),
        **{"remainder" if k == "master_param" and is_half else k: v for k, v in entries.items()},
    }


def encode(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Convert a state dict to FusedAdam's, indexed. ``adam_w_mode`` is not in it: the constructor sets that."""
    Checkpoint.of(state_dict).refuse_foreign(_FORM)
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
