"""Adam."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Number, buffer, hyper, static
from compiled_optim.lowering.vocabulary import bias_correction, maximum, product, sqrt
from compiled_optim.optimizer import CompiledOptimizer


class Adam(CompiledOptimizer):
    """Adam (arXiv:1412.6980, Algorithm 1), with weight decay in the gradient or decoupled from it.

    ``amsgrad`` keeps the maximum of the second moment (arXiv:1904.09237). Differs from torch.optim.Adam: moments are
    averaged in float32 also for lower-precision parameters.
    """

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    amsgrad: bool = static(default=False)
    decoupled_weight_decay: bool = static(default=False, kw_only=True)
    exp_avg, exp_avg_sq, max_exp_avg_sq = buffer(), buffer(), buffer(when="amsgrad")
    advice: ClassVar[str] = "SparseAdam"

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        step_size = lr / bias_correction(beta1, step)
        return (
            weight_decay,
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
        param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, weight_decay, decay, step_size,
        beta1, weight1, beta2, weight2, correction2, eps, amsgrad, decoupled_weight_decay,
    ):  # fmt: skip
        if decoupled_weight_decay:
            param = decay * param
        else:
            grad = grad + product(weight_decay, param)
        exp_avg = beta1 * exp_avg + weight1 * grad
        exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad * grad
        if amsgrad:
            max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
        denominator = sqrt(max_exp_avg_sq if amsgrad else exp_avg_sq) / correction2 + eps
        return param - step_size * (exp_avg / denominator), exp_avg, exp_avg_sq, max_exp_avg_sq
