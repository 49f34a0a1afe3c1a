"""Records of how steps change a few elements of each parameter, made without waiting for the device.

A step reads up to 128 elements from the middle of each parameter before and after its update. The results go into tables on
the device, which hold the last 64 steps. Only ``co.health`` reads them, and then reads all elements of tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.lowering.coefficients import TableCoefficients
from compiled_optim.lowering.kernels.table import Launch, upload
from compiled_optim.lowering.kernels.triton import TritonKernel, prepared
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.memory.layout import as_real, flat, is_dense, plain_copy, scalar_dtype
from compiled_optim.plan.clipping import NAMES, Clipping
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.storage import PARTS

ELEMENTS, STEPS = 128, 64
KINDS = torch.float16, torch.bfloat16, torch.float32, torch.float64  # dtypes that kernels read, by number
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Looks:
    """Reads a few elements of each parameter before and after a step, in torch's operations; none waits for the device.

    The results go into the row ``index`` of a :class:`Watch`'s ``table``.
    """

    def __init__(self, plan: Plan, clipping: Clipping, table: Tensor, index: Tensor) -> None:
        self._clipping, self._table, self._index = clipping, table, index[:1]
        self._weights = [_weight(member).detach() for member in plan.members]
        self._samples = [sample(weight, weight) for weight in self._weights]
        self._quantities = table.new_zeros(table.shape[1:])
        self._blocks = table.new_zeros(5, len(self._samples), ELEMENTS)  # their norms are the first quantities
        self._before, self._after, self._grads = (
            [row[: sample.numel()] for row, sample in zip(block, self._samples, strict=True)] for block in self._blocks[:3]
        )
        self._absent = table.new_full((ELEMENTS,), math.nan)  # instead of a gradient
        self._zero, self._one = torch.arange(2.0, dtype=scalar_dtype(table.device), device=table.device).unbind()
        runs = [[*run] for _, run in itertools.groupby((member.groups[member.group] for member in plan.members), id)]
        self._groups = [(run[0], len(run)) for run in runs]  # the group of successive parameters, and their number
        self._next = torch.arange(1, STEPS + 1, device=table.device).remainder_(STEPS)  # the index after each

    def see_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Read the gradients that the next step takes, one for each member of the plan."""
        sources = [
            self._absent[: row.numel()] if grad is None or grad.is_sparse else sample(grad, weight)
            for row, weight, grad in zip(self._grads, self._weights, grads, strict=True)
        ]
        torch._foreach_copy_(self._grads, sources)

    def begin(self) -> None:
        """Read the parameters, before a step updates them."""
        torch._foreach_copy_(self._before, self._samples)

    def end(self) -> None:
        """Write the table's row about the step; each line is one launch."""
        weights, updates, grads, *_ = self._blocks
        torch._foreach_copy_(self._after, self._samples)
        updates.sub_(weights)
        torch.logical_and(self._blocks[1:3], grads, out=self._blocks[3:])
        torch.linalg.vector_norm(self._blocks, dim=2, out=self._quantities[:5])
        skipped = self._zero if self._clipping.idle else self._clipping.outcome(self._table.device)[1]
        scalars = torch.cat([*(self._rate(g).expand(n) for g, n in self._groups), skipped.expand(len(self._samples))])
        self._quantities[5:].copy_(scalars.view(2, -1))
        self._table.index_copy_(0, self._index, self._quantities[None])
        torch.gather(self._next, 0, self._index, out=self._index)

    def _rate(self, group: ParamGroup) -> Tensor:
        rate = group.read_only("lr")[0].detach() if "lr" in group else self._one
        return rate if rate.device == self._table.device else self._one  # one on another device would need a wait


class KernelLooks:
    """:class:`Looks` in two launches, for a plan whose kernels read the addresses of gradients from tables on the device."""

    def __init__(self, coefficients: TableCoefficients, table: Tensor, index: Tensor) -> None:
        from compiled_optim.step.sample_kernels import look, note

        self._kernel, self._coefficients, self._table, self._index = note, coefficients, table, index
        plan = coefficients.plan
        hypers = [hyper.name for hyper in plan.hypers for _ in range(hyper.length)]
        rows = []
        for member, group, grad_dtype in zip(plan.members, plan.group_index, plan.grad_dtypes, strict=True):
            weight, grad = _weight(member).detach(), grad_dtype.to_real()
            taken = sample(weight, weight)
            start = (taken.data_ptr() - weight.data_ptr()) // taken.element_size()
            rate = len(NAMES) + group * len(hypers) + hypers.index("lr") if "lr" in hypers else -1
            form = taken.numel(), taken.stride(0), start * grad.itemsize, *map(KINDS.index, (taken.dtype, grad))
            rows.append([taken.data_ptr(), *form, rate])
        self._samples, self._before = upload(rows, table.device), table.new_empty(len(rows), ELEMENTS)
        self._notes: dict[int, tuple[Launch, Sequence[Tensor]]] = {}
        self._on_device = coefficients.on_device
        with self._on_device:
            self._look = prepared(look, (len(rows),), (self._samples, self._before, index), (ELEMENTS,))

    def begin(self) -> None:
        """Read the parameters, as :meth:`Looks.begin`."""
        with self._on_device:
            self._look()

    def end(self) -> None:
        """Write the row, as :meth:`Looks.end`, and read the gradients, from the addresses of the update."""
        read = self._coefficients.table
        with self._on_device:
            if (known := self._notes.get(id(read.grads))) is None:  # a step that is captured has its own table
                tensors = self._samples, read.grads, read.hypers, read.outcome, self._before, self._index, self._table
                known = prepared(self._kernel, (len(self._before),), tensors, (ELEMENTS, STEPS)), tensors
                self._notes[id(read.grads)] = known
            known[0]()


class Watch:
    """A table of how the last steps changed a few elements of each parameter of a plan.

    It continues the tables of ``before``. Its shape is (steps, quantities, parameters). Quantities are the norms of the
    sampled weight, update and gradient, NaN for none; the roots of the numbers of elements that had a gradient and moved,
    and of those that had one; ``lr``, 1 if a rule has none; and whether the step was skipped.

    Attributes:
        columns: the column of the table for each parameter.
        lost: by parameter, in words, averages that were at 0 after a load.
    """

    def __init__(self, lowering: Lowering, clipping: Clipping, before: Sequence[Watch]) -> None:
        self.plan, self._lowering, self._clipping = lowering.plan, lowering, clipping
        self.columns = {member.owner: column for column, member in enumerate(self.plan.members)}
        dtypes = [as_real(_weight(member).detach()).dtype for member in self.plan.members]
        dtype, device = functools.reduce(torch.promote_types, dtypes, torch.float32), self.plan.device
        self._table = torch.full((STEPS, 7, len(dtypes)), math.nan, dtype=dtype, device=device)
        self._index = torch.zeros(2, dtype=torch.int64, device=device)  # of the rows of the next step and of this step
        self._old_sums = [_bit_sum(member) for member in self.plan.members]
        self.lost: dict[Tensor, str] = {}
        for other in before:
            self._take_over(other)

    def _take_over(self, other: Watch) -> None:
        for owner in self.columns.keys() & other.columns.keys():
            column, previous = self.columns[owner], other.columns[owner]
            self._table[:, :, column] = other._table[:, :, previous].to(self._table)
            self._index.copy_(other._index)
            self._old_sums[column] = other._old_sums[previous].to(self._index.device)
            self.lost |= {owner: other.lost[owner]} if owner in other.lost else {}

    @functools.cached_property
    def looks(self) -> Looks | KernelLooks:
        """The writer of the table. It is made once the lowering is compiled, which may give state other memory."""
        lowering, written = self._lowering, (self._clipping, self._table, self._index)
        coefficients = lowering.coefficients
        if (
            isinstance(coefficients, TableCoefficients)
            and isinstance(coefficients.kernel, TritonKernel)
            and lowering.reads_addresses
        ):
            return KernelLooks(coefficients, *written[1:])
        return Looks(self.plan, *written)

    def note_load(self) -> None:
        """Note which averages are at 0 now, after a load."""
        self.lost = {m.owner: names for m in self.plan.members if (names := zero_moments(m, self.plan))}

    def taken(self) -> Tensor:
        """Return the rows of the steps so far, the last one last, on the CPU in float64. Waits for the device."""
        table = self._table.roll(-int(self._index[0].item()), 0).cpu().double()
        return table[~table[:, 0].isnan().all(1)]

    def has_moved(self, column: int) -> bool:
        """Return whether bits of a parameter have changed since it is watched. Waits for the device."""
        return not torch.equal(_bit_sum(self.plan.members[column]), self._old_sums[column])

    def elements(self, column: int) -> int:
        """Return how many elements of a parameter steps read."""
        member = self.plan.members[column]
        return sample(member.param, _weight(member)).numel()


def zero_moments(member: Member, plan: Plan) -> str:
    """Return, in words, the averages of a parameter that are at 0 though it has taken steps. Waits for the device."""
    if not member.param.numel() or not member.entries["step"].item():
        return ""
    averages = {b.name for b in plan.rule.buffers if b.init == 0 and not b.is_copy} - {*PARTS}
    zeros = [name for name in plan.buffers if name in averages and not member.entries[name].any()]
    return "" if zeros and has_zero_gradient(member) else " and ".join(zeros)


def has_zero_gradient(member: Member) -> bool:
    """Return whether a parameter has a dense gradient of zeros now."""
    grad = member.owner.grad
    return grad is not None and not grad.is_sparse and not bool(grad.count_nonzero())


def _weight(member: Member) -> Tensor:
    """Return the master copy of a parameter, which has all of its bits, or else the parameter."""
    return member.entries.get("master_param", member.param)


def sample(tensor: Tensor, weight: Tensor, elements: int = ELEMENTS, *, spread: bool = False) -> Tensor:
    """Return a view of up to ``elements`` numbers of ``tensor``, at the same indices as of ``weight``.

    They are from the middle, or ``spread`` over all where the weight is contiguous. For a tensor in another order of memory
    than the weight, or for a conjugate, it may be a copy.
    """
    real = as_real(tensor.resolve_conj())
    if weight.is_contiguous():
        real = real.contiguous()
        count = min(real.numel(), elements)
        stride = max(1, real.numel() // elements) if spread else 1
        start = max(0, real.numel() - count * stride) // 2
        return real.as_strided((count,), (stride,), real.storage_offset() + start)
    while real.dim() > 1:
        real = real.select(0, real.shape[0] // 2)
    return real[:elements]


def _bit_sum(member: Member) -> Tensor:
    """Return sums of the bits, as integers, of a parameter and of its further bits: 8 sums, each of every eighth element.

    A single sum would not change if two elements move equally far in opposite directions, as biases of two classes do.
    """
    tensors = [member.param, *(member.entries[name] for name in PARTS if name in member.entries)]
    dense = [flat(t if is_dense(t) else plain_copy(t.detach())) for t in tensors if t.numel()]
    bits = [t.view(_INTEGERS[t.element_size()]) for t in dense]
    sums = [t[start::8].sum(dtype=torch.int64) for t in bits for start in range(8)]
    return torch.stack(sums) if sums else torch.zeros(1, dtype=torch.int64, device=member.param.device)
