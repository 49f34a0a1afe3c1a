"""The vocabulary of rules as Triton, and how kernels read tables and elements."""

WORDS = """\
import triton
import triton.language as tl


@triton.jit
def sqrt_(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


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
def narrow(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))


@triton.jit
def wide(address, dtype: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
"""
