"""Prodigy."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, absolute, buffer, hyper, maximum, product, scalar, sqrt, total, where


class Prodigy(CompiledOptimizer):
    """Prodigy: Adam that estimates its learning rate as it goes (arXiv:2306.06101, Algorithm 4).

    The estimate ``d`` of the learning rate grows with the distance of all parameters together from where they started. Every
    parameter's state has a copy. ``d`` is a quotient of two sums, which decay by ``sqrt(betas[1])`` in each step; the first
    group's ``betas`` and ``d_coef`` apply. Weight decay is decoupled, as with ``decouple=True`` in the authors' package. As
    in the paper, ``eps`` is multiplied by the ``d`` of the step, and so is a gradient where ``betas[0]`` is 0. Differs from
    the authors' package, which uses the next ``d`` for both.

    16-bit parameters need ``weights``. Without it, most of the measured distance is rounding error.
    """

    lr: Number = hyper(default=1.0, ge=0, doc="factor of the estimated learning rate, for schedules.")
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0, doc="a step subtracts ``lr * d * weight_decay * param``.")
    d0: Number = hyper(default=1e-6, gt=0, doc="the estimate that training starts with.")
    d_coef: Number = hyper(default=1.0, gt=0, doc="factor of each new estimate.")
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")
    s, p0 = buffer(), buffer(init="param")
    d, d_numerator = scalar(init="d0", shared=True), scalar(shared=True)

    @staticmethod
    def coefficients(lr, betas, eps, weight_decay, d):
        beta1, beta2 = betas
        return dict(
            step_size=lr * d,
            shrinkage=lr * d * weight_decay,
            beta1=beta1,
            weight1=(1 - beta1) * d,
            beta2=beta2,
            weight2=(1 - beta2) * d * d,
            beta3=sqrt(beta2),
            weight3=(1 - sqrt(beta2)) * lr * d * d,
            eps=d * eps,
        )

    @staticmethod
    def reduce(param, grad, c, s, p0):
        return dict(gain=total(product(c.weight3 * grad, p0 - param)), size=total(absolute(c.beta3 * s + c.weight3 * grad)))

    @staticmethod
    def adapt(gain, size, d, d_numerator, betas, d_coef):
        numerator, grows = sqrt(betas[1]) * d_numerator + gain, size > 0
        estimate = d_coef * numerator / where(grows, size, 1.0)
        return dict(d_numerator=where(grows, numerator, d_numerator), d=where(grows, maximum(d, estimate), d))

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, s, p0):
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        step = product(c.shrinkage, param) + c.step_size * exp_avg / (sqrt(exp_avg_sq) + c.eps)
        return dict(step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, s=c.beta3 * s + c.weight3 * grad, p0=p0)
