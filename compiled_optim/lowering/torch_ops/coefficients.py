"""The scalar stage of a step: step counts, schedules' values and hyperparameters in, the kernels' few numbers out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.gradient import scaled
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Plan


class CoefficientStage:
    """Evaluates a rule's ``coefficients`` for all tensors of a plan at once, in float64 where the device has it."""

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self._plan = plan
        self._clipping = clipping
        self._square_sums: Tensor | None = None
        self._names = plan.rule.coefficient_names(plan.statics)
        self._scalar_names = [s.name for s in plan.rule.scalars]
        signs = [-1.0 if maximizes else 1.0 for maximizes in plan.maximizes]
        self._sign = torch.tensor(signs, dtype=plan.scalars.dtype, device=plan.device)
        # None where all are 1, so that nothing is multiplied by them
        self._numbers = {n: None if {*row} == {1.0} else self._sign.new_tensor(row) for n, row in plan.numbers.items()}
        self._skip = torch.zeros_like(self._sign)
        self._group_index = torch.tensor(plan.group_index, device=plan.device)
        given = plan.recorded_scalars
        self._recorded: tuple[int, Tensor] | None = None if given is None else (plan.scalars._version, given)

    def connect(self, square_sums: Tensor) -> None:
        """Take the vector whose sum is the sum of the squares of all gradients."""
        self._square_sums = square_sums

    def advance(self, present: Tensor | None) -> Tensor:
        """Count a step for the tensors where ``present`` is true (all if None) and return their coefficients.

        Returns a (2 + coefficients, tensors) matrix: the factor of the gradient, 1 where the step is skipped
        and else 0, and what the rule's update takes. The columns of absent tensors hold values of no meaning.
        """
        plan = self._plan
        factor, skip = self._sign, self._skip
        if not self._clipping.idle:
            factor, skip, present = self._control(present)
        old = self._scalars()
        step = old[0] + 1
        values: dict[str, Any] = {"step": step, **self._numbers, **plan.statics, **self._hypers()}
        values |= dict(zip(self._scalar_names, old[1:].unbind(), strict=True))
        results = plan.rule.evaluated(values)
        rows = {
            name: torch.as_tensor(value, dtype=step.dtype, device=step.device).expand_as(step)
            for name, value in results.items()
        }
        coefficients = torch.stack([factor, skip, *(rows[name] for name in self._names)])
        self._store(torch.stack([step, *(rows[name] for name in self._scalar_names)]), old, present)
        return coefficients

    def _control(self, present: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Factor and skip mark per tensor, and which tensors are present and not skipped."""
        plan = self._plan
        dtype = self._sign.dtype
        clipping = [t.to(plan.device, dtype) for t in self._clipping.tensors(plan.device)]
        square_sum = torch.zeros_like(clipping[0]) if self._square_sums is None else self._square_sums.sum()
        factor, norm, skip = scaled(square_sum, *clipping)
        skip = torch.as_tensor(skip, dtype=dtype, device=plan.device)
        outcome = self._clipping.outcome(plan.device)
        outcome[:2] = torch.stack([norm, skip]).detach()
        if plan.leads:
            outcome[2] += skip.detach()
        live = (skip == 0).expand_as(self._sign)
        return self._sign * factor, skip.expand_as(self._sign), live if present is None else present & live

    def _hypers(self) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """The hyperparameters by name, as vectors over the tensors (0-dim where one group holds them all)."""
        plan = self._plan
        rows = [t for group in plan.groups for h in plan.hypers for t in group.tensors(h.name)]
        same = [t.to(plan.device, plan.scalars.dtype) for t in rows]
        table = torch.stack(same).view(len(plan.groups), -1).t()
        columns = iter((table[:, 0] if len(plan.groups) == 1 else table[:, self._group_index]).unbind())
        return {h.name: tuple(next(columns) for _ in range(h.length)) if h.is_tuple else next(columns) for h in plan.hypers}

    def _scalars(self) -> Tensor:
        """The scalars as the last step left them: with its graph if it was recorded and nobody wrote to them since."""
        if self._recorded is not None and self._recorded[0] == self._plan.scalars._version:
            return self._recorded[1]
        return self._plan.scalars.clone() if torch.is_grad_enabled() else self._plan.scalars

    def _store(self, new: Tensor, old: Tensor, present: Tensor | None) -> None:
        new = new if present is None else torch.where(present, new, old)
        self._plan.scalars.copy_(new.detach())
        self._recorded = (self._plan.scalars._version, new) if new.requires_grad else None
