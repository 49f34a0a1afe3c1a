"""Adagrad."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Number, buffer, hyper
from compiled_optim.lowering.vocabulary import product, sqrt
from compiled_optim.optimizer import CompiledOptimizer


class Adagrad(CompiledOptimizer):
    """Adagrad: steps over the root of the sum of squared gradients (Duchi et al., JMLR 12, 2011, Figure 1).

    Differs from torch.optim.Adagrad: gradients are dense.
    """

    lr: Number = hyper(default=1e-2, ge=0)
    lr_decay: Number = hyper(default=0.0, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    initial_accumulator_value: Number = hyper(default=0.0, ge=0)
    eps: Number = hyper(default=1e-10, ge=0)
    sum = buffer(init="initial_accumulator_value")
    positional_flags: ClassVar[tuple[str, ...]] = ("foreach",)
    group_flags: ClassVar[tuple[str, ...]] = ("foreach", "maximize", "differentiable", "fused")

    @staticmethod
    def coefficients(step, lr, lr_decay, weight_decay, eps):
        return weight_decay, lr / (1 + (step - 1) * lr_decay), eps

    @staticmethod
    def update(param, grad, sum, weight_decay, step_size, eps):
        grad = grad + product(weight_decay, param)
        sum = sum + grad * grad
        return param - step_size * (grad / (sqrt(sum) + eps)), sum
