"""State dicts of bitsandbytes and FlashOptim, in codes of 8 bits that become float32.

bitsandbytes has ``state1`` and ``state2``; a code is an index of a table ``qmap``, and each 256 elements have an ``absmax``.
FlashOptim has ``NAME::quantized`` and ``NAME::scales``, one for each 32 elements. With a signed code, ``y = code / 127``, an
element is ``scale * y / (2 - |y|)``; with an unsigned one it is ``(scale * code / 255) ** 2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import foreign_state, refuse_foreign
from compiled_optim.convert.forms import by_parameter, count, group_for, in_float32, indexed
from compiled_optim.convert.whole import Keep

WRAPPER = "__bnb_optimizer_quant_state__"
"""The key under which bitsandbytes hides a parameter's tensors from FSDP."""

_ADAM, _LION, _SGD = ("exp_avg", "exp_avg_sq"), ("exp_avg",), ("momentum_buffer",)
_EXTRA = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}  # of groups of optimizers with two averages


def is_bitsandbytes(state_dict: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of bitsandbytes saved ``state_dict``."""
    return any(isinstance(v, Mapping) and (WRAPPER in v or "state1" in v) for v in state_dict["state"].values())


def is_flashoptim(state_dict: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of FlashOptim saved ``state_dict``."""
    return any("master_bytewidth" in group for group in state_dict["param_groups"])


def from_bitsandbytes(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert the state dict of Adam, AdamW, Lion or SGD. The files of other optimizers do not tell which one saved them."""
    return by_parameter(state_dict, _options_from_bnb, partial(_entries_from_bnb, keep))


def _averages(group: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return this package's names of ``state1`` and ``state2``."""
    betas, eps = group.get("betas"), group.get("eps")
    if isinstance(betas, (list, tuple)) and len(betas) == 2:
        if group.keys() >= _EXTRA.keys():
            return _ADAM
        if not eps and (betas[0] or betas[1]):
            return _LION if betas[1] else _SGD
    raise ValueError(f"{where} has betas={betas} and eps={eps}, unlike bitsandbytes' Adam, AdamW, Lion and SGD")


def _options_from_bnb(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    averages, (first, second) = _averages(group, where), group["betas"]
    betas = {"betas": (first, second)}
    options: dict[tuple[str, ...], dict[str, Any]] = {
        _ADAM: {**betas, "eps": group.get("eps"), "decoupled_weight_decay": True},  # in its Adam too
        _LION: betas,
        _SGD: {"momentum": first, "dampening": 0.0, "nesterov": False},
    }
    return {k: v for k, v in group.items() if k not in ("betas", "eps", *_EXTRA)} | options[averages]


def _entries_from_bnb(keep: Keep, entries: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    saved = {**entries, **entries.get(WRAPPER, {})}
    result = {"step": saved.get("step")}
    known = {"step", WRAPPER}
    for i, name in enumerate(_averages(group, where), 1):
        codes, table, scales = (saved.get(f"{kind}{i}") for kind in ("state", "qmap", "absmax"))
        known |= {f"state{i}", f"qmap{i}", f"absmax{i}"}
        if not isinstance(codes, Tensor):
            raise ValueError(f"{where} has no state{i}")
        if codes.dtype == torch.uint8:
            if not isinstance(table, Tensor) or not isinstance(scales, Tensor) or table.shape != (256,):
                raise ValueError(f"{where} has codes of 8 bits without a qmap{i} of 256 numbers and an absmax{i}")
            values = torch.index_select(table.float(), 0, codes.flatten().int())
            codes = keep(_scaled(values, scales, 256, f"absmax{i} in {where}").view(codes.shape))
        result[name] = codes
    if others := sorted(str(key) for key in saved if key not in known):
        raise ValueError(f"{where} has {', '.join(others)}, which no optimizer here has")
    return result


def to_bitsandbytes(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Convert a state dict of Adam, AdamW, Lion or SGD to bitsandbytes', indexed, in 32 bits."""
    refuse_foreign(state_dict, "bitsandbytes")
    content = indexed(state_dict)
    states = [content["state"].get(param, {}) for group in content["param_groups"] for param in group["params"]]
    averages = max((tuple(sorted({*entries} - {"step"})) for entries in states), default=())
    if averages not in (_ADAM, _LION, _SGD):
        raise ValueError(f"bitsandbytes has no optimizer with the state {', '.join(map(str, averages)) or 'of none'}")
    result = by_parameter(content, partial(_options_to_bnb, averages), partial(_entries_to_bnb, keep, averages))
    return {"state": result["state"], "param_groups": result["param_groups"]}


def _options_to_bnb(averages: tuple[str, ...], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = {_ADAM: ("betas", "eps"), _LION: ("betas",), _SGD: ("momentum",)}[averages]
    ignored = ("decoupled_weight_decay",) if averages == _ADAM else ()
    options = group_for(group, ("lr", "weight_decay", *names), where, "bitsandbytes", *ignored)
    if averages == _ADAM and group["weight_decay"] and not group.get("decoupled_weight_decay"):
        decoupling = f"decoupled_weight_decay={group.get('decoupled_weight_decay', 'unknown')}"
        raise ValueError(f"{where} has weight_decay and {decoupling}, but bitsandbytes' Adam always decouples it")
    if averages == _ADAM:
        return {**options, **_EXTRA}
    return {**options, "betas": (options.pop("momentum"), 0.0) if averages == _SGD else options["betas"], "eps": 0.0}


def _entries_to_bnb(
    keep: Keep, averages: tuple[str, ...], entries: Mapping[str, Any], group: Mapping[str, Any], where: str
) -> dict[str, Any]:
    if {*entries} - {"step"} != {*averages}:
        raise ValueError(f"{where} has {', '.join(sorted(map(str, entries)))} instead of {', '.join(averages)}")
    form = "bitsandbytes"
    states = {f"state{i}": in_float32(entries[n], f"{n} in {where}", form, keep) for i, n in enumerate(averages, 1)}
    return {"step": int(count(entries.get("step", 1), f"the step in {where}", 2**31)), WRAPPER: states}


def from_flashoptim(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert FlashOptim's state dict. ``error_bits`` need the weights, which it does not hold: ``lossy`` drops them."""
    foreign = foreign_state(state_dict)
    split = [k for k, v in state_dict["state"].items() if k not in foreign and "error_bits" in v]
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
    values = _scaled(parts / (2 - parts.abs()) if is_signed else parts, scales, 32, where)
    return (values if is_signed else values.square_()).view(codes.shape)


def _scaled(values: Tensor, scales: Tensor, size: int, where: str) -> Tensor:
    """Multiply each ``size`` of the flat ``values`` in place by one of the ``scales``, and return them."""
    full = len(values) // size
    if scales.shape != (-(-len(values) // size),):
        raise ValueError(f"{where} has {scales.numel()} scales for {len(values)} elements, not one for each {size}")
    values[: full * size].view(-1, size).mul_(scales[:full, None].float())
    values[full * size :].mul_(scales[full:].float())
    return values
