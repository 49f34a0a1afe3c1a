"""The vocabulary of rules as Triton, and how kernels read tables and elements."""

from compiled_optim.rule.bits import GROUP

WORDS = f"""\
import triton
import triton.language as tl

GROUP = tl.constexpr({GROUP})


@triton.jit
def sqrt_(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


# Within a unit in the last place, in half the instructions and without branches.
@triton.jit
def near_sqrt(x):
    tiny = x < 2.0**-126  # which the instruction would take for 0
    return tl.sqrt(tl.where(tiny, x * 2.0**24, x)) * tl.where(tiny, 2.0**-12, 1.0)


@triton.jit
def maximum_(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absolute_(x):
    return tl.abs(x)


@triton.jit
def sign_(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)


@triton.jit
def floor_(x):
    return tl.floor(x)


@triton.jit
def power_(x, y):
    base = x + 0.0 * y
    return tl.where(y == 0, 1.0, tl.exp(y * tl.log(base)))


@triton.jit
def where_(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def product_(x, y):
    weighted = x * y
    return tl.where(weighted == weighted, weighted, 0.0)


@triton.jit
def bits_(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits_(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def from_upper_(x):
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def integer_(x):
    return x.to(tl.int32)


@triton.jit
def number_(x):
    return x.to(tl.float32)


@triton.jit
def shift_right_(whole, count):
    return whole >> count


@triton.jit
def group_max_(x, inside):
    return tl.max(tl.reshape(tl.where(inside, x, 0), [inside.shape[0] // GROUP, GROUP]), axis=1)


@triton.jit
def spread_(x):
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], GROUP]), [x.shape[0] * GROUP])


@triton.jit
def bias_correction_(beta, step):
    x = step * tl.log(beta)
    power = tl.exp(x)
    small = (1 - power) * x / tl.log(power)  # the rounding errors of both differences cancel
    return tl.where(power == 1, -x, tl.where(power < 0.5, 1 - power, small))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    return x.to(dtype)


@triton.jit
def address(tensors, row, count, t, here, dtype: tl.constexpr):
    return tl.load(tensors + row * count + t, mask=here, other=0).to(tl.pointer_type(dtype))


@triton.jit
def control_of(hypers, index):
    return tl.load(tl.load(hypers + index).to(tl.pointer_type(tl.float64)))


@triton.jit
def hyper_of(hypers, index, here):
    return tl.load(tl.load(hypers + index, mask=here, other=0).to(tl.pointer_type(tl.float64)), mask=here, other=0.5)


@triton.jit
def square(x):
    return x * x


@triton.jit
def by_size(square_sum, if_large, otherwise, if_small):
    return tl.where(square_sum > 2.0**100, if_large, tl.where(square_sum < 2.0**-100, if_small, otherwise))


@triton.jit
def row_sums(x, row: tl.constexpr):
    return tl.sum(tl.reshape(x, [x.shape[0] // row, row]), axis=1)


# In float64, for ``row`` elements each. Most GPUs are slow in float64, so squares are in float32: large and small ones in
# units that bring them into its range.
@triton.jit
def square_sums_of_rows(x, row: tl.constexpr):
    x = x if x.dtype == tl.float64 else x.to(tl.float32)
    plain = row_sums(square(x), row)
    sums = by_size(plain, row_sums(square(x * 2.0**-66), row), plain, row_sums(square(x * 2.0**90), row))
    return sums.to(tl.float64) * by_size(plain, 2.0**132, 1.0, 2.0**-180)


@triton.jit
def narrow(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))


@triton.jit
def wide(address, dtype: tl.constexpr, multiple: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), multiple)


@triton.jit
def load_shared(pointer, start, left, size: tl.constexpr):
    group = tl.arange(0, size // GROUP)
    return tl.load(pointer + start // GROUP + group, mask=group * GROUP < left)


# Of the threads that have a group's number, the one with the group's first element stores it; a thread has ``row`` elements
# in a row. As a vector of one number for each group, the numbers would change threads, by way of shared memory.
@triton.jit
def store_shared(pointer, start, left, x, row: tl.constexpr):
    elements = spread_(x)
    rows = tl.max(tl.reshape(elements, [elements.shape[0] // row, row]), axis=1)
    at = tl.arange(0, rows.shape[0]) * row
    tl.store(pointer + start // GROUP + at // GROUP, rows, mask=(at % GROUP == 0) & (at < left))
"""
