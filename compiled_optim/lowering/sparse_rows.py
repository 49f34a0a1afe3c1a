"""The multi-tensor lowering for sparse gradients: the rows that gradients name are updated in place, in one launch.

All shapes follow from the numbers of entries, which the host knows: no step waits for the device, and a CUDA graph can hold
it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.events import EventLog
from compiled_optim.lowering import multi_tensor
from compiled_optim.lowering.address_rows import HyperRow, upload
from compiled_optim.lowering.entries import add_up, has_distinct_rows, row_strides
from compiled_optim.lowering.interface import Capturable
from compiled_optim.lowering.kernel_table import Kernel, TableRows
from compiled_optim.lowering.layout import compute_dtype
from compiled_optim.lowering.recent import Recent
from compiled_optim.lowering.square_sums import square_sum
from compiled_optim.plan import Plan
from compiled_optim.signature import MULTI_TENSOR, kernel_signature
from compiled_optim.torch_internals import assert_on_device, is_capturing

Rows: TypeAlias = Literal["distinct", "repeated", "said to be distinct", "unknown"]
"""What is known of the rows that entries name. The host has looked at them in the first two cases."""

_PRESENT = 16  # any address but 0, which says that there is no gradient
_KEPT_BATCHES = 16  # for as many numbers of entries, memory is kept


class RowTableLowering(Capturable):
    """Runs the multi-tensor kernels on rows: the address of a row follows from its number, on the device.

    An elected entry is to the kernel a tensor with scalars of its own, any other entry one without a gradient. The
    parameter is one more tensor, without elements, that advances the real scalars. Parameters are contiguous. Those whose
    rows share a kernel and a shape are updated together, however many they are.
    """

    name = "multi_tensor"

    square_sum_count = 1

    def __init__(self, plan: Plan, controls: Controls, log: EventLog) -> None:
        self.plan = plan
        self._controls = controls
        self._log = log
        self._hypers = HyperRow(plan, controls, log)
        self._kernels: list[Kernel] = []
        self._batches: Recent[tuple[tuple[int, ...], tuple[int, ...], int], RowBatch] = Recent(_KEPT_BATCHES)
        self._kinds: Recent[tuple[tuple[int, ...], int], RowKind] = Recent(_KEPT_BATCHES)
        self._elections = [torch.empty(0, dtype=torch.int64, device=plan.device)]  # a captured graph may use any of them
        self._parts: list[Part] = []
        self._gathered = self._holds = False
        self._captured: list[object] = []  # read by every replay
        self._on_device = multi_tensor.current_device(plan.device)

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
                self._log, kernel_signature(self.plan, m, compute_dtype(m.param.dtype), MULTI_TENSOR), [m.name]
            )
            for m in members
        ]
        self._scalars = self.plan.scalars  # brought together before the table notes where they lie
        self._whole = multi_tensor.Table(
            self.plan,
            self._controls,
            range(len(members)),
            self._kernels[0],
            self._hypers,
            self._log,
            leads=self.plan.leads,
        )

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``, and the kernels read ``whole``."""
        self._square_sum = own
        self._whole.all_square_sums = whole

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Take ``grads``, or the parameters' own, and bring the table of hyperparameters up to date."""
        self._hypers.refresh()
        alike: dict[tuple[Any, ...], dict[int, Tensor]] = {}
        for i, grad in enumerate(self.plan.gradients(grads)):
            if grad is not None:
                shape = grad.shape[grad.sparse_dim() :]
                alike.setdefault((self._kernels[i], grad.sparse_dim(), grad.dtype, shape), {})[i] = grad
        reads_indices = self.plan.device.type == "cpu" and not is_capturing(self.plan.device)
        self._parts = []
        for (kernel, sparse_dims, *_), found in alike.items():
            positions, counts = tuple(found), tuple(grad._nnz() for grad in found.values())
            batch = self._batches.get((positions, counts, sparse_dims), self._batch_of)
            rows: Rows = "unknown"
            if reads_indices:
                distinct = [has_distinct_rows(grad, self.plan.members[i].name) for i, grad in found.items()]
                rows = "distinct" if all(distinct) else "repeated"
            elif all(grad.is_coalesced() for grad in found.values()):
                rows = "said to be distinct"
            self._parts.append(Part(batch, kernel, list(found.values()), rows))
        needed = max((part.batch.rows for part in self._parts), default=0)
        if len(self._elections[-1]) < needed:
            self._elections.append(self._elections[-1].new_empty(needed))
        if is_capturing(self.plan.device):
            self._captured += [part.batch for part in self._parts]
        self._gathered = self._holds = False

    def launch_key(self) -> tuple[object, ...]:
        """What a graph that holds :meth:`launch` depends on besides the memory of the tables; it stands for this object."""
        return (*super().launch_key(), *((part.batch, part.rows) for part in self._parts))

    def hold(self) -> None:
        """Copy the prepared gradients to where :meth:`launch`, if it is captured now or was before, reads them."""
        for part in self._parts:
            part.batch.hold(part.grads)
        self._holds = True

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients."""
        self._gather()
        self._square_sum.fill_(square_sum([part.batch.sums for part in self._parts]))

    def launch(self) -> None:
        """Update the rows that the gradients name, and count a step of every parameter that has a gradient."""
        self._gather()
        leads = self._whole.leads
        with self._on_device:
            if not self._parts:
                self._kernels[0](self._whole)  # writes down what became of the step
            for part in self._parts:
                part.batch.take(self._whole, self._scalars, leads=leads)
                part.kernel(part.batch)
                leads = False

    def finish(self) -> None:
        """Let go of the gradients, and let autograd know that the parameters have changed."""
        self.plan.finish()
        self._parts = []

    def _gather(self) -> None:
        if not self._gathered:
            for part in self._parts:
                indices, values = (self._holds and part.batch.held) or joined(part.grads)
                part.batch.gather(indices, values, self._elections[-1], part.rows)
        self._gathered = True

    def _batch_of(self, key: tuple[tuple[int, ...], tuple[int, ...], int]) -> RowBatch:
        positions, counts, sparse_dims = key
        if is_capturing(self.plan.device):
            raise RuntimeError(
                f"{self.plan.rule.name}.step() cannot be captured in a CUDA graph now: no step was taken before with "
                f"gradients of so many entries ({', '.join(map(str, counts))}); take one step before capturing"
            )
        kind = self._kinds.get((positions, sparse_dims), self._kind_of)
        return RowBatch(self.plan, self._whole, kind, counts, self._kernels[positions[0]].chunk)

    def _kind_of(self, key: tuple[tuple[int, ...], int]) -> RowKind:
        return RowKind(self.plan, self._whole, *key)


@dataclass(frozen=True)
class Part:
    """The gradients whose rows one kernel updates together."""

    batch: RowBatch
    kernel: Kernel
    grads: list[Tensor]
    rows: Rows


class RowKind:
    """What is known of parameters whose rows share a kernel before their gradients are.

    Args:
        plan: all parameters.
        whole: the table of them all.
        positions: which of them these are, with dense parts of one shape.
        sparse_dims: how many sparse dimensions their gradients have.

    Attributes:
        columns: (rows of the table, parameters) int64: what the kernel reads of the parameters themselves.
        facts: (1 + 2 * sparse dimensions + rows of the table, parameters) int64: for each its position in the plan, the
            first of its rows in a common count, the strides of all its sparse dimensions but the last in rows, the sizes of
            the sparse dimensions, and what the table says of the row with number 0.
        row_bytes: (rows of the table, 1) int64: what the table's entries grow by from row to row.
    """

    def __init__(self, plan: Plan, whole: multi_tensor.Table, positions: Sequence[int], sparse_dims: int) -> None:
        device, rows = plan.device, TableRows(plan.rule, plan.statics)
        self.positions = tuple(positions)
        members = [plan.members[i] for i in positions]
        shapes = [m.param.shape[:sparse_dims] for m in members]
        self.dense = members[0].param.shape[sparse_dims:]
        self.dtype = compute_dtype(members[0].param.dtype)
        width = math.prod(self.dense)
        firsts = [0, *itertools.accumulate(map(math.prod, shapes))]
        self.rows = firsts.pop()
        row_bytes = torch.zeros(len(whole.tensors), 1, dtype=torch.int64, device="cpu")
        row_bytes[0] = width * members[0].param.element_size()
        for row, name in enumerate(plan.buffers, rows.buffers):
            row_bytes[row] = width * members[0].entries[name].element_size()
        self.row_bytes = upload(row_bytes, device)
        self.columns = whole.tensors.index_select(1, upload(positions, device))
        self.columns[rows.numel] = width
        strides = zip(*[row_strides(shape)[:-1] for shape in shapes], strict=True)
        places = [positions, firsts, *strides, *zip(*shapes, strict=True)]
        self.facts = torch.cat([upload(places, device), self.columns - self.row_bytes * upload(firsts, device)])


class RowBatch:
    """A :class:`~compiled_optim.lowering.kernel_table.KernelTable` of the rows of several parameters.

    All memory stays where it is, and all that follows from the numbers of entries is computed once.

    Args:
        plan: all parameters.
        whole: the table of them all.
        kind: those that have gradients.
        counts: how many entries each gradient has.
        chunk: how many elements the kernel updates at a time.
    """

    def __init__(self, plan: Plan, whole: multi_tensor.Table, kind: RowKind, counts: Sequence[int], chunk: int) -> None:
        device, rows = plan.device, TableRows(plan.rule, plan.statics)
        count, width = sum(counts), math.prod(kind.dense)
        of_entry = upload(torch.repeat_interleave(torch.tensor(counts, device="cpu")), device)  # which of the parameters
        places, self._base = kind.facts.index_select(1, of_entry).tensor_split([len(kind.facts) - len(kind.columns)])
        sparse_dims = len(places) // 2
        self._positions, self._first_rows, *self._strides = places[: 1 + sparse_dims].unbind()
        self._limits = places[1 + sparse_dims :]
        self._row_bytes = kind.row_bytes
        self._names = ", ".join(f"'{plan.members[i].name}'" for i in kind.positions)
        self.rows = kind.rows

        self._own = torch.arange(count, device=device)
        self.held: tuple[Tensor, Tensor] | None = None
        self.sums = torch.empty(count, *kind.dense, dtype=kind.dtype, device=device)
        self._sum_addresses = _addresses(self.sums, count)
        self.grads = torch.full((count + len(counts),), _PRESENT, dtype=torch.int64, device=device)
        self._copies = torch.empty(len(plan.scalars), count, dtype=plan.scalars.dtype, device=device)
        self._base[rows.scalars : rows.numel] = _addresses(self._copies, self._copies.numel()).view_as(self._copies)
        self.tensors = torch.cat([self._base, kind.columns], 1)

        self.chunks = torch.cartesian_prod(self._own, torch.arange(-(-width // chunk), device=device))
        self.stretches = self.chunks[:0]  # measured in torch operations
        numbers = 1 + len(plan.rule.coefficient_names)
        self.coefficients = torch.empty(numbers, count + len(counts), dtype=torch.float64, device=device)
        self.hypers, self.outcome = whole.hypers, whole.outcome
        self.square_sums = self.all_square_sums = whole.square_sums
        self.leads = False
        self.elements = count * width

    def hold(self, grads: Sequence[Tensor]) -> None:
        """Copy indices and values of the entries of ``grads``, one for each parameter, to ``held``, whose memory stays."""
        entries = joined(grads)
        if self.held is None:
            self.held = entries
        else:
            torch._foreach_copy_(self.held, entries)

    def gather(self, indices: Tensor, values: Tensor, election: Tensor, found: Rows) -> None:
        """Add up the entries.

        Args:
            indices: (sparse dimensions, entries) int64.
            values: (entries, dense part).
            election: (rows,) int64, scratch memory.
            found: what is known of their rows.
        """
        if found not in ("distinct", "repeated"):
            inside = (indices >= 0) & (indices < self._limits)
            assert_on_device(inside.all(), f"an entry of the gradients of {self._names} lies outside of its parameter")
        rows = self._first_rows
        for stride, index in zip([*self._strides, None], indices, strict=False):
            rows = rows + index if stride is None else torch.addcmul(rows, stride, index)
        elected, values = self._own, values.to(self.sums.dtype)
        if found == "distinct":
            self.sums.copy_(values)
        else:
            elected = add_up(rows, self._own, values, election, self.sums, sorts=found != "said to be distinct")
        count = len(self._own)
        torch.mul(self._sum_addresses, elected == self._own, out=self.grads[:count])
        torch.addcmul(self._base, self._row_bytes, rows, out=self.tensors[:, :count])

    def take(self, whole: multi_tensor.Table, scalars: Tensor, *, leads: bool) -> None:
        """Take what the kernel reads besides the gradients, as it is now."""
        torch.index_select(scalars, 1, self._positions, out=self._copies)
        self.all_square_sums, self.leads = whole.all_square_sums, leads


def joined(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The indices (sparse dimensions, entries) and the values (entries, dense part) of all ``grads``."""
    return torch.cat([grad._indices() for grad in grads], 1), torch.cat([grad._values() for grad in grads])


def _addresses(tensor: Tensor, count: int) -> Tensor:
    """The addresses of ``count`` pieces of equal size, one after the other, that make up ``tensor``."""
    size = max(tensor.nbytes // max(count, 1), 1)
    start = tensor.data_ptr()
    return torch.arange(start, start + count * size, size, device=tensor.device)
