"""The lowerings for sparse gradients, whose entries are added up per row.

A COO gradient of N entries may name a row several times. Each row elects one of its entries, through a table with one
number per row. The values of all its entries are summed at the elected one. If no two entries name the same row, all are
elected. All shapes follow from N, which the host knows, so no step waits for the device.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compiled_optim.lowering.coefficients import TableCoefficients
from compiled_optim.lowering.kernels.table import (
    BUFFERS,
    NUMEL,
    PARAM,
    Ints,
    Kernel,
    Launches,
    tensor_rows,
    upload,
)
from compiled_optim.lowering.lists import ListLowering, Vectors
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.memory.torch_internals import Captures, assert_on_device, is_capturing, is_fake
from compiled_optim.plan.clipping import square_sum
from compiled_optim.plan.compilations import LISTS, MULTI_TENSOR, CompilationLog, KernelKey, kernel_key
from compiled_optim.plan.plan import Member, Plan


def has_distinct_rows(grad: Tensor, name: str) -> bool:
    """Return True if no two entries of the sparse gradient of the parameter ``name`` name the same row.

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


def add_up(rows: Tensor, numbers: Tensor, values: Tensor, election: Tensor, sums: Tensor, *, sorts: bool = True) -> Tensor:
    """Add up the values of the entries of each row, at the index of the entry that the row elects.

    Args:
        rows: (N,) int64, the rows that the entries name.
        numbers: the entries' numbers, 0 to N - 1.
        values: (N, ...).
        election: (rows,) int64, scratch memory.
        sums: written, shaped as ``values``: at an elected entry its row's sum, elsewhere 0.
        sorts: True if an accelerator sorts the entries, so that a sum of several entries is the same every time.

    Returns:
        For each entry, the one that its row elected: (N,) int64.
    """
    election.index_put_((rows,), numbers)
    elected = election[rows]
    sums.zero_()
    if values.device.type == "cpu" or not sorts:
        sums.index_add_(0, elected, values)
    else:
        sums.index_put_((elected,), values, accumulate=True)
    return elected


def row_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of the sparse dimensions, in rows."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


@dataclass
class Entries:
    """The N entries of a sparse gradient, added up per row."""

    index: tuple[Tensor, ...]  # for each sparse dimension, the indices of the entries: (N,) int64
    elected: Tensor  # for each entry, the one that its row elected: (N,) int64
    sums: Tensor  # (N, dense part); at an elected entry the row's gradient, elsewhere 0

    def numel(self) -> int:
        """Return the number of elements of the gradient."""
        return self.sums.numel()


def entries_of(grad: Tensor, dtype: torch.dtype, *, distinct: bool) -> Entries:
    """Return the entries of ``grad``, summed in ``dtype``; ``distinct`` means that no two name the same row."""
    indices, values = grad._indices(), grad._values().to(dtype)
    index = indices.unbind() or (indices.new_zeros(len(values)),)  # without sparse dimensions there is one row
    numbers = torch.arange(len(values), device=values.device)
    if distinct:
        return Entries(index, numbers, values.contiguous())
    shape = grad.shape[: grad.sparse_dim()] or (1,)
    rows = torch.zeros_like(numbers)
    for stride, positions in zip(row_strides(shape), index, strict=True):
        rows.add_(positions, alpha=stride)
    sums = torch.empty_like(values, memory_format=torch.contiguous_format)
    return Entries(index, add_up(rows, numbers, values, numbers.new_empty(math.prod(shape)), sums), sums)


class GatheredRows(Vectors):
    """The rows of a member's parameter and buffers that a gradient names, copied out and copied back."""

    def __init__(self, plan: Plan, member: Member) -> None:
        self._full = [member.param.detach(), *(member.entries[name] for name in plan.buffers)]
        self._dim = member.param.dim()

    def read(self, grad: Entries) -> list[Tensor]:
        self._index = grad.index
        one_row = grad.sums.dim() > self._dim  # no sparse dimensions
        self._targets = [t.unsqueeze(0) for t in self._full] if one_row else self._full
        param, *buffers = (t[grad.index].reshape(-1) for t in self._targets)
        return [param, grad.sums[grad.elected].reshape(-1), *buffers]

    def store(self, new: Sequence[Tensor]) -> None:
        for target, rows in zip(self._targets, new, strict=True):
            target.index_put_(self._index, rows.view(-1, *target.shape[len(self._index) :]))


class GatheredRowsLowering(ListLowering):
    """The step on copies of rows, which are copied back after it. Entries of one row write the same values.

    If ``compiled``, Inductor's kernels update the copies, else plain torch operations.
    """

    _vectors = GatheredRows

    def _kind(self, member: Member, grad_dtype: torch.dtype) -> tuple[KernelKey, bool]:
        return kernel_key(self.plan, member, compute_dtype(member.param.dtype), LISTS), True

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        super().prepare(grads, captures)
        is_read = self.plan.device.type == "cpu" and not any(g is not None and is_fake(g) for g in self._grads)

        def added_up(member: Member, grad: Tensor) -> Entries:
            distinct = is_read and has_distinct_rows(grad, member.name)
            return entries_of(grad, compute_dtype(member.param.dtype), distinct=distinct)

        pairs = zip(self.plan.members, self._grads, strict=True)
        self._grads = [None if grad is None else added_up(member, grad) for member, grad in pairs]

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients, after the entries of each row have been added up."""
        self._square_sum.fill_(square_sum([e.sums for e in self._grads if e is not None], self.plan.device))


Rows: TypeAlias = Literal["distinct", "repeated", "coalesced", "uncoalesced"]
"""The knowledge of the rows that entries name. In the first two cases the host has read them."""

_CACHED_BATCHES = 16  # different numbers of entries whose memory is cached


class RowTableLowering(Lowering):
    """The step with multi-tensor kernels on rows, whose addresses are computed from their indices on the device.

    Coefficients are evaluated for each parameter. For the update each entry is a tensor with the coefficients of its
    parameter, and has a gradient if its row elected it. Parameters are contiguous. All of them whose rows share a kernel and
    a shape are updated together.
    """

    name = "multi_tensor"
    coefficients: TableCoefficients

    def __init__(self, plan: Plan, coefficients: TableCoefficients, log: CompilationLog) -> None:
        super().__init__(plan, coefficients, log)
        self._elections = [torch.empty(0, dtype=torch.int64, device=plan.device)]  # a captured graph may use any of them
        self._prepared: list[RowBatch] = []
        self._captured: list[object] = []  # read by every replay

    def compile(self) -> None:
        assert not self.plan.outputs.choice, "words are of parameters, not of rows"
        keys = [kernel_key(self.plan, m, compute_dtype(m.param.dtype), MULTI_TENSOR) for m in self.plan.members]
        self._kernels = [self.coefficients.obtain(key, [i]) for i, key in enumerate(keys)]
        self._batch_of = _cached_batches(self.plan, self._kernels)
        self.coefficients.compile(self._kernels[0])

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        capturing = self.plan.device in captures
        self.coefficients.prepare(capturing)
        alike: dict[tuple[Any, ...], dict[int, Tensor]] = {}
        all_grads = self.plan.gradients(grads)
        for i, grad in enumerate(all_grads):
            if grad is not None:
                shape = grad.shape[grad.sparse_dim() :]
                alike.setdefault((self._kernels[i], grad.sparse_dim(), grad.dtype, shape), {})[i] = grad
        reads_indices = self.plan.device.type == "cpu" and not capturing
        self._prepared = []
        for (_, sparse_dims, *_), batch_grads in alike.items():
            positions, counts = tuple(batch_grads), tuple(grad._nnz() for grad in batch_grads.values())
            batch = self._batch_of(positions, counts, sparse_dims)
            rows: Rows = "uncoalesced"
            if reads_indices:
                distinct = [has_distinct_rows(grad, self.plan.members[i].name) for i, grad in batch_grads.items()]
                rows = "distinct" if all(distinct) else "repeated"
            elif all(grad.is_coalesced() for grad in batch_grads.values()):
                rows = "coalesced"
            batch.prepare(list(batch_grads.values()), rows)
            self._prepared.append(batch)
        needed = max((batch.kind.rows for batch in self._prepared), default=0)
        if len(self._elections[-1]) < needed:
            self._elections.append(self._elections[-1].new_empty(needed))
        self.coefficients.table.gradients.mark(all_grads, capturing)
        if capturing:
            self._captured += self._prepared

    def launch_key(self) -> dict[str, object]:
        key: dict[str, object] = {}
        for batch in self._prepared:
            for i, count in zip(batch.positions, batch.counts, strict=True):
                key[f"gradient of '{self.plan.members[i].name}'"] = f"with {count} entries in {batch.rows} rows"
            key[f"memory for the gradient of '{self.plan.members[batch.positions[0]].name}'"] = batch
        return key

    def copy_gradients_for_graph(self) -> None:
        for batch in self._prepared:
            batch.copy_entries()

    def measure(self) -> None:
        self._gather()
        self._square_sum.fill_(square_sum([batch.sums for batch in self._prepared], self.plan.device))

    def launch(self) -> None:
        """Update the rows that the gradients name, and count a step of every parameter that has a gradient."""
        self._gather()
        if self._prepared:
            self.coefficients.step(self._prepared)
        else:  # update nothing, but write the outcome of the step
            self.coefficients.evaluate()

    def finish(self) -> None:
        super().finish()
        for batch in self._prepared:
            batch.finish()
        self._prepared = []

    def _gather(self) -> None:
        for batch in self._prepared:
            batch.gather(self._elections[-1])


def _cached_batches(plan: Plan, kernels: Sequence[Kernel]) -> Callable[[Ints, Ints, int], RowBatch]:
    """Return a cached function that returns the memory for gradients of some parameters.

    It takes their positions, the number of entries of each, and their number of sparse dimensions. The caches must not refer
    to the lowering, which they would keep alive.
    """
    tensors, _ = tensor_rows(plan, range(len(plan.members)))

    @functools.lru_cache(_CACHED_BATCHES)
    def kind_of(positions: Ints, sparse_dims: int) -> RowKind:
        return RowKind(plan, tensors, positions, sparse_dims)

    @functools.lru_cache(_CACHED_BATCHES)
    def batch_of(positions: Ints, counts: Ints, sparse_dims: int) -> RowBatch:
        if is_capturing(plan.device):
            raise RuntimeError(
                f"{plan.rule.name}.step() cannot be captured in a CUDA graph now: no step was taken before with "
                f"gradients of so many entries ({', '.join(map(str, counts))}); take one step before capturing"
            )
        return RowBatch(plan, kind_of(positions, sparse_dims), positions, counts, kernels[positions[0]])

    return batch_of


class RowKind:
    """The facts about the parameters at ``positions``, whose rows share a kernel, that do not depend on gradients.

    ``tensors`` is the table of the whole plan. Gradients have ``sparse_dims`` sparse dimensions and equal dense shapes.

    Attributes:
        facts: (2 * sparse dimensions + rows of the table, parameters) int64: for each parameter the index of its first
            row among the rows of all, the strides in rows of all its sparse dimensions but the last, the sizes of the sparse
            dimensions, and its entries of the table for a row with index 0.
        row_bytes: (rows of the table, 1) int64: the difference of the table's entries from row to row.
        rows: the number of rows of all parameters.
    """

    def __init__(self, plan: Plan, tensors: Tensor, positions: Sequence[int], sparse_dims: int) -> None:
        members = [plan.members[i] for i in positions]
        self.names = ", ".join(f"'{m.name}'" for m in members)
        shapes = [m.param.shape[:sparse_dims] for m in members]
        self.dense = members[0].param.shape[sparse_dims:]
        self.dtype = compute_dtype(members[0].param.dtype)
        self.width = math.prod(self.dense)
        *firsts, self.rows = itertools.accumulate(map(math.prod, shapes), initial=0)
        sizes = {PARAM: members[0].param.element_size()}
        sizes |= {row: members[0].entries[name].element_size() for row, name in enumerate(plan.buffers, BUFFERS)}
        self.row_bytes = upload([[self.width * sizes.get(row, 0)] for row in range(len(tensors))], plan.device)
        columns = tensors.index_select(1, upload(positions, plan.device))
        columns[NUMEL] = self.width
        strides = zip(*[row_strides(shape)[:-1] for shape in shapes], strict=True)
        layout = upload([firsts, *strides, *zip(*shapes, strict=True)], plan.device)
        self.facts = torch.cat([layout, columns - self.row_bytes * layout[0]])


class RowBatch:
    """A :class:`~compiled_optim.lowering.kernels.table.TensorTable` of the rows of several parameters.

    Its memory has fixed addresses. All that follows from ``counts``, the numbers of gradients' entries, is computed once.
    ``rows`` is the knowledge of the rows that the prepared entries name.
    """

    output_sums: Sequence[Tensor] = ()

    def __init__(self, plan: Plan, kind: RowKind, positions: Ints, counts: Ints, kernel: Kernel) -> None:
        device, count = plan.device, sum(counts)
        self.kind, self.kernel = kind, kernel
        self.positions, self.counts = positions, counts
        of_entry = upload(torch.repeat_interleave(torch.tensor(counts, device="cpu")), device)  # the parameter of each entry
        layout, self._base = kind.facts.index_select(1, of_entry).tensor_split([len(kind.facts) - len(kind.row_bytes)])
        sparse_dims = (len(layout) + 1) // 2  # without sparse dimensions it has the first rows only
        self._first_rows, *self._strides = layout[:sparse_dims].unbind()
        self._limits = layout[sparse_dims:]

        self._numbers = torch.arange(count, device=device)
        self._entries: tuple[Tensor, ...] = ()  # the prepared ones: indices and values
        self._copied: tuple[Tensor, ...] = ()
        self.sums = torch.empty(count, *kind.dense, dtype=kind.dtype, device=device)
        size, start = max(kind.width * self.sums.element_size(), 1), self.sums.data_ptr()
        self._sum_addresses = torch.arange(start, start + count * size, size, device=device)
        self.grads = torch.empty_like(self._numbers)
        self.tensors = torch.empty_like(self._base)
        self.blocks = torch.cartesian_prod(self._numbers, torch.arange(-(-kind.width // kernel.block), device=device))
        self.elements = count * kind.width
        self.launches = Launches()

    def prepare(self, grads: Sequence[Tensor], rows: Rows) -> None:
        """Take the entries of ``grads``, one for each parameter; ``rows`` is the knowledge of the rows that they name."""
        # (sparse dimensions, entries) int64, and (entries, dense part)
        self._entries = torch.cat([g._indices() for g in grads], 1), torch.cat([g._values() for g in grads])
        self.rows, self._is_gathered = rows, False

    def copy_entries(self) -> None:
        """Copy the prepared entries to memory with fixed addresses, and read them there."""
        if self._copied:
            torch._foreach_copy_(self._copied, self._entries)
        self._entries = self._copied = self._copied or self._entries

    def finish(self) -> None:
        """Release the entries."""
        self._entries = ()

    def gather(self, election: Tensor) -> None:
        """Add up the prepared entries, unless that is done; ``election`` is scratch memory, (rows,) int64."""
        if self._is_gathered:
            return
        self._is_gathered = True
        indices, values = self._entries
        if self.rows not in ("distinct", "repeated"):
            inside = (indices >= 0) & (indices < self._limits)
            assert_on_device(inside.all(), f"an entry of the gradients of {self.kind.names} lies outside of its parameter")
        rows = self._first_rows
        for stride, index in zip([*self._strides, None], indices, strict=False):
            rows = rows + index if stride is None else torch.addcmul(rows, stride, index)
        elected, values = self._numbers, values.to(self.sums.dtype)
        if self.rows == "distinct":
            self.sums.copy_(values)
        else:
            elected = add_up(rows, self._numbers, values, election, self.sums, sorts=self.rows != "coalesced")
        torch.mul(self._sum_addresses, elected == self._numbers, out=self.grads)
        torch.addcmul(self._base, self.kind.row_bytes, rows, out=self.tensors)
