"""MARS."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, ema, hyper, maximum, sqrt, total


def _corrected(grad, c, prev_grad):
    return grad + c.correction * (grad - prev_grad)


class MARS(CompiledOptimizer):
    """MARS: AdamW of gradients that are corrected by their last change (arXiv:2411.10438, MARS-AdamW, approximate).

    A tensor's corrected gradient is scaled to the norm 1 if it is longer. The first gradient has no correction, as in
    the paper. Differs from the authors' code, which corrects it too, and has AdamW for vectors unless ``optimize_1d``.
    """

    lr: Number = hyper(default=3e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.95, 0.99), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    gamma: Number = hyper(default=0.025, ge=0, doc="strength of the correction.")
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")
    prev_grad = buffer(init=lambda grad: grad, int8="signed")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay, gamma):
        correction2 = sqrt(bias_correction(betas[1], step))
        step_size = correction2 * lr / bias_correction(betas[0], step)
        numbers = dict(decay=1 - lr * weight_decay, step_size=step_size, eps=correction2 * eps)
        return dict(**numbers, **ema(betas), correction=gamma * betas[0] / (1 - betas[0]))

    @staticmethod
    def reduce(grad, c, prev_grad):
        corrected = _corrected(grad, c, prev_grad)
        return dict(square_sum=total(corrected * corrected, over="tensor"))

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, prev_grad):
        corrected = _corrected(grad, c, prev_grad) / maximum(sqrt(c.square_sum), 1.0)
        exp_avg = c.beta1 * exp_avg + c.weight1 * corrected
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * corrected * corrected
        step = c.step_size * exp_avg / (sqrt(exp_avg_sq) + c.eps)
        return dict(param=c.decay * param, step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, prev_grad=grad)
