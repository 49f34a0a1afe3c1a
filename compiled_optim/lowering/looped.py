"""Lowerings of rules on whole tensors to loops over stacks, and products of matrices between them.

The loops are C++ on a CPU and Triton on a GPU. On a GPU the tensors of a stack are updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import triton_stacks
from compiled_optim.lowering.kernels.cpp_stacks import StackLoops, stack_source
from compiled_optim.lowering.kernels.table import BUFFERS, PARAM, CoefficientTable
from compiled_optim.lowering.multi_tensor import MultiTensorLowering
from compiled_optim.lowering.stacked import Stack, StackTableLowering
from compiled_optim.lowering.torch_ops.eager import Lowering
from compiled_optim.lowering.torch_ops.inductor import fits_indices
from compiled_optim.memory.cache import library
from compiled_optim.memory.layout import compute_dtype, is_plain, overlap_shifted, plain_copy
from compiled_optim.memory.torch_internals import Captures
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import COEFFICIENTS, CompilationLog, KernelKey, kernel_key
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.transforms import equal_parts

_ELEMENTS = {"tensor": 1 << 22, "matrix": 1 << 20}
"""The most elements in a stack of several tensors, by granularity: sums then need little memory, products fit in caches."""

_BYTES, _TENSORS = 1 << 27, 65535  # the most bytes of parameters, and tensors, in a stack of several on a GPU

_kernels: dict[KernelKey, Any] = {}  # functions of a stack's shape that return its kernel
_examples: dict[str, tuple[int, ...]] = {}  # the first shape with some code, by that code


def refusal(plan: Plan, source_of: Callable[..., Any] = stack_source) -> str | None:
    """Return why loops, as ``source_of`` writes them, and products cannot run the rule on the plan's tensors.

    None if they can; empty if the reason is not in the rule.
    """
    pairs = zip(plan.members, plan.grad_dtypes, strict=True)
    keys = dict.fromkeys((kernel_key(plan, m, dtype, ""), m.owner.shape) for m, dtype in pairs if m.owner.numel())
    refusals = (_refusal(plan, source_of, key, shape) for key, shape in keys)
    return next((why for why in refusals if why is not None), None)


def refusal_in_place(plan: Plan) -> str | None:
    """Return :func:`refusal`; also empty if tensors cannot be updated in place, or their elements exceed 32-bit indices."""
    shapes = {member.owner.shape for member in plan.members}
    if plan.sharded or not all(fits_indices(plan.device, s.numel()) for s in shapes):
        return ""
    if any(plan.rule.axes_of(s, plan.statics) != tuple(range(len(s))) for s in shapes):
        return ""
    tensors = [tensor for m in plan.members for tensor in (m.param, *(m.entries[name] for name in plan.buffers))]
    in_place = all(t.is_contiguous() and is_plain(t) and not t.is_complex() for t in tensors)
    return refusal(plan, triton_stacks.stack_source) if in_place else ""


def _refusal(plan: Plan, source_of: Callable[..., Any], key: KernelKey, shape: torch.Size) -> str | None:
    if plan.rule.granularity == "matrix" and len(shape) < 2:  # flattened after the optimizer was constructed
        return ""
    key, fields, parts = _of_parts(key), {b.name: b for b in plan.rule.buffers}, _parts(plan.rule, plan.statics, shape)
    if len(parts) > 1 and (len(shape) > 2 or plan.rule.reads_index(plan.statics)):
        return ""  # the matrices of a part are not contiguous, or its elements have indices in the whole tensor
    for part in parts:
        source, *others = (source_of(each, part.shape) for each in dict.fromkeys((key, key.with_all_buffers())))
        if whys := [each for each in (source, *others) if isinstance(each, str)]:
            return whys[0]
        sizes, whole = source.update.sizes(part.shape), torch.Size(part.shape) if len(parts) > 1 else shape
        shapes = [plan.rule.shape_of(fields[name], whole, plan.statics) for name in plan.buffers]
        axes = [source.update.inputs[f"buffer{i}"] for i in range(len(shapes))]
        if [math.prod(s) for s in shapes] != [math.prod(sizes[letter] for letter in letters if letter) for letters in axes]:
            return f"{plan.rule.name} has state of another shape than the parameter's"
    return None


class Rows(NamedTuple):
    """Rows of a tensor that loops update as one: a vector, a matrix, or a batch of matrices.

    ``first`` is the index of the first row, ``shape`` the shape that loops see.
    """

    first: int
    shape: tuple[int, ...]


def _parts(rule: Rule, statics: Mapping[str, Any], shape: torch.Size) -> list[Rows]:
    """Return the parts of a parameter; consecutive equal ones are a batch."""
    if rule.granularity != "matrix":
        sizes = [shape[axis] for axis in rule.axes_of(shape, statics)]
        return [Rows(0, (shape.numel(),) if len(sizes) < 2 else (math.prod(sizes[:-2]), *sizes[-2:]))]
    *batch, rows, columns = shape
    parts = [(first, count * math.prod(batch), size) for first, count, size in equal_parts(statics.get("split") or [rows])]
    return [Rows(first, (count, size, columns) if batch or count > 1 else (size, columns)) for first, count, size in parts]


def _of_parts(key: KernelKey) -> KernelKey:
    """Return the key without ``split``, for which the rule updates each part as a whole."""
    if key.rule.granularity != "matrix":
        return key
    return dataclasses.replace(key, statics=tuple(choice for choice in key.statics if choice[0] != "split"))


class LoopLowering(StackTableLowering):
    """The step of one plan for which :func:`refusal` is None."""

    stacks: Sequence[LoopStack]

    def _stacked(self, positions: Sequence[int], key: KernelKey) -> LoopStack:
        return LoopStack(self.plan, positions, key)

    def _key(self, member: Member, grad_dtype: torch.dtype) -> KernelKey:
        return kernel_key(self.plan, member, grad_dtype, "")

    def _most(self, key: KernelKey, shape: torch.Size) -> int:
        return max(_ELEMENTS[self.plan.rule.granularity] // shape.numel(), 1)

    def _kernel_of(self, stack: Stack, names: Sequence[str]) -> Any:
        assert isinstance(stack, LoopStack)
        loops = functools.partial(StackLoops, load=functools.cache(library))  # shared by shapes, loaded before any step
        loops_of = {}
        for part, shape in zip(stack.parts, stack.shapes, strict=True):
            key = _key(stack.key, part, stack_source)
            loops_of[shape] = self._log.obtain(_kernels, key, names, functools.partial(_by_shape, loops, shape))(shape)
        return loops_of.__getitem__

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        Lowering.prepare(self, grads, captures)
        capturing = self.plan.device in captures
        self.hypers.prepare(capturing)
        if not self.plan.addresses.unlike:
            self.table.gradients.follow(self.plan.addresses, capturing)
            return
        pairs = zip(self._grads, self.plan.members, strict=True)
        self._grads = [None if grad is None else _arranged(grad, member.param) for grad, member in pairs]
        self.table.gradients.publish(self._grads, capturing)

    measure = Lowering.measure

    def launch(self) -> None:
        self._evaluator.evaluate(self.table)
        if not self.table.outcome[1]:
            for stack in self.stacks:
                stack.update(self._grads, self.table)


class LoopStack(Stack):
    """Tensors of one shape, which are updated in place if their memory is as an update reads it, and otherwise in copies."""

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        super().__init__(plan, positions, key)
        self.parts = _parts(plan.rule, plan.statics, self._owner.shape)
        fits = self._axes is None and not plan.sharded
        self._in_place = fits and all(param.is_contiguous() and is_plain(param) for param in self._params)
        self._addresses = torch.tensor([param.data_ptr() for param in self._params], device="cpu")

    def share(self, first: int) -> None:
        super().share(first)
        count = len(self._owned) if len(self.parts) == 1 else 1
        self.shapes = [(count, *part.shape) for part in self.parts]  # of the rows that a kernel updates at once

    def update(self, grads: Sequence[Tensor | None], table: CoefficientTable) -> None:
        """Update the tensors that have a gradient in ``grads``, the plan's, with coefficients of ``table``."""
        if all(grads[i] is None for i in self.positions):
            return
        if self._in_place:
            self._run(self._addresses, table.gradients.pointers, self._buffers, table)
            return
        gathered = self.gathered(grads)
        assert gathered is not None
        param, grad, *buffers = self._as_updated(gathered)
        columns = [self.positions[i] for i in self._owned]
        present = [(i, row.data_ptr()) for i, row in zip(columns, grad, strict=True) if grads[i] is not None]
        pointers = torch.zeros_like(table.gradients.pointers)
        pointers.numpy()[[i for i, _ in present]] = [address for _, address in present]
        if self._owned:
            self._run(torch.tensor([row.data_ptr() for row in param], device="cpu"), pointers, buffers, table)
        local_param, *local_buffers = self._as_stored([param, *buffers])
        _copy(self._params, local_param.unbind())
        _copy(self._buffers, local_buffers)

    def _run(self, params: Tensor, grads: Tensor, buffers: Sequence[Tensor], table: CoefficientTable) -> None:
        tensors = {"coefficients": table.coefficients, "outcome": table.outcome, "index": self._index}
        tensors |= {"params": params, "grads": grads, **{f"buffer{i}": buffer for i, buffer in enumerate(buffers)}}
        addresses, columns = {name: tensor.data_ptr() for name, tensor in tensors.items()}, table.coefficients.shape[1]
        if len(self.parts) == 1:
            self.kernel(self.shapes[0]).run(addresses, columns)
            return
        for part, shape in zip(self.parts, self.shapes, strict=True):
            for rows in self._each(part, params, grads, buffers):
                self.kernel(shape).run(addresses | {name: tensor.data_ptr() for name, tensor in rows.items()}, columns)

    def _each(self, part: Rows, params: Tensor, grads: Tensor, buffers: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield a kernel's arguments for ``part`` of each tensor in turn: in the stack, these parts are not contiguous."""
        row, grad_row = (part.shape[-1] * dtype.itemsize for dtype in self.key.dtypes[:2])
        grads = _moved(grads, part.first * grad_row)
        for i, address in enumerate(torch.split(params + part.first * row, 1)):
            rows = {f"buffer{j}": buffer[i, part.first :] for j, buffer in enumerate(buffers)}
            yield {"index": self._index[i:], "params": address, "grads": grads, **rows}


class KernelStackLowering(MultiTensorLowering):
    """The step of one plan on a GPU for which :func:`refusal_in_place` is None."""

    name = "stacked"

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping, log)
        positions: dict[tuple[KernelKey, torch.Size], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.owner.numel():
                positions.setdefault((kernel_key(plan, member, grad_dtype, ""), member.owner.shape), []).append(i)
        self.stacks = [
            KernelStack(plan, where[start : start + most], key, part)
            for (key, shape), where in positions.items()
            for most in [min(max(_BYTES // (compute_dtype(key.dtypes[0]).itemsize * shape.numel()), 1), _TENSORS)]
            for start in range(0, len(where), most)
            for part in _parts(plan.rule, plan.statics, shape)
        ]

    def _table_key(self, member: Member, grad_dtype: torch.dtype) -> KernelKey:
        return dataclasses.replace(super()._table_key(member, grad_dtype), arrangement=COEFFICIENTS)

    def compile(self) -> None:
        super().compile()
        for stack in self.stacks:
            names = [self.plan.members[i].name for i in stack.positions]
            make = functools.partial(_by_shape, triton_stacks.StackKernels, stack.shape)
            stack.kernels = self._log.obtain(_kernels, stack.key, names, make)(stack.shape)

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        super().prepare(grads, captures)
        self._is_captured = self.plan.device in captures

    def resumes(self, grads: list[Tensor | None] | None, *, state: bool, keep_alive: bool) -> bool:
        self._is_captured = False
        return super().resumes(grads, state=state, keep_alive=keep_alive)

    def copy_gradients_for_graph(self) -> None:
        self._is_captured = True  # the capture comes next; the table has the addresses of gradients

    def launch(self) -> None:
        with self._on_device:
            self.tables[0].kernel.evaluate(self.table)
            for stack in self.stacks:  # in a replay, other parameters may have gradients
                if self._is_captured or not self.table.gradients.are_absent(stack.positions):
                    stack.update(self.tables[0].tensors, self.table)


class KernelStack:
    """A part of tensors of one shape at ``positions`` of a plan."""

    kernels: triton_stacks.StackKernels  # assigned when compiled

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey, part: Rows) -> None:
        self.positions, self.key = positions, _key(key, part, triton_stacks.stack_source)
        self.shape = (len(positions), *part.shape)
        self._index = torch.tensor(positions, device="cpu").to(plan.device)
        self._bytes_before: Tensor | None = None  # of parameters and buffers, as in a tensor table
        if part.first:
            member = plan.members[positions[0]]
            tensors = {PARAM: member.param, **{i: member.entries[name] for i, name in enumerate(plan.buffers, BUFFERS)}}
            before = [tensors[i][: part.first].nbytes if i in tensors else 0 for i in range(BUFFERS + len(plan.buffers))]
            self._bytes_before = torch.tensor(before, device="cpu").view(-1, 1).to(plan.device)
            self._grad_bytes_before = part.first * part.shape[-1] * key.dtypes[1].itemsize

    def update(self, tensors: Tensor, table: CoefficientTable) -> None:
        """Update the tensors whose rows in a tensor table are ``tensors``, with coefficients of ``table``."""
        grads = table.grads
        if self._bytes_before is not None:
            tensors, grads = tensors + self._bytes_before, _moved(grads, self._grad_bytes_before)
        arguments = {"tensors": tensors, "grads": grads, "index": self._index, "outcome": table.outcome}
        self.kernels.run(arguments | {"coefficients": table.coefficients}, table.inputs.shape[1])


def _by_shape(kind: Callable[..., Any], shape: Sequence[int], key: KernelKey) -> Callable[[Sequence[int]], Any]:
    """Return a cached function from the shape of stacks of ``key`` to their ``kind`` of kernel; compile ``shape`` now."""
    of_shape = functools.cache(functools.partial(kind, key))
    of_shape(shape)
    return of_shape


def _key(key: KernelKey, part: Rows, source_of: Callable[..., Any]) -> KernelKey:
    """Return the key of the kernel that updates ``part`` of tensors of ``key``; stacks with the same code share it."""
    key = _of_parts(key)
    source = source_of(key, part.shape)
    assert not isinstance(source, str), "loops cannot run all of the plan"
    # Triton specializes its code on these, too.
    kinds = "" if key.device == "cpu" else str([(size == 1, size % 16 == 0) for size in part.shape])
    example = _examples.setdefault(source.text + kinds, part.shape)
    return dataclasses.replace(key, arrangement=f"loops over stacks like {' x '.join(map(str, example))}")


def _moved(grads: Tensor, offset: int) -> Tensor:
    """Return the addresses of gradients plus ``offset`` bytes; 0 for absent ones."""
    return torch.add(grads, grads.sign(), alpha=offset)


def _copy(to: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy each of ``new`` into its tensor in ``to``, unless both have the same memory."""
    for old, tensor in zip(to, new, strict=True):
        if old.data_ptr() != tensor.data_ptr():
            old.copy_(tensor)


def _arranged(grad: Tensor, param: Tensor) -> Tensor:
    """Return ``grad`` as loops read it: contiguous, and without an overlap with ``param``; a copy only if needed."""
    return grad if grad.is_contiguous() and is_plain(grad) and not overlap_shifted(grad, param) else plain_copy(grad)
