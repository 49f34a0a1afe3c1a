"""The kernel of symmetric products, which needs Triton."""

import triton
from triton import language as tl


@triton.jit
def _load(places, i, j, rows: tl.constexpr, columns: tl.constexpr, whole: tl.constexpr):
    if whole:
        return tl.load(places)
    return tl.load(places, (i < rows)[:, None] & (j < columns)[None, :], 0.0)


@triton.jit
def _number(value, place, step: tl.constexpr):
    return tl.cast(value if step is None else tl.load(value + place * step), tl.float32)


@triton.jit
def symmetric_product(
    x,
    out,
    a,
    b,
    c,
    x_step,
    rows: tl.constexpr,
    columns: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
    matrices: tl.constexpr,
    is_quadratic: tl.constexpr,
    step: tl.constexpr,
    block: tl.constexpr,
    depth: tl.constexpr,
):
    """Write a tile of ``x @ x.mT`` and the mirrored one to ``out``, or of ``a + b * x + c * x @ x`` of symmetric ``x``.

    As many ``matrices``, one after the other, have the same numbers.
    """
    place, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    line = ((tl.sqrt_rn(8.0 * place + 1.0) - 1.0) * 0.5).to(tl.int32)
    column = place - line * (line + 1) // 2
    i, j = line * block + tl.arange(0, block), column * block + tl.arange(0, block)
    whole: tl.constexpr = rows % block == 0 and columns % depth == 0
    x += matrix * x_step
    out += matrix * rows * rows
    total = tl.zeros((block, block), tl.float32)
    for start in range(0, columns, depth):
        k = start + tl.arange(0, depth)
        left = _load(x + i[:, None] * down + k[None, :] * right, i, k, rows, columns, whole)
        above = _load(x + j[:, None] * down + k[None, :] * right, j, k, rows, columns, whole)
        total = tl.dot(left, tl.trans(above), total)
    if is_quadratic:
        tile, tensor = _load(x + i[:, None] * down + j[None, :] * right, i, j, rows, columns, whole), matrix // matrices
        total = _number(b, tensor, step) * tile.to(tl.float32) + _number(c, tensor, step) * total
        total = tl.where(i[:, None] == j[None, :], _number(a, tensor, step) + total, total)
    made = total.to(out.dtype.element_ty)
    turned = tl.trans(made)
    if line == column:
        made = tl.where(i[:, None] >= j[None, :], made, turned)
    inside = (i < rows)[:, None] & (j < rows)[None, :]
    tl.store(out + i[:, None] * rows + j[None, :], made, inside)
    if line != column:
        tl.store(out + j[:, None] * rows + i[None, :], turned, tl.trans(inside))
