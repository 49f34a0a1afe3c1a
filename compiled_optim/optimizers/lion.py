"""Lion."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, ema, hyper, sign


class Lion(CompiledOptimizer):
    """Lion: the sign of a momentum, with decoupled weight decay (arXiv:2302.06675, Algorithm 2).

    The state is one average of gradients.
    """

    lr: Number = hyper(ge=0, doc="learning rate: the distance that every element moves in a step.")
    betas: tuple[Number, Number] = hyper(
        default=(0.9, 0.99), ge=0, lt=1, doc="share of the average in a step; its decay rate."
    )
    weight_decay: Number = hyper(default=0.0, ge=0)
    exp_avg = buffer(int8="signed")

    @staticmethod
    def coefficients(lr, betas, weight_decay):
        return dict(lr=lr, decay=1 - lr * weight_decay, **ema(betas))

    @staticmethod
    def update(param, grad, c, exp_avg):
        direction = sign(c.beta1 * exp_avg + c.weight1 * grad)
        return dict(param=c.decay * param, step=c.lr * direction, exp_avg=c.beta2 * exp_avg + c.weight2 * grad)
