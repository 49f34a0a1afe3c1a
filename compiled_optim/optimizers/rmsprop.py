"""RMSprop."""

from collections.abc import Mapping

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, hyper, product, sqrt, static, where


class RMSprop(CompiledOptimizer, decays="gradient"):
    """RMSprop (Hinton, Coursera 2012, lecture 6e); ``centered`` divides by the deviation (arXiv:1308.0850, equation 40).

    Differs from torch.optim.RMSprop: a variance that rounding makes negative counts as 0 instead of yielding NaN, and while
    ``momentum`` is 0 during a run, the buffer is the last step instead of keeping its value.
    """

    lr: Number = hyper(default=1e-2, ge=0)
    alpha: Number = hyper(default=0.99, ge=0, doc="how much of the averages stays from one step to the next.")
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    momentum: Number = hyper(default=0.0, ge=0, doc="the share of the last step that is added to the next; 0 for no buffer.")
    centered: bool = static(default=False, doc="subtract the squared average of gradients from the average of squares.")
    square_avg, momentum_buffer = buffer(int8="unsigned"), buffer(when="momentum", int8="signed")
    grad_avg = buffer(when="centered")

    @staticmethod
    def check(hypers, statics):
        """Raise ``ValueError`` where the small difference of two averages would be a difference of roundings."""
        chosen = statics.get("state_dtype")
        chosen = chosen.get("square_avg") if isinstance(chosen, Mapping) else chosen
        if statics["centered"] and chosen == "int8":
            raise ValueError("state_dtype='int8' of square_avg does not go with centered=True; choose torch.float32 for it")

    @staticmethod
    def coefficients(lr, alpha, eps, weight_decay, momentum):
        return dict(weight_decay=weight_decay, lr=lr, alpha=alpha, weight=1 - alpha, eps=eps, momentum=momentum)

    @staticmethod
    def update(param, grad, c, square_avg, momentum_buffer, grad_avg, centered):
        grad = grad + product(c.weight_decay, param)
        square_avg = c.alpha * square_avg + c.weight * grad * grad
        variance = square_avg
        if centered:
            grad_avg = c.alpha * grad_avg + c.weight * grad
            variance = square_avg - grad_avg * grad_avg
            variance = where(variance > 0, variance, 0.0)
        direction = grad / (sqrt(variance) + c.eps)
        if momentum_buffer is not None:
            direction = momentum_buffer = c.momentum * momentum_buffer + direction
        step = c.lr * direction
        return dict(step=step, square_avg=square_avg, momentum_buffer=momentum_buffer, grad_avg=grad_avg)
