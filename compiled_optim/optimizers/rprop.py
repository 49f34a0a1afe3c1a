"""Rprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from compiled_optim.fields import Number, buffer, hyper
from compiled_optim.lowering.vocabulary import maximum, minimum, sign, where
from compiled_optim.optimizer import CompiledOptimizer


class Rprop(CompiledOptimizer):
    """Rprop: step sizes that grow while the gradient keeps its sign (Riedmiller and Braun, doi:10.1109/ICNN.1993.298623).

    Where the sign changes the parameter rests for a step. Differs from torch.optim.Rprop: the product of two tiny
    gradients of equal sign does not underflow to "no sign".
    """

    lr: Number = hyper(default=1e-2, ge=0)
    etas: tuple[Number, Number] = hyper(default=(0.5, 1.2), gt=0)
    step_sizes: tuple[Number, Number] = hyper(default=(1e-6, 50.0), lt=None)
    prev, step_size = buffer(), buffer(init="lr")
    group_flags: ClassVar[tuple[str, ...]] = ("foreach", "maximize", "differentiable", "capturable")

    @staticmethod
    def check(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the first eta shrinks and the second grows."""
        smaller, larger = hypers["etas"]
        if not 0 < smaller < 1 < larger:
            raise ValueError(f"Invalid eta values: {smaller}, {larger}")

    @staticmethod
    def coefficients(step, lr, etas, step_sizes):
        smaller, larger = etas
        smallest, largest = step_sizes
        first = step == 1  # takes the learning rate as it is now, whatever it was when the state was made
        return first, lr, smaller, larger, smallest, largest

    @staticmethod
    def update(param, grad, prev, step_size, first, lr, smaller, larger, smallest, largest):
        agreement = sign(grad) * sign(prev)
        step_size = where(first > 0, lr, step_size) * where(agreement > 0, larger, where(agreement < 0, smaller, 1.0))
        step_size = minimum(maximum(step_size, smallest), largest)
        grad = where(agreement < 0, 0.0, grad)
        return param - sign(grad) * step_size, grad, step_size
