"""ASGD."""

from __future__ import annotations

from typing import ClassVar

from compiled_optim.fields import Number, buffer, hyper, scalar
from compiled_optim.lowering.vocabulary import power, product, where
from compiled_optim.optimizer import CompiledOptimizer


class ASGD(CompiledOptimizer):
    """Averaged stochastic gradient descent (Polyak and Juditsky, doi:10.1137/0330046), the average in the state's ``ax``.

    Differs from torch.optim.ASGD: ``eta`` and ``mu`` are float64.
    """

    lr: Number = hyper(default=1e-2, ge=0)
    lambd: Number = hyper(default=1e-4)
    alpha: Number = hyper(default=0.75)
    t0: Number = hyper(default=1e6, lt=None)
    weight_decay: Number = hyper(default=0.0, ge=0)
    eta, mu = scalar(init="lr"), scalar(init=1.0)
    ax = buffer()
    positional_flags: ClassVar[tuple[str, ...]] = ("foreach", "maximize", "differentiable", "capturable")
    group_flags: ClassVar[tuple[str, ...]] = positional_flags

    @staticmethod
    def coefficients(step, lr, lambd, alpha, t0, weight_decay, eta, mu):
        step_size = where(step == 1, lr, eta)  # the learning rate as it is now, whatever it was when the state was made
        next_eta = lr / power(1 + lambd * lr * step, alpha)
        next_mu = 1 / where(step - t0 > 1, step - t0, 1.0)
        return next_eta, next_mu, weight_decay, 1 - lambd * step_size, step_size, 1 - mu, mu

    @staticmethod
    def update(param, grad, ax, weight_decay, decay, step_size, kept, mu):
        grad = grad + product(weight_decay, param)
        param = decay * param - step_size * grad
        return param, product(kept, ax) + mu * param
