"""Sums over many elements in stages, so that no program of an accelerator walks a whole tensor alone.

Inductor splits a reduction by the sizes that it compiles with, not by later ones. Here the number of programs grows with the
tensor: rows are summed first, then :data:`CHUNK` of their sums at a time, then the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # how many numbers a program adds up in the second stage
_ALONE = 1 << 13  # the most numbers that one program adds up where their count is known to the compiler


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """By operator, how Inductor is to write it; all its own ones are among them."""
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    return {**select_decomp_table(), aten.mean.dim: _mean, aten.linalg_vector_norm.default: _norm}


def _mean(x: Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not keepdim or dtype is not None:
        return NotImplemented
    return _sum(x, dims) / math.prod(x.shape[d] for d in dims)


def _norm(
    x: Tensor, order: float, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if order != 2 or dims is None or not keepdim or dtype is not None:
        return NotImplemented
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _sum(wide * wide, dims).sqrt().to(x.dtype)


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The sum over neighbouring dimensions, which stay, of size 1."""
    left = sorted(d % x.dim() for d in dims)
    shape = [1 if d in left else size for d, size in enumerate(x.shape)]
    if left[-1] == x.dim() - 1 > 1:
        x = x.sum(-1, keepdim=True)
        del left[-1]
    if left:
        x = _chunked(x.flatten(left[0], left[-1]), left[0])
    return x.reshape(shape)


def _chunked(x: Tensor, dim: int) -> Tensor:
    """The sum over one dimension of any size.

    Padding would copy everything, so the last chunk reads the last number again and counts it as 0.
    """
    size = x.shape[dim]
    if isinstance(size, int) and size <= _ALONE:
        return x.sum(dim)
    place = torch.arange((size + CHUNK - 1) // CHUNK * CHUNK, device=x.device)
    exists = (place < size).view([-1 if d == dim else 1 for d in range(x.dim())])
    padded = torch.where(exists, x.index_select(dim, place.clamp(max=size - 1)), 0.0)
    chunks = padded.view(*x.shape[:dim], -1, CHUNK, *x.shape[dim + 1 :])
    return chunks.sum(dim + 1).sum(dim)
