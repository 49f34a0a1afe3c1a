"""Storage of 32-bit numbers in fewer bits, or split over two tensors. Written once for tensors and generated code.

The *remainder* of a 16-bit parameter holds the bits of its 32-bit value that the parameter lacks. Arithmetic is on integers,
so that compilers remove no rounding, and all lowerings store the same bits. NaN stays NaN, and infinity stays infinite.

The first functions are words, as those of :mod:`~compiled_optim.rule.vocabulary`, but for this package only. Integers have
32 bits, and ``+ - * & | ^ << >>`` work on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_optim.rule.symbols import word
from compiled_optim.rule.vocabulary import absolute, floor, maximum, minimum, sqrt, where

GROUP = 64
"""The number of elements, adjacent in memory, that share a scale."""


@word
def bits(x: Tensor) -> Tensor:
    """Return the bits of a float32 as a 32-bit integer, on which ``+ - * & | ^ << >>`` work; ``>>`` keeps the sign."""
    return x.to(torch.float32).view(torch.int32)  # of a float64 parameter, whose state has fewer bits


@word
def from_bits(x: Tensor) -> Tensor:
    """Return the float32 of these :func:`bits`."""
    return x.view(torch.float32)


@word
def from_upper(x: Tensor) -> Tensor:
    """Return the float32 of the upper 16 of these :func:`bits`; the others become 0. bfloat16 can represent it."""
    return (x & -65536).view(torch.float32)


@word
def integer(x: Tensor) -> Tensor:
    """Convert a whole number to a 32-bit integer."""
    return x.to(torch.int32)


@word
def number(x: Tensor) -> Tensor:
    """Convert a 32-bit integer to a float32."""
    return x.to(torch.float32)


@word
def group_max(x: Tensor) -> Tensor:
    """Return the largest integer of each :data:`GROUP` elements, at least 0: one number for each of these groups."""
    return x.view(*x.shape[:-1], -1, GROUP).amax(-1)


@word
def broadcast(x: Tensor) -> Tensor:
    """Repeat the number of each group for each of its elements."""
    return x.unsqueeze(-1).expand(*x.shape, GROUP).flatten(-2)


_SIGN, _MAGNITUDE = -(1 << 31), (1 << 31) - 1
_NOT_A_NUMBER = 0x7FC00000
_LOWER = {"bfloat16": 16, "float16": 13}  # the number of lower bits of a float32 that the dtype lacks
_SHRINK = {"bfloat16": 1.0, "float16": 2.0**-112}  # the factor that gives a float32 the exponents of the dtype
_HALF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half an ulp of 1
_LEAST_HALF = 2.0**-25  # and of float16's smallest numbers, which weights can reach
_LARGEST = {"bfloat16": 0x7F80, "float16": 0x7C00}  # the bits of infinity in the dtype


def _magnitude(x: Any, dtype: str) -> Any:
    """Return the bits of ``|x|`` with the exponents of ``dtype``: first those of ``dtype``, then those that it lacks."""
    if dtype == "bfloat16":
        return bits(x) & _MAGNITUDE
    return bits(absolute(x) * _SHRINK[dtype])


def _value(upper: Any, like: Any, dtype: str) -> Any:
    """Return the float32 of these bits of a magnitude in float16, with the sign of ``like``."""
    size = from_bits(upper << _LOWER[dtype]) * (1 / _SHRINK[dtype])
    return from_bits(bits(where(size >= 65536.0, size * 2.0**127, size)) | (bits(like) & _SIGN))  # infinity's is 65536 there


def _raised(x: Any, lower: int, noise: Any = None) -> Any:
    """Add to ``x`` so that cutting off its ``lower`` bits rounds: to nearest, ties to even, or by 24 bits of ``noise``.

    With noise, the probability to round up grows with those bits.
    """
    if not lower:
        return x
    return x + (((1 << (lower - 1)) - 1) + ((x >> lower) & 1) if noise is None else noise >> (24 - lower))


def _in_place(x: Any, lower: int, noise: Any = None) -> Any:
    """Return the bits of ``x`` with its sign, :func:`_raised`. NaN gets fixed bits: a carry could change its exponent."""
    return where(x == x, _raised(bits(x), lower, noise), _NOT_A_NUMBER)


@word
def to_bfloat16(x: Any) -> Any:
    """Round ``x`` to bfloat16, ties to even, as a float32. A processor's own instruction gives NaN other bits."""
    return from_upper(_in_place(x, _LOWER["bfloat16"]))


def nearest(x: Any, dtype: str) -> Any:
    """Round ``x`` to ``dtype``, ties to even, as a float32."""
    return to_bfloat16(x) if dtype == "bfloat16" else randomly_rounded(x, None, dtype)


def randomly_rounded(x: Any, noise: Any, dtype: str) -> Any:
    """Round ``x`` to one of its two neighbours in ``dtype``, more often to the nearer one, as a float32.

    ``noise`` is an integer of 24 random bits.
    """
    if dtype == "bfloat16":
        return from_upper(_in_place(x, _LOWER[dtype], noise))
    return _limited(_raised(_magnitude(x, dtype), _LOWER[dtype], noise) >> _LOWER[dtype], x, dtype)


def _limited(upper: Any, x: Any, dtype: str) -> Any:
    """Return the float32 of these bits of a magnitude in float16, with the sign of ``x``; NaN where ``x`` is."""
    return where(x == x, _value(minimum(upper, _LARGEST[dtype]), x, dtype), x)


def _lost_and_held(dtype: str, remainder_bits: int) -> tuple[int, int]:
    """Return how many bits of a magnitude a remainder cannot hold, and how many it holds."""
    held = min(remainder_bits, _LOWER[dtype])
    return _LOWER[dtype] - held, held


def split(x: Any, dtype: str, remainder_bits: int, noise: Any = None) -> tuple[Any, Any]:
    """Split ``x`` into the nearest number of ``dtype``, as a float32, and an integer remainder of ``remainder_bits`` bits.

    The unit of the remainder is the last bit that both hold together. With 16 bits they hold the whole float32, except
    beyond float16's exponents. With fewer, ``x`` is first rounded: at random with ``noise``, an integer of 24 random bits,
    else to nearest, ties to even. Halfway between two numbers of ``dtype``, the larger magnitude is taken. If the number is
    infinite in ``dtype``, the remainder is 0.
    """
    lost, held = _lost_and_held(dtype, remainder_bits)
    if dtype == "bfloat16":
        both = _in_place(x, lost, noise)
        return from_upper(both + 0x8000), (both << 16) >> (16 + lost)
    both = _raised(_magnitude(x, dtype), lost, noise) >> lost
    upper = (both + (1 << (held - 1))) >> held
    return _limited(upper, x, dtype), both - (upper << held)


def joined(param: Any, remainder: Any, dtype: str, remainder_bits: int) -> Any:
    """Return the float32 that :func:`split` split; within half a unit of a parameter that was written since."""
    lost, _ = _lost_and_held(dtype, remainder_bits)
    magnitude, change = _magnitude(param, dtype), integer(remainder) << lost
    if dtype == "bfloat16":
        moved = from_bits(bits(param) + maximum(change, 0 - magnitude))
    else:
        size = from_bits(maximum(magnitude + change, 0)) * (1 / _SHRINK[dtype])
        moved = from_bits(bits(size) | (bits(param) & _SIGN))
    return where(magnitude < _LARGEST[dtype] << _LOWER[dtype], moved, param)


def compensated(param: Any, compensation: Any, dtype: str) -> Any:
    """Return ``param`` plus its rounding error; ``param`` alone where that is more than rounding can cause.

    That happens where other code wrote a smaller number into the parameter since, such as 0.
    """
    most = absolute(param) * _HALF[dtype]
    most = maximum(most, _LEAST_HALF) if dtype == "float16" else most
    return where(absolute(compensation) <= most, param + compensation, param)


def remainder_beside(value: Any, param: Any, dtype: str, remainder_bits: int) -> Any:
    """Return the remainder that brings ``param``, an unchanged number of ``dtype``, nearest to ``value``.

    It equals :func:`split`'s remainder if ``split`` rounds ``value`` to the same ``param``.
    """
    lost, held = _lost_and_held(dtype, remainder_bits)
    both = _raised(_magnitude(value, dtype), lost) >> lost
    signed = where(bits(value) & _SIGN == bits(param) & _SIGN, both, 0 - both)
    remainder = signed - ((_magnitude(param, dtype) >> _LOWER[dtype]) << held)
    limit = 1 << (remainder_bits - 1)
    return where((value - value == 0) & (param - param == 0), maximum(minimum(remainder, limit - 1), -limit), 0)


def copy_beside(value: Any, param: Any, dtype: str) -> Any:
    """Return a float32 that rounds to ``param``: ``value`` if it does, else the nearest one.

    The nearest is a neighbour of ``value`` if ``value`` is halfway between ``param`` and another number of ``dtype``.
    """
    most = (1 << (_LOWER[dtype] - 1)) - 1  # of the last bit of a float32, less than half a unit of ``dtype``
    remainder = minimum(maximum(remainder_beside(value, param, dtype, 16), -most), most)
    return where(nearest(value, dtype) == param, value, joined(param, remainder, dtype, 16))


def noise_of(key: Any, index: Any) -> Any:
    """Return 24 bits, 16 random and 8 zeros, for ``key``, an integer below 2**24, and ``index``, an integer counter.

    Each two neighbours share one random number, half each. The key comes after a first round of mixing: before it, other
    keys would give the same numbers in another order.
    """
    x = index >> 1
    for after, (shift, factor) in enumerate(((16, 0x7FEB352D), (15, 0x46CA68B5), (16, 0x5BD1E995))):
        x = x ^ (integer(key) << 7) if after == 1 else x
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    x = x ^ ((x >> 15) & ((1 << 17) - 1))
    return where(index & 1 == 0, x << 8, x >> 8) & 0xFFFF00


_SMALLEST = 0x0D800000  # the bits of 2**-100, the least scale: its inverse is finite


def scale_of(value: Any) -> Any:
    """Return the largest magnitude of each group, at least 2**-100; 0 where all are 0.

    It has all bits of a float32: rounded up to fewer, the scale of a slow average would rise and never fall. It is NaN or
    infinite where an element of the group is.
    """
    peak = minimum(group_max(bits(value) & _MAGNITUDE), _NOT_A_NUMBER)
    return from_bits(where(peak == 0, 0, maximum(peak, _SMALLEST)))


_MOST = 1 - 2.0**-12  # limits a threshold so that the largest of a group has the largest code despite rounding
_LEVELS = 255.0  # the largest unsigned code
_OFFSET, _OFFSET_BITS = 0.06875, 0x3D8CCCCD
_STEP = 18  # signed codes are 2**18 float32s apart; 127 of them go from the offset to 1 more


def encoded(value: Any, scale: Any, kind: str, threshold: Any = 0.5) -> Any:
    """Return the integer code of ``value``: of its part of its group's ``scale``, the largest magnitude.

    An ``"unsigned"`` code is the square root of the part. Fractions from ``1 - threshold`` on round up: to nearest, or with
    a :func:`threshold_of` each step, right on average. A positive number gets at least 1: its square root is a divisor. A
    ``"signed"`` code is linear up to a sixteenth of the scale, and logarithmic above: the bits of the number plus an offset,
    rounded likewise.
    """
    threshold = threshold if isinstance(threshold, float) else threshold * _MOST
    if kind == "unsigned":
        root = sqrt(value)
        code = integer(root * broadcast(_inverse(scale, _LEVELS, of_root=True)) + threshold)
        return maximum(code, minimum(bits(root), 1))
    part = from_bits(bits(value) & _MAGNITUDE) * broadcast(_inverse(scale, 1.0))
    code = (bits(part + _OFFSET) + (parts_in(threshold, _STEP) - _OFFSET_BITS)) >> _STEP
    negative = bits(value) >> 31  # -1 where it is, else 0
    return (code ^ negative) - negative


def parts_in(share: Any, count: int) -> Any:
    """Return how many of ``2**count`` parts a number in [0, 1) is, an integer below that."""
    return int(share * 2**count) if isinstance(share, float) else integer(share * (2.0**count - 1))


def _inverse(scale: Any, levels: float, *, of_root: bool = False) -> Any:
    divisor = maximum(scale, 2.0**-100)  # avoids a division by 0
    return levels / (sqrt(divisor) if of_root else divisor)


def decoded(code: Any, scale: Any, kind: str) -> Any:
    """Return the number with this code; see :func:`encoded`. The largest code stands for the scale itself."""
    code = integer(code)
    if kind == "unsigned":
        root = number(code)
        return root * root * (1 / (_LEVELS * _LEVELS)) * broadcast(scale)
    part = from_bits((absolute(code) << _STEP) + _OFFSET_BITS) - _OFFSET
    return from_bits(bits(part * broadcast(scale)) | (code & _SIGN))


_KEYS = float(1 << 24)
_GOLDEN = 0.6180339887498949
_BLOCK = 1024.0  # steps
_QUOTIENTS = 4.0


def key_of(count: Any, seed: Any) -> Any:
    """Return an integer below 2**24 for each count, such as a step, and each seed, itself an integer below 2**24.

    It is computed in float64, where every intermediate number is exact, so that no compiler changes it.
    """
    x = _below(count * 10619863.0 + seed, _KEYS)
    return _below(floor(x * x * 2.0**-12) + count * 7296283.0, _KEYS)


def threshold_of(step: Any, seed: Any) -> Any:
    """Return a number in [0, 1) for each step of each seed, spread evenly over consecutive steps; in float64.

    Rounded to nearest, an average that a step changes by less than half a code would never change: squares that are averaged
    with 0.999 would rise with large gradients, and never fall with small ones; momentum would go on without gradients.

    Multiples of an irrational number of small partial quotients are spread evenly. But with the golden ratio, those of steps
    a Fibonacci number apart are near each other: gradients of that period would be rounded alike for long. So every block of
    steps begins at random, and has one of 16 such numbers.
    """
    block = floor(step * (1 / _BLOCK))
    key = key_of(block, seed)
    first = _below(key, _QUOTIENTS)
    second = _below(floor(key * (1 / _QUOTIENTS)), _QUOTIENTS)
    ratio = floor(_KEYS / (1.0 + first + 1.0 / (1.0 + second + _GOLDEN)))
    return _below((step - block * _BLOCK) * ratio + key, _KEYS) * (1 / _KEYS)


def another(threshold: Any) -> Any:
    """Return a threshold of another phase, for a second use in the same step."""
    shifted = threshold + int(_GOLDEN * _KEYS) / _KEYS
    return shifted - floor(shifted)


def _below(x: Any, limit: float) -> Any:
    """Return the remainder of a whole number divided by ``limit``, a power of 2."""
    return x - floor(x * (1 / limit)) * limit
