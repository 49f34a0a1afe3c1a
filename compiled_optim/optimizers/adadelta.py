"""Adadelta."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, hyper, product, sqrt


class Adadelta(CompiledOptimizer, decays="gradient"):
    """Adadelta: steps in the units of the parameter (arXiv:1212.5701, Algorithm 1), times a learning rate."""

    lr: Number = hyper(default=1.0, ge=0, doc="learning rate: the step is this number times the direction.")
    rho: Number = hyper(default=0.9, ge=0, le=1, doc="how much of the averages of squares stays from one step to the next.")
    eps: Number = hyper(default=1e-6, ge=0, doc="is added to both averages, in units of squared gradients and steps.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    square_avg, acc_delta = buffer(int8="unsigned"), buffer(int8="unsigned")

    @staticmethod
    def coefficients(lr, rho, eps, weight_decay):
        return dict(weight_decay=weight_decay, lr=lr, rho=rho, weight=1 - rho, eps=eps)

    @staticmethod
    def update(param, grad, c, square_avg, acc_delta):
        grad = grad + product(c.weight_decay, param)
        square_avg = c.rho * square_avg + c.weight * grad * grad
        delta = sqrt(acc_delta + c.eps) / sqrt(square_avg + c.eps) * grad
        acc_delta = c.rho * acc_delta + c.weight * delta * delta
        return dict(step=c.lr * delta, square_avg=square_avg, acc_delta=acc_delta)
