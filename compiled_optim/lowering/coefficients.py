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
        self._recorded: tuple[int, Tensor] | None = None

    def advance(self, present: Tensor | None) -> Tensor:
        """Count a step for the tensors where ``present`` is true (all if None) and return their coefficients.

        Returns a (coefficients, tensors) matrix, its rows in the order of ``names``. The columns of absent tensors hold
        values of no meaning.
        """
        plan = self._plan
        old = self._scalars()
        step = plan.scalars[0] + 1
        values: dict[str, Any] = {"step": step, **plan.statics, **plan.hypers()}
        values |= dict(zip(self._scalar_names, old[1:].unbind(), strict=True))
        results = plan.rule.coefficients(**{name: values[name] for name in self._takes})
        count = len(self._scalar_names)
        assert len(results) - count == len(self.names) - 1, f"{plan.rule.name}.coefficients and .update disagree"
        rows = [torch.as_tensor(r, dtype=step.dtype, device=step.device).expand_as(step) for r in results]
        coefficients = torch.stack([plan.sign, *rows[count:]])
        self._store(torch.stack([step, *rows[:count]]), old, present)
        return coefficients

    def _scalars(self) -> Tensor:
        """The scalars as the last step left them: with its graph if it was recorded and nobody wrote to them since."""
        if self._recorded is not None and self._recorded[0] == self._plan.scalars._version:
            return self._recorded[1]
        return self._plan.scalars.clone() if torch.is_grad_enabled() else self._plan.scalars

    def _store(self, new: Tensor, old: Tensor, present: Tensor | None) -> None:
        new = new if present is None else torch.where(present, new, old)
        self._plan.scalars.copy_(new.detach())
        self._recorded = (self._plan.scalars._version, new) if new.requires_grad else None
