"""The scalar stage of a step: step counts, schedules' values and hyperparameters in, the kernels' few numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_optim.lowering.gradient import scaled
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import Rule


class Given(NamedTuple):
    """What the coefficients of a plan are made of.

    Attributes:
        scalars: as :attr:`~compiled_optim.plan.plan.Plan.scalars`, before the step.
        hypers: the hyperparameters of each of the plan's groups, one group after the other.
        clipping: the numbers called :data:`~compiled_optim.plan.clipping.NAMES`; none where gradients are used as they are.
        constants: :attr:`CoefficientStage.constants`.
        group_index: which of the plan's groups each tensor is in.
    """

    scalars: Tensor
    hypers: Sequence[Tensor]
    clipping: Sequence[Tensor]
    constants: Tensor
    group_index: Tensor


class Found(NamedTuple):
    """What a step makes of them.

    Attributes:
        rows: the coefficients, with one entry per tensor: the factor of the gradient, 1 where the step is skipped, else 0,
            and what the rule's update takes. Entries of absent tensors have no meaning.
        scalars: those after the step.
        outcome: the norm of all gradients, and 1 where the step is skipped; None without clipping.
    """

    rows: list[Tensor]
    scalars: Tensor
    outcome: Tensor | None


class Stage(Protocol):
    """What evaluates the coefficients of a plan's steps."""

    def connect(self, square_sums: Tensor) -> None:
        """Take the vector whose sum is the sum of the squares of all gradients."""

    def advance(self, present: Tensor | None) -> Tensor:
        """Count a step for the tensors where ``present`` is true (all if None) and return their coefficients.

        Returns a (2 + coefficients, tensors) matrix, see :attr:`Found.rows`.
        """


class CoefficientStage:
    """Evaluates a rule's ``coefficients`` for all tensors of a plan at once, in float64 where the device has it."""

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self._plan = plan
        self._clipping = clipping
        self._square_sums: Tensor | None = None
        self._names = plan.rule.coefficient_names(plan.statics)
        signs = [-1.0 if maximizes else 1.0 for maximizes in plan.maximizes]
        # None where all are 1, so that nothing is multiplied by them
        numbers = {name: None if {*row} == {1.0} else row for name, row in plan.numbers.items()}
        self._rows = [name for name, row in numbers.items() if row is not None]
        self._neutral = dict.fromkeys(numbers.keys() - self._rows)
        rows = [signs, *(row for row in numbers.values() if row is not None)]
        self.constants = torch.tensor(rows, dtype=plan.scalars.dtype, device="cpu").to(plan.device)
        self.group_index = torch.tensor(plan.group_index, device="cpu").to(plan.device)
        given = plan.recorded_scalars
        self._recorded: tuple[int, Tensor] | None = None if given is None else (plan.scalars._version, given)

    def connect(self, square_sums: Tensor) -> None:
        """As :meth:`Stage.connect`."""
        self._square_sums = square_sums

    def advance(self, present: Tensor | None) -> Tensor:
        """As :meth:`Stage.advance`."""
        plan, clipping = self._plan, self._clipping
        hypers = [t for group in plan.groups for h in plan.hypers for t in group.read_only(h.name)]
        numbers = () if clipping.idle else clipping.tensors(plan.device)
        given = Given(self._scalars(), hypers, numbers, self.constants, self.group_index)
        result = self.evaluate(given, None if self._square_sums is None else self._square_sums.sum(), present)
        coefficients = torch.stack(result.rows)
        if result.outcome is not None:
            note_outcome(clipping.outcome(plan.device), result.outcome.detach(), counts=plan.leads)
        plan.scalars.copy_(result.scalars.detach())
        self._recorded = (plan.scalars._version, result.scalars) if result.scalars.requires_grad else None
        return coefficients

    def evaluate(self, given: Given, square_sum: Tensor | None, present: Tensor | None) -> Found:
        """Count a step as :meth:`advance`, of what is ``given``, and write nothing.

        ``square_sum`` is that of all gradients; None where nobody needs it.
        """
        plan = self._plan
        signs, *rows = given.constants.unbind()
        numbers = self._neutral | dict(zip(self._rows, rows, strict=True))
        clipping = [t.to(plan.device, given.scalars.dtype) for t in given.clipping]
        hypers, rule = self._hypers(given), plan.rule
        return found(rule, self._names, plan.statics, given.scalars, hypers, numbers, signs, clipping, square_sum, present)

    def _hypers(self, given: Given) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """The hyperparameters by name, as vectors over the tensors (0-dim where one group holds them all)."""
        plan = self._plan
        same = [t.to(plan.device, plan.scalars.dtype) for t in given.hypers]
        if len(plan.groups) == 1:
            columns = iter(same)
        else:
            table = torch.stack(same).view(len(plan.groups), -1).t()
            columns = iter(table[:, given.group_index].unbind())
        return {h.name: tuple(next(columns) for _ in range(h.length)) if h.is_tuple else next(columns) for h in plan.hypers}

    def _scalars(self) -> Tensor:
        """The scalars as the last step left them: with its graph if it was recorded and nobody wrote to them since."""
        if self._recorded is not None and self._recorded[0] == self._plan.scalars._version:
            return self._recorded[1]
        return self._plan.scalars.clone() if torch.is_grad_enabled() else self._plan.scalars


def found(
    rule: Rule,
    names: Sequence[str],
    statics: Mapping[str, Any],
    scalars: Tensor,
    hypers: Mapping[str, Tensor | tuple[Tensor, ...]],
    numbers: Mapping[str, Tensor | None],
    signs: Tensor,
    clipping: Sequence[Tensor],
    square_sum: Tensor | None,
    present: Tensor | None,
) -> Found:
    """What a step makes of ``scalars``; vectors have an entry for each tensor.

    ``names`` are the rule's :meth:`~Rule.coefficient_names`. ``hypers`` and ``numbers`` are what its ``coefficients`` read,
    by name, ``signs`` factors of the gradients. ``clipping``, ``square_sum`` and ``present`` are as for
    :meth:`CoefficientStage.evaluate`.
    """
    factor, outcome, skip = signs, None, torch.zeros_like(signs)
    if clipping:
        total = torch.zeros_like(clipping[0]) if square_sum is None else square_sum
        clip, norm, skipped = scaled(total, *clipping)
        skipped = torch.as_tensor(skipped, dtype=scalars.dtype, device=scalars.device)
        outcome = torch.stack([norm, skipped])
        live = (skipped == 0).expand_as(factor)
        present = live if present is None else present & live
        factor, skip = factor * clip, skipped.expand_as(factor)
    step = scalars[0] + 1
    own = [s.name for s in rule.scalars]
    values: dict[str, Any] = {"step": step, **numbers, **statics, **hypers}
    values |= dict(zip(own, scalars[1:].unbind(), strict=True))
    rows = {
        name: torch.as_tensor(value, dtype=step.dtype, device=step.device).expand_as(step)
        for name, value in rule.evaluated(values).items()
    }
    new = torch.stack([step, *(rows[name] for name in own)])
    new = new if present is None else torch.where(present, new, scalars)
    return Found([factor, skip, *(rows[name] for name in names)], new, outcome)


def note_outcome(outcome: Tensor, found: Tensor, *, counts: bool) -> None:
    """Write :attr:`Found.outcome` to what :meth:`Clipping.outcome` returned; ``counts`` where this plan counts the skips."""
    skipped = outcome[2:] + found[1:] if counts else outcome[2:]
    outcome.copy_(torch.cat([found, skipped]))
