"""The lowering of rules that are not elementwise: equal tensors are stacked, and each stack is updated at once.

State lives in the stacks; parameters and gradients are copied in, unless a stack holds a single tensor, and parameters out.
A rule that reduces is compiled by Inductor for stacks of any size, so that neither the number of tensors nor their shapes
compile anything; a rule on matrices once for each of their shapes, and any number of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.events import EventLog, Signature, kernel_signature
from compiled_optim.fields import compute_dtype
from compiled_optim.lowering.inductor import OPTIONS
from compiled_optim.lowering.rule_step import rule_step
from compiled_optim.lowering.staged import StagedLowering
from compiled_optim.plan import Plan
from compiled_optim.torch_internals import compile_graph, prepare_cpu_compiler

Kernel = Callable[[list[Tensor]], Sequence[Tensor]]

_COUNT = 5
_EXAMPLES = {"vectors": (_COUNT, 7), "matrices": (_COUNT, 3, 11, 7)}
"""Sizes to compile with, where any may follow: different ones, since equal ones would stay equal."""

# With it, reductions over different dimensions of any size fail on a GPU: "CantSplit" (torch 2.13).
_OPTIONS = {"loop_ordering_after_fusion": False}

_kernels: dict[Signature, Kernel] = {}
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
        if compiled and plan.device.type == "cpu":
            prepare_cpu_compiler()
        positions: dict[tuple[Signature, torch.Size], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.param.numel() > 0:
                signature = kernel_signature(plan, member, grad_dtype, f"stacks of {self._sizes(member.param)}")
                positions.setdefault((signature, member.param.shape), []).append(i)
        self.stacks = [Stack(plan, where, signature) for (signature, _), where in positions.items()]

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
                    stack.kernel = self._log.obtain(_kernels, stack.signature, names, self._make)
                else:
                    stack.kernel = _uncompiled(stack.signature)

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""
        coefficients, mask = self._advance()
        if mask is not None:
            coefficients[1].masked_fill_(~mask, 1.0)
        for stack in self.stacks:
            stack.step(self._grads, coefficients)

    def _sizes(self, param: Tensor) -> str:
        if self.plan.rule.granularity == "matrix":
            return " x ".join(map(str, param.shape))
        return "vectors" if param.dim() < 2 else "matrices"

    def _make(self, signature: Signature) -> Kernel:
        tensors = _example(signature)
        sizes = tensors[0].shape
        matrices = signature.rule.granularity == "matrix"
        dynamic = [[d for d, size in enumerate(t.shape) if size > 1 and not (matrices and d)] for t in tensors]
        graph = compile_graph(_stack_function(signature), tensors, dynamic, OPTIONS | _OPTIONS, from_one=True)
        if graph is None:
            self._log.fall_back(f"{signature.rule.name} runs eager: torch.compile is switched off", "switch it on")
            return _uncompiled(signature)

        def run(tensors: list[Tensor]) -> Sequence[Tensor]:
            return graph(
                {sizes[0]: len(tensors[0])} if matrices else dict(zip(sizes, tensors[0].shape, strict=True)), tensors
            )

        return run


class Stack:
    """Tensors of one shape and one dtype each for parameters, gradients and every buffer.

    An update sees (tensors, columns), or (tensors, batch, rows, columns) where a parameter has two dimensions or more;
    (tensors, rows, columns) where the rule's granularity says that all are matrices.
    """

    def __init__(self, plan: Plan, positions: Sequence[int], signature: Signature) -> None:
        self.positions = tuple(positions)
        self.signature = signature
        self.kernel: Kernel | None = None
        members = [plan.members[i] for i in positions]
        self._params = [m.param.detach() for m in members]
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

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        assert self.kernel is not None
        own = [grads[i] for i in self.positions]
        present = next((grad for grad in own if grad is not None), None)
        if present is None:
            return
        given = [torch.zeros_like(present) if grad is None else grad for grad in own]
        params = _stack(self._params)
        stacked = _stack(given)
        param = self._seen(params)
        columns = coefficients.index_select(1, self._index).to(self._dtype)
        columns = columns.view(*columns.shape, *[1] * (param.dim() - 1))
        new_param, *new_buffers = self.kernel([param, self._seen(stacked), *self._buffers, *columns.unbind()])
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
    """``tensors`` in one contiguous tensor; a single contiguous one is not copied."""
    return tensors[0].contiguous().unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors)).contiguous()


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


def _uncompiled(signature: Signature) -> Kernel:
    function = _stack_function(signature)
    return lambda tensors: function(*tensors)
