"""Signum."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, hyper, sign


class Signum(CompiledOptimizer):
    """Signum: the sign of a momentum (arXiv:1802.04434, Algorithm 2), with decoupled weight decay.

    With ``momentum=0`` it is signSGD, Algorithm 1. The state is one average of gradients.
    """

    lr: Number = hyper(ge=0, doc="learning rate: the distance that every element moves in a step.")
    momentum: Number = hyper(default=0.9, ge=0, lt=1, doc="how much of the average stays from one step to the next.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    momentum_buffer = buffer(int8="signed")

    @staticmethod
    def coefficients(lr, momentum, weight_decay):
        return dict(lr=lr, decay=1 - lr * weight_decay, momentum=momentum, weight=1 - momentum)

    @staticmethod
    def update(param, grad, c, momentum_buffer):
        momentum_buffer = c.momentum * momentum_buffer + c.weight * grad
        return dict(param=c.decay * param, step=c.lr * sign(momentum_buffer), momentum_buffer=momentum_buffer)
