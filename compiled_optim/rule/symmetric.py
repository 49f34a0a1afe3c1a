"""Products of matrices that are symmetric, in the vocabulary of rules on matrices.

They are torch operations. In code that is compiled for a GPU on which it is known to be faster, a Triton kernel computes
what is on and below the diagonal, and writes it above too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.memory.torch_internals import called_while_tracing, is_traced
from compiled_optim.rule.vocabulary import identity


class Tiling(NamedTuple):
    """How the kernel divides products, on GPUs of one compute capability."""

    rows: int  # the fewest of matrices for which it is taken; nothing else decides, so that all processes compute alike
    block: int  # rows and columns of the tile that a program computes
    depth: int  # columns of the factors that it reads at a time
    stages: int  # how many times as many are on their way
    warps: int


TILINGS = {(8, 0): Tiling(1024, 128, 64, 3, 8), (9, 0): Tiling(768, 128, 64, 4, 8)}
"""By compute capability of NVIDIA's GPUs. On others it is not known to be faster.

On an A100, kernels of this kind took 0.84 of cuBLAS' time at 1024 rows (README of github.com/nil0x9/flash-muon). On an H100
modded-nanogpt takes them, with these tiles, for batches of 768 rows; alone, matrices of 1024 rows took longer. Tiles of 128
read the least, and 12 matrices of 768 rows are 252 of them, for 132 multiprocessors.
"""


def gram(x: Tensor) -> Tensor:
    """``x @ x.mT``."""
    tiling = _tiling(x)
    return x @ x.mT if tiling is None else _multiplied(x, (), tiling)


def quadratic(x: Tensor, a: Any, b: Any, c: Any, dtype: torch.dtype) -> Tensor:
    """``a + b * x + c * x @ x`` of symmetric matrices, added in ``dtype``; the numbers may differ between tensors."""
    write: Callable[..., Tensor | None] = getattr(type(x), "quadratic", lambda *_: None)
    if (written := write(x, (a, b, c), dtype)) is not None:
        return written
    tensors = [number for number in (a, b, c) if isinstance(number, Tensor)]
    first = tensors[0] if tensors else x
    are_alike = all(t.device == x.device and (t.shape, t.stride()) == (first.shape, first.stride()) for t in tensors)
    if (tiling := _tiling(x, *tensors)) is not None and len(tensors) in (0, 3) and are_alike:
        return _multiplied(x, (a, b, c), tiling)
    square, wide = (x @ x).to(dtype), x.to(dtype)
    made: Tensor = (a * identity(wide) + b * wide + c * square).to(x.dtype)
    return made


def _tiling(x: Tensor, *numbers: Tensor) -> Tiling | None:
    """How to multiply ``x`` by itself where Inductor compiles that, without a gradient; None for torch's way."""
    if not is_traced() or not isinstance(x, Tensor) or x.dim() < 3 or (x.dtype, x.device.type) != (torch.bfloat16, "cuda"):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *numbers)):
        return None
    tiling = tiling_of(x.device)
    return None if tiling is None or x.shape[-2] < tiling.rows else tiling


@called_while_tracing
def tiling_of(device: torch.device) -> Tiling | None:
    """How a GPU multiplies symmetric matrices; None if it should not."""
    is_served = device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None
    return TILINGS.get(torch.cuda.get_device_capability(device)) if is_served else None


def _multiplied(x: Tensor, numbers: Sequence[Any], tiling: Tiling) -> Tensor:
    """The product of matrices by themselves, or with ``numbers`` what :func:`quadratic` returns."""
    from compiled_optim.rule.symmetric_kernel import symmetric_product

    made, matrices = x.new_empty((*x.shape[:-1], x.shape[-2])), x.flatten(0, -3)
    weights = [n.expand(x.shape[0], *n.shape[1:]) if isinstance(n, Tensor) else float(n) for n in numbers]
    step = weights[0].stride(0) if numbers and isinstance(weights[0], Tensor) else None
    given = matrices, made, *(weights or [x] * 3), matrices.stride(0)
    layout = *x.shape[-2:], *matrices.stride()[1:], math.prod(x.shape[1:-2])
    constants = *layout, len(numbers) > 0, step, tiling.block, tiling.depth
    tiles = -(-x.shape[-2] // tiling.block)
    grid = (tiles * (tiles + 1) // 2, matrices.shape[0])
    symmetric_product[grid](*given, *constants, num_stages=tiling.stages, num_warps=tiling.warps)
    return made
