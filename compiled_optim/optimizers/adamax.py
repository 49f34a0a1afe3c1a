"""Adamax."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Number, buffer, hyper
from compiled_optim.lowering.vocabulary import absolute, bias_correction, maximum, product
from compiled_optim.optimizer import CompiledOptimizer


class Adamax(CompiledOptimizer):
    """Adamax: Adam with the infinity norm in place of the second moment (arXiv:1412.6980, Algorithm 2)."""

    lr: Number = hyper(default=2e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    exp_avg, exp_inf = buffer(), buffer()
    positional_flags: ClassVar[tuple[str, ...]] = ("foreach",)
    group_flags: ClassVar[tuple[str, ...]] = ("foreach", "maximize", "differentiable", "capturable")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        return weight_decay, lr / bias_correction(beta1, step), beta1, 1 - beta1, beta2, eps

    @staticmethod
    def update(param, grad, exp_avg, exp_inf, weight_decay, step_size, beta1, weight1, beta2, eps):
        grad = grad + product(weight_decay, param)
        exp_avg = beta1 * exp_avg + weight1 * grad
        exp_inf = maximum(beta2 * exp_inf, absolute(grad) + eps)
        return param - step_size * (exp_avg / exp_inf), exp_avg, exp_inf
