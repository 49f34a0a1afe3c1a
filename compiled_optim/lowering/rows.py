"""What multi-tensor kernels read: tables in the memory of their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from compiled_optim.fields import Rule


class KernelTable(Protocol):
    """The tensors that share one kernel.

    Attributes:
        tensors: (rows, tensors) int64; see :class:`TableRows`.
        hypers: (groups * hyperparameters) int64, addresses of float64 numbers, a row per group.
        chunks: (chunks, 2) int64, the tensor and which of its chunks.
        coefficients: (tensors * coefficients) float64, scratch memory.
        elements: real numbers in all parameters.
        aligned: whether every address is a multiple of 16 bytes.
    """

    tensors: Tensor
    hypers: Tensor
    chunks: Tensor
    coefficients: Tensor
    elements: int
    aligned: bool


class Kernel(Protocol):
    """A compiled kernel. ``chunk`` is the number of elements it updates at a time."""

    @property
    def chunk(self) -> int:
        """Elements in a chunk."""

    def __call__(self, table: KernelTable) -> None:
        """Update the tensors of ``table`` that have a gradient."""


class TableRows:
    """Which row of the int64 table over the tensors holds what.

    Row 0 holds the parameters' addresses, row 1 the gradients' (0 where there is none), then come the addresses of the
    buffers and of the scalars, the number of real elements, the index of the group, and whether to maximize.
    """

    def __init__(self, rule: Rule, statics: Mapping[str, Any]) -> None:
        self.buffers = 2
        self.scalars = self.buffers + len(rule.present_buffers(statics))
        self.numel = self.scalars + 1 + len(rule.scalars)
        self.group = self.numel + 1
        self.maximize = self.numel + 2
        self.hypers = sum(h.length for h in rule.hypers)
