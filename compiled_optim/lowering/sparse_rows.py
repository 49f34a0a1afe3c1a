"""The lowering for sparse gradients: the rows that a gradient names are updated, every other row stays as it is.

A COO gradient of N entries may name a row several times. Each row elects one of its entries, through a table with one
number per row, and the values of all its entries are summed there. All shapes follow from N, which the host knows: no step
waits for the device, and a CUDA graph can hold it. A gradient that is already coalesced elects all its entries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.events import EventLog, kernel_signature
from compiled_optim.fields import compute_dtype
from compiled_optim.lowering import inductor, multi_tensor
from compiled_optim.lowering.coefficients import CoefficientStage
from compiled_optim.lowering.rows import Kernel, TableRows
from compiled_optim.lowering.rule_step import rule_step
from compiled_optim.lowering.square_sums import square_sum
from compiled_optim.plan import Plan

_PRESENT = 16  # any address but 0, which says that there is no gradient


@dataclass
class Entries:
    """The N entries of a sparse gradient, added up per row.

    Attributes:
        index: for each sparse dimension, where the entries lie: (N,) int64.
        own: the entries' numbers: (N,) int64.
        elected: for each entry, the one that its row elected: (N,) int64.
        sums: (N, dense part); at an elected entry the row's gradient, elsewhere 0.
    """

    index: tuple[Tensor, ...]
    own: Tensor
    elected: Tensor
    sums: Tensor


def entries_of(grad: Tensor, dtype: torch.dtype) -> Entries:
    """The entries of ``grad``, summed in ``dtype``."""
    indices, values = grad._indices(), grad._values().to(dtype)
    index = indices.unbind() or (indices.new_zeros(len(values)),)  # without sparse dimensions there is one row
    own = torch.arange(len(values), device=values.device)
    if grad.is_coalesced():
        return Entries(index, own, own, values.contiguous())
    winner = indices.new_empty(grad.shape[: grad.sparse_dim()] or (1,))
    winner.index_put_(index, own)
    elected = winner[index]
    sums = torch.zeros_like(values, memory_format=torch.contiguous_format)
    if values.device.type == "cpu":
        sums.index_add_(0, elected, values)
    else:  # sorts instead of adding atomically: the same sum every time
        sums.index_put_((elected,), values, accumulate=True)
    return Entries(index, own, elected, sums)


class SparseGradients:
    """The gradients of one step of a plan, their entries made when they are first needed."""

    def __init__(self, plan: Plan) -> None:
        self._dtypes = [compute_dtype(m.param.dtype) for m in plan.members]
        self.take(())

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the next step, one per parameter, or let go of the last with an empty sequence."""
        self._grads = grads
        self._entries: dict[int, Entries] = {}
        self.positions = [i for i, grad in enumerate(grads) if grad is not None]

    def entries(self, position: int) -> tuple[Entries, int]:
        """The entries of one gradient, and its number of sparse dimensions."""
        grad = self._grads[position]
        assert grad is not None
        if position not in self._entries:
            self._entries[position] = entries_of(grad, self._dtypes[position])
        return self._entries[position], grad.sparse_dim()

    def square_sum(self) -> Tensor | float:
        """The sum of the squares of all gradients, each as it is after its rows have been added up."""
        return square_sum([self.entries(i)[0].sums for i in self.positions])


class RowTableLowering:
    """Runs the multi-tensor kernels on rows: the address of a row follows from its number, on the device.

    An elected entry is to the kernel a tensor with scalars of its own, any other entry one without a gradient. The
    parameter is one more tensor, without elements, that advances the real scalars. Parameters are contiguous.
    """

    name = "multi_tensor"

    square_sum_count = 1

    def __init__(self, plan: Plan, controls: Controls, log: EventLog) -> None:
        self.plan = plan
        self._controls = controls
        self._log = log
        self._kernels: list[Kernel] = []
        self._grads = SparseGradients(plan)
        self._rows = TableRows(plan.rule, plan.statics)
        self._coefficients = len(plan.rule.coefficient_names) + 1
        self._layout = functools.cache(self._layout_of)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return bool(self._kernels)

    def compile(self) -> None:
        """Make the kernels that do not exist yet, and the table of the parameters."""
        if self._kernels:
            return
        members = self.plan.members
        self._kernels = [
            multi_tensor.obtain_kernel(
                self._log, kernel_signature(self.plan, m, compute_dtype(m.param.dtype), "multi-tensor"), [m.name]
            )
            for m in members
        ]
        self._whole = multi_tensor.Table(
            self.plan, self._controls, range(len(members)), self._kernels[0], self._log, leads=self.plan.leads
        )

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``, and the kernels read ``whole``."""
        self._square_sum = own
        self._whole.all_square_sums = whole

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Take ``grads``, or the parameters' own, and bring the table of hyperparameters up to date."""
        self._grads.take(self.plan.gradients(grads))
        self._whole.refresh()

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients."""
        self._square_sum.fill_(self._grads.square_sum())

    def launch(self) -> None:
        """Update the rows that the gradients name, and count a step of every parameter that has a gradient."""
        leads = self._whole.leads
        for position in self._grads.positions:
            self._kernels[position](self._table(position, leads=leads))
            leads = False

    def finish(self) -> None:
        """Let go of the gradients."""
        self._grads.take(())

    def _table(self, position: int, *, leads: bool) -> _RowTable:
        entries, sparse_dims = self._grads.entries(position)
        device, rows, layout = self.plan.device, self._rows, self._layout(position, sparse_dims)
        count = len(entries.own)
        tensors = torch.empty(len(layout.column), count + 1, dtype=torch.int64, device=device)
        tensors[:, count:] = layout.column
        here, first = tensors[:, :count], layout.column
        for step, index in zip(layout.steps[:-1], entries.index, strict=False):
            first = torch.addcmul(first, step, index)
        torch.addcmul(first, layout.steps[-1], entries.index[-1], out=here)
        grads = torch.full((count + 1,), _PRESENT, dtype=torch.int64, device=device)
        torch.mul(_addresses(entries.sums, count), entries.elected == entries.own, out=grads[:count])
        copies = self.plan.scalars[:, position, None].expand(-1, count).clone(memory_format=torch.contiguous_format)
        here[rows.scalars : rows.numel] = _addresses(copies, copies.numel()).view_as(copies)
        return _RowTable(
            tensors,
            grads,
            self._whole.hypers,
            torch.cartesian_prod(entries.own, layout.pieces),
            torch.empty((count + 1) * self._coefficients, dtype=torch.float64, device=device),
            self._whole.square_sums,
            self._whole.all_square_sums,
            self._whole.outcome,
            leads,
            entries.sums.numel(),
            layout.aligned,
            (entries.sums, copies),
        )

    def _layout_of(self, position: int, sparse_dims: int) -> _RowLayout:
        member, device = self.plan.members[position], self.plan.device
        width = math.prod(member.param.shape[sparse_dims:])
        sizes = torch.zeros(len(self._whole.tensors), 1, dtype=torch.int64)
        sizes[0] = member.param.element_size()
        for row, name in enumerate(self.plan.buffers, self._rows.buffers):
            sizes[row] = member.state[name].element_size()
        column = self._whole.tensors[:, position, None].clone()
        column[self._rows.numel] = width
        return _RowLayout(
            column,
            [(sizes * stride).to(device) for stride in member.param.stride()[:sparse_dims] or (0,)],
            torch.arange(-(-width // self._kernels[position].chunk), device=device),
            self._whole.aligned and width * int(sizes[sizes > 0].min()) % 16 == 0,
        )


@dataclass
class _RowLayout:
    """What is the same for all rows of a parameter, for gradients of one number of sparse dimensions.

    Attributes:
        column: the parameter's column of the table, with the number of elements of a row.
        steps: for each sparse dimension, what one row further adds to the column.
        pieces: the numbers of a row's chunks.
        aligned: whether every row begins at a multiple of 16 bytes.
    """

    column: Tensor
    steps: list[Tensor]
    pieces: Tensor
    aligned: bool


def _addresses(tensor: Tensor, count: int) -> Tensor:
    """The addresses of ``count`` pieces of equal size, one after the other, that make up ``tensor``."""
    size = max(tensor.nbytes // max(count, 1), 1)
    start = tensor.data_ptr()
    return torch.arange(start, start + count * size, size, device=tensor.device)


@dataclass
class _RowTable:
    """What the kernels read; ``held`` is memory that ``tensors`` has the addresses of."""

    tensors: Tensor
    grads: Tensor
    hypers: Tensor
    chunks: Tensor
    coefficients: Tensor
    square_sums: Tensor
    all_square_sums: Tensor
    outcome: Tensor
    leads: bool
    elements: int
    aligned: bool
    held: tuple[Tensor, ...]


class GatheredRowsLowering:
    """Copies the rows out, updates the copies, and copies them back; entries of one row write the same values.

    Args:
        plan: the tensors.
        controls: what holds for the whole step.
        log: where compilations are recorded.
        compiled: whether Inductor's kernels update the copies, or plain torch operations.
    """

    square_sum_count = 1

    def __init__(self, plan: Plan, controls: Controls, log: EventLog, *, compiled: bool) -> None:
        self.plan = plan
        self.name = "inductor" if compiled else "eager"
        self._log = log
        self._compiled = compiled
        self._kernels: list[inductor.Kernel] = []
        self._grads = SparseGradients(plan)
        self._stage = CoefficientStage(plan, controls)
        self._update = rule_step(plan.rule, plan.statics)
        self._mask = functools.lru_cache(maxsize=256)(self._mask_of)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return bool(self._kernels) or not self._compiled

    def compile(self) -> None:
        """Make the kernels that do not exist yet."""
        if self._compiled and not self._kernels:
            self._kernels = [
                inductor.obtain_kernel(
                    self._log, kernel_signature(self.plan, m, compute_dtype(m.param.dtype), "in place"), [m.name]
                )
                for m in self.plan.members
            ]

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``; the sum of ``whole`` is the sum over all gradients."""
        self._square_sum = own
        self._stage.connect(whole)

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Take ``grads``, one entry per parameter, or the parameters' own."""
        self._grads.take(self.plan.gradients(grads))

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients."""
        self._square_sum.fill_(self._grads.square_sum())

    def launch(self) -> None:
        """Update the rows that the gradients name, and count a step of every parameter that has a gradient."""
        here = self._grads.positions
        columns = self._stage.advance(self._mask(tuple(i in here for i in range(len(self.plan.members))))).unbind(1)
        for position in here:
            member = self.plan.members[position]
            entries, sparse_dims = self._grads.entries(position)
            tensors = [member.param.detach(), *(member.state[name] for name in self.plan.buffers)]
            if not sparse_dims:
                tensors = [t.unsqueeze(0) for t in tensors]
            if entries.sums.numel():
                self._update_rows(position, tensors, entries, columns[position].to(entries.sums.dtype).unbind())

    def finish(self) -> None:
        """Let go of the gradients."""
        self._grads.take(())

    def _update_rows(
        self, position: int, tensors: Sequence[Tensor], entries: Entries, coefficients: Sequence[Tensor]
    ) -> None:
        grad = entries.sums[entries.elected]
        rows = [t[entries.index] for t in tensors]
        if self._compiled:
            self._kernels[position](grad.numel(), [t.view(-1) for t in (rows[0], grad, *rows[1:])] + list(coefficients))
        else:
            param, buffers = self._update(rows[0], grad, rows[1:], coefficients)
            rows = [param, *buffers]
        for tensor, new in zip(tensors, rows, strict=True):
            tensor.index_put_(entries.index, new)

    def _mask_of(self, present: tuple[bool, ...]) -> Tensor | None:
        return None if all(present) else torch.tensor(present, device=self.plan.device)


def sparse_lowering(plan: Plan, controls: Controls, log: EventLog, name: str) -> RowTableLowering | GatheredRowsLowering:
    """The lowering of a plan whose gradients are sparse, where ``name`` is that of dense ones."""
    if name == "multi_tensor" and all(m.param.is_contiguous() for m in plan.members):
        return RowTableLowering(plan, controls, log)
    return GatheredRowsLowering(plan, controls, log, compiled=name != "eager")
