"""RAdam."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Accumulation, Number, bias_correction, buffer, decayed, ema, hyper, sqrt, static, where


class RAdam(CompiledOptimizer, decays="gradient"):
    """RAdam: Adam whose adaptive step is rectified by its variance (arXiv:1908.03265, Algorithm 2)."""

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    decoupled_weight_decay: bool = static(default=False)
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")
    accumulation = Accumulation(kept=("beta1", "beta2"))

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        correction2 = bias_correction(beta2, step)
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * (1 - correction2) / correction2
        adaptive = length > 5
        # Below the threshold, values for which everything is finite and the rectification is 1.
        longest, length = where(adaptive, longest, 6.0), where(adaptive, length, 6.0)
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        rectified = sqrt(ratio * where(adaptive, correction2, 1.0))
        return dict(
            weight_decay=weight_decay,
            decay=1 - lr * weight_decay,
            step_size=rectified * lr / bias_correction(beta1, step),
            adaptive=adaptive,
            **ema(betas),
            eps=where(adaptive, eps, 0.0),
        )

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, decoupled_weight_decay):
        param, grad = decayed(param, grad, c, decoupled_weight_decay)
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        denominator = sqrt(where(c.adaptive > 0, exp_avg_sq, 1.0)) + c.eps
        return dict(param=param, step=c.step_size * (exp_avg / denominator), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
