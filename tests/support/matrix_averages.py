"""A rule on matrices with two buffers that 8 bits hold. No product is added to anything: all compilers round it alike."""

from __future__ import annotations

import compiled_optim as co
from compiled_optim.rule import Number, absolute, buffer, hyper, maximum, sqrt, where


class MatrixAverages(co.CompiledOptimizer, granularity="matrix"):
    """What is left of a gradient or, where it is larger, the gradient; and likewise its square."""

    lr: Number = hyper(default=0.01, ge=0)
    beta: Number = hyper(default=0.9, ge=0, lt=1)

    exp_avg = buffer(int8="signed")
    exp_avg_sq = buffer(int8="unsigned")

    @staticmethod
    def coefficients(lr, beta):
        return dict(lr=lr, beta=beta)

    @staticmethod
    def update(param, grad, exp_avg, exp_avg_sq, c):
        exp_avg = where(absolute(grad) > absolute(exp_avg), grad, c.beta * exp_avg)
        exp_avg_sq = maximum(c.beta * exp_avg_sq, grad * grad)
        return dict(step=c.lr * exp_avg / (sqrt(exp_avg_sq) + 1e-6), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
