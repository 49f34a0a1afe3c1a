"""State that is stored as some choices of ``weights`` and ``state_dtype`` say, brought to what others say.

A buffer is stored in floating point, or in codes with a scale for each group of elements. The groups follow one another in
the order of memory that the codes have. A weight has one of the parts that hold what its own dtype cannot, or none. Entries
may be DTensors: each process converts its part of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory import sharding
from compiled_optim.memory.layout import MemoryOrder, flat
from compiled_optim.memory.sharding import as_part_of, is_sharded, local, placement, spread_like, zeros_spread_like
from compiled_optim.rule import formats
from compiled_optim.rule.bits import GROUP
from compiled_optim.rule.fields import Buffer
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.storage import (
    CODE_DTYPES,
    HALVES,
    PARTS,
    REST_DTYPES,
    code_name,
    parts_beside,
    parts_of,
    scale_name,
    whole,
)

CODES = {dtype: kind for kind, dtype in CODE_DTYPES.items()}
"""The dtypes of codes, and the numbers that they stand for."""

_PART_OF = {"kahan": "kahan_comp", "split8": "remainder", "split16": "remainder", "master": "master_param"}
SPLITS = {dtype: mode for mode, dtype in REST_DTYPES.items()}


def converted(
    declaration: Declaration, param: Tensor, entries: Mapping[str, Tensor], choices: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    """What changes in ``entries``, of one parameter's state, so that they are as ``choices`` say: new ones by name.

    An entry that has no place any more is None. Those that are as they must be stay the tensors that they are. A weight is
    taken for what ``param``, as it is now, and its part make together, and keeps of that what the new part can hold.

    Raises:
        ValueError: codes have no scales, or not as many as groups, or are of the other kind; or a weight has two parts.
    """
    found: dict[str, Tensor | None] = {}
    for field in declaration.buffers:
        if field.int8 and held_name(field, entries):
            found |= _converted_buffer(declaration, field, param, entries, choices)
    return found | _converted_part(declaration, param, entries, choices)


def held_name(field: Buffer, entries: Mapping[str, Any]) -> str | None:
    """The entry that holds the buffer ``field``, if one does; of two the plain one, which somebody put beside the codes.

    That may hold codes too: checkpoints of before have them there.
    """
    return next((name for name in (field.name, code_name(field.name)) if name in entries), None)


def _converted_buffer(
    declaration: Declaration, field: Buffer, param: Tensor, entries: Mapping[str, Tensor], choices: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    coded, scale, held = code_name(field.name), scale_name(field.name), held_name(field, entries)
    assert held is not None
    value, wanted = entries[held], declaration.dtype_of(field, param.dtype, choices)
    gone: dict[str, Tensor | None] = {name: None for name in (field.name, coded, scale) if name in entries}
    if wanted not in CODES and value.dtype not in CODES:
        return {name: None for name in gone if name != held}
    shape = declaration.shape_of(_field(declaration, scale), param.shape, choices)
    if value.dtype in CODES:
        scales = check_codes(field, value, entries.get(scale))
        if wanted == value.dtype and _are_in_place(value, scales, param):
            is_shaped = tuple(scales.shape) == shape or is_sharded(scales)
            new = {coded: value, scale: scales if is_shaped else scales.reshape(shape)}
            return {name: tensor for name, tensor in {**gone, **new}.items() if tensor is not entries.get(name)}
        value = _decoded(value, scales, param)
    if wanted not in CODES:
        return {**gone, field.name: value.to(wanted)}
    codes, scales = encoded(own_part(value, param), local(param), wanted)
    return {**gone, coded: spread_part(codes, param), scale: _as_scales(scales, param, shape)}


def _field(declaration: Declaration, name: str) -> Buffer:
    return next(b for b in declaration.buffers if b.name == name)


def check_codes(field: Buffer, codes: Tensor, scales: Tensor | None) -> Tensor:
    """The ``scales`` of ``codes`` of the buffer ``field``; ``ValueError`` where they do not belong together."""
    if CODES[codes.dtype] != field.int8:
        raise ValueError(f"{code_name(field.name)} is {codes.dtype}; its codes are of {field.int8} numbers")
    if scales is None or not scales.is_floating_point():
        raise ValueError(f"{code_name(field.name)} has codes of 8 bits without {scale_name(field.name)}, their scales")
    groups = -(-codes.numel() // GROUP)
    if scales.numel() != groups and not is_sharded(codes):
        raise ValueError(f"{scale_name(field.name)} has {scales.numel()} numbers for {groups} groups of {GROUP} codes")
    return scales


def _are_in_place(codes: Tensor, scales: Tensor, param: Tensor) -> bool:
    """Whether ``codes`` and ``scales`` are for ``param`` as they are, or will be once they are spread like it."""
    if placement(codes) == placement(scales) == placement(param):
        order = MemoryOrder(local(param))
        if _order(local(codes)) == _order(order.target):
            return True
        moved = order.arranged(local(codes).to(param.device))
        return not _are_full(local(codes), local(scales)) and _are_full(moved, local(scales))
    return local(codes).is_contiguous() and local(param).is_contiguous()  # of DTensors all groups are in that order


def _order(tensor: Tensor) -> list[tuple[int, int]]:
    """What tells in which order the elements of a tensor are updated."""
    strides = MemoryOrder(tensor).target.stride()
    return [(size, stride) for size, stride in zip(tensor.shape, strides, strict=True) if size > 1]


def _are_full(codes: Tensor, scales: Tensor) -> bool:
    """Whether each group, in the order of memory of ``codes``, holds the largest code or nothing, as steps leave it.

    So codes are known that a file format brought into another order than that of their scales. Those of an infinite scale
    tell nothing.
    """
    vector = _vector(codes).int().abs().view(-1, GROUP).amax(1)
    scales = scales.detach().reshape(-1).to(vector.device)
    largest = torch.where(scales == 0, 0, torch.iinfo(codes.dtype).max)
    return bool(((vector == largest) | scales.isinf()).all())


def _decoded(codes: Tensor, scales: Tensor, param: Tensor) -> Tensor:
    """The numbers of codes: a DTensor, where they are spread like ``param``, or else whole."""
    if placement(codes) == placement(scales) == placement(param):
        return spread_part(decoded(local(codes), local(scales)), param)
    return decoded(sharding.whole(codes), sharding.whole(scales))


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers, in float32, of codes in their order of memory, with their scales."""
    scales = scales.detach().reshape(-1).to(codes.device).float()
    numbers = formats.decoded(_vector(codes).int(), scales, CODES[codes.dtype])
    result = torch.empty_like(MemoryOrder(codes).target, dtype=torch.float32)
    flat(result).copy_(numbers[: codes.numel()])
    return result


def _vector(codes: Tensor) -> Tensor:
    """All of ``codes`` in their order of memory, and zeros up to a whole number of groups."""
    order = MemoryOrder(codes)
    order.load()
    return filled(flat(order.target))


def encoded(value: Tensor, param: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes of ``value``, of this dtype, in the order of memory of ``param``, and a vector of their scales."""
    order = MemoryOrder(param)
    vector = filled(flat(order.arranged(value.detach().float())))
    scales = formats.scale_of(vector)
    codes = torch.empty_like(order.target, dtype=dtype, requires_grad=False)
    flat(codes).copy_(formats.encoded(vector, scales, CODES[dtype])[: codes.numel()])
    return codes, scales


def filled(vector: Tensor) -> Tensor:
    """``vector`` with zeros up to a whole number of groups."""
    missing = -vector.shape[0] % GROUP
    return torch.nn.functional.pad(vector, (0, missing)) if missing else vector


def _converted_part(
    declaration: Declaration, param: Tensor, entries: Mapping[str, Tensor], choices: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    mode, half = choices.get("weights") or ("", "")
    new = part_of(choices)
    is_there = new is not None and new in entries and mode_of(new, entries[new]) == mode
    if is_there:  # beside what an interrupted conversion left
        return {name: None for name in PARTS if name in entries and name != new}
    if (name := stored_part(entries)) is None:
        return {}
    gone: dict[str, Tensor | None] = {name: None}
    if new is None:
        return gone
    values = weight(param, {name: entries[name]}, mode_of(name, entries[name]), half)
    value = parts_beside(local(param.detach()).float(), values, mode, half)[new]
    dtype = declaration.dtype_of(_field(declaration, new), param.dtype, choices)
    part = torch.empty_like(local(param.detach()), dtype=dtype, requires_grad=False).copy_(value)
    return gone | {new: spread_part(part, param)}


def part_of(choices: Mapping[str, Any]) -> str | None:
    """Which of :data:`PARTS` a weight has under these choices."""
    chosen = choices.get("weights")
    return None if chosen is None else _PART_OF.get(chosen[0])


def stored_part(entries: Mapping[str, Any]) -> str | None:
    """Which of :data:`PARTS` is in ``entries``; ``ValueError`` where several are."""
    stored = [name for name in PARTS if name in entries]
    if len(stored) > 1:
        raise ValueError(f"it has both {' and '.join(stored)}, and a weight has one of them")
    return stored[0] if stored else None


def mode_of(name: str, part: Tensor) -> str:
    """The mode of a weight whose part has this name; ``ValueError`` where it does not have the dtype for it."""
    if name == "remainder" and part.dtype not in SPLITS:
        raise ValueError(f"remainder is {part.dtype} instead of {' or '.join(map(str, SPLITS))}")
    if name != "remainder" and not part.is_floating_point():
        raise ValueError(f"{name} is {part.dtype}, which is no floating-point number")
    return SPLITS[part.dtype] if name == "remainder" else "kahan" if name == "kahan_comp" else "master"


def weight(param: Tensor, parts: Mapping[str, Any], mode: str, half: str) -> Tensor:
    """The float32 of a weight of the dtype ``half`` that is stored in ``mode``: this process's part of it."""
    values = {name: own_part(parts[name], param) for name in PARTS if parts.get(name) is not None}
    numbers = {name: part.float() if part.is_floating_point() else part for name, part in values.items()}
    return whole(local(param.detach()).float(), numbers, mode, half)  # type: ignore[no-any-return]


def adds_nothing(param: Tensor, name: str, part: Tensor) -> bool:
    """Whether ``param`` holds by itself what ``part`` adds to a weight, as where that is 0 or ``param`` is in float32."""
    value, found, mode = local(param.detach()), own_part(part, param), mode_of(name, part)
    if value.is_complex():
        return False
    value = value.float()
    for half in [HALVES[param.dtype]] if param.dtype in HALVES else HALVES.values():
        if mode == "kahan":
            low = formats.nearest(value - found.float(), half)
            both = low + found.float()  # or one bit less, in full_precision_state_dict
            is_held = (value == both) | (value == both.nextafter(low)) if param.dtype not in HALVES else found == 0
        else:
            new = parts_of(value, {}, mode, half)[name]
            is_held = new == found
        if bool(is_held.all()):
            return True
    return False


def own_part(tensor: Tensor, param: Tensor) -> Tensor:
    """This process's part of ``tensor``, on the device of ``param``, if it is spread like ``param`` or whole."""
    if placement(tensor) != placement(param):
        tensor = spread_like(sharding.whole(tensor), param)
    return local(tensor.detach()).to(param.device)


def spread_part(tensor: Tensor, param: Tensor) -> Tensor:
    """``tensor``, of the shape of this process's part of ``param``, as a DTensor where ``param`` is one."""
    return as_part_of(tensor, param) if is_sharded(param) else tensor


def _as_scales(scales: Tensor, param: Tensor, shape: tuple[int, ...]) -> Tensor:
    result = zeros_spread_like(param, shape, scales.dtype)
    part = local(result)
    part.copy_(scales.view_as(part))
    return result
