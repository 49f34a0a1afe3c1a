"""The kernel of symmetric products, which needs Triton."""

import triton
from triton import language as tl


@triton.jit
def _load(x, lines, depth, rows: tl.constexpr, columns: tl.constexpr, down: tl.constexpr, right: tl.constexpr, whole: tl.constexpr):
    places = x + lines[:, None] * down + depth[None, :] * right
    if whole:
        return tl.load(places)
    return tl.load(places, (lines < rows)[:, None] & (depth < columns)[None, :], 0.0)


@triton.jit
def _number(value, place):
    if value.dtype.is_ptr():
        return tl.load(value + place).to(tl.float32)
    else:  # noqa: RET505 (Triton takes it for two types otherwise)
        return value


@triton.jit
def multiply(
    x,
    out,
    a,
    b,
    c,
    number_step,
    x_step,
    x_inner_step,
    out_step,
    out_inner_step,
    rows: tl.constexpr,
    columns: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
    is_quadratic: tl.constexpr,
    block: tl.constexpr,
    depth: tl.constexpr,
):
    """Write a tile of ``x @ x.mT`` and the mirrored one to ``out``, or of ``a + b * x + c * x @ x`` of symmetric ``x``."""
    place, outer, inner = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = ((tl.sqrt_rn(8.0 * place + 1.0) - 1.0) * 0.5).to(tl.int32)
    column = place - line * (line + 1) // 2
    x += outer * x_step + inner * x_inner_step
    out += outer * out_step + inner * out_inner_step
    i, j = line * block + tl.arange(0, block), column * block + tl.arange(0, block)
    total = tl.zeros((block, block), tl.float32)
    for start in range(0, columns, depth):
        k = start + tl.arange(0, depth)
        left = _load(x, i, k, rows, columns, down, right, rows % block == 0 and columns % depth == 0)
        above = _load(x, j, k, rows, columns, down, right, rows % block == 0 and columns % depth == 0)
        total = tl.dot(left, tl.trans(above), total)
    if is_quadratic:
        tile = _load(x, i, j, rows, columns, down, right, rows % block == 0).to(tl.float32)
        total = _number(b, outer * number_step) * tile + _number(c, outer * number_step) * total
        total = tl.where(i[:, None] == j[None, :], _number(a, outer * number_step) + total, total)
    made = total.to(out.dtype.element_ty)
    turned = tl.trans(made)
    if line == column:
        made = tl.where(i[:, None] >= j[None, :], made, turned)
    inside = (i < rows)[:, None] & (j < rows)[None, :]
    tl.store(out + i[:, None] * rows + j[None, :], made, inside)
    if line != column:
        tl.store(out + j[:, None] * rows + i[None, :], turned, tl.trans(inside))
