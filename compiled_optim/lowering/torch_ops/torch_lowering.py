"""The part of a step that is the same for every lowering whose kernels take gradients and coefficients as tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.lowering.gradient import square_sum
from compiled_optim.lowering.torch_ops.coefficients import CoefficientStage, Stage
from compiled_optim.lowering.torch_ops.recent import Recent
from compiled_optim.memory.layout import real_numel
from compiled_optim.memory.sharding import add_over_shards
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Plan


class TorchLowering:
    """Runs the step of one plan: the coefficients first, in torch operations, then what a subclass makes of them."""

    square_sum_count = 1

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self.plan = plan
        self._stage: Stage = CoefficientStage(plan, clipping)
        self._grads: Sequence[Tensor | None] = ()
        self._stages = plan.rule.mean_stages(plan.statics)
        self._masks: Recent[tuple[bool, ...], Tensor] = Recent(256)  # a new one waits for the device

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        self._square_sum = square_sums
        self._stage.connect(all_square_sums)

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        self._grads = self.plan.gradients(grads)

    def measure(self) -> None:
        self._square_sum.fill_(square_sum(self._grads, self.plan.device))

    def finish(self) -> None:
        self.plan.finish()
        self._grads = ()

    def _advance(self) -> tuple[Tensor, Tensor | None]:
        """Count a step of every parameter with a gradient.

        Returns the coefficients, see :meth:`CoefficientStage.advance`, behind them the rule's means, and which parameters
        have a gradient; None if all have.
        """
        present = tuple(grad is not None for grad in self._grads)
        mask = None
        if not all(present):
            mask = self._masks.get(present, lambda marks: torch.tensor(marks, device=self.plan.device))
        coefficients = self._stage.advance(mask)
        for stage, places in self._stages.items():
            sums = coefficients.new_zeros(places.stop - places.start, len(self.plan.members))
            self._sum_means(stage, coefficients, sums)
            coefficients = torch.cat([coefficients, self._means(sums)])
        return coefficients, mask

    def _sum_means(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors), what a stage of the rule's means is over each prepared tensor."""
        raise NotImplementedError(f"the means of {self.plan.rule.name}")

    def _means(self, sums: Tensor) -> Tensor:
        if self.plan.sharded:
            assert not sums.requires_grad, "autograd does not see what other processes add"
            add_over_shards(sums, self.plan.params[0])
        return sums / self._counts

    @functools.cached_property
    def _counts(self) -> Tensor:
        """The numbers of elements: of DTensors the whole ones, and at least 1."""
        counts = [max(real_numel(param), 1) for param in self.plan.params]
        return torch.tensor(counts, dtype=self.plan.scalars.dtype, device=self.plan.device)
