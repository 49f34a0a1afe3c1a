"""ADOPT."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, decayed, hyper, maximum, minimum, power, sqrt, static, where


class ADOPT(CompiledOptimizer, decays="gradient"):
    """ADOPT: Adam that normalizes a gradient before its average, by earlier squares (arXiv:2411.02853, Algorithm 2).

    As in the authors' code, the first step only squares the gradient, and step ``t`` limits a normalized gradient to
    ``(t - 1)**0.25``. ``decoupled_weight_decay`` is their ``decouple``.
    """

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.9999), ge=0, lt=1)
    eps: Number = hyper(default=1e-6, ge=0, doc="the least divisor, in units of the gradient.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    decoupled_weight_decay: bool = static(default=False)
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        follows = where(step > 1, 1.0, 0.0)
        beta2 = follows * betas[1]
        decay = dict(weight_decay=weight_decay, decay=1 - follows * lr * weight_decay)
        averages = dict(weight1=follows * (1 - betas[0]), beta2=beta2, weight2=1 - beta2)
        return dict(lr=follows * lr, eps=eps, limit=power(step - 1, 0.25), **averages, **decay)

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, decoupled_weight_decay):
        param, grad = decayed(param, grad, c, decoupled_weight_decay)
        divisor = maximum(sqrt(exp_avg_sq), c.eps)
        normed = minimum(maximum(grad / where(c.limit > 0, divisor, 1.0), -c.limit), c.limit)
        exp_avg = exp_avg + c.weight1 * (normed - exp_avg)
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        return dict(param=param, step=c.lr * exp_avg, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
