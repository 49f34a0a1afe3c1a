"""The lowering of rules that are not elementwise: equal tensors are stacked, and each stack is updated at once.

State lives in the stacks; parameters and gradients are copied in, unless a stack holds a single tensor, and parameters out.
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
from compiled_optim.fields import compute_dtype
from compiled_optim.lowering.address_rows import HyperRow
from compiled_optim.lowering.coefficient_table import CoefficientTable, coefficient_signature
from compiled_optim.lowering.inductor import OPTIONS
from compiled_optim.lowering.interface import Capturable
from compiled_optim.lowering.kernel_table import Kernel
from compiled_optim.lowering.layout import is_plain, plain_copy
from compiled_optim.lowering.multi_tensor import current_device, obtain_kernel
from compiled_optim.lowering.rule_step import rule_step
from compiled_optim.lowering.staged import StagedLowering
from compiled_optim.plan import Plan
from compiled_optim.signature import Signature, kernel_signature
from compiled_optim.torch_internals import compile_graph

StackKernel = Callable[[list[Tensor]], Sequence[Tensor]]

_COUNT = 5
_EXAMPLES = {"vectors": (_COUNT, 7), "matrices": (_COUNT, 3, 11, 7)}
"""Sizes to compile with, where any may follow: different ones, since equal ones would stay equal."""

# With it, reductions over different dimensions of any size fail on a GPU: "CantSplit" (torch 2.13).
_OPTIONS = {"loop_ordering_after_fusion": False}

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
            Stack(plan, where[start : start + self._most(shape)], signature)
            for (signature, shape), where in positions.items()
            for start in range(0, len(where), self._most(shape))
        ]

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return all(stack.kernel is not None for stack in self.stacks)

    def compile(self) -> None:
        """Make the kernels that do not exist yet."""
        for stack in self.stacks:
            if stack.kernel is None:
                names = [self.plan.members[i].name for i in stack.positions]
                if self._compiled:
                    obtain = self._log.obtain_or_fall_back
                    stack.kernel = obtain(_kernels, stack.signature, names, _make, _uncompiled)
                else:
                    stack.kernel = _uncompiled(stack.signature)

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

    def _most(self, shape: torch.Size) -> int:
        """The number of tensors of ``shape`` that a stack may have."""
        on_cpu = self.plan.device.type == "cpu" and self.plan.rule.granularity == "tensor"
        return max(_CPU_ELEMENTS // shape.numel(), 1) if on_cpu else len(self.plan.members)

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
        """Write the sum of the squares of the prepared gradients."""
        stacks = [grads for stack in self.stacks if (grads := self._stacked_gradients(stack)) is not None]
        self._square_sum.fill_(sum((_square_sum(grads) for grads in stacks), 0.0))

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
        return stack.held if self._holds else super()._stacked_gradients(stack)


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
        self._matrices = plan.rule.granularity == "matrix"
        self._index = torch.tensor(positions, device=plan.device)
        self._dtype = compute_dtype(self._params[0].dtype)
        self._buffers = []
        for name in plan.buffers:
            stacked = _stack([m.state[name] for m in members])
            for member, view in zip(members, stacked.unbind(), strict=True):
                member.state.set_quietly(name, view)
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
        torch._foreach_copy_([*self._params, *self._buffers], [*new_param.view_as(params).unbind(), *new_buffers])

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
    count, *shape = _EXAMPLES[kind] if kind in _EXAMPLES else (_COUNT, *map(int, kind.split(" x ")))
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
    tensors = _example(signature)
    sizes = tensors[0].shape
    matrices = signature.rule.granularity == "matrix"
    dynamic = [[d for d, size in enumerate(t.shape) if size > 1 and not (matrices and d)] for t in tensors]
    graph = compile_graph(_stack_function(signature), tensors, dynamic, OPTIONS | _OPTIONS, from_one=True)
    if isinstance(graph, str):
        return graph

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        return graph({sizes[0]: len(tensors[0])} if matrices else dict(zip(sizes, tensors[0].shape, strict=True)), tensors)

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
