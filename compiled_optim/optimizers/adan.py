"""Adan."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, ema, hyper, sqrt, static, where


class Adan(CompiledOptimizer):
    """Adan: Adam with an average of the gradient's changes (arXiv:2208.06677, Algorithm 1), without restarts.

    ``betas`` are for averages of gradients, of their changes and of squares: 1 less the paper's.
    """

    lr: Number = hyper(ge=0)
    betas: tuple[Number, Number, Number] = hyper(
        default=(0.98, 0.92, 0.99), ge=0, lt=1, doc="decay rates of the three averages."
    )
    weight_decay: Number = hyper(default=2e-2, ge=0, doc="a step then divides parameters by ``1 + lr * weight_decay``.")
    eps: Number = hyper(default=1e-6, ge=0)
    adam_wd: bool = static(default=False, doc="decay weights as AdamW does. optimi ignores this argument.")
    exp_avg, exp_avg_diff = buffer(int8="signed"), buffer(int8="signed")
    exp_avg_sq, prev_grad = buffer(int8="unsigned"), buffer(int8="signed")

    @staticmethod
    def coefficients(step, lr, betas, weight_decay, eps):
        beta1, beta2, beta3 = betas
        correction3 = sqrt(bias_correction(beta3, step))
        return dict(
            decay=1 - lr * weight_decay,
            shrink=1 / (1 + lr * weight_decay),
            follows=step > 1,
            grad_size=correction3 * lr / bias_correction(beta1, step),
            diff_size=correction3 * lr * beta2 / bias_correction(beta2, step),
            **ema(betas),
            eps=correction3 * eps,
        )

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_diff, exp_avg_sq, prev_grad, adam_wd):
        diff = where(c.follows > 0, grad - prev_grad, 0.0)
        nesterov = grad + c.beta2 * diff
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_diff = c.beta2 * exp_avg_diff + c.weight2 * diff
        exp_avg_sq = c.beta3 * exp_avg_sq + c.weight3 * nesterov * nesterov
        step = (c.grad_size * exp_avg + c.diff_size * exp_avg_diff) / (sqrt(exp_avg_sq) + c.eps)
        decayed = dict(param=c.decay * param) if adam_wd else dict(after=lambda moved: c.shrink * moved)
        state = dict(exp_avg=exp_avg, exp_avg_diff=exp_avg_diff, exp_avg_sq=exp_avg_sq, prev_grad=grad)
        return dict(step=step, **decayed, **state)
