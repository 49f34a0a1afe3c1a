"""Symmetric products of matrices as Triton: tiles on and below the diagonal are computed, and mirrored above it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.lowering.kernels.triton import launcher
from compiled_optim.memory.torch_internals import called_while_tracing


class Tiling(NamedTuple):
    """The sizes in which the kernel divides products, on GPUs of one compute capability."""

    rows: int  # the fewest for the kernel; nothing else decides, so that all processes compute alike
    block: int  # rows and columns of the tile that a program computes
    depth: int  # columns of the factors that a program reads at a time
    stages: int  # such reads in flight at once (``num_stages`` of Triton)
    warps: int


TILINGS = {(9, 0): Tiling(768, 128, 64, 3, 4)}
"""Tilings by compute capability of NVIDIA's GPUs. On others the kernel is not known to be faster.

On an H100, it took 0.61 to 0.92 of the time of torch.bmm for 8 or 12 matrices of 768 or 1024 rows, 0.81 for 4 of 2048, and
twice the time for one of 512. Two programs fit on a multiprocessor. Earlier GPUs cannot load tiles by descriptors in
hardware: there, the kernel spills registers.
"""

ALIGNED = 8  # rows and columns are multiples of this, so that each row begins at a multiple of 16 bytes

TEXT = """

@triton.jit
def tile_of(x, matrix, row, column, block: tl.constexpr, depth: tl.constexpr, is_transposed: tl.constexpr):
    if is_transposed:
        return tl.trans(tl.reshape(x.load([matrix, column, row]), [depth, block]))
    return tl.reshape(x.load([matrix, row, column]), [block, depth])


# A tile of x @ x.mT and the mirrored one, or of a + b * x + c * x @ x of symmetric x. One on the diagonal is symmetric:
# both elements add the same products in one order. As many matrices, one after the other, have the same numbers.
@triton.jit(do_not_specialize_on_alignment=["a", "b", "c"])
def symmetric_product(a, b, c, index, x, tiles, out, columns, matrices, is_transposed: tl.constexpr,
                      is_quadratic: tl.constexpr, by_index: tl.constexpr, block: tl.constexpr, depth: tl.constexpr):
    block_index, matrix = tl.program_id(0), tl.program_id(1)
    line = ((tl.sqrt_rn(8.0 * block_index + 1.0) - 1.0) * 0.5).to(tl.int32)
    top, left = line * block, (block_index - line * (line + 1) // 2) * block
    i, j = (top + tl.arange(0, block))[:, None], (left + tl.arange(0, block))[None, :]
    total = tl.zeros((block, block), tl.float32)
    for start in range(0, columns, depth):
        rows = tile_of(x, matrix, top, start, block, depth, is_transposed)
        total = tl.dot(rows, tl.trans(tile_of(x, matrix, left, start, block, depth, is_transposed)), total)
    if is_quadratic:
        column = tl.load(index + matrix // matrices) if by_index else 0
        linear = tl.load(b + column).to(tl.float32) * tile_of(tiles, matrix, top, left, block, block, False).to(tl.float32)
        total = linear + tl.load(c + column).to(tl.float32) * total
        total = tl.where(i == j, tl.load(a + column).to(tl.float32) + total, total)
    made = total.to(tl.bfloat16)
    out.store([matrix, top, left], tl.reshape(made, [1, block, block]))
    if top != left:
        out.store([matrix, left, top], tl.reshape(tl.trans(made), [1, block, block]))
"""
"""The text of the kernel, for a module that begins like those of elementwise rules."""


@called_while_tracing
def tiling_of(device: torch.device) -> Tiling | None:
    """Return the tiling for symmetric products on ``device``; None where torch computes them."""
    is_served = device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None
    return TILINGS.get(torch.cuda.get_device_capability(device)) if is_served else None


def multiplier(
    module: ModuleType,
    tiling: Tiling,
    shape: Sequence[int],
    device: torch.device,
    *,
    transposed: bool = False,
    numbers: str = "",
) -> Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], object]:
    """Return the launcher of a ``module``'s kernel for stacks of one ``shape``, (tensors, ..., rows, columns).

    It is called with a stack x and a result in bfloat16, [a, b, c] in float64 and an int64 index. The result is x @ x.mT, or
    x.mT @ x if ``transposed``. With ``numbers`` it is a + b * x + c * x @ x of symmetric x: ``"same"`` takes the first
    element of a, b and c for all tensors, and ``"each"`` takes ``a[index[i]]`` and so on for tensor i.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    block, depth, (*batch, height, width) = tiling.block, tiling.depth, shape
    rows, columns = (width, height) if transposed else (height, width)
    tiles, count, square = -(-rows // block), math.prod(batch), [1, block, block]
    constants = columns, count // batch[0], transposed, bool(numbers), numbers == "each", block, depth

    def arguments(x: Tensor, out: Tensor) -> tuple[Any, ...]:
        x, out = x.view(count, height, width), out.view(count, rows, rows)
        read = TensorDescriptor.from_tensor(x, [1, depth, block] if transposed else [1, block, depth])
        return read, TensorDescriptor.from_tensor(x, square), TensorDescriptor.from_tensor(out, square), *constants

    like = arguments(
        *(torch.empty(n, dtype=torch.bfloat16, device=device) for n in (count * height * width, count * rows**2))
    )
    types = [torch.float64] * 3 + [torch.int64]
    grid = tiles * (tiles + 1) // 2, count
    launch = launcher(module.symmetric_product, grid, types, like, device, num_warps=tiling.warps, num_stages=tiling.stages)
    return lambda x, out, abc, index: launch([*abc, index], arguments(x, out))
