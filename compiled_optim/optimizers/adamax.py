"""Adamax."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, absolute, bias_correction, buffer, hyper, maximum, product


class Adamax(CompiledOptimizer, decays="gradient"):
    """Adamax: Adam with the infinity norm instead of the second moment (arXiv:1412.6980, Algorithm 2)."""

    lr: Number = hyper(default=2e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1, doc="decay rates of the average and the maximum.")
    eps: Number = hyper(default=1e-8, ge=0, doc="is added to the magnitude of each gradient.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    exp_avg, exp_inf = buffer(int8="signed"), buffer(int8="unsigned")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        step_size = lr / bias_correction(beta1, step)
        return dict(weight_decay=weight_decay, step_size=step_size, beta1=beta1, weight1=1 - beta1, beta2=beta2, eps=eps)

    @staticmethod
    def update(param, grad, c, exp_avg, exp_inf):
        grad = grad + product(c.weight_decay, param)
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_inf = maximum(c.beta2 * exp_inf, absolute(grad) + c.eps)
        return dict(step=c.step_size * (exp_avg / exp_inf), exp_avg=exp_avg, exp_inf=exp_inf)
