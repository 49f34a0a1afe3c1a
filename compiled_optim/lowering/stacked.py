"""The lowering of rules that are not elementwise: equal tensors are stacked, and each stack is updated at once.

State lives in the stacks; parameters and gradients are copied in, unless a stack holds a single tensor, and parameters out.
A stack is so large that a device is busy with it, and so small that its copies are little beside a large model.
A rule that reduces is compiled by Inductor for stacks of any size, so that neither the number of tensors nor their shapes
compile anything; a rule on matrices once for each of their shapes, and any number of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.events import EventLog
from compiled_optim.lowering.address_rows import HyperRow
from compiled_optim.lowering.coefficient_table import CoefficientTable, coefficient_signature
from compiled_optim.lowering.inductor import OPTIONS, fits_indices, say_too_large
from compiled_optim.lowering.interface import Capturable
from compiled_optim.lowering.kernel_table import Kernel
from compiled_optim.lowering.layout import compute_dtype, is_plain, plain_copy
from compiled_optim.lowering.multi_tensor import current_device, obtain_kernel
from compiled_optim.lowering.partial_sums import decompositions
from compiled_optim.lowering.rule_step import rule_step
from compiled_optim.lowering.staged import StagedLowering
from compiled_optim.plan import Plan
from compiled_optim.signature import Signature, kernel_signature
from compiled_optim.torch_internals import compile_graph, without_memory

StackKernel = Callable[[list[Tensor]], Sequence[Tensor]]

_COUNT = 5
_EXAMPLES = {"vectors": (_COUNT, 7), "matrices": (_COUNT, 3, 11, 7)}
"""Sizes to compile with, where any may follow: different ones, since equal ones would stay equal."""

_LARGE_EXAMPLES = {"vectors": (_COUNT, 8191), "matrices": (_COUNT, 3, 1031, 769)}
"""Those for accelerators, where Inductor chooses blocks by them."""

_SEQUENTIAL = {"cpu"}
"""Where a thread may well walk a whole tensor."""

# With it, reductions over different dimensions of any size fail on a GPU: "CantSplit" (torch 2.13).
_OPTIONS = {"loop_ordering_after_fusion": False, "assert_indirect_indexing": False}

_BYTES = 1 << 27
"""The most in a stack of several tensors, as bytes of the widest of them: a step needs 6 to 8 times as many beside them."""

_KEPT_BYTES = 1 << 27
"""The most gradients that stay stacked between :meth:`StackTableLowering.measure` and the update."""

_CPU_ELEMENTS = 1 << 17
"""The most in a stack of several tensors on a CPU: copies and results stay in the cache, in memory that malloc keeps."""

_kernels: dict[Signature, StackKernel | str] = {}  # or why there is none
_serial = itertools.count()


class StackedLowering(StagedLowering):
    """Runs the step of one plan.

    Args:
        plan: the tensors, none of them complex or a DTensor.
        controls: what holds for the whole step.
        log: where compilations and fallbacks are recorded.
        compiled: whether Inductor's kernels update the stacks, or plain torch operations.
    """

    name = "stacked"

    def __init__(self, plan: Plan, controls: Controls, log: EventLog, *, compiled: bool) -> None:
        super().__init__(plan, controls)
        self._log = log
        self._compiled = compiled
        positions: dict[tuple[Signature, torch.Size], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.param.numel() > 0:
                signature = kernel_signature(plan, member, grad_dtype, f"stacks of {self._sizes(member.param)}")
                positions.setdefault((signature, member.param.shape), []).append(i)
        self.stacks = [
            Stack(plan, where[start : start + most], signature)
            for (signature, shape), where in positions.items()
            for most in [self._most(signature, shape)]
            for start in range(0, len(where), most)
        ]

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return all(stack.kernel is not None for stack in self.stacks)

    def compile(self) -> None:
        """Make the kernels that do not exist yet."""
        for stack in self.stacks:
            if stack.kernel is None:
                stack.kernel = self._obtain(stack, [self.plan.members[i].name for i in stack.positions])

    def _obtain(self, stack: Stack, names: Sequence[str]) -> StackKernel:
        if not self._compiled:
            return _uncompiled(stack.signature)
        if not fits_indices(self.plan.device, stack.numel):
            say_too_large(self._log, names[0])
            return _uncompiled(stack.signature)
        return self._log.obtain_or_fall_back(_kernels, stack.signature, names, _make, _uncompiled)

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""
        columns = self._columns()
        for stack in self.stacks:
            grads = self._stacked_gradients(stack)
            if grads is not None:
                stack.step(grads, columns)

    def _columns(self) -> Tensor:
        """Count a step, and return the coefficients of all tensors, with a mark for those that stay as they are."""
        coefficients, mask = self._advance()
        if mask is not None:
            coefficients[1].masked_fill_(~mask, 1.0)
        return coefficients

    def _stacked_gradients(self, stack: Stack) -> Tensor | None:
        """The prepared gradients of ``stack``, anything in place of absent ones; None if it has none."""
        return stack.gathered(self._grads)

    def _most(self, signature: Signature, shape: torch.Size) -> int:
        """The number of tensors of ``shape`` that a stack may have."""
        in_cache = self.plan.device.type == "cpu" and self.plan.rule.granularity == "tensor"
        elements = _CPU_ELEMENTS if in_cache else _BYTES // max(dtype.itemsize for dtype in signature.dtypes)
        return max(elements // shape.numel(), 1)

    def _sizes(self, param: Tensor) -> str:
        if self.plan.rule.granularity == "matrix":
            return " x ".join(map(str, param.shape))
        return "vectors" if param.dim() < 2 else "matrices"


class StackTableLowering(Capturable, StackedLowering):
    """Stacks whose coefficients a multi-tensor kernel evaluates, so that a CUDA graph can hold the step.

    Args:
        plan: the tensors, none of them complex or a DTensor.
        controls: what holds for the whole step.
        log: where compilations and fallbacks are recorded.
    """

    def __init__(self, plan: Plan, controls: Controls, log: EventLog) -> None:
        super().__init__(plan, controls, log, compiled=True)
        self._controls = controls
        self._hypers = HyperRow(plan, controls, log)
        self._parts: list[tuple[Kernel, CoefficientTable]] = []
        self._kept: dict[Stack, Tensor] = {}
        self._measured_whole = self._first_within(_KEPT_BYTES)
        self._holds = False
        self._on_device = current_device(plan.device)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return bool(self._parts) and super().is_compiled

    def compile(self) -> None:
        """Make the kernels that do not exist yet, and the tables they read."""
        if not self._parts:
            self._make_tables()  # first, since a compiler that does not work says so at once, unlike Inductor
        super().compile()

    def _make_tables(self) -> None:
        positions: dict[Signature, list[int]] = {}
        for i in range(len(self.plan.members)):
            positions.setdefault(coefficient_signature(self.plan, i), []).append(i)
        for signature, where in positions.items():
            kernel = obtain_kernel(self._log, signature, [self.plan.members[i].name for i in where])
            leads = self.plan.leads and not self._parts
            table = CoefficientTable(self.plan, self._controls, where, self._hypers, self._log, leads=leads)
            self._parts.append((kernel, table))

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``; the sum of ``whole`` is the sum over all gradients."""
        self._square_sum = own
        for _, table in self._parts:
            table.all_square_sums = whole

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Take ``grads``, or the parameters' own, and bring the tables up to date."""
        super().prepare(grads)
        self._kept = {}
        self._holds = False
        self._hypers.refresh()
        for _, table in self._parts:
            table.prepare(self._grads)

    @contextlib.contextmanager
    def uploading_later(self, steps: int) -> Iterator[None]:
        """Leave uploads of a capture of ``steps`` steps to the end of the ``with`` block."""
        with contextlib.ExitStack() as stack:
            for _, table in self._parts:
                stack.enter_context(table.gradients.uploading_later(steps))
            yield

    def hold(self) -> None:
        """Copy the prepared gradients to where :meth:`launch`, if it is captured now or was before, reads them."""
        for stack in self.stacks:
            stack.hold(self._grads)
        self._holds = True

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients. What is stacked for that is kept for :meth:`launch`."""
        rows = [row for stack in self.stacks for row in self._measured(stack)]
        self._square_sum.fill_(sum(map(_square_sum, rows), 0.0))

    def _measured(self, stack: Stack) -> Sequence[Tensor]:
        """The prepared gradients of ``stack``, together or one by one, whether they are held or not."""
        if stack in self._measured_whole:
            grads = self._stacked_gradients(stack)
            if grads is None:
                return []
            self._kept[stack] = grads
            return [grads]
        if self._holds:
            assert stack.held is not None
            return torch.split(stack.held, 1)
        return [_stack([grad]) for i in stack.positions if (grad := self._grads[i]) is not None]

    def _first_within(self, limit: int) -> set[Stack]:
        """The first stacks of several tensors, as many as have gradients of ``limit`` bytes together."""
        several = [stack for stack in self.stacks if len(stack.positions) > 1]
        ends = itertools.accumulate(stack.numel * stack.signature.dtypes[1].itemsize for stack in several)
        return {stack for stack, end in zip(several, ends, strict=True) if end <= limit}

    def _columns(self) -> Tensor:
        with self._on_device:
            for kernel, table in self._parts:
                kernel(table)
        columns = [table.columns() for _, table in self._parts]
        if len(columns) == 1:
            return columns[0]
        whole = columns[0].new_empty(len(columns[0]), len(self.plan.members))
        for (_, table), own in zip(self._parts, columns, strict=True):
            whole.index_copy_(1, table.index, own)
        return whole

    def _stacked_gradients(self, stack: Stack) -> Tensor | None:
        if self._holds:
            return stack.held
        return self._kept.pop(stack, None) if stack in self._kept else super()._stacked_gradients(stack)


class Stack:
    """Tensors of one shape and one dtype each for parameters, gradients and every buffer.

    An update sees (tensors, columns), or (tensors, batch, rows, columns) where a parameter has two dimensions or more;
    (tensors, rows, columns) where the rule's granularity says that all are matrices.
    """

    def __init__(self, plan: Plan, positions: Sequence[int], signature: Signature) -> None:
        self.positions = tuple(positions)
        self.signature = signature
        self.kernel: StackKernel | None = None
        self.held: Tensor | None = None
        members = [plan.members[i] for i in positions]
        self._params = [m.param.data for m in members]  # whose versions are counted by who knows what was updated
        self._shape = members[0].param.shape
        self.numel = len(members) * self._shape.numel()
        self._matrices = plan.rule.granularity == "matrix"
        self._index = torch.tensor(positions, device=plan.device)
        self._dtype = compute_dtype(self._params[0].dtype)
        self._buffers = []
        for name in plan.buffers:
            stacked = _stack([m.entries[name] for m in members])
            for member, view in zip(members, stacked.unbind(), strict=True):
                member.put(name, view)
            self._buffers.append(self._seen(stacked))

    def gathered(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The stack's own among ``grads``, over the whole plan, with 0 for those that are None; None if all are."""
        own = [grads[i] for i in self.positions]
        present = next((grad for grad in own if grad is not None), None)
        if present is None:
            return None
        return _stack([torch.zeros_like(present) if grad is None else grad for grad in own])

    def hold(self, grads: Sequence[Tensor | None]) -> None:
        """Copy the stack's own among ``grads`` to ``held``, whose memory stays, with 0 for those that are None."""
        if self.held is None:
            dtype = getattr(torch, self.signature.grad_dtype)
            self.held = torch.empty(len(self.positions), *self._shape, dtype=dtype, device=self._params[0].device)
        own = [grads[i] for i in self.positions]
        if any(grad is None for grad in own):
            self.held.zero_()
        places = [place for place, grad in zip(self.held.unbind(), own, strict=True) if grad is not None]
        if places:
            torch._foreach_copy_(places, [grad for grad in own if grad is not None])

    def step(self, grads: Tensor, coefficients: Tensor) -> None:
        """Update the tensors from their stacked gradients, where the coefficients have no mark."""
        assert self.kernel is not None
        params = _stack(self._params)
        param = self._seen(params)
        columns = coefficients.index_select(1, self._index).to(self._dtype)
        columns = columns.view(*columns.shape, *[1] * (param.dim() - 1))
        new_param, *new_buffers = self.kernel([param, self._seen(grads), *self._buffers, *columns.unbind()])
        torch._foreach_copy_(self._params, new_param.view_as(params).unbind())
        if self._buffers:  # apart, since tensors of several dtypes are copied one by one
            torch._foreach_copy_(self._buffers, new_buffers)

    def _seen(self, stacked: Tensor) -> Tensor:
        """``stacked`` as an update sees it."""
        if self._matrices:
            return stacked
        if len(self._shape) < 2:
            return stacked.view(len(stacked), -1)
        batch = math.prod(stacked.shape[1:-2])
        return stacked.view(len(stacked), batch, *stacked.shape[-2:])


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` in one contiguous tensor; a single one that lies in memory like that is not copied."""
    stacked = tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
    return stacked if stacked.is_contiguous() and is_plain(stacked) else plain_copy(stacked)


def _square_sum(stack: Tensor) -> Tensor:
    """The sum of the squares of ``stack``, equal bit for bit wherever it lies."""
    norms: Tensor = torch.linalg.vector_norm(stack.view(len(stack), -1), dim=1, dtype=compute_dtype(stack.dtype))
    return norms.double().square().sum()


def _example(signature: Signature) -> list[Tensor]:
    """Tensors to compile a kernel of ``signature`` with, none the same object."""
    rule = signature.rule
    kind = signature.layout.removeprefix("stacks of ")
    examples = _EXAMPLES if signature.device in _SEQUENTIAL else _LARGE_EXAMPLES
    count, *shape = examples[kind] if kind in examples else (_COUNT, *map(int, kind.split(" x ")))
    param, grad = (torch.ones(count, *shape, dtype=dtype, device=signature.device) for dtype in signature.dtypes[:2])
    present = rule.present_buffers(dict(signature.statics))
    fields = [b for b in rule.buffers if b.name in present]
    buffers = [
        torch.ones(count, *field.shape_for(param[0]), dtype=dtype, device=signature.device)
        for field, dtype in zip(fields, signature.dtypes[2:], strict=True)
    ]
    dtype = compute_dtype(param.dtype)
    column = (count, *[1] * len(shape))
    columns = [torch.ones(column, dtype=dtype, device=signature.device) for _ in range(len(rule.coefficient_names) + 2)]
    return [param, grad, *buffers, *columns]


def _make(signature: Signature) -> StackKernel | str:
    matrices = signature.rule.granularity == "matrix"
    function, options = _stack_function(signature), OPTIONS | _OPTIONS
    sequential = signature.device in _SEQUENTIAL
    with without_memory():
        tensors = _example(signature)
        dynamic = [[d for d, size in enumerate(t.shape) if size > 1 and not (matrices and d)] for t in tensors]
        staged = None if sequential else decompositions()
        graph = compile_graph(function, tensors, dynamic, options, from_one=True, decompositions=staged)
    if isinstance(graph, str):
        return graph
    sizes = tensors[0].shape

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        return graph({sizes[0]: len(tensors[0])} if matrices else dict(zip(sizes, tensors[0].shape, strict=True)), tensors)

    if not sequential:
        kinds = [(t.shape[1:], t.dtype) for t in tensors]
        ones = {kind: torch.ones(1, *kind[0], dtype=kind[1], device=signature.device) for kind in set(kinds)}
        run([ones[kind] for kind in kinds])  # loads and tunes what a capture could not
    return run


def _stack_function(signature: Signature) -> Callable[..., tuple[Tensor, ...]]:
    """The function to compile, with a code object of its own: Dynamo's recompile limit counts per code object.

    Its results are new tensors: Inductor 2.13 fails on CPUs where a reduction's input is also written.
    """
    update = rule_step(signature.rule, dict(signature.statics))
    count = len(signature.buffer_dtypes)

    def stack(param: Tensor, grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        new_param, new_buffers = update(param, grad, rest[:count], rest[count:])
        return (new_param, *new_buffers)

    stack.__code__ = stack.__code__.replace(co_name=f"{signature.rule.name}_stack_{next(_serial)}")
    return stack


def _uncompiled(signature: Signature) -> StackKernel:
    function = _stack_function(signature)
    return lambda tensors: function(*tensors)
