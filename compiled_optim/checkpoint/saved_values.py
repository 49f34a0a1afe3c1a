"""Reading the values of a checkpoint, which may be anything: each becomes a number, a tensor to copy, or an error.

No memory is read before it is known to be there. Whatever a value raises becomes an :class:`Unloadable` that names it.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.layout import is_lost, is_plain, plain_copy
from compiled_optim.memory.sharding import is_sharded, local
from compiled_optim.torch_internals import shape_of_part

FLOATING = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}
_OWN_TYPES = (Tensor, torch.nn.Parameter)


class Unloadable(ValueError):
    """Names the part of a checkpoint that cannot be loaded, and says why."""


@contextlib.contextmanager
def naming(
    what: str, failed: str = "cannot be read", *, passing: tuple[type[Exception], ...] = (Unloadable,)
) -> Iterator[None]:
    """Turn whatever a value of a checkpoint raises inside a ``with`` block into an :class:`Unloadable` about ``what``.

    Errors of the types in ``passing`` are left as they are: they name what they are about.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        raise Unloadable(f"{what} {failed} ({type(error).__name__}: {error})") from error


def described(value: Any, depth: int = 2) -> str:
    """``value`` as messages show it: itself where it is plain, else its type. The repr of a tensor would read its memory."""
    with contextlib.suppress(Exception):  # too many digits, or a class of its own
        if isinstance(value, tuple) and depth:
            return f"({', '.join(described(element, depth - 1) for element in value)})"
        if value is None or isinstance(value, (int, float, str, bytes)):
            return repr(value)
    return f"a {type(value).__name__}"


def as_number(value: Any, what: str, *, finite: bool = True) -> float:
    """``value``, called ``what``, as a float; :class:`Unloadable` if it is no number, or must be ``finite`` and is not."""
    with naming(what):
        if isinstance(value, Tensor):
            value = _item(value, what)
        is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
        if is_complex or not hasattr(value, "__float__"):  # numpy's complex numbers have one, and lose their imaginary part
            raise Unloadable(f"{what} is not a number")
        try:
            number = float(value)
        except OverflowError:
            raise Unloadable(f"{what} is too large") from None
        if finite and not math.isfinite(number):
            raise Unloadable(f"{what} is {number}")
    return number


def is_set(group: Mapping[str, Any], option: str, where: str) -> bool:
    """Whether ``option`` of a saved group, called ``where``, is there and neither None nor 0."""
    value = group.get(option)
    return value is not None and as_number(value, f"{option} of {where}") != 0


def _item(tensor: Tensor, what: str) -> Any:
    check_memory(tensor, what)
    if tensor.numel() != 1:
        raise Unloadable(f"{what} is not a number")
    full: Any = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full.detach().item()


def as_tensor(value: Any, what: str, dtypes: Collection[torch.dtype] = FLOATING) -> Tensor:
    """``value``, called ``what``, as a tensor of one of these dtypes that ``copy_`` can read.

    The result shares memory with a DTensor or a tensor of torch's own classes; a tensor of any other class is copied.
    What is something else, or torch cannot copy, is :class:`Unloadable`.
    """
    if not isinstance(value, Tensor):
        raise Unloadable(f"{what} is not a tensor")
    with naming(what):
        check_memory(value, what)
        if value.dtype not in dtypes:
            raise Unloadable(f"{what} is {value.dtype}")
        if is_sharded(value) or (type(value) in _OWN_TYPES and is_plain(value)):
            return value.detach()
        return plain_copy(value)


def as_buffer(value: Any, what: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """:func:`as_tensor` of ``shape``: of ``dtype`` where that is of integers, else complex exactly if ``dtype`` is."""
    tensor = as_tensor(value, what, FLOATING if dtype in FLOATING else {dtype})
    if tuple(tensor.shape) != shape:
        raise Unloadable(f"{what} has shape {tuple(tensor.shape)} instead of {shape}")
    if tensor.is_complex() != dtype.is_complex:
        raise Unloadable(f"{what} is {tensor.dtype} instead of {dtype}")
    return tensor


def check_memory(tensor: Tensor, what: str) -> None:
    """Raise :class:`Unloadable` unless ``tensor``, called ``what``, is strided and its elements are in memory."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise Unloadable(f"{what} is a {'nested' if tensor.is_nested else tensor.layout} tensor")
    part = local(tensor)
    if part.untyped_storage().device.type == "meta":  # also that of torch's fake tensors
        raise Unloadable(f"{what} is a meta tensor")
    if is_lost(part):
        raise Unloadable(f"{what} has no memory: its storage is empty or too small")
    shape, expected = tuple(part.shape), shape_of_part(tensor) if is_sharded(tensor) else tuple(part.shape)
    if shape != expected and (part.numel() or 0 not in expected):  # FSDP gives an empty part any empty shape
        raise Unloadable(f"{what} has a part of shape {shape} on this process instead of {expected}")
