"""The lowering of rules that are not elementwise: equal tensors are stacked, and each stack is updated at once.

Loops update the tensors of a stack in place where their memory allows it. Otherwise parameters and gradients are copied into
a contiguous stack, and parameters are copied out; state then lives in stacks. A stack is large enough to keep the device
busy, and small enough that its copies need little memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

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
from compiled_optim.lowering.stack_loops import LoopKernels, Loops
from compiled_optim.memory.layout import (
    compute_dtype,
    is_plain,
    parts_of_stack,
    plain_copy,
    whole_stack,
)
from compiled_optim.memory.torch_compiler import ListFunction
from compiled_optim.memory.torch_internals import Captures, is_capturing, without_autocast
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
        assert not plan.outputs.choice, "updates of stacks have no outputs"
        self.name = "stacked" if compiled else "eager"
        self._of_table = coefficients if isinstance(coefficients, TableCoefficients) else None
        positions: dict[tuple[KernelKey, torch.Size, bool], list[int]] = {}
        for i, (member, dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            key = stack_code.key_of(plan, member, dtype) if loops is None else kernel_key(plan, member, dtype, "")
            in_place = loops is not None and _is_in_order(plan, member)
            if member.owner.numel() > 0:
                positions.setdefault((key, member.owner.shape, in_place), []).append(i)
        self._by_code: list[CodeStack] = []
        self._by_loops: list[LoopStack] = []
        for (key, shape, in_place), where in positions.items():
            elements = stack_code.most_elements(key) if loops is None else loops.most_elements(key)
            most = min(max(elements // shape.numel(), 1), stack_loops.MOST_TENSORS)
            for part in (where[start : start + most] for start in range(0, len(where), most)):
                if loops is None:
                    self._by_code.append(CodeStack(plan, part, key, compiled=compiled))
                else:
                    self._by_loops.append(LoopStack(plan, part, key, loops, in_place=in_place))
        self.stacks: list[CodeStack | LoopStack] = [*self._by_code, *self._by_loops]
        self._copies = [stack.copies for stack in self.stacks if stack.copies is not None]
        firsts = itertools.accumulate((len(copies.positions) for copies in self._copies), initial=0)
        for first, copies in zip(firsts, self._copies, strict=False):
            copies.share(first)
        if gathered := [copies for copies in self._copies if plan.sharded and copies.owners is None]:
            name = plan.members[gathered[0].positions[0]].name
            log.fall_back(
                f"every process updates all of '{name}', which is split over more than one dimension of its mesh",
                "a step takes longer",
            )

    def compile(self) -> None:
        if self._of_table is not None:  # raises at once if the compiler does not work
            self._compile_tables(self._of_table)
        for stack in self.stacks:
            stack.compile([self.plan.members[i].name for i in stack.positions], self._log)

    def _compile_tables(self, coefficients: TableCoefficients) -> None:
        """Make the tables of coefficients, and of the tensors that are updated in place."""
        plan, positions = self.plan, dict[KernelKey, list[int]]()
        for i, dtype in enumerate(plan.grad_dtypes):
            positions.setdefault(coefficient_key(plan, dtype), []).append(i)
        kernels = [coefficients.obtain(key, where) for key, where in positions.items()]
        coefficients.compile(kernels[0])
        in_place = [stack for stack in self.stacks if stack.copies is None]
        self._tensors, self._orders = tensor_rows(plan, itertools.chain(*(stack.positions for stack in in_place)))
        measured = ([i for i in where if i in self._orders] for where in positions.values())
        self.tables = [
            KernelTensors(kernel, plan, self._tensors, coefficients.table.gradients, where, 0)
            for kernel, where in zip(kernels, measured, strict=True)
            if where
        ]
        self.square_sum_count = sum(table.square_sum_count for table in self.tables) + bool(self._copies)
        self.reads_addresses = bool(self.tables) and not self._copies

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        self._reads_copies = False
        if self._of_table is None:
            super().prepare(grads, captures)
            return
        capturing, gradients = self.plan.device in captures, self._of_table.table.gradients
        self.coefficients.prepare(capturing)
        if self.reads_addresses and not self.plan.addresses.unlike:
            gradients.follow(self.plan.addresses, capturing)
            return
        self._grads = self.plan.gradients(grads)
        if not self.tables:
            gradients.mark(self._grads, capturing)
        elif not self.plan.addresses.unlike:
            gradients.follow(self.plan.addresses, capturing)
        else:
            grads_of = {i: grad for i, grad in enumerate(self._grads) if grad is not None}
            arranged = {i: self._orders[i].arranged(grad) if i in self._orders else grad for i, grad in grads_of.items()}
            self._grads = list(map(arranged.get, range(len(self._grads))))
            gradients.publish(self._grads, capturing)

    def copy_gradients_for_graph(self) -> None:
        for copies in self._copies:
            copies.copy_gradients(self._grads)
        self._reads_copies = True

    def measure(self) -> None:
        if self._of_table is None:
            super().measure()
            return
        with self._of_table.on_device:
            for table in self.tables:
                table.kernel.measure(table)
        if self._copies:
            grads = itertools.chain(*map(self._one_by_one, self._copies))
            self._square_sum.fill_(sum(map(_square_sum, grads), 0.0))

    def _one_by_one(self, copies: Copies) -> Iterable[Tensor]:
        """Return the prepared gradients of ``copies`` in stacks of one tensor, which are not copied if contiguous."""
        if self._reads_copies:
            assert copies.copied_gradients is not None
            return torch.split(copies.copied_gradients, 1)
        return (stack_of([grad]) for i in copies.positions if (grad := self._grads[i]) is not None)

    def _gradients(self, copies: Copies) -> Tensor | None:
        """Return the prepared gradients of ``copies``, with 0 for absent ones; None if it has none."""
        return copies.copied_gradients if self._reads_copies else copies.gathered(self._grads)

    def _update(self) -> None:
        if self._by_code:
            columns = self.coefficients.columns()
            with without_autocast():
                for stack in self._by_code:
                    if (grads := self._gradients(stack.copies)) is not None:
                        stack.update(grads, columns)
        if self._by_loops:
            assert self._of_table is not None
            self._run_loops(self._of_table)

    def _run_loops(self, coefficients: TableCoefficients) -> None:
        table, captured = coefficients.table, is_capturing(self.plan.device)  # a replay may have other gradients
        with coefficients.on_device:
            for stack in self._by_loops:
                if stack.copies is None:
                    if captured or not table.gradients.are_absent(stack.positions):
                        stack.update(self._tensors, table)
                elif (grads := self._gradients(stack.copies)) is not None:
                    stack.update_copies(stack.copies, grads, table)


class CodeStack:
    """Tensors of one shape that code of torch operations updates, in ``copies``; Inductor compiles it if ``compiled``."""

    code: ListFunction  # assigned when compiled

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey, *, compiled: bool) -> None:
        self.positions, self._key, self._compiled = positions, key, compiled
        self.copies = Copies(plan, positions, key)
        self._dtype = compute_dtype(key.dtypes[0])

    def compile(self, names: Sequence[str], log: CompilationLog) -> None:
        """Obtain the code for the parameters ``names``."""
        self.code = stack_code.obtain(self._key, self.copies.numel, names, log, compiled=self._compiled)
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
    """Tensors of one shape that ``loops`` update: in place, or else in ``copies``.

    Each part of tensors with ``split`` has kernels of its own.
    """

    kernels: Sequence[LoopKernels]  # assigned when compiled, by a process that updates some of the tensors

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey, loops: Loops, *, in_place: bool) -> None:
        self.positions, self.key, self._loops = positions, key, loops
        member = plan.members[positions[0]]
        self.parts = stack_loops.row_parts(plan.rule, plan.statics, member.owner.shape)
        self.copies = None if in_place else Copies(plan, positions, key)
        entries = [member.owner, *(member.state[name] for name in plan.buffers)]
        sizes = dict(zip([PARAM, *range(BUFFERS, BUFFERS + len(plan.buffers))], map(_row_bytes, entries), strict=True))
        self._row_bytes = torch.tensor([sizes.get(row, 0) for row in range(max(sizes) + 1)], device="cpu")
        self._grad_row_bytes = _row_bytes(member.owner) // member.owner.element_size() * key.dtypes[1].itemsize

    def compile(self, names: Sequence[str], log: CompilationLog) -> None:
        """Obtain the kernels for the parameters ``names``."""
        device = torch.device(self.key.device)
        self._index = upload(self.positions, device) if self.copies is None else self.copies.index
        self._row_bytes = upload(self._row_bytes, device).view(-1, 1)
        if count := len(self._index):
            self.kernels = [stack_loops.obtain(self._loops, self.key, part, count, names, log) for part in self.parts]

    def update(self, tensors: Tensor, table: CoefficientTable) -> None:
        """Update in place, at the addresses in ``tensors``, the tensors whose gradients have addresses in ``table``."""
        self._run(tensors, table.grads, table)

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
        _copy(self._params, param.unbind())
        _copy(self._buffers, buffers)  # a separate call, since tensors of several dtypes are copied one by one

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


def _is_in_order(plan: Plan, member: Member) -> bool:
    """Return True if the memory of a parameter is in the order in which the rule sees its elements."""
    shape = member.owner.shape
    axes = [axis for axis in plan.rule.axes_of(shape, plan.statics) if shape[axis] != 1]
    return not plan.sharded and axes == sorted(axes) and member.param.is_contiguous() and is_plain(member.param)


def _row_bytes(tensor: Tensor) -> int:
    """Return the size of a contiguous tensor's row, along its first dimension."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _copy(to: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy each of ``new`` into its tensor in ``to``, unless it was updated there."""
    pairs = [(old, t) for old, t in zip(to, new, strict=True) if _storage(old) != _storage(t)]
    if pairs:
        torch._foreach_copy_([old for old, _ in pairs], [t for _, t in pairs])


def _storage(tensor: Tensor) -> object:
    return tensor.untyped_storage()._cdata


def _starts(stack: Tensor) -> Tensor:
    """Return the address of each tensor in a contiguous stack, int64, without waiting for the device."""
    start, size = stack.data_ptr(), stack.nbytes // len(stack)
    return torch.arange(start, start + stack.nbytes, size, device=stack.device)


def _square_sum(stack: Tensor) -> Tensor:
    """Return the sum of squares, equal bit for bit at any address; see :func:`~compiled_optim.plan.clipping.square_sum`."""
    rows = stack.view(len(stack), math.prod(stack.shape[1:]))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square().sum()
