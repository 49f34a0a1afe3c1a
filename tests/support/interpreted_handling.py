"""Triton's kernels on the cases of ``handling``, and which accesses are wide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import handling
import torch
from torch import nn

import compiled_optim as co

SIZES = (1, 12, 15, 120, 1030, 2048)
WIDTHS = (1, 4, 6, 8, 1028)
BY_DTYPE = {"float32": (torch.float32,) * 2, "float64": (torch.float64,) * 2, "bfloat16": (torch.bfloat16,) * 2}
BY_DTYPE["bfloat16 gradients"] = (torch.float32, torch.bfloat16)


def interpreted() -> dict[str, Any]:
    """Return errors by case, and the sizes of what is accessed 16 bytes at a time."""
    with claims() as claimed:
        return {
            "errors": handling.errors("multi_tensor"),
            "alignment matters": [name for name in BY_DTYPE if alignment_matters(BY_DTYPE[name][0])],
            "wide": {name: wide(*dtypes, set(), claimed) for name, dtypes in BY_DTYPE.items()},
            "wide beside unaligned gradients": wide(torch.float32, torch.float32, {120, 2048}, claimed),
            "wide rows": [width for width in WIDTHS if has_wide_rows(width, claimed)],
            "huge": handling.end_of_huge(2),
        }


@contextlib.contextmanager
def claims() -> Iterator[set[int]]:
    """The addresses that kernels claim to be multiples of something, each of them checked."""
    from triton.runtime.interpreter import TensorHandle

    claimed: set[int] = set()

    def check(handle: Any, name: str, values: list[int]) -> None:
        assert name == "tt.divisibility"
        assert not (handle.data % values[0]).any(), f"{handle.data} is no multiple of {values[0]}"
        claimed.update(handle.data.ravel().tolist())

    with mock.patch.object(TensorHandle, "set_attr", check):
        yield claimed


def alignment_matters(dtype: torch.dtype) -> bool:
    """Whether results differ by a bit between aligned tensors and others."""
    aligned = handling.results("multi_tensor", dtype, lambda step, i: False)
    others = [
        handling.results("multi_tensor", dtype, lambda step, i: True),
        handling.results("multi_tensor", dtype, lambda step, i: step % 2 == i % 2),
    ]
    return any(not torch.equal(x, y) for other in others for x, y in zip(aligned, other, strict=True))


def wide(dtype: torch.dtype, grad_dtype: torch.dtype, unaligned: set[int], claimed: set[int]) -> list[int]:
    """Which of SIZES are sizes of parameters that are accessed 16 bytes at a time, in part at least.

    Args:
        dtype: theirs.
        grad_dtype: that of their gradients.
        unaligned: sizes of those whose gradients are unaligned.
        claimed: see :func:`claims`.
    """
    params = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
    for param in params:
        offset = int(len(param) in unaligned)
        param.grad_dtype = grad_dtype
        param.grad = torch.ones(len(param) + offset, dtype=grad_dtype)[offset:]
    claimed.clear()
    co.AdamW(params, max_grad_norm=1.0, lowering="multi_tensor").step()
    return [len(param) for param in params if param.data_ptr() in claimed]


def has_wide_rows(width: int, claimed: set[int]) -> bool:
    """Whether rows of so many float32 numbers are accessed 16 bytes at a time, in part at least."""
    param = nn.Parameter(torch.ones(8, width))
    param.grad = torch.sparse_coo_tensor([[1, 4]], torch.ones(2, width), param.shape)
    claimed.clear()
    co.SparseAdam([param]).step()
    return all(param[row].data_ptr() in claimed for row in (1, 4))
