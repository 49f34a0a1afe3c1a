"""The multi-tensor lowering for sparse gradients: the rows that gradients name are updated in place, in one launch.

All shapes follow from the numbers of entries, and the host knows these. So no step waits for the device, and a CUDA graph
can hold it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering import multi_tensor
from compiled_optim.lowering.gradient import square_sum
from compiled_optim.lowering.interface import Capturable
from compiled_optim.lowering.kernels.pointers import HyperPointers, upload
from compiled_optim.lowering.kernels.table import BUFFERS, NUMEL, PARAM, CoefficientTable, Kernel
from compiled_optim.lowering.sparse.entries import add_up, has_distinct_rows, row_strides
from compiled_optim.lowering.torch_ops.torch_lowering import Recent
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.kernel_key import MULTI_TENSOR, kernel_key
from compiled_optim.plan.plan import Plan
from compiled_optim.torch_internals import assert_on_device, is_capturing

Rows: TypeAlias = Literal["distinct", "repeated", "said to be distinct", "unknown"]
"""What is known of the rows that entries name. In the first two cases the host has looked at them."""

_KEPT_BATCHES = 16  # memory is kept for as many different numbers of entries


class RowTableLowering(Capturable):
    """Runs the multi-tensor kernels on rows: the address of a row follows from its number, on the device.

    Coefficients are evaluated for parameters. To the update each entry is a tensor that its parameter owns, and has a
    gradient if its row elected it. Parameters are contiguous. Those whose rows share a kernel and a shape are updated
    together, however many they are.
    """

    name = "multi_tensor"

    square_sum_count = 1

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        self.plan = plan
        self._clipping = clipping
        self._log = log
        self._hypers = HyperPointers(plan, clipping, log)
        self._kernels: list[Kernel] = []
        self._batches: Recent[tuple[tuple[int, ...], tuple[int, ...], int], RowBatch] = Recent(_KEPT_BATCHES)
        self._kinds: Recent[tuple[tuple[int, ...], int], RowKind] = Recent(_KEPT_BATCHES)
        self._elections = [torch.empty(0, dtype=torch.int64, device=plan.device)]  # a captured graph may use any of them
        self._parts: list[Part] = []
        self._gathered = self._reads_copies = False
        self._captured: list[object] = []  # read by every replay
        self._on_device = multi_tensor.current_device(plan.device)

    @property
    def is_compiled(self) -> bool:
        return bool(self._kernels)

    def compile(self) -> None:
        if self._kernels:
            return
        members = self.plan.members
        self._kernels = [
            multi_tensor.obtain_kernel(
                self._log, kernel_key(self.plan, m, compute_dtype(m.param.dtype), MULTI_TENSOR), [m.name]
            )
            for m in members
        ]
        self._tensors = multi_tensor.PlanTensors(self.plan).table
        self._table = CoefficientTable(self.plan, self._clipping, self._hypers, self._log)

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        self._hypers.prepare()
        alike: dict[tuple[Any, ...], dict[int, Tensor]] = {}
        given = self.plan.gradients(grads)
        for i, grad in enumerate(given):
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
        self._table.mark(given)
        if is_capturing(self.plan.device):
            self._captured += [part.batch for part in self._parts]
        self._gathered = self._reads_copies = False

    def launch_key(self) -> tuple[object, ...]:
        return (*super().launch_key(), *((part.batch, part.rows) for part in self._parts))

    def copy_gradients_for_graph(self) -> None:
        for part in self._parts:
            part.batch.copy_entries(part.grads)
        self._reads_copies = True

    def measure(self) -> None:
        self._gather()
        self._square_sum.fill_(square_sum([part.batch.sums for part in self._parts], self.plan.device))

    def launch(self) -> None:
        """Update the rows that the gradients name, and count a step of every parameter that has a gradient."""
        self._gather()
        with self._on_device:
            if not self._parts:
                self._kernels[0].evaluate(self._table)  # writes down what became of the step
            for part in self._parts[:1]:
                part.kernel.step(part.batch, self._table)
            for part in self._parts[1:]:
                part.kernel.update(part.batch, self._table)

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        raise NotImplementedError("totals are of dense gradients")

    def finish(self) -> None:
        self.plan.finish()
        self._parts = []

    def _gather(self) -> None:
        if not self._gathered:
            for part in self._parts:
                indices, values = (self._reads_copies and part.batch.copied_entries) or joined(part.grads)
                part.batch.gather(indices, values, self._elections[-1], part.rows)
        self._gathered = True

    def _batch_of(self, key: tuple[tuple[int, ...], tuple[int, ...], int]) -> RowBatch:
        positions, counts, sparse_dims = key
        if is_capturing(self.plan.device):
            raise RuntimeError(
                f"{self.plan.rule.name}.step() cannot be captured in a CUDA graph now: no step was taken before with "
                f"gradients of so many entries ({', '.join(map(str, counts))}); take one step before capturing"
            )
        kind = self._kinds.get((positions, sparse_dims), lambda key: RowKind(self.plan, self._tensors, *key))
        return RowBatch(self.plan, kind, counts, self._kernels[positions[0]].chunk)


@dataclass(frozen=True)
class Part:
    """The gradients whose rows one kernel updates together."""

    batch: RowBatch
    kernel: Kernel
    grads: list[Tensor]
    rows: Rows


class RowKind:
    """What is known of the parameters at ``positions``, whose rows share a kernel, before their gradients are.

    ``tensors`` is the table of the whole plan. Their gradients have ``sparse_dims`` sparse dimensions and
    dense parts of one shape.

    Attributes:
        facts: (2 * sparse dimensions + rows of the table, parameters) int64: for each the first of its rows in a
            common count, the strides of all its sparse dimensions but the last in rows, the sizes of the sparse dimensions,
            and what the table says of the row with number 0.
        row_bytes: (rows of the table, 1) int64: what the table's entries grow by from row to row.
    """

    def __init__(self, plan: Plan, tensors: Tensor, positions: Sequence[int], sparse_dims: int) -> None:
        self.positions = tuple(positions)
        members = [plan.members[i] for i in positions]
        shapes = [m.param.shape[:sparse_dims] for m in members]
        self.dense = members[0].param.shape[sparse_dims:]
        self.dtype = compute_dtype(members[0].param.dtype)
        width = math.prod(self.dense)
        firsts = [0, *itertools.accumulate(map(math.prod, shapes))]
        self.rows = firsts.pop()
        row_bytes = torch.zeros(len(tensors), 1, dtype=torch.int64, device="cpu")
        row_bytes[PARAM] = width * members[0].param.element_size()
        for row, name in enumerate(plan.buffers, BUFFERS):
            row_bytes[row] = width * members[0].entries[name].element_size()
        self.row_bytes = upload(row_bytes, plan.device)
        columns = tensors.index_select(1, upload(positions, plan.device))
        columns[NUMEL] = width
        strides = zip(*[row_strides(shape)[:-1] for shape in shapes], strict=True)
        places = upload([firsts, *strides, *zip(*shapes, strict=True)], plan.device)
        self.facts = torch.cat([places, columns - self.row_bytes * places[0]])


class RowBatch:
    """A :class:`~compiled_optim.lowering.kernels.table.TensorTable` of the rows of several parameters.

    All memory stays where it is, and all that follows from ``counts``, the number of each gradient's entries, is computed
    once. The kernel updates ``chunk`` elements at a time.
    """

    def __init__(self, plan: Plan, kind: RowKind, counts: Sequence[int], chunk: int) -> None:
        device = plan.device
        count, width = sum(counts), math.prod(kind.dense)
        of_entry = upload(torch.repeat_interleave(torch.tensor(counts, device="cpu")), device)  # which of the parameters
        places, self._base = kind.facts.index_select(1, of_entry).tensor_split([len(kind.facts) - len(kind.row_bytes)])
        sparse_dims = (len(places) + 1) // 2  # a row of firsts stands for none too
        self._first_rows, *self._strides = places[:sparse_dims].unbind()
        self._limits = places[sparse_dims:]
        self._row_bytes = kind.row_bytes
        self._names = ", ".join(f"'{plan.members[i].name}'" for i in kind.positions)
        self.rows = kind.rows

        self._own = torch.arange(count, device=device)
        self.copied_entries: tuple[Tensor, Tensor] | None = None
        self.sums = torch.empty(count, *kind.dense, dtype=kind.dtype, device=device)
        self._sum_addresses = _addresses(self.sums, count)
        self.grads = torch.empty_like(self._own)
        self.tensors = torch.empty_like(self._base)
        self.chunks = torch.cartesian_prod(self._own, torch.arange(-(-width // chunk), device=device))
        self.elements = count * width

    def copy_entries(self, grads: Sequence[Tensor]) -> None:
        """Copy the entries of ``grads``, one for each parameter, to ``copied_entries``, whose memory stays where it is."""
        entries = joined(grads)
        if self.copied_entries is None:
            self.copied_entries = entries
        else:
            torch._foreach_copy_(self.copied_entries, entries)

    def gather(self, indices: Tensor, values: Tensor, election: Tensor, found: Rows) -> None:
        """Add up the entries: ``indices``, (sparse dimensions, entries) int64, and ``values``, (entries, dense part).

        ``election`` is scratch memory, (rows,) int64; ``found`` says what is known of the rows.
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
        torch.mul(self._sum_addresses, elected == self._own, out=self.grads)
        torch.addcmul(self._base, self._row_bytes, rows, out=self.tensors)


def joined(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The indices (sparse dimensions, entries) and the values (entries, dense part) of all ``grads``."""
    return torch.cat([grad._indices() for grad in grads], 1), torch.cat([grad._values() for grad in grads])


def _addresses(tensor: Tensor, count: int) -> Tensor:
    """The addresses of ``count`` pieces of equal size, one after the other, that make up ``tensor``."""
    size = max(tensor.nbytes // max(count, 1), 1)
    start = tensor.data_ptr()
    return torch.arange(start, start + count * size, size, device=tensor.device)
