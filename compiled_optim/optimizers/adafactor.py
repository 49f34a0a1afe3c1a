"""Adafactor."""

import torch
from torch import Tensor

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, fact, hyper, maximum, minimum, power, sqrt, static, where


def _root_of_mean(squares: Tensor) -> Tensor:
    return sqrt(squares.mean(tuple(range(1, squares.dim())), keepdim=True))


class Adafactor(CompiledOptimizer, granularity="tensor"):
    """Adafactor (arXiv:1804.04235, Algorithms 4 and 5): the second moment of a matrix as the product of two vectors.

    The two elements of ``eps`` bound the second moment and the parameter's scale from below. If the first is None, it is the
    machine epsilon of the parameter's dtype. As in torch.optim.Adafactor, it bounds the estimate and not the squared
    gradient, means replace the paper's sums, and weights decay by ``lr``. DTensors are gathered for a step, and every
    process has both full vectors.

    Parameters of more than two axes are factored over the last two, as in torch.optim. ``factored_dims="largest"`` takes the
    two largest axes, and the later ones of equal axes: convolutions then have less state.
    """

    lr: Number = hyper(default=1e-2, ge=0, doc="relative step size, at most ``1 / sqrt(step)``.")
    beta2_decay: Number = hyper(default=-0.8, le=0, doc="a new squared gradient has the weight ``step**beta2_decay``.")
    eps: tuple[Number | None, Number] = hyper(
        default=(None, 1e-3), ge=0, doc="least root of the second moment; least scale."
    )
    d: Number = hyper(default=1.0, ge=1, lt=None, doc="a direction whose root mean square is larger is scaled down to this.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    factored_dims: str = static(default="last", kw_only=True, doc='the ``"last"`` or the ``"largest"`` two axes, see above.')
    matrix, vector = fact(of=lambda shape: len(shape) > 1), fact(of=lambda shape: len(shape) < 2)
    row_var = buffer(when="matrix", shape=lambda shape: (*shape[:-1], 1))
    col_var = buffer(when="matrix", shape=lambda shape: (*shape[:-2], 1, shape[-1]))
    variance = buffer(when="vector")

    @staticmethod
    def axes(shape: torch.Size, factored_dims: str) -> list[int]:
        """Return the axes in the order that an update sees: the factored ones last."""
        if factored_dims == "last":
            return list(range(len(shape)))
        largest = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
        return [axis for axis in range(len(shape)) if axis not in largest] + sorted(largest)

    @staticmethod
    def check(hypers, statics):
        if statics["factored_dims"] not in ("last", "largest"):
            raise ValueError(f"factored_dims must be 'last' or 'largest', got {statics['factored_dims']!r}")

    @staticmethod
    def coefficients(step, lr, beta2_decay, eps, d, weight_decay, resolution):
        bound = where(eps[0] == eps[0], eps[0], resolution)
        weight, rho = power(step, beta2_decay), minimum(lr, 1 / sqrt(step))
        return dict(weight=weight, rho=rho, decay=1 - lr * weight_decay, bound=bound, least_scale=eps[1], d=d)

    @staticmethod
    def update(param, grad, c, row_var, col_var, variance, matrix):
        scale = _root_of_mean(param * param)
        size = where(scale > c.least_scale, scale, c.least_scale) * c.rho
        square = grad * grad
        if matrix:
            row_var = row_var + c.weight * (square.mean(-1, keepdim=True) - row_var)
            col_var = col_var + c.weight * (square.mean(-2, keepdim=True) - col_var)
            estimate = row_var / maximum(row_var.mean(-2, keepdim=True), c.bound) * col_var
        else:
            estimate = variance = variance + c.weight * (square - variance)
        estimate = maximum(estimate, c.bound * c.bound)
        excess = _root_of_mean(square / estimate) / c.d
        step = size / where(excess > 1, excess, 1.0) * (grad / sqrt(estimate))  # as torch.optim: NaN is not above 1
        return dict(param=c.decay * param, step=step, row_var=row_var, col_var=col_var, variance=variance)
