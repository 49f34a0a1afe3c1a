"""ASGD."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, hyper, power, product, scalar, where


class ASGD(CompiledOptimizer, decays="gradient"):
    """Averaged stochastic gradient descent (Polyak and Juditsky, doi:10.1137/0330046). The state ``ax`` is the average.

    Differs from torch.optim.ASGD: ``eta`` and ``mu`` are float64.
    """

    lr: Number = hyper(default=1e-2, ge=0, doc="learning rate of the first step.")
    lambd: Number = hyper(default=1e-4, ge=0, doc="how fast the learning rate and the parameters decay.")
    alpha: Number = hyper(default=0.75, ge=0, doc="the exponent of the decay of the learning rate.")
    t0: Number = hyper(default=1e6, lt=None, doc="the step at which averaging begins.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    eta, mu = scalar(init="lr"), scalar(init=1.0)
    ax = buffer()

    @staticmethod
    def coefficients(step, lr, lambd, alpha, t0, weight_decay, eta, mu):
        step_size = where(step == 1, lr, eta)  # the current learning rate, not the one at the state's creation
        next_eta = lr / power(1 + lambd * lr * step, alpha)
        next_mu = 1 / where(step - t0 > 1, step - t0, 1.0)
        numbers = dict(weight_decay=weight_decay, decay=1 - lambd * step_size, step_size=step_size, kept=1 - mu, added=mu)
        return dict(eta=next_eta, mu=next_mu, **numbers)

    @staticmethod
    def update(param, grad, c, ax):
        grad = grad + product(c.weight_decay, param)
        return dict(param=c.decay * param, step=c.step_size * grad, ax=lambda new: product(c.kept, ax) + c.added * new)
