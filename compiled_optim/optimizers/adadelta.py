"""Adadelta."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Number, buffer, hyper
from compiled_optim.lowering.vocabulary import product, sqrt
from compiled_optim.optimizer import CompiledOptimizer


class Adadelta(CompiledOptimizer):
    """Adadelta: steps in the units of the parameter (arXiv:1212.5701, Algorithm 1), times a learning rate."""

    lr: Number = hyper(default=1.0, ge=0)
    rho: Number = hyper(default=0.9, ge=0, le=1)
    eps: Number = hyper(default=1e-6, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    square_avg, acc_delta = buffer(), buffer()
    positional_flags: ClassVar[tuple[str, ...]] = ("foreach",)
    group_flags: ClassVar[tuple[str, ...]] = ("maximize", "capturable", "foreach", "differentiable")

    @staticmethod
    def coefficients(lr, rho, eps, weight_decay):
        return weight_decay, lr, rho, 1 - rho, eps

    @staticmethod
    def update(param, grad, square_avg, acc_delta, weight_decay, lr, rho, weight, eps):
        grad = grad + product(weight_decay, param)
        square_avg = rho * square_avg + weight * grad * grad
        delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * grad
        acc_delta = rho * acc_delta + weight * delta * delta
        return param - lr * delta, square_avg, acc_delta
