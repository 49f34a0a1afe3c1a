"""NAdam."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Number, buffer, hyper, scalar, static
from compiled_optim.lowering.vocabulary import bias_correction, power, product, sqrt
from compiled_optim.optimizer import CompiledOptimizer


class NAdam(CompiledOptimizer):
    """NAdam: Adam with Nesterov momentum (Dozat, ICLR 2016 workshop, openreview.net OM0jvwB8jIp57ZJjtNEZ).

    Differs from torch.optim.NAdam: ``mu_product`` is float64, and moments are averaged in float32 also for
    lower-precision parameters.
    """

    lr: Number = hyper(default=2e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    momentum_decay: Number = hyper(default=4e-3, ge=0)
    decoupled_weight_decay: bool = static(default=False)
    mu_product = scalar(init=1.0)
    exp_avg, exp_avg_sq = buffer(), buffer()
    group_flags: ClassVar[tuple[str, ...]] = ("maximize", "foreach", "capturable", "differentiable")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay, momentum_decay, mu_product):
        beta1, beta2 = betas
        mu = beta1 * (1 - 0.5 * power(0.96, step * momentum_decay))
        mu_next = beta1 * (1 - 0.5 * power(0.96, (step + 1) * momentum_decay))
        mu_product = mu_product * mu
        correction2 = sqrt(bias_correction(beta2, step))
        grad_size = lr * (1 - mu) / (1 - mu_product)
        momentum_size = lr * mu_next / (1 - mu_product * mu_next)
        return (
            mu_product,
            weight_decay,
            1 - lr * weight_decay,
            grad_size,
            momentum_size,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            correction2,
            eps,
        )

    @staticmethod
    def update(
        param, grad, exp_avg, exp_avg_sq, weight_decay, decay, grad_size, momentum_size,
        beta1, weight1, beta2, weight2, correction2, eps, decoupled_weight_decay,
    ):  # fmt: skip
        if decoupled_weight_decay:
            param = decay * param
        else:
            grad = grad + product(weight_decay, param)
        exp_avg = beta1 * exp_avg + weight1 * grad
        exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad * grad
        denominator = sqrt(exp_avg_sq) / correction2 + eps
        return param - (grad_size * grad + momentum_size * exp_avg) / denominator, exp_avg, exp_avg_sq
