"""LAMB."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, ema, hyper, mean, product, sqrt, where


def _adam(param, grad, c, exp_avg, exp_avg_sq):
    exp_avg = c.beta1 * exp_avg + c.weight1 * grad
    exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
    step = c.average_size * exp_avg / (sqrt(exp_avg_sq) + c.eps) + product(c.weight_decay, param)
    return dict(step=step, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


class LAMB(CompiledOptimizer):
    """LAMB: Adam with steps in proportion to the parameter's norm (arXiv:1904.00962, Algorithm 2, with phi(x) = x).

    If the norm of the parameter or of Adam's step is 0, the step is Adam's, as in the paper's code.
    """

    lr: Number = hyper(default=1e-3, ge=0, doc="learning rate: the norm of a step over the norm of the parameter.")
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-6, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0, doc="this times the parameter is added before the norm is taken.")
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        correction2 = sqrt(bias_correction(beta2, step))
        average_size = correction2 / bias_correction(beta1, step)
        return dict(lr=lr, weight_decay=weight_decay, **ema(betas), average_size=average_size, eps=correction2 * eps)

    @staticmethod
    def reduce(param, grad, c, exp_avg, exp_avg_sq):
        direction = _adam(param, grad, c, exp_avg, exp_avg_sq)["step"]
        return dict(weights=mean(param * param), directions=mean(direction * direction))

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq):
        moved = _adam(param, grad, c, exp_avg, exp_avg_sq)
        weights, directions = sqrt(c.weights), sqrt(c.directions)
        ratio = weights / where(directions != 0, directions, 1.0)
        trust = where(weights * directions != 0, ratio, 1.0)  # one condition: gcc vectorizes no second one
        return {**moved, "step": c.lr * trust * moved["step"]}
