"""AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

from compiled_optim.fields import Number, buffer, hyper, static
from compiled_optim.lowering.vocabulary import bias_correction, maximum, sqrt
from compiled_optim.optimizer import CompiledOptimizer


class AdamW(CompiledOptimizer):
    """AdamW: Adam with decoupled weight decay (arXiv:1711.05101, Algorithm 2).

    ``amsgrad`` keeps the maximum of the second moment (arXiv:1904.09237). Differs from torch.optim.AdamW: moments are
    averaged in float32 also for lower-precision parameters.
    """

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=1e-2, ge=0)
    amsgrad: bool = static(default=False)
    exp_avg, exp_avg_sq, max_exp_avg_sq = buffer(), buffer(), buffer(when="amsgrad")
    group_constants: ClassVar[dict[str, Any]] = {"decoupled_weight_decay": True}

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        step_size = lr / bias_correction(beta1, step)
        return (
            1 - lr * weight_decay,
            step_size,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            sqrt(bias_correction(beta2, step)),
            eps,
        )

    @staticmethod
    def update(
        param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq,
        decay, step_size, beta1, weight1, beta2, weight2, correction2, eps, amsgrad,
    ):  # fmt: skip
        exp_avg = beta1 * exp_avg + weight1 * grad
        exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad * grad
        second_moment = exp_avg_sq
        if amsgrad:
            max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
            second_moment = max_exp_avg_sq
        denominator = sqrt(second_moment) / correction2 + eps
        return decay * param - step_size * (exp_avg / denominator), exp_avg, exp_avg_sq, max_exp_avg_sq
