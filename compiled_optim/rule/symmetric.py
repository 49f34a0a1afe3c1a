"""Products of matrices that are symmetric, in the vocabulary of rules on matrices.

They are torch operations. In code that is compiled for a GPU on which it is known to be faster, a Triton kernel computes
what is on and below the diagonal, and writes it above too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.memory.torch_internals import called_while_tracing, is_traced
from compiled_optim.rule.vocabulary import identity


class Tiling(NamedTuple):
    """How a kernel divides products, on GPUs of one compute capability.

    Attributes:
        rows: the fewest rows of matrices for which it is taken. The shape decides alone: processes must compute alike.
        block: rows and columns of the tile that a program computes.
        depth: how many columns of the factors it reads at a time.
        stages: how many times as many are on their way.
        warps: of 32 threads in a program.
    """

    rows: int
    block: int
    depth: int
    stages: int
    warps: int


TILINGS = {(8, 0): Tiling(1024, 128, 64, 3, 8), (9, 0): Tiling(768, 128, 64, 4, 8)}
"""By compute capability of NVIDIA's GPUs. Others multiply as always: nobody is known to have measured them.

On an A100, kernels of this kind took 0.84 of cuBLAS' time at 1024 rows (README of github.com/nil0x9/flash-muon). On an H100
modded-nanogpt takes them, with these tiles, for batches of 768 rows; alone, matrices of 1024 rows took longer. Tiles of 128
read the least, and 12 matrices of 768 rows are 252 of them, for 132 multiprocessors.
"""


def gram(x: Tensor) -> Tensor:
    """``x @ x.mT``."""
    if (tiling := _tiling(x)) is None:
        return x @ x.mT
    return _multiplied(x, (), tiling)


def quadratic(x: Tensor, a: Any, b: Any, c: Any, dtype: torch.dtype) -> Tensor:
    """``a + b * x + c * x @ x`` of symmetric matrices, added in ``dtype``."""
    if (tiling := _tiling(x)) is None:
        square, wide = (x @ x).to(dtype), x.to(dtype)
        made: Tensor = (a * identity(wide) + b * wide + c * square).to(x.dtype)
        return made
    return _multiplied(x, (a, b, c), tiling)


def _tiling(x: Tensor) -> Tiling | None:
    """How to multiply ``x`` by itself where Inductor compiles that; None for torch's way."""
    if not is_traced() or not isinstance(x, Tensor) or x.dim() < 3 or (x.dtype, x.device.type) != (torch.bfloat16, "cuda"):
        return None
    tiling = _tiling_of(x.device)
    return None if tiling is None or x.shape[-2] < tiling.rows else tiling


@called_while_tracing
def _tiling_of(device: torch.device) -> Tiling | None:
    return None if torch.version.hip else TILINGS.get(torch.cuda.get_device_capability(device))


def _multiplied(x: Tensor, numbers: Sequence[Any], tiling: Tiling) -> Tensor:
    """The product of matrices by themselves, or with ``numbers`` what :func:`quadratic` returns."""
    from compiled_optim.rule.symmetric_kernel import symmetric_product

    rows, columns = x.shape[-2:]
    made = x.new_empty((*x.shape[:-1], rows))
    stack, out = (t.reshape(x.shape[0], math.prod(x.shape[1:-2]), *t.shape[-2:]) for t in (x, made))
    given = [n.expand(x.shape[0], *n.shape[1:]) if isinstance(n, Tensor) else n for n in numbers] or [x] * 3
    tiles = -(-rows // tiling.block)
    symmetric_product[(tiles * (tiles + 1) // 2, stack.shape[0], stack.shape[1])](
        stack,
        out,
        *given,
        *stack.stride()[:2],
        *out.stride()[:2],
        rows,
        columns,
        *stack.stride()[2:],
        bool(numbers),
        *[n.stride(0) if isinstance(n, Tensor) else None for n in given],
        tiling.block,
        tiling.depth,
        num_stages=tiling.stages,
        num_warps=tiling.warps,
    )
    return made
