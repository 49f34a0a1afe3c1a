"""The part of a step that is the same for every lowering whose kernels take gradients and coefficients as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.lowering.coefficients import CoefficientStage
from compiled_optim.lowering.recent import Recent
from compiled_optim.lowering.square_sums import square_sum
from compiled_optim.plan import Plan


class StagedLowering:
    """Runs the step of one plan: the coefficients first, in torch operations, then what a subclass makes of them.

    Args:
        plan: the tensors.
        controls: what holds for the whole step.
    """

    square_sum_count = 1

    def __init__(self, plan: Plan, controls: Controls) -> None:
        self.plan = plan
        self._stage = CoefficientStage(plan, controls)
        self._grads: Sequence[Tensor | None] = ()
        self._masks: Recent[tuple[bool, ...], Tensor | None] = Recent(256)  # a new one waits for the device

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``; the sum of ``whole`` is the sum over all gradients."""
        self._square_sum = own
        self._stage.connect(whole)

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Take ``grads``, one entry per parameter, or the parameters' own."""
        self._grads = self.plan.gradients(grads)

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients."""
        self._square_sum.fill_(square_sum(self._grads))

    def finish(self) -> None:
        """Let go of the gradients, and let autograd know that the parameters have changed."""
        self.plan.finish()
        self._grads = ()

    def _advance(self) -> tuple[Tensor, Tensor | None]:
        """Count a step of every parameter with a gradient.

        Returns:
            The coefficients, see :meth:`CoefficientStage.advance`, and which parameters have a gradient; None if all have.
        """
        present = tuple(grad is not None for grad in self._grads)
        mask = self._masks.get(present, self._mask_of)
        return self._stage.advance(mask), mask

    def _mask_of(self, present: tuple[bool, ...]) -> Tensor | None:
        return None if all(present) else torch.tensor(present, device=self.plan.device)
