"""SparseAdam."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Gradients, Number, buffer, hyper
from compiled_optim.lowering.vocabulary import bias_correction, sqrt
from compiled_optim.optimizer import CompiledOptimizer


class SparseAdam(CompiledOptimizer):
    """Adam (arXiv:1412.6980, Algorithm 1) on the rows that sparse gradients name, for ``nn.Embedding(sparse=True)``.

    The moments of other rows do not decay. ``eps`` is outside the bias correction (the paper's section 2, end). Differs from
    torch.optim.SparseAdam: repeated rows are added up, and moments averaged, in float32 also for lower-precision parameters,
    ``lr`` may be 0, and no step waits for the device.
    """

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, gt=0)
    exp_avg, exp_avg_sq = buffer(), buffer()
    gradients: ClassVar[Gradients] = "sparse"
    advice: ClassVar[str] = "Adam"
    positional_flags: ClassVar[tuple[str, ...]] = ("maximize",)
    group_flags: ClassVar[tuple[str, ...]] = ("maximize",)

    @staticmethod
    def coefficients(step, lr, betas, eps):
        beta1, beta2 = betas
        step_size = lr * sqrt(bias_correction(beta2, step)) / bias_correction(beta1, step)
        return step_size, beta1, 1 - beta1, beta2, 1 - beta2, eps

    @staticmethod
    def update(param, grad, exp_avg, exp_avg_sq, step_size, beta1, weight1, beta2, weight2, eps):
        exp_avg = beta1 * exp_avg + weight1 * grad
        exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad * grad
        return param - step_size * (exp_avg / (sqrt(exp_avg_sq) + eps)), exp_avg, exp_avg_sq
