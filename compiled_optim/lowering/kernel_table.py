"""What multi-tensor kernels read: tables in the memory of their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from compiled_optim.controls import NAMES
from compiled_optim.rule.rule import Rule


class KernelTable(Protocol):
    """The tensors that share one kernel.

    Attributes:
        tensors: (rows, tensors) int64; see :class:`TableRows`.
        grads: (tensors,) int64, addresses of the gradients, 0 where there is none.
        hypers: (controls + groups * hyperparameters) int64, addresses of float64 numbers: first the step's controls, as in
            :data:`compiled_optim.controls.NAMES`, then a row per group.
        chunks: (chunks, 2) int64, the tensor and which of its chunks; what a kernel updates at a time.
        stretches: (stretches, 2) int64, the tensor and which of its stretches; what a kernel measures at a time.
        coefficients: (1 + coefficients, tensors) float64, written by the kernel: the factor of the gradient, then the rule's
            own; what it says of a tensor without a gradient, and in a skipped step, has no meaning.
        square_sums: float64, this table's part of ``all_square_sums``.
        all_square_sums: float64, what the sum of the squares of all gradients consists of; empty if nobody needs it.
        outcome: (3,) float64, the norm, whether the step was skipped, and how many were; see ``leads``.
        leads: whether this table's kernel counts a skipped step.
        elements: real numbers in all parameters.
    """

    tensors: Tensor
    hypers: Tensor
    chunks: Tensor
    stretches: Tensor
    coefficients: Tensor
    square_sums: Tensor
    all_square_sums: Tensor
    outcome: Tensor
    leads: bool
    elements: int

    @property
    def grads(self) -> Tensor:
        """See above."""


class Kernel(Protocol):
    """A compiled kernel."""

    @property
    def chunk(self) -> int:
        """Elements that it updates at a time."""

    @property
    def stretch(self) -> int:
        """Elements that it measures at a time."""

    def square_sum_count(self, stretches: int) -> int:
        """How many partial sums :meth:`measure` writes for a table of so many stretches."""

    def measure(self, table: KernelTable) -> None:
        """Write the partial sums of the squares of the gradients."""

    def __call__(self, table: KernelTable) -> None:
        """Update the tensors of ``table`` that have a gradient."""


class TableRows:
    """Which row of the int64 table over the tensors holds what.

    Row 0 holds the parameters' addresses; then come the addresses of the buffers and of the scalars, the number of real
    elements, the index of the group, and whether to maximize. The hyperparameters begin behind the ``controls``.
    """

    def __init__(self, rule: Rule, statics: Mapping[str, Any]) -> None:
        self.controls = len(NAMES)
        self.buffers = 1
        self.scalars = self.buffers + len(rule.present_buffers(statics))
        self.numel = self.scalars + 1 + len(rule.scalars)
        self.group = self.numel + 1
        self.maximize = self.numel + 2
        self.hypers = sum(h.length for h in rule.hypers)
