"""SGD."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Accumulation, Number, buffer, hyper, product, static, where


class SGD(CompiledOptimizer, advice="SparseAdam", decays="gradient"):
    """Stochastic gradient descent with momentum (Sutskever et al., ICML 2013), in torch.optim.SGD's form.

    The first step ignores ``dampening``, as in torch.optim. Differs from torch.optim.SGD: gradients must be dense, and the
    state also holds ``step``. While an in-place write keeps ``momentum`` at 0, the buffer is the gradient; torch.optim
    leaves it unchanged. If ``momentum`` is raised from 0 in a run, or the buffer is removed, ``dampening`` applies at once.
    """

    lr: Number = hyper(default=1e-3, ge=0, doc="learning rate: the step is this number times the direction.")
    momentum: Number = hyper(default=0.0, ge=0, doc="how much of the buffer stays from step to step; 0 for no buffer.")
    dampening: Number = hyper(default=0.0, doc="the share of each gradient that is not added to the buffer.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    nesterov: bool = static(default=False, doc="step along gradient + ``momentum`` * buffer; needs momentum, no dampening.")
    momentum_buffer = buffer(when="momentum", int8="signed")
    accumulation = Accumulation(kept=("momentum",), unless=("nesterov",))
    implied_state = {"step": 1.0}

    @staticmethod
    def check(hypers, statics):
        if statics["nesterov"] and (hypers["momentum"] <= 0 or hypers["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    @staticmethod
    def coefficients(step, lr, momentum, dampening, weight_decay):
        undamped = (step == 1) | (momentum == 0)
        grad_weight = where(undamped, 1.0, 1 - dampening)
        return dict(lr=lr, momentum=momentum, grad_weight=grad_weight, weight_decay=weight_decay)

    @staticmethod
    def update(param, grad, c, momentum_buffer, nesterov):
        grad = grad + product(c.weight_decay, param)
        if momentum_buffer is not None:
            momentum_buffer = c.momentum * momentum_buffer + c.grad_weight * grad
            grad = grad + c.momentum * momentum_buffer if nesterov else momentum_buffer
        return dict(step=c.lr * grad, momentum_buffer=momentum_buffer)
