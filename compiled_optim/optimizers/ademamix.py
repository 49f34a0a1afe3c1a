"""AdEMAMix."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, ema, exp, hyper, log, maximum, minimum, sqrt, where


class AdEMAMix(CompiledOptimizer):
    """AdEMAMix: AdamW with a second, much slower average of gradients (arXiv:2409.03137, Algorithm 1).

    ``alpha`` and the half-life of the slow average grow over the first steps, the latter from ``betas[0]``'s.
    """

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number, Number] = hyper(
        default=(0.9, 0.999, 0.9999), ge=0, lt=1, doc="decay rates of the averages: of gradients, of squares, slow."
    )
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    alpha: Number = hyper(default=5.0, ge=0, doc="factor of the slow average in a step.")
    t_alpha: Number = hyper(default=0.0, ge=0, doc="steps in which ``alpha`` grows from 0; 0 for none.")
    t_beta3: Number = hyper(default=0.0, ge=0, doc="steps in which ``betas[2]`` grows from ``betas[0]``; 0 for none.")
    exp_avg, exp_avg_sq, exp_avg_slow = buffer(int8="signed"), buffer(int8="unsigned"), buffer(int8="signed")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay, alpha, t_alpha, t_beta3):
        beta1, beta2, beta3 = betas
        correction2, share = sqrt(bias_correction(beta2, step)), minimum(step / maximum(t_beta3, 1.0), 1.0)
        beta3 = where(share < 1, exp(1 / ((1 - share) / log(beta1) + share / log(beta3))), beta3)
        return dict(
            decay=1 - lr * weight_decay,
            fast=correction2 * lr / bias_correction(beta1, step),
            slow=correction2 * lr * alpha * minimum(step / maximum(t_alpha, 1.0), 1.0),
            **ema((beta1, beta2, beta3)),
            eps=correction2 * eps,
        )

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, exp_avg_slow):
        exp_avg, exp_avg_slow = c.beta1 * exp_avg + c.weight1 * grad, c.beta3 * exp_avg_slow + c.weight3 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        step = (c.fast * exp_avg + c.slow * exp_avg_slow) / (sqrt(exp_avg_sq) + c.eps)
        return dict(param=c.decay * param, step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, exp_avg_slow=exp_avg_slow)
