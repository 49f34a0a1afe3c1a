"""Adafactor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, fact, hyper, maximum, minimum, power, sqrt, static, where


def _root_mean_square(stack: Tensor) -> Tensor:
    return sqrt((stack * stack).mean(tuple(range(1, stack.dim())), keepdim=True))


class Adafactor(CompiledOptimizer, granularity="tensor"):
    """Adafactor (arXiv:1804.04235, Algorithms 4 and 5): the second moment of a matrix as the product of two vectors.

    ``eps`` bounds the second moment and the parameter's scale; its first element may be None, for the machine epsilon of the
    parameter's dtype. As torch.optim.Adafactor it bounds the estimate and not the squared gradient, takes means where the
    paper has sums, and decays weights by ``lr``. Differs from it: a group of several dtypes takes the epsilon of each.
    DTensors are gathered for a step, and the two vectors are whole on every process.

    Parameters of more than two axes are factored over the last two, as by torch.optim, or with ``factored_dims="largest"``
    over the two largest, of equal ones the later: less state for a convolution, whose kernel sizes come last. A checkpoint
    of the other choice does not fit.
    """

    lr: Number = hyper(default=1e-2, ge=0, doc="the largest step, relative to the parameter; ``1 / sqrt(step)`` if less.")
    beta2_decay: Number = hyper(default=-0.8, le=0, doc="the exponent of the step count in the weight of a new square.")
    eps: tuple[Number | None, Number] = hyper(default=(None, 1e-3), ge=0, doc="root of the least square; least scale.")
    d: Number = hyper(default=1.0, ge=1, lt=None, doc="the root mean square to which longer directions are shortened.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    factored_dims: str = static(default="last", kw_only=True, doc='the ``"last"`` or the ``"largest"`` two axes, see above.')
    matrix, vector = fact(of=lambda shape: len(shape) > 1), fact(of=lambda shape: len(shape) < 2)
    row_var = buffer(when="matrix", shape=lambda shape: (*shape[:-1], 1))
    col_var = buffer(when="matrix", shape=lambda shape: (*shape[:-2], 1, shape[-1]))
    variance = buffer(when="vector")

    @staticmethod
    def axes(shape: torch.Size, factored_dims: str) -> list[int]:
        """The axes in the order in which an update sees them: the factored ones last."""
        if factored_dims == "last":
            return list(range(len(shape)))
        largest = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
        return [axis for axis in range(len(shape)) if axis not in largest] + sorted(largest)

    @staticmethod
    def check(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
        if statics["factored_dims"] not in ("last", "largest"):
            raise ValueError(f"factored_dims must be 'last' or 'largest', got {statics['factored_dims']!r}")

    @staticmethod
    def coefficients(step, lr, beta2_decay, eps, d, weight_decay, resolution):
        bound = where(eps[0] == eps[0], eps[0], resolution)
        return dict(
            weight=power(step, beta2_decay),
            rho=minimum(lr, 1 / sqrt(step)),
            decay=1 - lr * weight_decay,
            bound=bound,
            least_scale=eps[1],
            d=d,
        )

    @staticmethod
    def update(param, grad, c, row_var, col_var, variance, matrix):
        scale = _root_mean_square(param)
        size = where(scale > c.least_scale, scale, c.least_scale) * c.rho
        square = grad * grad
        if matrix:
            row_var = row_var + c.weight * (square.mean(-1, keepdim=True) - row_var)
            col_var = col_var + c.weight * (square.mean(-2, keepdim=True) - col_var)
            estimate = row_var * col_var / maximum(row_var.mean(-2, keepdim=True), c.bound)
        else:
            estimate = variance = variance + c.weight * (square - variance)
        direction = grad / sqrt(maximum(estimate, c.bound * c.bound))
        excess = _root_mean_square(direction) / c.d
        clipped = size / where(excess > 1, excess, 1.0)  # as torch.optim: 1 for NaN, which stays where it is
        return dict(param=c.decay * param, step=clipped * direction, row_var=row_var, col_var=col_var, variance=variance)
