"""State dicts of FlashOptim, in codes of 8 bits that become float32.

It has ``NAME::quantized`` and ``NAME::scales``, one for each 32 elements. With a signed code, ``y = code / 127``, an element
is ``scale * y / (2 - |y|)``; with an unsigned one it is ``(scale * code / 255) ** 2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import Checkpoint
from compiled_optim.interop.forms import by_parameter, scaled_blocks
from compiled_optim.interop.replace_files import Keep


def matches(state_dict: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of FlashOptim saved ``state_dict``."""
    return any("master_bytewidth" in group for group in state_dict["param_groups"])


def decode(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert FlashOptim's state dict. ``error_bits`` need the weights, which it does not hold: ``lossy`` drops them."""
    split = [key for key, entries in Checkpoint.of(state_dict).state.items() if "error_bits" in entries]
    if split and not lossy:
        raise ValueError(
            f"the state of {', '.join(map(repr, split))} has error_bits, which cannot be read without the weights; "
            "lossy=True (--lossy) leaves them out. FlashOptim's get_fp32_model_state_dict has all bits of the weights, and "
            "load_full_precision_state_dict takes them"
        )
    return by_parameter(state_dict, _without_marks, partial(_decoded_entries, keep))


def _without_marks(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("master_bytewidth", "quantize")}


def _decoded_entries(keep: Keep, entries: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {"step": 1.0}  # FlashLion does not save it, and Lion does not use it
    for key, value in entries.items():
        name, _, kind = key.partition("::")
        if kind == "quantized":
            scales = entries.get(f"{name}::scales")
            if not isinstance(value, Tensor) or not isinstance(scales, Tensor) or scales.itemsize != 2:
                raise ValueError(f"{where} has {key} without scales of 16 bits")
            result[name] = keep(_decoded(value, scales.view(torch.float16), f"{key} in {where}"))
        elif kind != "scales" and key != "error_bits":
            result[key] = value
    return result


def _decoded(codes: Tensor, scales: Tensor, where: str) -> Tensor:
    if codes.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"{where} is {codes.dtype} instead of int8 or uint8")
    is_signed = codes.dtype == torch.int8
    parts = codes.flatten().float() / (127 if is_signed else 255)
    values = scaled_blocks(parts / (2 - parts.abs()) if is_signed else parts, scales, 32, where)
    return (values if is_signed else values.square_()).view(codes.shape)
