"""Adam."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Accumulation, Number, bias_correction, buffer, decayed, ema, hyper, maximum, sqrt, static


class Adam(CompiledOptimizer, advice="SparseAdam", decays="gradient"):
    """Adam (arXiv:1412.6980, Algorithm 1), with weight decay in the gradient or decoupled from it.

    ``amsgrad`` keeps the maximum of the second moment (arXiv:1904.09237).
    """

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    amsgrad: bool = static(default=False)
    decoupled_weight_decay: bool = static(default=False, kw_only=True)
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")
    max_exp_avg_sq = buffer(when="amsgrad", int8="unsigned")
    accumulation = Accumulation(kept=("beta1", "beta2"))

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        correction2 = sqrt(bias_correction(beta2, step))  # in the numerator and in eps, it spares a division
        return dict(
            weight_decay=weight_decay,
            decay=1 - lr * weight_decay,
            step_size=correction2 * lr / bias_correction(beta1, step),
            **ema(betas),
            eps=correction2 * eps,
        )

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, max_exp_avg_sq, amsgrad, decoupled_weight_decay):
        param, grad = decayed(param, grad, c, decoupled_weight_decay)
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        if amsgrad:
            max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
        denominator = sqrt(max_exp_avg_sq if amsgrad else exp_avg_sq) + c.eps
        step = c.step_size * (exp_avg / denominator)
        return dict(param=param, step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, max_exp_avg_sq=max_exp_avg_sq)
