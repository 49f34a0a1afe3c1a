"""StableAdamW."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, ema, hyper, maximum, mean, product, sqrt


class StableAdamW(CompiledOptimizer):
    """StableAdamW: AdamW with smaller steps where gradients exceed their average (arXiv:2304.13013, Algorithm 2).

    A tensor's learning rate, also for its decay, is divided by the root mean square of ``grad / sqrt(exp_avg_sq)`` if that
    is above 1. The state holds averages without bias correction; the step divides them by ``1 - beta**step``. This equals
    Algorithm 2, and optimi's step, while ``betas`` are constant. If ``betas`` change, results differ.
    """

    lr: Number = hyper(ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.99), ge=0, lt=1)
    weight_decay: Number = hyper(default=1e-2, ge=0, doc="a step subtracts its rate times this times the parameter.")
    eps: Number = hyper(default=1e-6, gt=0, doc="keeps divisors from 0, in units of the gradient.")
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")

    @staticmethod
    def coefficients(step, lr, betas, weight_decay, eps):
        beta1, beta2 = betas
        correction2 = sqrt(bias_correction(beta2, step))
        return dict(
            shrinkage=lr * weight_decay,
            step_size=correction2 * lr / bias_correction(beta1, step),
            **ema(betas),
            correction2=correction2,
            eps=correction2 * eps,
        )

    @staticmethod
    def reduce(grad, c, exp_avg_sq):
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        ratio = c.correction2 * grad / maximum(sqrt(exp_avg_sq), c.eps)
        return dict(mean_square=mean(ratio * ratio))

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq):
        slowdown = maximum(sqrt(c.mean_square), 1.0)
        param = param - product(c.shrinkage / slowdown, param)
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        step = c.step_size / slowdown * (exp_avg / (sqrt(exp_avg_sq) + c.eps))
        return dict(param=param, step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
