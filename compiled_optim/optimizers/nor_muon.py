"""NorMuon."""

import math

import torch

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.optimizers import newton_schulz as ns
from compiled_optim.rule import Number, buffer, hyper, maximum, sqrt, static

_LEAST_NORM = 1e-7  # by which a matrix is divided


class NorMuon(CompiledOptimizer, granularity="matrix"):
    """Muon whose rows have equal shares of a step (arXiv:2510.05491, Algorithm 1).

    For the matrices of hidden layers, as Muon; a row holds the weights of one neuron. Momentum is orthogonalized as in
    Muon, with the same ``ns_coefficients``. Each row is then divided by the root of its average square over the steps.
    Finally the matrix is scaled so that its elements have the root mean square 0.2 for any shape: ``lr`` and
    ``weight_decay`` can be AdamW's. The average of squares has the shape ``(..., rows, 1)`` and starts at 0, without bias
    correction: the last scaling makes up for it.

    The authors' code differs from their paper, and from this class. It gives the scaled matrix the norm that it had when it
    was orthogonalized, times the root of rows over columns where that is above 1. It uses ``nesterov`` momentum, and the
    defaults 0.02 of ``lr`` and 0 of ``weight_decay``.
    """

    lr: Number = hyper(default=1e-3, ge=0, doc="learning rate: 5 times the root mean square of a step's elements.")
    weight_decay: Number = hyper(default=0.1, ge=0)
    betas: tuple[Number, Number] = hyper(
        default=(0.95, 0.95), ge=0, lt=1, doc="how much stays from one step to the next: of the momentum; of the squares."
    )
    eps: Number = hyper(default=1e-8, ge=0, doc="is added to the root of a row's average square.")
    ns_coefficients: ns.Coefficients = hyper(
        default=(3.4445, -4.775, 2.0315), fixed=ns.sequence, doc="as Muon's: three numbers, triples for each, or a name."
    )
    ns_steps: int = static(default=ns.STEPS, doc="how many iterations a step makes; of a sequence, all.")
    nesterov: bool = static(default=False, doc="orthogonalize a mix of gradient and momentum, not the momentum alone.")
    momentum_buffer = buffer(int8="signed")
    row_var = buffer(shape=lambda shape: (*shape[:-1], 1))

    @staticmethod
    def coefficients(step, lr, weight_decay, betas, eps, ns_coefficients):
        a, b, c = ns_coefficients
        weight1, weight2 = 1 - betas[0], 1 - betas[1]
        return dict(lr=lr, decay=1 - lr * weight_decay, weight1=weight1, weight2=weight2, eps=eps, a=a, b=b, c=c)

    @staticmethod
    def update(param, grad, c, momentum_buffer, row_var, nesterov, ns_coefficients, ns_steps):
        momentum_buffer = torch.lerp(momentum_buffer, grad, c.weight1)
        direction = torch.lerp(momentum_buffer, grad, c.weight1) if nesterov else momentum_buffer
        triples = ns.iterations((c.a, c.b, c.c), ns_coefficients, ns_steps)
        direction = ns.orthogonalized(direction, triples, _LEAST_NORM).contiguous()  # a tall one is transposed
        row_var = torch.lerp(row_var, (direction * direction).mean(-1, keepdim=True), c.weight2)
        direction = direction / (sqrt(row_var) + c.eps)
        norm = torch.linalg.vector_norm(direction, dim=(-2, -1), keepdim=True)
        size = 0.2 * math.sqrt(param.shape[-2] * param.shape[-1])
        step = c.lr * size * direction / maximum(norm, _LEAST_NORM)
        return dict(param=c.decay * param, step=step, momentum_buffer=momentum_buffer, row_var=row_var)

    check = staticmethod(ns.check_iterations)
