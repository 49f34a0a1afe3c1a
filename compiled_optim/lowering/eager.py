"""The lowering to plain torch operations, one tensor at a time: for debugging and for gradients through the step."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.lowering.layout import as_real, compute_dtype
from compiled_optim.lowering.rule_step import rule_step
from compiled_optim.lowering.staged import StagedLowering
from compiled_optim.plan import Member, Plan


class EagerLowering(StagedLowering):
    """Runs the step of one plan without compiling anything.

    With ``differentiable`` the step is recorded by autograd: the new parameter, which replaces the old one in place, and the
    new state depend on the old ones, on the gradient and on every hyperparameter tensor that requires grad. The state
    tensors are replaced, so that the recorded ones stay as they were.
    """

    name = "eager"

    def __init__(self, plan: Plan, controls: Controls, *, differentiable: bool = False) -> None:
        super().__init__(plan, controls)
        self._update = rule_step(plan.rule, plan.statics)
        self._differentiable = differentiable

    is_compiled = True

    def compile(self) -> None:
        """There is nothing to compile."""

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""
        with torch.set_grad_enabled(self._differentiable):
            coefficients, _ = self._advance()
            for member, grad, column in zip(self.plan.members, self._grads, coefficients.unbind(1), strict=True):
                if grad is not None:
                    self._step_one(member, grad, column.to(compute_dtype(member.param.dtype)))

    def _step_one(self, member: Member, grad: Tensor, column: Tensor) -> None:
        names, param = self.plan.buffers, member.param
        old = param.clone() if self._differentiable else param
        new_param, new_buffers = self._update(
            as_real(old), as_real(grad.resolve_conj()), [as_real(member.entries[n]) for n in names], column.unbind()
        )
        if param.is_complex():
            new_param, *new_buffers = (torch.view_as_complex(t) for t in (new_param, *new_buffers))
        param.copy_(new_param)
        for name, new in zip(names, new_buffers, strict=True):
            if self._differentiable:
                member.put(name, new)
            else:
                member.entries[name].copy_(new)
