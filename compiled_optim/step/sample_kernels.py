"""Kernels that read samples before and after a step, a program for each parameter; they need Triton.

A row of ``samples`` has, of one parameter: the sample's address, length and stride; the offset in bytes from the gradient's
address to its sample; the dtypes of both, as indices in ``KINDS``; and the index in ``hypers`` of its ``lr``, -1 for none.
"""

import triton
from triton import language as tl


@triton.jit
def _read(address, kind, at, inside, dtype: tl.constexpr):
    read = tl.load(address.to(tl.pointer_type(tl.float16)) + at, inside & (kind == 0), 0.0).to(dtype)
    read += tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, inside & (kind == 1), 0.0).to(dtype)
    read += tl.load(address.to(tl.pointer_type(tl.float32)) + at, inside & (kind == 2), 0.0).to(dtype)
    return read + tl.load(address.to(tl.pointer_type(tl.float64)) + at, inside & (kind == 3), 0.0).to(dtype)


@triton.jit
def _norm(x):
    wide = x.to(tl.float64)
    return tl.sqrt(tl.sum(wide * wide, axis=0))


@triton.jit
def look(samples, before, index, elements: tl.constexpr):
    """Store the parameters before a step, and copy ``index``: programs of ``note`` read the copy and write the first one."""
    t, lane = tl.program_id(0), tl.arange(0, elements)
    row = samples + 7 * t
    inside, at = lane < tl.load(row + 1), lane * tl.load(row + 2)
    tl.store(before + t * elements + lane, _read(tl.load(row), tl.load(row + 4), at, inside, before.dtype.element_ty))
    tl.store(index + 1, tl.load(index))


@triton.jit
def note(samples, grads, hypers, outcome, before, index, table, elements: tl.constexpr, steps: tl.constexpr):
    """Write the row of the ``table`` about a step, as the class ``Watch`` describes it, and the next row's ``index``."""
    t, lane, count = tl.program_id(0), tl.arange(0, elements), tl.num_programs(0)
    row, start, here = samples + 7 * t, tl.load(grads + t), tl.load(index + 1)
    inside, at = lane < tl.load(row + 1), lane * tl.load(row + 2)
    weight = tl.load(before + t * elements + lane)
    update = _read(tl.load(row), tl.load(row + 4), at, inside, weight.dtype) - weight
    grad = _read(start + tl.load(row + 3), tl.load(row + 5), at, inside & (start != 0), weight.dtype)
    grad = tl.where(inside & (start == 0), float("nan"), grad)
    rate = tl.load(row + 6)
    known = tl.load(hypers + rate, rate >= 0, 0).to(tl.pointer_type(tl.float64))
    to = table + here * 7 * count + t
    tl.store(to, _norm(weight))
    tl.store(to + count, _norm(update))
    tl.store(to + 2 * count, _norm(grad))
    tl.store(to + 3 * count, _norm((update != 0) & (grad != 0)))
    tl.store(to + 4 * count, _norm(grad != 0))
    tl.store(to + 5 * count, tl.load(known, rate >= 0, 1.0))
    tl.store(to + 6 * count, tl.load(outcome + 1))
    tl.store(index, (here + 1) % steps)
