"""AdamW."""

from compiled_optim.optimizers.adam import Adam
from compiled_optim.rule import Number, bias_correction, ema, hyper, maximum, sqrt, static


class AdamW(Adam, decays="weights"):
    """AdamW: Adam with decoupled weight decay (arXiv:1711.05101, Algorithm 2).

    All other arguments, and the state, are Adam's.
    """

    weight_decay: Number = hyper(default=1e-2, ge=0)
    decoupled_weight_decay: bool = static(default=True, init=False)

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        correction2 = sqrt(bias_correction(beta2, step))  # in the numerator and in eps, it spares a division
        return dict(
            decay=1 - lr * weight_decay,
            step_size=correction2 * lr / bias_correction(beta1, step),
            **ema(betas),
            eps=correction2 * eps,
        )

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, max_exp_avg_sq, amsgrad):
        param = c.decay * param
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        if amsgrad:
            max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
        denominator = sqrt(max_exp_avg_sq if amsgrad else exp_avg_sq) + c.eps
        step = c.step_size * (exp_avg / denominator)
        return dict(param=param, step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, max_exp_avg_sq=max_exp_avg_sq)
