"""NAdam."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, decayed, ema, hyper, power, scalar, sqrt, static


class NAdam(CompiledOptimizer, decays="gradient"):
    """NAdam: Adam with Nesterov momentum (Dozat, ICLR 2016 workshop, openreview.net OM0jvwB8jIp57ZJjtNEZ).

    Differs from torch.optim.NAdam: ``mu_product`` is float64.
    """

    lr: Number = hyper(default=2e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    momentum_decay: Number = hyper(default=4e-3, ge=0, doc="how fast the momentum approaches ``betas[0]``.")
    decoupled_weight_decay: bool = static(default=False)
    mu_product = scalar(init=1.0)
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay, momentum_decay, mu_product):
        beta1, beta2 = betas
        mu = beta1 * (1 - 0.5 * power(0.96, step * momentum_decay))
        mu_next = beta1 * (1 - 0.5 * power(0.96, (step + 1) * momentum_decay))
        mu_product = mu_product * mu
        correction2 = sqrt(bias_correction(beta2, step))
        return dict(
            mu_product=mu_product,
            weight_decay=weight_decay,
            decay=1 - lr * weight_decay,
            grad_size=correction2 * lr * (1 - mu) / (1 - mu_product),
            momentum_size=correction2 * lr * mu_next / (1 - mu_product * mu_next),
            **ema(betas),
            eps=correction2 * eps,
        )

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, decoupled_weight_decay):
        param, grad = decayed(param, grad, c, decoupled_weight_decay)
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        step = (c.grad_size * grad + c.momentum_size * exp_avg) / (sqrt(exp_avg_sq) + c.eps)
        return dict(param=param, step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
