"""The lowering to plain torch operations, tensor by tensor."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from compiled_optim.lowering.coefficients import TorchCoefficients
from compiled_optim.lowering.list_program import Lists, ListValues, programs
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.memory.layout import as_real, compute_dtype
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.plan import Plan


class EagerLowering(Lowering):
    """The step of one plan tensor by tensor, uncompiled: for debugging, and for gradients through the step.

    With ``differentiable`` the step is recorded by autograd: the new parameter, which replaces the old one in place, and the
    new state depend on the old ones, on the gradient and on every hyperparameter tensor that requires grad. The state
    tensors are replaced, so that autograd's recorded ones are unchanged.
    """

    name = "eager"
    coefficients: TorchCoefficients

    def __init__(
        self, plan: Plan, coefficients: TorchCoefficients, log: CompilationLog, *, differentiable: bool = False
    ) -> None:
        super().__init__(plan, coefficients, log)
        self._programs = programs(plan.rule, tuple(plan.statics.items()), False)
        self._differentiable = differentiable

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        with torch.set_grad_enabled(self._differentiable):
            yield from super().launch_in_stages()

    def _reduce(self, stage: int) -> Tensor:
        sums = self.coefficients.sums(self._stages[stage])
        if not self.plan.is_meta:  # meta tensors have no numbers to sum
            for i, lists, values in self._lists():
                sums[:, i] = torch.stack([total for (total,) in lists.sums(stage, values)])
        return sums

    def _update(self) -> None:
        for i, lists, values in self._lists():
            member = self.plan.members[i]
            for name, (new,) in lists.updated(values).items():
                old = member.param if name == "param" else member.entries[name]
                new = torch.view_as_complex(new) if old.is_complex() else new
                member.put(name, new) if self._differentiable and old is not member.param else old.copy_(new)

    def _lists(self) -> Iterator[tuple[int, Lists, ListValues]]:
        """Yield the position, the lists of one tensor and the values of each parameter that has a prepared gradient."""
        for i, (grad, column) in enumerate(zip(self._grads, self.coefficients.rows.unbind(1), strict=True)):
            if grad is None:
                continue
            member = self.plan.members[i]
            old = member.param.clone() if self._differentiable else member.param
            if self.plan.wrapped:
                old = old * 1  # a plain tensor where the class lacks operations that the step takes
            scale, skip, *numbers = column.to(compute_dtype(old.dtype)).unbind()
            targets = [old, *(member.entries[name] for name in self.plan.buffers)]
            lists = Lists(self._programs, [[as_real(t)] for t in targets], [skip])
            yield i, lists, lists.values([as_real(grad.resolve_conj())], [scale], [[n] for n in numbers])
