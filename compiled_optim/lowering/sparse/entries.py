"""The entries of sparse gradients, added up per row.

A COO gradient of N entries may name a row several times. Each row elects one of its entries, through a table with one
number per row. The values of all its entries are summed at the elected one. Where no two entries name the same row, all
are elected. All shapes follow from N, and the host knows N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def has_distinct_rows(grad: Tensor, name: str) -> bool:
    """Whether no two entries of the sparse gradient of the parameter ``name`` name the same row.

    The host reads all indices: a gradient may claim to be coalesced and not be.

    Raises:
        IndexError: an entry lies outside of the gradient's shape.
    """
    sizes = grad.shape[: grad.sparse_dim()]
    indices = grad._indices().numpy()
    for dimension, (index, size) in enumerate(zip(indices, sizes, strict=True)):
        outside = index[(index < 0) | (index >= size)]
        if len(outside):
            where = f"at {outside[0]} of dimension {dimension}"
            raise IndexError(f"the gradient of '{name}' has an entry {where}; it must be >= 0 and < {size}")
    rows = np.asarray(row_strides(sizes), dtype=np.int64) @ indices
    return grad.is_coalesced() and bool((rows[1:] > rows[:-1]).all())


def add_up(rows: Tensor, own: Tensor, values: Tensor, election: Tensor, sums: Tensor, *, sorts: bool = True) -> Tensor:
    """Add the values of the entries of each row, at the place of the entry that the row elects.

    Args:
        rows: (N,) int64, the rows that the entries name.
        own: the entries' numbers, 0 to N - 1.
        values: (N, ...).
        election: (rows,) int64, scratch memory.
        sums: written, as ``values``: at an elected entry its row's sum, elsewhere 0.
        sorts: whether an accelerator sorts the entries. A sum of several entries is then the same every time.

    Returns:
        For each entry, the one that its row elected: (N,) int64.
    """
    election.index_put_((rows,), own)
    elected = election[rows]
    sums.zero_()
    if values.device.type == "cpu" or not sorts:
        sums.index_add_(0, elected, values)
    else:
        sums.index_put_((elected,), values, accumulate=True)
    return elected


def row_strides(shape: Sequence[int]) -> list[int]:
    """By how many rows each sparse dimension moves on."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


@dataclass
class Entries:
    """The N entries of a sparse gradient, added up per row."""

    index: tuple[Tensor, ...]  # for each sparse dimension, where the entries lie: (N,) int64
    elected: Tensor  # for each entry, the one that its row elected: (N,) int64
    sums: Tensor  # (N, dense part); at an elected entry the row's gradient, elsewhere 0


def entries_of(grad: Tensor, dtype: torch.dtype, *, distinct: bool) -> Entries:
    """The entries of ``grad``, summed in ``dtype``; ``distinct`` says that no two name the same row."""
    indices, values = grad._indices(), grad._values().to(dtype)
    index = indices.unbind() or (indices.new_zeros(len(values)),)  # without sparse dimensions there is one row
    own = torch.arange(len(values), device=values.device)
    if distinct:
        return Entries(index, own, values.contiguous())
    shape = grad.shape[: grad.sparse_dim()] or (1,)
    rows = torch.zeros_like(own)
    for stride, positions in zip(row_strides(shape), index, strict=True):
        rows.add_(positions, alpha=stride)
    sums = torch.empty_like(values, memory_format=torch.contiguous_format)
    return Entries(index, add_up(rows, own, values, own.new_empty(math.prod(shape)), sums), sums)
