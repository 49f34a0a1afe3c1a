"""The lowering of rules that are not elementwise: equal tensors are stacked, and each stack is updated at once.

Loops update the tensors of a stack in place where their memory allows it. Otherwise parameters and gradients are copied into
a contiguous stack, and parameters are copied out; state then lives in stacks. A stack is large enough to keep the device
busy, and small enough that its copies need little memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.lowering import stack_code, stack_loops
from compiled_optim.lowering.coefficients import TableCoefficients, TorchCoefficients
from compiled_optim.lowering.kernels.table import (
    BUFFERS,
    PARAM,
    CoefficientTable,
    KernelTensors,
    tensor_rows,
    upload,
)
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.lowering.owners import Owners, owners
from compiled_optim.lowering.stack_loops import Loops, StackKernels
from compiled_optim.memory.layout import (
    compute_dtype,
    is_plain,
    parts_of_stack,
    plain_copy,
    whole_stack,
)
from compiled_optim.memory.torch_compiler import Code
from compiled_optim.memory.torch_internals import Captures, is_capturing
from compiled_optim.plan.compilations import CompilationLog, KernelKey, coefficient_key, kernel_key
from compiled_optim.plan.plan import Member, Plan


class StackLowering(Lowering):
    """The step of one plan with stacks of equal tensors, which are not complex.

    Each DTensor is gathered by one process, stack by stack. Those that are split along more than one dimension are gathered
    by every process instead.

    Args:
        loops: the loops that update the stacks; None for code of torch operations. Their coefficients are of a table.
        compiled: True if Inductor compiles that code.
    """

    def __init__(
        self,
        plan: Plan,
        coefficients: TorchCoefficients | TableCoefficients,
        log: CompilationLog,
        *,
        loops: Loops | None = None,
        compiled: bool = True,
    ) -> None:
        super().__init__(plan, coefficients, log)
        self._loops, self._compiled = loops, compiled
        self.name = "stacked" if compiled else "eager"
        positions: dict[tuple[KernelKey, torch.Size], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.owner.numel() > 0:
                positions.setdefault((self._key(member, grad_dtype), member.owner.shape), []).append(i)
        self.stacks = [
            (CodeStack if loops is None else LoopStack)(plan, where[start : start + most], key)
            for (key, shape), where in positions.items()
            for most in [self._most(key, shape)]
            for start in range(0, len(where), most)
        ]
        copied = [stack.copies for stack in self.stacks if stack.copies is not None]
        firsts = itertools.accumulate((len(copies.positions) for copies in copied), initial=0)
        for first, copies in zip(firsts, copied, strict=False):
            copies.share(first)
        if gathered := [copies for copies in copied if plan.sharded and copies.owners is None]:
            name = plan.members[gathered[0].positions[0]].name
            log.fall_back(
                f"every process updates all of '{name}', which is split over more than one dimension of its mesh",
                "a step takes longer",
            )
        self.reads_addresses = loops is not None and not copied
        self._copied = copied

    def _key(self, member: Member, grad_dtype: torch.dtype) -> KernelKey:
        if self._loops is None:
            return stack_code.key_of(self.plan, member, grad_dtype)
        return kernel_key(self.plan, member, grad_dtype, "")

    def _most(self, key: KernelKey, shape: torch.Size) -> int:
        """Return the most tensors of ``shape`` that a stack may have."""
        most = stack_code.most_elements(key) if self._loops is None else self._loops.most_elements(key)
        return min(max(most // shape.numel(), 1), stack_loops.TENSORS)

    def compile(self) -> None:
        if isinstance(self.coefficients, TableCoefficients):  # raises at once if the compiler does not work
            self._compile_tables(self.coefficients)
        for stack in self.stacks:
            stack.compile([self.plan.members[i].name for i in stack.positions], self._log, compiled=self._compiled)

    def _compile_tables(self, coefficients: TableCoefficients) -> None:
        """Make the tables of the tensors that are updated in place; kernels measure the gradients of these."""
        plan, key = self.plan, coefficient_key(self.plan)
        in_place = [stack for stack in self.stacks if isinstance(stack, LoopStack) and stack.copies is None]
        positions: dict[KernelKey, list[int]] = {}
        for i in itertools.chain(*(stack.positions for stack in in_place)):
            dtypes = (key.dtypes[0], plan.grad_dtypes[i].to_real())
            positions.setdefault(dataclasses.replace(key, dtypes=dtypes), []).append(i)
        kernels = [coefficients.obtain(each, where) for each, where in positions.items()]
        coefficients.compile(kernels[0] if kernels else coefficients.obtain(key, range(len(plan.members))))
        tensors, self._orders = tensor_rows(plan, itertools.chain(*positions.values()))
        self.tables = [
            KernelTensors(kernel, plan, tensors, coefficients.table.gradients, where, 0)
            for kernel, where in zip(kernels, positions.values(), strict=True)
        ]
        self.square_sum_count = sum(table.square_sum_count for table in self.tables) + bool(self._copied)
        for stack in in_place:
            stack.tensors = tensors

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        super().prepare(grads, captures)
        self._reads_copies = False
        if not isinstance(self.coefficients, TableCoefficients):
            return
        capturing, gradients = self.plan.device in captures, self.coefficients.table.gradients
        if self._loops is None:
            gradients.mark(self._grads, capturing)
        elif not self.plan.addresses.unlike:
            gradients.follow(self.plan.addresses, capturing)
        else:
            found = {i: grad for i, grad in enumerate(self._grads) if grad is not None}
            arranged = {i: self._orders[i].arranged(grad) if i in self._orders else grad for i, grad in found.items()}
            self._grads = list(map(arranged.get, range(len(self._grads))))
            gradients.publish(self._grads, capturing)

    def copy_gradients_for_graph(self) -> None:
        for copies in self._copied:
            copies.copy_gradients(self._grads)
        self._reads_copies = True

    def measure(self) -> None:
        if not isinstance(self.coefficients, TableCoefficients):
            super().measure()
            return
        with self.coefficients.on_device:
            for table in self.tables:
                table.kernel.measure(table)
        if self._copied:
            stacks = (grads for copies in self._copied if (grads := self._gradients(copies)) is not None)
            self._square_sum.fill_(sum(map(_square_sum, stacks), 0.0))

    def _gradients(self, copies: Copies) -> Tensor | None:
        """Return the prepared gradients of ``copies``, with anything for absent ones; None if it has none."""
        return copies.copied_gradients if self._reads_copies else copies.gathered(self._grads)

    def _update(self) -> None:
        if isinstance(self.coefficients, TableCoefficients) and self._loops is not None:
            self._run_loops(self.coefficients)
            return
        columns = self.coefficients.columns()
        for stack in self.stacks:
            assert isinstance(stack, CodeStack)
            if (grads := self._gradients(stack.copies)) is not None:
                stack.update(grads, columns)

    def _run_loops(self, coefficients: TableCoefficients) -> None:
        table, captured = coefficients.table, is_capturing(self.plan.device)  # a replay may have other gradients
        with coefficients.on_device:
            for stack in self.stacks:
                assert isinstance(stack, LoopStack)
                if not captured and table.gradients.are_absent(stack.positions):
                    continue
                if stack.copies is None:
                    stack.update(table)
                elif (grads := self._gradients(stack.copies)) is not None:
                    stack.update_copies(stack.copies, grads, table)


class CodeStack:
    """Tensors of one shape that code of torch operations updates, in ``copies``."""

    code: Code  # assigned when compiled

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        self.positions, self._key = positions, key
        self.copies = Copies(plan, positions, key)
        self._dtype = compute_dtype(key.dtypes[0])

    def compile(self, names: Sequence[str], log: CompilationLog, *, compiled: bool) -> None:
        """Obtain the code for the parameters ``names``."""
        self.code = stack_code.obtain(self._key, self.copies.numel, names, log, compiled=compiled)
        # Rows of numbers begin at multiples of 16 bytes; otherwise Inductor's code copies each.
        spare = self.copies.index.new_zeros(-len(self.copies.index) % 4)
        self._padded = torch.cat([self.copies.index, spare])

    def update(self, grads: Tensor, coefficients: Tensor) -> None:
        """Update from stacked ``grads``; a tensor is unchanged where the second of its ``coefficients`` is not 0."""
        param, grad, *buffers = self.copies.collect(grads)
        columns = coefficients.index_select(1, self._padded).to(param.device, self._dtype)[:, : len(param)]
        columns = columns.view(*columns.shape, *[1] * (param.dim() - 1))
        new = self.code([param, grad, *buffers, *columns.unbind()]) if len(param) else [param, *buffers]
        self.copies.spread(new)


class LoopStack:
    """Tensors of one shape that loops update: in place, or in ``copies`` if their memory is not as loops read it.

    A part of the tensors with ``split`` has kernels of its own.
    """

    tensors: Tensor  # the table of addresses of the plan's tensors that are updated in place; assigned when compiled
    kernels: Sequence[StackKernels]  # likewise

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        self.positions, self.key = positions, key
        members, owner = [plan.members[i] for i in positions], plan.members[positions[0]].owner
        self.parts = stack_loops.parts_of(plan.rule, plan.statics, owner.shape)
        self.copies = None if _are_in_order(plan, members) else Copies(plan, positions, key)
        self._index = upload(positions, plan.device)
        entries = {PARAM: owner, **{i: members[0].state[name] for i, name in enumerate(plan.buffers, BUFFERS)}}
        rows = [math.prod(entries[i].shape[1:]) * entries[i].element_size() if i in entries else 0 for i in _rows(plan)]
        self._row_bytes = upload(rows, plan.device).view(-1, 1)  # of parameters and buffers, as in a table of tensors
        self._grad_row_bytes = math.prod(owner.shape[1:]) * key.dtypes[1].itemsize

    def compile(self, names: Sequence[str], log: CompilationLog, *, compiled: bool) -> None:
        """Obtain the kernels for the parameters ``names``."""
        if self.copies is not None:
            self._index = self.copies.index
        if count := len(self._index):
            self.kernels = [stack_loops.obtain(self.key, part, count, names, log) for part in self.parts]

    def update(self, table: CoefficientTable) -> None:
        """Update in place the tensors whose gradients have addresses in ``table``."""
        self._run(self.tensors, table.grads, table)

    def update_copies(self, copies: Copies, grads: Tensor, table: CoefficientTable) -> None:
        """Update copies from stacked ``grads``, for the tensors whose gradients are marked in ``table``."""
        param, grad, *buffers = copies.collect(grads)
        if len(param):
            tensors = table.inputs.new_zeros(len(self._row_bytes), table.inputs.shape[1])
            for row, stack in zip([PARAM, *range(BUFFERS, len(tensors))], [param, *buffers], strict=True):
                tensors[row].index_copy_(0, self._index, _starts(stack))
            is_there = table.grads.index_select(0, self._index) != 0
            addresses = torch.zeros_like(table.grads).index_copy_(0, self._index, _starts(grad) * is_there)
            self._run(tensors, addresses, table)
        copies.spread([param, *buffers])

    def _run(self, tensors: Tensor, grads: Tensor, table: CoefficientTable) -> None:
        """Update the tensors whose addresses are ``tensors``, a table, from gradients whose addresses are ``grads``."""
        arguments = {"index": self._index, "outcome": table.outcome, "coefficients": table.coefficients}
        for part, kernels in zip(self.parts, self.kernels, strict=True):
            arguments |= {"tensors": tensors, "grads": grads}
            if part.first:
                offset = self._grad_row_bytes * part.first
                arguments["tensors"] = torch.add(tensors, self._row_bytes, alpha=part.first)
                arguments["grads"] = torch.add(grads, grads.sign(), alpha=offset)  # 0 stays 0
            kernels.run(arguments, table.inputs.shape[1])


class Copies:
    """Tensors of one shape and one dtype each for parameters, gradients and every buffer, copied into stacks and out again.

    An update gets tensors of shape (tensors, columns) for vectors, and (tensors, batch, rows, columns) for parameters of
    more dimensions, whose axes are in the rule's order. A rule of granularity "matrix" gets (tensors, ..., rows, columns).
    Of DTensors, the local shards are stacked.

    Attributes:
        index: the columns of the tensors that this process updates, int64 on the device.
        owners: the assignment of DTensors to processes; None if each process updates all.
    """

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        self.positions, self.grad_dtype = positions, key.dtypes[1]
        self.copied_gradients: Tensor | None = None
        members = [plan.members[i] for i in positions]
        self._params = [m.param.data for m in members]  # the plan counts the versions of the parameters
        self._owner = members[0].owner
        self.numel = len(members) * self._owner.numel()
        self._matrices = plan.rule.granularity == "matrix"
        axes = plan.rule.axes_of(self._owner.shape, plan.statics)
        self._axes = None if axes == tuple(range(len(axes))) else axes
        self.index = torch.tensor(positions, device="cpu").to(plan.device)
        self._buffers = [stack_of([m.entries[name] for m in members]) for name in plan.buffers]
        for name, stacked in zip(plan.buffers, self._buffers, strict=True):
            for member, view in zip(members, stacked.unbind(), strict=True):
                member.put(name, view)
        entries = [members[0].state[name] for name in plan.buffers]
        self._likes: list[Tensor] = [self._owner, self._owner, *entries]  # with the placements of param, grad and buffers
        self.owners: Owners | None = None

    def share(self, first: int) -> None:
        """Assign each DTensor to one process, if that is possible: the first one to process ``first``, and so on."""
        self.owners = owners(self._likes, len(self.positions), first)
        if self.owners is not None:
            self.index = self.index[self.owners.owned]

    def gathered(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return the stack's gradients among ``grads`` in one tensor, with 0 for absent ones; None if all are absent."""
        filled = self._filled(grads)
        return stack_of(filled) if filled else None

    def copy_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Copy the stack's gradients among ``grads``, 0 for absent ones, to ``copied_gradients``, whose address is fixed."""
        if self.copied_gradients is None:
            like = self._params[0]
            self.copied_gradients = like.new_zeros(len(self.positions), *like.shape, dtype=self.grad_dtype)
        if filled := self._filled(grads):
            torch.stack(filled, out=self.copied_gradients)
        else:
            self.copied_gradients.zero_()

    def _filled(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the stack's gradients among ``grads``, with 0 for absent ones; an empty list if all are absent."""
        stacked = [grads[i] for i in self.positions]
        present = next((grad for grad in stacked if grad is not None), None)
        return [] if present is None else [torch.zeros_like(present) if grad is None else grad for grad in stacked]

    def collect(self, grads: Tensor) -> list[Tensor]:
        """Return parameters, ``grads`` and buffers of the tensors that this process updates, as an update takes them."""
        stored = [stack_of(self._params), grads, *self._buffers]
        if self.owners is not None:
            return list(map(self._arranged, self.owners.collect(stored)))
        return list(map(self._arranged, map(whole_stack, stored, self._likes)))

    def spread(self, updated: Sequence[Tensor]) -> None:
        """Copy this process's parts of all tensors back, from the new parameters and buffers of an update."""
        kinds = [0, *range(2, len(self._likes))]
        full = [self._restored(new, self._likes[kind]) for new, kind in zip(updated, kinds, strict=True)]
        if self.owners is not None:
            param, *buffers = self.owners.spread(full, kinds)
        else:
            param, *buffers = (parts_of_stack(new, self._likes[kind]) for new, kind in zip(full, kinds, strict=True))
        torch._foreach_copy_(self._params, param.unbind())
        if self._buffers:  # a separate call, since tensors of several dtypes are copied one by one
            torch._foreach_copy_(self._buffers, buffers)

    def _arranged(self, full: Tensor) -> Tensor:
        if self._axes:
            full = full.permute(0, *(1 + axis for axis in self._axes)).contiguous()
        if self._owner.dim() < 2:
            return full.view(len(full), math.prod(full.shape[1:]))  # also on a process that updates none
        return full if self._matrices else full.view(len(full), math.prod(full.shape[1:-2]), *full.shape[-2:])

    def _restored(self, updated: Tensor, like: Tensor) -> Tensor:
        if self._axes is None:
            return updated.view(len(updated), *like.shape)
        full = updated.view(len(updated), *(like.shape[axis] for axis in self._axes))
        return full.permute(0, *(1 + self._axes.index(axis) for axis in range(like.dim())))


def stack_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``tensors`` in one contiguous tensor; a single contiguous one is not copied."""
    stacked = tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
    return stacked if stacked.is_contiguous() and is_plain(stacked) else plain_copy(stacked)


def _are_in_order(plan: Plan, members: Sequence[Member]) -> bool:
    """Return True if the memory of the parameters is in the order in which the rule sees their elements."""
    shape = members[0].owner.shape
    if plan.sharded or plan.rule.axes_of(shape, plan.statics) != tuple(range(len(shape))):
        return False
    return all(member.param.is_contiguous() and is_plain(member.param) for member in members)


def _rows(plan: Plan) -> range:
    """Return the rows of a table of tensors."""
    return range(BUFFERS + len(plan.buffers))


def _starts(stack: Tensor) -> Tensor:
    """Return the address of each tensor in a contiguous stack, int64, without waiting for the device."""
    start, size = stack.data_ptr(), stack.nbytes // len(stack)
    return torch.arange(start, start + stack.nbytes, size, device=stack.device)


def _square_sum(stack: Tensor) -> Tensor:
    """Return the sum of squares, equal bit for bit at any address; see :func:`~compiled_optim.plan.clipping.square_sum`."""
    rows = stack.view(len(stack), math.prod(stack.shape[1:]))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square().sum()
