"""The scalar stage of a step by a rule's multi-tensor kernel, for tensors that are then updated in another way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.events import EventLog
from compiled_optim.lowering.address_rows import GradientRow, HyperRow, tensor_rows, upload
from compiled_optim.plan import Plan
from compiled_optim.rule.fields import Static
from compiled_optim.rule.rule import Rule, argument_names
from compiled_optim.signature import Signature


@functools.cache
def coefficients_alone(rule: Rule) -> Rule:
    """A rule with the coefficients of ``rule`` and an update of single elements that leaves them as they are.

    ``resolution``, which is the same for all tensors of a kernel, is one more static field.
    """

    def update(param: Any) -> dict[str, Any]:
        return {"param": param}

    used = argument_names(rule.coefficients)
    statics = tuple(s for s in (*rule.statics, Static(0.0, name="resolution")) if s.name in used)
    return dataclasses.replace(rule, statics=statics, facts=(), buffers=(), update=update, granularity="element")


def coefficient_signature(plan: Plan, position: int) -> Signature:
    """The signature of the kernel that evaluates the coefficients of the tensor at ``position``."""
    rule = coefficients_alone(plan.rule)
    values = {**plan.statics, "resolution": torch.finfo(plan.members[position].param.dtype).eps}
    statics = tuple((s.name, values[s.name]) for s in rule.statics)
    return Signature(rule, statics, plan.device.type, "coefficients", "float64", "float64", ())


class CoefficientTable:
    """What a kernel reads to evaluate coefficients; see :class:`~compiled_optim.lowering.kernel_table.KernelTable`.

    Its gradients have no addresses, only a mark that they are there.

    Args:
        plan: the tensors' plan.
        controls: what holds for the whole step.
        positions: which of the plan's tensors share the kernel.
        hypers: of the plan.
        log: where refreshes are counted.
        leads: whether the kernel counts a skipped step.
    """

    def __init__(
        self, plan: Plan, controls: Controls, positions: Sequence[int], hypers: HyperRow, log: EventLog, *, leads: bool
    ) -> None:
        self.positions = tuple(positions)
        self.index = upload(list(positions), plan.device)
        nothing = [0] * len(positions)
        self.tensors = tensor_rows(plan, positions, [nothing], nothing)
        self.chunks = self.stretches = self.tensors.new_empty(0, 2)
        numbers = 1 + len(plan.rule.coefficient_names)
        self.coefficients = torch.empty(numbers, len(positions), dtype=torch.float64, device=plan.device)
        self.outcome = controls.outcome(plan.device)
        self.square_sums = self.all_square_sums = self.coefficients.new_empty(0)
        self.hypers = hypers.row
        self.leads = leads
        self.elements = 0
        self.gradients = GradientRow(len(positions), plan.device, log)
        self._present = [False] * len(positions)  # as the kernel knows it

    @property
    def grads(self) -> Tensor:
        """Not 0 where there is a gradient."""
        return self.gradients.row

    def prepare(self, grads: Sequence[Tensor | None]) -> None:
        """Note which of the plan's tensors have a gradient."""
        present = [grads[i] is not None for i in self.positions]
        self.gradients.publish(None if present == self._present else present)
        self._present = present

    def columns(self) -> Tensor:
        """What the kernel wrote, as :meth:`~compiled_optim.lowering.coefficients.CoefficientStage.advance` returns it.

        The marks in the second row are not 0 for absent gradients too.
        """
        marks = torch.where(self.grads == 0, 1.0, self.outcome[1])
        return torch.cat([self.coefficients[:1], marks.unsqueeze(0), self.coefficients[1:]])
