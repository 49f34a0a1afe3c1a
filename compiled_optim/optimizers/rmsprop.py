"""RMSprop."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Number, buffer, hyper, static
from compiled_optim.lowering.vocabulary import product, sqrt, where
from compiled_optim.optimizer import CompiledOptimizer


class RMSprop(CompiledOptimizer):
    """RMSprop (Hinton, Coursera 2012, lecture 6e); ``centered`` divides by the deviation (arXiv:1308.0850, equation 40).

    Differs from torch.optim.RMSprop: averages are taken in float32 also for lower-precision parameters, a variance that
    rounding makes negative counts as 0 instead of yielding NaN, and while ``momentum`` is set to 0 during a run the buffer
    follows the step instead of standing still.
    """

    lr: Number = hyper(default=1e-2, ge=0)
    alpha: Number = hyper(default=0.99, ge=0)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    momentum: Number = hyper(default=0.0, ge=0)
    centered: bool = static(default=False)
    square_avg, momentum_buffer, grad_avg = buffer(), buffer(when="momentum"), buffer(when="centered")
    positional_flags: ClassVar[tuple[str, ...]] = ("capturable", "foreach", "maximize", "differentiable")
    group_flags: ClassVar[tuple[str, ...]] = positional_flags

    @staticmethod
    def coefficients(lr, alpha, eps, weight_decay, momentum):
        return weight_decay, lr, alpha, 1 - alpha, eps, momentum

    @staticmethod
    def update(
        param, grad, square_avg, momentum_buffer, grad_avg, weight_decay, lr, alpha, weight, eps, momentum, centered
    ):  # fmt: skip
        grad = grad + product(weight_decay, param)
        square_avg = alpha * square_avg + weight * grad * grad
        variance = square_avg
        if centered:
            grad_avg = alpha * grad_avg + weight * grad
            variance = square_avg - grad_avg * grad_avg
            variance = where(variance > 0, variance, 0.0)
        direction = grad / (sqrt(variance) + eps)
        if momentum_buffer is not None:
            direction = momentum_buffer = momentum * momentum_buffer + direction
        return param - lr * direction, square_avg, momentum_buffer, grad_avg
