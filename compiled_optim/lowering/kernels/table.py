"""What kernels read and write: tables in the memory of their device.

``evaluate`` works on one :class:`CoefficientTable` for all parameters of a plan, whatever their dtypes. ``measure`` and
``update`` work on a :class:`TensorTable` for each kernel. A tensor there names its owner: the parameter whose
coefficients hold for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compiled_optim.lowering.kernels.pointers import GradientPointers, HyperPointers, upload
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import NUMBERS
from compiled_optim.state import scalar_names

GROUP_INDEX, MAXIMIZE, FIRST_NUMBER = range(3)
SCALARS = FIRST_NUMBER + len(NUMBERS)
"""Rows of a :class:`CoefficientTable`: the index of the group, whether to maximize, the parameter's :data:`NUMBERS` (bits of
a float64), and the addresses of the step count and of the rule's scalars."""

PARAM, NUMEL, OWNER, BUFFERS = range(4)
"""Rows of a :class:`TensorTable`: the address, the number of real elements, the owner, and the addresses of the buffers."""


class CoefficientTable:
    """What ``evaluate`` reads and writes; a column is a parameter of the plan.

    Args:
        plan: the parameters.
        clipping: what holds for the whole step.
        hypers: of the plan.
        log: where refreshes are counted.

    Attributes:
        owners: (rows, parameters) int64; see :data:`GROUP_INDEX` and the rows beside it.
        hypers: (clipping + groups * hyperparameters,) int64, addresses of float64 numbers: first the step's clipping, as in
            :data:`compiled_optim.plan.clipping.NAMES`, then those of each group.
        gradients: not 0 for the parameters that take part in the step.
        coefficients: (1 + coefficients, parameters) float64, written: the factor of the gradient, then the rule's own, then
            its means. A column means nothing where the parameter takes no part, and in a skipped step.
        all_square_sums: float64, what the sum of the squares of all gradients consists of; empty if nobody needs it.
        outcome: (3,) float64, written: the norm, whether the step was skipped, and how many were.
        leads: whether a skipped step is counted here.
    """

    def __init__(self, plan: Plan, clipping: Clipping, hypers: HyperPointers, log: CompilationLog) -> None:
        members = plan.members
        self.owners = upload(
            [
                plan.group_index,
                plan.maximizes,
                *(np.array(plan.numbers[name]).view(np.int64).tolist() for name in NUMBERS),
                *([m.entries[name].data_ptr() for m in members] for name in scalar_names(plan.rule)),
            ],
            plan.device,
        )
        self.hypers = hypers.pointers
        self.gradients = GradientPointers(len(members), plan.device, log)
        numbers = 1 + len(plan.rule.number_names(plan.statics)[-1])
        self.coefficients = torch.empty(numbers, len(members), dtype=torch.float64, device=plan.device)
        self.all_square_sums = self.coefficients.new_empty(0)
        self.outcome = clipping.outcome(plan.device)
        self.leads = plan.leads

    def mark(self, grads: Sequence[Tensor | None]) -> None:
        """Let those take part that have a gradient, where no kernel reads the gradients' addresses here."""
        self.gradients.publish_marks([grad is not None for grad in grads])


class TensorTable(Protocol):
    """The tensors that one kernel updates, each of them in chunks."""

    tensors: Tensor  # (rows, tensors) int64; see PARAM and the rows beside it
    chunks: Tensor  # (chunks, 2) int64, the tensor and which of its chunks
    elements: int  # real numbers in all tensors of the chunks

    @property
    def grads(self) -> Tensor:
        """(tensors,) int64, the addresses of the gradients; 0 leaves a tensor as it is."""


class MeasuredTable(TensorTable, Protocol):
    """Tensors whose gradients a kernel measures too, in stretches, and of which it takes means; each is its own owner.

    A span is a tensor, its first chunk, the one after its last, and its number of real elements: of a DTensor that of all
    parts, and at least 1.
    """

    stretches: Tensor  # (stretches, 2) int64, the tensor and which of its stretches
    square_sums: Tensor  # float64, written: the partial sums of the squares of the gradients
    spans: Tensor  # (tensors, 4) int64
    sums: Tensor  # (expressions, chunks) float64, written: the sums over chunks


class Kernel(Protocol):
    """A rule's compiled functions. A rule that is not elementwise has ``evaluate`` only."""

    @property
    def chunk(self) -> int:
        """Elements that it updates at a time."""

    @property
    def stretch(self) -> int:
        """Elements that it measures at a time."""

    def square_sum_count(self, stretches: int) -> int:
        """How many partial sums :meth:`measure` writes for so many stretches."""

    def measure(self, table: MeasuredTable) -> None:
        """Write the partial sums of the squares of the gradients."""

    def evaluate(self, coefficients: CoefficientTable) -> None:
        """Count a step, and write the coefficients of all parameters that take part, and what became of the step."""

    def average(self, stage: int, table: MeasuredTable, coefficients: CoefficientTable) -> None:
        """Write the means of one stage of the rule, behind the coefficients of the tensors that have a gradient.

        Of a DTensor it is this part's share of the mean.
        """

    def update(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        """Update the tensors that have a gradient, with the coefficients of their owners."""

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        """Evaluate, then update: in one call where that is faster."""


def pieces(numels: Sequence[int], size: int, tensors: npt.ArrayLike | None = None) -> Tensor:
    """The int64 table (pieces, 2) of all pieces of tensors with ``numels`` elements: the tensor, and which of its pieces.

    A piece has ``size`` elements, the last one of a tensor maybe fewer. ``tensors`` are their numbers, by default from 0 on.
    """
    counts = -(-np.array(numels, dtype=np.int64) // size)
    places = np.repeat(np.arange(len(counts)), counts)
    which = np.arange(len(places)) - (np.cumsum(counts) - counts)[places]
    named = places if tensors is None else np.asarray(tensors, dtype=np.int64)[places]
    return torch.from_numpy(np.stack([named, which], axis=1))


def spans(numels: Sequence[int], size: int, tensors: Sequence[int], wholes: Sequence[int]) -> Tensor:
    """The spans of a :class:`MeasuredTable` whose chunks are the :func:`pieces` of the same tensors.

    ``wholes`` says by number how many real elements a tensor has in all its parts.
    """
    ends = np.cumsum(-(-np.array(numels, dtype=np.int64) // size))
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    counts = [max(wholes[t], 1) for t in tensors]
    return torch.from_numpy(np.stack([np.asarray(tensors, dtype=np.int64), starts, ends, np.array(counts)], axis=1))
