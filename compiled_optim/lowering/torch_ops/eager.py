"""The lowering to plain torch operations, one tensor at a time: for debugging and for gradients through the step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.torch_lowering import TorchLowering, Vectors, rule_reductions, rule_step
from compiled_optim.memory.layout import as_real, compute_dtype, real_numel
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Member, Plan

_Values: TypeAlias = tuple[Any, ...]  # what an update takes


class EagerLowering(TorchLowering):
    """Runs the step of one plan without compiling anything.

    With ``differentiable`` the step is recorded by autograd: the new parameter, which replaces the old one in place, and the
    new state depend on the old ones, on the gradient and on every hyperparameter tensor that requires grad. The state
    tensors are replaced, so that the recorded ones stay as they were.
    """

    name = "eager"

    def __init__(self, plan: Plan, clipping: Clipping, *, differentiable: bool = False) -> None:
        super().__init__(plan, clipping)
        self._update = rule_step(plan.rule, plan.statics)
        self._reduced = [rule_reductions(plan.rule, plan.statics, stage) for stage in range(len(plan.rule.reductions))]
        self._differentiable = differentiable
        by_memory = plan.rule.goes_by_memory(plan.statics)
        self._vectors = {id(m): Vectors(plan, m) for m in plan.members} if by_memory else None

    is_compiled = True

    def compile(self) -> None:
        """There is nothing to compile."""

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        with torch.set_grad_enabled(self._differentiable):
            coefficients = yield from self._advance_and_reduce()
            for member, values in self._present(coefficients):
                new_param, new_buffers = self._update(*values)
                if self._vectors is not None:
                    self._vectors[id(member)].store([new_param, *new_buffers])
                    continue
                if member.param.is_complex():
                    new_param, *new_buffers = (torch.view_as_complex(t) for t in (new_param, *new_buffers))
                member.param.copy_(new_param)
                for name, new in zip(self.plan.buffers, new_buffers, strict=True):
                    member.put(name, new) if self._differentiable else member.entries[name].copy_(new)

    def _sum_expressions(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        if self.plan.is_meta:  # there is nothing to sum
            return
        places = {id(member): i for i, member in enumerate(self.plan.members)}
        for member, values in self._present(coefficients):
            expressions = self._reduced[stage](*values[:4])
            count = real_numel(member.param)  # without what fills up the last group
            flat_sums = [e.flatten()[:count].sum(dtype=sums.dtype) for e in expressions]
            sums[:, places[id(member)]] = torch.stack(flat_sums)

    def _present(self, coefficients: Tensor) -> Iterator[tuple[Member, _Values]]:
        """The members that have a prepared gradient, each with what its update takes."""
        names = self.plan.buffers
        for member, grad, column in zip(self.plan.members, self._grads, coefficients.unbind(1), strict=True):
            if grad is None:
                continue
            numbers = column.to(compute_dtype(member.param.dtype)).unbind()
            if self._vectors is not None:
                param, vector, *buffers = self._vectors[id(member)].read(grad)
                index = torch.arange(len(param), device=param.device).to(torch.int32)
                yield member, (param, vector, buffers, numbers, index)
                continue
            old = member.param.clone() if self._differentiable else member.param
            if self.plan.wrapped:
                old = old * 1  # a plain tensor where the class lacks operations that the step takes
            buffers = [as_real(member.entries[n]) for n in names]
            yield member, (as_real(old), as_real(grad.resolve_conj()), buffers, numbers)
