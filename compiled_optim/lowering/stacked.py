"""Lowerings of rules that are not elementwise: equal tensors are stacked, and each stack is updated at once.

State lives in the stacks. Parameters and gradients are copied in, unless a stack has a single tensor, and parameters are
copied out. A stack is large enough to keep the device busy, and small enough that its copies need little memory.

Inductor compiles a rule that reduces for stacks of any size, so neither the number of tensors nor their shapes cause
a recompile. It compiles a rule on matrices once for each of their shapes, for any number of matrices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.kernels.table import CoefficientTable
from compiled_optim.lowering.multi_tensor import Capturable
from compiled_optim.lowering.owners import Owners, owners
from compiled_optim.lowering.torch_ops.eager import TorchLowering
from compiled_optim.lowering.torch_ops.inductor import OPTIONS, fits_indices, say_too_large
from compiled_optim.memory.layout import compute_dtype, is_plain, parts_of_stack, plain_copy, whole_stack
from compiled_optim.memory.torch_compiler import Code, compiled
from compiled_optim.memory.torch_internals import Captures
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog, KernelKey, coefficient_key, kernel_key
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import INDEX, number_type

BLOCK = 256  # numbers that a program adds up in the second stage
_ALONE = 1 << 13  # the most numbers that one program adds up if the compiler knows their count


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that replace Inductor's own, by operator."""
    return {torch.ops.aten.mean.dim: _mean, torch.ops.aten.linalg_vector_norm.default: _norm}


def _mean(x: Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not keepdim or dtype is not None:
        return NotImplemented
    return _sum(x, dims) / math.prod(x.shape[d] for d in dims)


def _norm(
    x: Tensor, order: float, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if order != 2 or dims is None or not keepdim or dtype is not None:
        return NotImplemented
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _sum(wide * wide, dims).sqrt().to(x.dtype)


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sum over adjacent dimensions, which become dimensions of size 1."""
    left = sorted(d % x.dim() for d in dims)
    shape = [1 if d in left else size for d, size in enumerate(x.shape)]
    if left[-1] == x.dim() - 1 > 1:
        x = x.sum(-1, keepdim=True)
        del left[-1]
    if left:
        x = _sum_in_blocks(x.flatten(left[0], left[-1]), left[0])
    return x.reshape(shape)


def _sum_in_blocks(x: Tensor, dim: int) -> Tensor:
    """Return the sum over one dimension of any size.

    Padding would copy everything, so the last block reads the last number again and counts it as 0.
    """
    size = x.shape[dim]
    if isinstance(size, int) and size <= _ALONE:
        return x.sum(dim)
    index = torch.arange((size + BLOCK - 1) // BLOCK * BLOCK, device=x.device)
    exists = (index < size).view([-1 if d == dim else 1 for d in range(x.dim())])
    padded = torch.where(exists, x.index_select(dim, index.clamp(max=size - 1)), 0.0)
    blocks = padded.view(*x.shape[:dim], -1, BLOCK, *x.shape[dim + 1 :])
    return blocks.sum(dim + 1).sum(dim)


_COUNT = 5
_EXAMPLES = {"vectors": (_COUNT, 7), "matrices": (_COUNT, 3, 11, 7)}
"""Sizes to compile with, for any sizes. All differ, since Inductor assumes that equal sizes stay equal."""

_LARGE_EXAMPLES = {"vectors": (_COUNT, 8191), "matrices": (_COUNT, 3, 1031, 769)}
"""The same for accelerators, where Inductor chooses its blocks by these sizes."""

_SEQUENTIAL = {"cpu"}  # devices on which one thread may process a whole tensor

# With it, reductions over different dimensions of any size fail on a GPU: "CantSplit" (torch 2.13).
_OPTIONS = {"loop_ordering_after_fusion": False, "assert_indirect_indexing": False}

_BYTES = 1 << 27
"""The most bytes in a stack of several tensors, of their widest dtype. A step needs 6 to 8 times as many besides."""

_CACHED_BYTES = 1 << 27
"""The most bytes of gradients that stay stacked between :meth:`StackTableLowering.measure` and the update."""

_CPU_ELEMENTS = 1 << 17
"""The most elements in a stack of several tensors on a CPU: copies and results stay in the cache, and malloc keeps them."""

_STACKS = "stacks of "  # the prefix of arrangements that Inductor compiles
_kernels: dict[KernelKey, Code | str] = {}  # or the reason if none compiles


class StackedLowering(TorchLowering):
    """The step of one plan with stacks of equal tensors, which are not complex.

    Each DTensor is gathered by one process, stack by stack. Those that are split along more than one dimension are gathered
    by every process instead. If ``compiled``, Inductor's kernels update the stacks, else plain torch operations.
    """

    name = "stacked"

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog, *, compiled: bool = True) -> None:
        super().__init__(plan, clipping, log)
        self._compiled = compiled
        self.name = "stacked" if compiled else "eager"
        positions: dict[tuple[KernelKey, torch.Size], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.owner.numel() > 0:
                positions.setdefault((self._key(member, grad_dtype), member.owner.shape), []).append(i)
        self.stacks: Sequence[Stack] = [
            self._stacked(where[start : start + most], key)
            for (key, shape), where in positions.items()
            for most in [self._most(key, shape)]
            for start in range(0, len(where), most)
        ]
        firsts = itertools.accumulate((len(stack.positions) for stack in self.stacks), initial=0)
        for first, stack in zip(firsts, self.stacks, strict=False):
            stack.share(first)
        if gathered := [s for s in self.stacks if plan.sharded and s.owners is None]:
            name = plan.members[gathered[0].positions[0]].name
            log.fall_back(
                f"every process updates all of '{name}', which is split over more than one dimension of its mesh",
                "a step takes longer",
            )

    def _stacked(self, positions: Sequence[int], key: KernelKey) -> Stack:
        return Stack(self.plan, positions, key)

    def compile(self) -> None:
        for stack in self.stacks:
            stack.kernel = self._kernel_of(stack, [self.plan.members[i].name for i in stack.positions])

    def _kernel_of(self, stack: Stack, names: Sequence[str]) -> Any:
        """Return the kernel of ``stack``, whose tensors have these ``names``."""
        if self._compiled and fits_indices(self.plan.device, stack.numel):
            return self._log.obtain_or_fall_back(_kernels, stack.key, names, _make, _uncompiled)
        if self._compiled:
            say_too_large(self._log, names[0])
        return _uncompiled(stack.key)

    def launch(self) -> None:
        columns = self._columns()
        for stack in self.stacks:
            if (grads := self._stacked_gradients(stack)) is not None:
                stack.step(grads, columns)

    def _columns(self) -> Tensor:
        """Count a step, and return the coefficients of all tensors. The second one is not 0 for tensors to skip."""
        coefficients, mask = self._advance()
        if mask is not None:
            coefficients[1].masked_fill_(~mask, 1.0)
        return coefficients

    def _stacked_gradients(self, stack: Stack) -> Tensor | None:
        """Return the prepared gradients of ``stack``, with anything for absent ones; None if it has none."""
        return stack.gathered(self._grads)

    def _most(self, key: KernelKey, shape: torch.Size) -> int:
        """Return the most tensors of ``shape`` that a stack may have."""
        in_cache = self.plan.device.type == "cpu" and self.plan.rule.granularity == "tensor"
        elements = _CPU_ELEMENTS if in_cache else _BYTES // max(dtype.itemsize for dtype in key.dtypes)
        return max(elements // shape.numel(), 1)

    def _key(self, member: Member, grad_dtype: torch.dtype) -> KernelKey:
        """Return the key of the kernel that updates ``member``."""
        shape = member.owner.shape
        kind = " x ".join(map(str, shape)) if self.plan.rule.granularity == "matrix" else "matrices"
        return kernel_key(self.plan, member, grad_dtype, _STACKS + (kind if len(shape) > 1 else "vectors"))


class StackTableLowering(Capturable, StackedLowering):
    """Stacks whose coefficients a kernel of the rule evaluates, so that a CUDA graph can hold the step."""

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping, log)
        several = [stack for stack in self.stacks if len(stack.positions) > 1]
        ends = itertools.accumulate(stack.numel * stack.key.dtypes[1].itemsize for stack in several)
        self._caches = {stack for stack, end in zip(several, ends, strict=True) if end <= _CACHED_BYTES}

    def compile(self) -> None:
        # First, since it raises at once if the compiler does not work, unlike Inductor.
        self._evaluator = self._obtain_kernel(coefficient_key(self.plan), range(len(self.plan.members)))
        self.table = CoefficientTable(self.plan, self._clipping, self.hypers, self._log)
        super().compile()

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        super().prepare(grads, captures)
        self._cached: dict[Stack, Tensor] = {}  # gradients, of the first stacks of several tensors that fit
        self._reads_copies = False
        self.hypers.prepare(self.plan.device in captures)
        self.table.gradients.mark(self._grads, self.plan.device in captures)

    def copy_gradients_for_graph(self) -> None:
        for stack in self.stacks:
            stack.copy_gradients(self._grads)
        self._reads_copies = True

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients. Some stacked gradients are kept for :meth:`launch`."""
        measured = [grads for stack in self.stacks for grads in self._measured(stack)]
        self._square_sum.fill_(sum(map(_square_sum, measured), 0.0))

    def _measured(self, stack: Stack) -> Sequence[Tensor]:
        """Return the prepared gradients of ``stack``, all together or one by one."""
        if stack in self._caches:
            if (grads := self._stacked_gradients(stack)) is None:
                return []
            self._cached[stack] = grads
            return [grads]
        if self._reads_copies:
            assert stack.copied_gradients is not None
            return torch.split(stack.copied_gradients, 1)
        return [stack_of([grad]) for i in stack.positions if (grad := self._grads[i]) is not None]

    def _columns(self) -> Tensor:
        with self._on_device:
            self._evaluator.evaluate(self.table)
        numbers = self.table.coefficients
        absent = torch.where(self.table.gradients.pointers == 0, 1.0, self.table.outcome[1])
        return torch.cat([numbers[:1], absent.unsqueeze(0), numbers[1:]])

    def _stacked_gradients(self, stack: Stack) -> Tensor | None:
        if self._reads_copies:
            return stack.copied_gradients
        return self._cached.pop(stack, None) if stack in self._cached else super()._stacked_gradients(stack)


class Stack:
    """Tensors of one shape and one dtype each for parameters, gradients and every buffer.

    An update gets tensors of shape (tensors, columns) for vectors, and (tensors, batch, rows, columns) for parameters of
    more dimensions, whose axes are in the rule's order. A rule of granularity "matrix" gets (tensors, ..., rows, columns).
    Of DTensors, the local shards are stacked.
    """

    kernel: Any  # assigned when compiled

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        self.positions = tuple(positions)
        self.key = key
        self.copied_gradients: Tensor | None = None
        members = [plan.members[i] for i in positions]
        self._params = [m.param.data for m in members]  # the plan counts the versions of the parameters
        self._owner = members[0].owner
        self.numel = len(members) * self._owner.numel()
        self._matrices = plan.rule.granularity == "matrix"
        axes = plan.rule.axes_of(self._owner.shape, plan.statics)
        self._axes = None if axes == tuple(range(len(axes))) else axes
        self._index = torch.tensor(positions, device=plan.device)
        self._dtype = compute_dtype(self._params[0].dtype)
        self._buffers = [stack_of([m.entries[name] for m in members]) for name in plan.buffers]
        for name, stacked in zip(plan.buffers, self._buffers, strict=True):
            for member, view in zip(members, stacked.unbind(), strict=True):
                member.put(name, view)
        entries = [members[0].state[name] for name in plan.buffers]
        self._likes: list[Tensor] = [self._owner, self._owner, *entries]  # with the placements of param, grad and buffers
        self.owners: Owners | None = None
        self._owned: Sequence[int] = range(len(positions))  # the tensors that this process updates

    def share(self, first: int) -> None:
        """Assign each DTensor to one process, if that is possible: the first one to process ``first``, and so on."""
        self.owners = owners(self._likes, len(self.positions), first)
        if self.owners is not None:
            self._owned = self.owners.owned
            self._index = self._index[self._owned]
        # Rows of numbers begin at multiples of 16 bytes; otherwise Inductor's code copies each.
        spare = self._index.new_zeros(-len(self._index) % 4)
        self._padded = torch.cat([self._index, spare])

    def gathered(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return the stack's gradients among ``grads`` in one tensor, with 0 for absent ones; None if all are absent."""
        filled = self._filled(grads)
        return stack_of(filled) if filled else None

    def copy_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Copy the stack's gradients among ``grads``, 0 for absent ones, to ``copied_gradients``, whose address is fixed."""
        if self.copied_gradients is None:
            like = self._params[0]
            self.copied_gradients = like.new_zeros(len(self.positions), *like.shape, dtype=self.key.dtypes[1])
        if filled := self._filled(grads):
            torch.stack(filled, out=self.copied_gradients)
        else:
            self.copied_gradients.zero_()

    def _filled(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the stack's gradients among ``grads``, with 0 for absent ones; an empty list if all are absent."""
        stacked = [grads[i] for i in self.positions]
        present = next((grad for grad in stacked if grad is not None), None)
        return [] if present is None else [torch.zeros_like(present) if grad is None else grad for grad in stacked]

    def step(self, grads: Tensor, coefficients: Tensor) -> None:
        """Update from stacked ``grads``; a tensor is unchanged where the second of its ``coefficients`` is not 0."""
        param, grad, *buffers = self._as_updated(grads)
        columns = coefficients.index_select(1, self._padded).to(param.device, self._dtype)[:, : len(param)]
        columns = columns.view(*columns.shape, *[1] * (param.dim() - 1))
        new = self.kernel([param, grad, *buffers, *columns.unbind()]) if self._owned else [param, *buffers]
        local_param, *local_buffers = self._as_stored(new)
        torch._foreach_copy_(self._params, local_param.unbind())
        if self._buffers:  # a separate call, since tensors of several dtypes are copied one by one
            torch._foreach_copy_(self._buffers, local_buffers)

    def _as_updated(self, grads: Tensor) -> list[Tensor]:
        """Return parameters, ``grads`` and buffers of the tensors that this process updates, as an update takes them."""
        stored = [stack_of(self._params), grads, *self._buffers]
        if self.owners is not None:
            return list(map(self._arranged, self.owners.collect(stored)))
        return list(map(self._arranged, map(whole_stack, stored, self._likes)))

    def _as_stored(self, updated: Sequence[Tensor]) -> list[Tensor]:
        """Return this process's parts of all tensors, from the new parameters and buffers of an update."""
        kinds = [0, *range(2, len(self._likes))]
        full = [self._restored(new, self._likes[kind]) for new, kind in zip(updated, kinds, strict=True)]
        if self.owners is not None:
            return self.owners.spread(full, kinds)
        return [parts_of_stack(new, self._likes[kind]) for new, kind in zip(full, kinds, strict=True)]

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


def _square_sum(stack: Tensor) -> Tensor:
    """Return the sum of squares, equal bit for bit at any address; see :func:`~compiled_optim.plan.clipping.square_sum`."""
    rows = stack.view(len(stack), math.prod(stack.shape[1:]))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square().sum()


def _examples(key: KernelKey) -> tuple[list[Tensor], list[list[int]]]:
    """Return meta tensors to compile a kernel of ``key`` with, and for each its dimensions of any size."""
    rule, statics = key.rule, dict(key.statics)
    kind = key.arrangement.removeprefix(_STACKS)
    examples = _EXAMPLES if key.device in _SEQUENTIAL else _LARGE_EXAMPLES
    count, *shape = examples[kind] if kind in examples else (_COUNT, *map(int, kind.split(" x ")))
    fields = [b for b in rule.buffers if b.name in rule.present_buffers(statics)]
    per_group = [*shape[:-1], shape[-1] // GROUP]
    of_buffers = [per_group if f.grouped else f.shape(torch.Size(shape)) if f.shape else shape for f in fields]
    kinds = list(zip([shape, shape, *of_buffers], key.dtypes, strict=True))
    column = [1] * len(shape), compute_dtype(key.dtypes[0])
    kinds += [column] * (len(rule.coefficient_names(statics)) + 2)
    tensors = [torch.empty(count, *sizes, dtype=dtype, device="meta") for sizes, dtype in kinds]
    of_any_size = slice(0, 1 if rule.granularity == "matrix" else None)
    return tensors, [[d for d in range(t.dim())[of_any_size] if t.shape[d] > 1] for t in tensors]


def _make(key: KernelKey) -> Code | str:
    sequential = key.device in _SEQUENTIAL
    examples, varying = _examples(key)
    staged = None if sequential else decompositions()
    code = compiled(_uncompiled(key), examples, varying, key.device, OPTIONS | _OPTIONS, staged)
    if not isinstance(code, str) and not sequential:
        kinds = [(t.shape[1:], t.dtype) for t in examples]
        ones = {kind: torch.ones(1, *kind[0], dtype=kind[1], device=key.device) for kind in set(kinds)}
        code([ones[kind] for kind in kinds])  # loads and tunes now, since a capture cannot
    return code


def _uncompiled(key: KernelKey) -> Code:
    """Return the update as a function of torch tensors, uncompiled.

    It takes parameter, gradient, buffers and coefficients, and computes in float64 for float64, in float32 for lower dtypes.
    A tensor is unchanged where the second coefficient is not 0. The results are new tensors: Inductor 2.13 fails on CPUs if
    a reduction's input is also written.
    """
    rule, statics = key.rule, dict(key.statics)
    names = ("param", *rule.present_buffers(statics))
    constants = {**dict.fromkeys(b.name for b in rule.buffers), **statics}
    numbers_of = number_type(rule.coefficient_names(statics))

    def stack(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        param, grad, *others = tensors
        dtype = compute_dtype(param.dtype)
        old = dict(zip(names, (param, *others), strict=False))
        factor, skip, *numbers = others[len(names) - 1 :]
        values = {**constants, "param": param.to(dtype), "grad": factor * grad.to(dtype), "c": numbers_of(*numbers)}
        if rule.reads_index(statics):
            shape = param.shape[1:]
            values[INDEX] = torch.arange(shape.numel(), dtype=torch.int32, device=param.device).view(1, *shape)
        new = rule.updated(values | {name: old[name].to(dtype) for name in names[1:]})
        updates = skip == 0
        return tuple(torch.where(updates, new[name].to(tensor.dtype), tensor) for name, tensor in old.items())

    return stack
