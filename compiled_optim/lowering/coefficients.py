"""The scalar stage of a step: step counts, schedules' values and hyperparameters in, the kernels' few numbers out."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from compiled_optim.plan import Plan


class CoefficientStage:
    """Evaluates a rule's ``coefficients`` for all tensors of a plan at once, in float64 where the device has it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._takes = frozenset(inspect.signature(plan.rule.coefficients).parameters)
        self._scalar_names = [s.name for s in plan.rule.scalars]
        self.names = ("sign", *plan.rule.coefficient_names)

    def advance(self, present: Tensor | None) -> Tensor:
        """Count a step for the tensors where ``present`` is true (all if None) and return their coefficients.

        Returns a (coefficients, tensors) matrix, its rows in the order of ``names``. The columns of absent tensors hold
        values of no meaning.
        """
        plan = self._plan
        step = plan.scalars[0] + 1
        values: dict[str, Any] = {"step": step, **plan.statics, **plan.hypers()}
        values |= dict(zip(self._scalar_names, plan.scalars[1:].unbind(), strict=True))
        results = plan.rule.coefficients(**{name: values[name] for name in self._takes})
        count = len(self._scalar_names)
        self._store([step, *results[:count]], present)
        assert len(results) - count == len(self.names) - 1, f"{plan.rule.name}.coefficients and .update disagree"
        rows = [torch.as_tensor(r, dtype=step.dtype, device=step.device) for r in results[count:]]
        return torch.stack([row.expand_as(step) for row in (plan.sign, *rows)])

    def _store(self, scalars: list[Tensor], present: Tensor | None) -> None:
        new = torch.stack(scalars).detach()
        self._plan.scalars.copy_(new if present is None else torch.where(present, new, self._plan.scalars))
