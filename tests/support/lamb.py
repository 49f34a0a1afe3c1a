"""LAMB (arXiv:1904.00962, Algorithm 2), as a user would write it: its means are of the weights and of the step."""

from __future__ import annotations

import compiled_optim as co
from compiled_optim.rule import Number, bias_correction, buffer, hyper, product, sqrt, where


def _averages(grad, c, exp_avg, exp_avg_sq):
    return c.beta1 * exp_avg + c.weight1 * grad, c.beta2 * exp_avg_sq + c.weight2 * grad * grad


def _direction(param, c, exp_avg, exp_avg_sq):
    step = exp_avg / c.correction1 / (sqrt(exp_avg_sq / c.correction2) + c.eps)
    return step + product(c.weight_decay, param)


class Lamb(co.CompiledOptimizer):
    """LAMB, whose decay is a coefficient that transforms know."""

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-6, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0)
    exp_avg, exp_avg_sq = buffer(int8="signed"), buffer(int8="unsigned")

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        return dict(
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            beta1=beta1,
            weight1=1 - beta1,
            beta2=beta2,
            weight2=1 - beta2,
            correction1=bias_correction(beta1, step),
            correction2=bias_correction(beta2, step),
        )

    @staticmethod
    def means(param, grad, c, exp_avg, exp_avg_sq):
        direction = _direction(param, c, *_averages(grad, c, exp_avg, exp_avg_sq))
        return dict(weights=param * param, directions=direction * direction)

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq):
        exp_avg, exp_avg_sq = _averages(grad, c, exp_avg, exp_avg_sq)
        moves = (c.weights > 0) & (c.directions > 0)
        trust = where(moves, sqrt(c.weights / where(moves, c.directions, 1.0)), 1.0)
        return dict(step=c.lr * trust * _direction(param, c, exp_avg, exp_avg_sq), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
