"""A checkpoint's state that other choices of ``weights`` and ``state_dtype`` stored, as those of the optimizer store it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.saved_values import FLOATING, Unloadable, as_buffer, as_tensor
from compiled_optim.conversion import CODES, SPLITS, adds_nothing, check_codes, converted, held_name, part_of, stored_part
from compiled_optim.memory.sharding import local
from compiled_optim.rule.fields import Buffer
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.storage import CODE_DTYPES, code_name, scale_name


def as_chosen(
    declaration: Declaration, param: Tensor, saved: Mapping[str, Any], choices: Mapping[str, Any]
) -> dict[str, Any]:
    """``saved``, the entries of ``param`` in a checkpoint, stored as ``choices`` say; the same tensors where they are so.

    Where the choices keep no part of a weight, one that is there stays, for the load to report; or goes, if ``param`` holds
    by itself what it adds. What is converted is in memory until the load is written.

    Raises:
        Unloadable: an entry that must be converted is not what it must be, such as a negative scale.
    """
    try:
        name = stored_part({part: value for part, value in saved.items() if value is not None})
        stored = {} if name is None else {name: _part(name, param, saved[name])}
        for field in declaration.buffers:
            if field.int8 and (held := held_name(field, saved)):
                stored |= _buffer(declaration, field, held, param, saved, choices)
        changes = converted(declaration, param, stored, choices)
        if name is not None and part_of(choices) is None and not adds_nothing(param, name, stored[name]):
            del changes[name]
    except Unloadable:
        raise
    except ValueError as error:
        raise Unloadable(str(error)) from error
    gone = {entry for entry, value in changes.items() if value is None}
    return {entry: value for entry, value in {**saved, **changes}.items() if entry not in gone}


def _part(name: str, param: Tensor, value: Any) -> Tensor:
    dtype = getattr(value, "dtype", param.dtype)
    return as_buffer(value, name, tuple(param.shape), dtype if name == "remainder" and dtype in SPLITS else param.dtype)


def _buffer(
    declaration: Declaration, field: Buffer, name: str, param: Tensor, saved: Mapping[str, Any], choices: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What of ``saved`` stores the buffer ``field`` under ``name``, if that is in codes or must become codes."""
    coded, scale, shape = code_name(field.name), scale_name(field.name), tuple(param.shape)
    if name != coded and coded in saved:
        raise Unloadable(f"it has both {name} and {coded}")
    dtype = getattr(saved[name], "dtype", None)
    if name == coded or dtype in CODES:
        if scale not in saved:
            raise Unloadable(f"{name} has codes of 8 bits, and the checkpoint has no {scale} for them")
        kind = dtype if dtype in CODES else CODE_DTYPES[field.int8 or ""]
        codes, scales = as_buffer(saved[name], name, shape, kind), as_tensor(saved[scale], scale)
        check_codes(field, codes, scales)
        _check_numbers(codes, name, scales, scale)
        return {name: codes, scale: scales}
    if dtype in FLOATING and scale in saved:
        raise Unloadable(f"{scale} belongs to codes of 8 bits, and {name} is {dtype}")
    is_coded = declaration.dtype_of(field, param.dtype, choices) in CODES
    return {name: as_buffer(saved[name], name, shape, param.dtype)} if is_coded else {}


def _check_numbers(codes: Tensor, name: str, scales: Tensor, scale: str) -> None:
    """Raise :class:`Unloadable` where codes or scales are none that a step makes; an overflow makes infinite scales."""
    given = local(scales).double()
    stored = given.float()
    if not bool(((stored >= 0) & (stored.isinf() == given.isinf())).all()):
        raise Unloadable(f"{scale} has numbers that are no scales: negative, NaN, or beyond float32's range")
    if codes.dtype == torch.int8 and bool((local(codes) == -128).any()):
        raise Unloadable(f"{name} has -128, which is no code")
