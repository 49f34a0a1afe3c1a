"""The words a rule may use besides ``+ - * /``, comparisons and ``if`` on static choices.

On tensors they are torch operations, which serve eager execution, autograd and Inductor; on symbols they are calls in the
language that the rule is written in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_optim.rule.symbols import word


@word
def sqrt(x: Tensor) -> Tensor:
    """Return the square root. Its derivative at 0 is 0: an element that never had a gradient must not become NaN."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return torch.sqrt(x)
    zero = x == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))


@word
def absolute(x: Tensor) -> Tensor:
    """Return the absolute value."""
    return torch.abs(x)


@word
def sign(x: Tensor) -> Tensor:
    """Return 1, 0 or -1; 0 for NaN."""
    return torch.sign(x)


@word
def floor(x: Tensor) -> Tensor:
    """Return the largest whole number not above ``x``. Its derivative is 0."""
    return torch.floor(x)


@word
def power(x: Any, y: Any) -> Tensor:
    """Return ``x**y``, where at least one is a tensor or symbol."""
    return torch.pow(x, y)


@word
def exp(x: Tensor) -> Tensor:
    """Return ``e**x``."""
    return torch.exp(x)


@word
def log(x: Tensor) -> Tensor:
    """Return the natural logarithm; minus infinity for 0."""
    return torch.log(x)


@word
def maximum(x: Any, y: Any) -> Tensor:
    """Return the larger of two numbers; NaN if either is."""
    x, y = (x, y) if isinstance(x, Tensor) else (y, x)
    return torch.maximum(x, y) if isinstance(y, Tensor) else x.clamp(min=y)


@word
def minimum(x: Any, y: Any) -> Tensor:
    """Return the smaller of two numbers; NaN if either is."""
    x, y = (x, y) if isinstance(x, Tensor) else (y, x)
    return torch.minimum(x, y) if isinstance(y, Tensor) else x.clamp(max=y)


@word
def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """Return ``x`` where ``condition`` holds, else ``y``."""
    return torch.where(condition, x, y)


@word
def product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x * y``, and 0 where that is NaN: a weight of 0 removes infinite values."""
    weighted = x * y
    return torch.where(weighted == weighted, weighted, 0.0)


@word
def bias_correction(beta: Tensor, step: Tensor) -> Tensor:
    """Return ``1 - beta**step`` without cancellation: within 2 ulp for every ``beta`` in [0, 1) and ``step`` >= 1."""
    zero = beta == 0  # where the logarithm has no derivative
    return torch.where(zero, 1 - beta**step, -torch.expm1(step * torch.log(torch.where(zero, 0.5, beta))))


@word
def identity(matrices: Tensor) -> Tensor:
    """Return an identity matrix for each of the square ``matrices``. For updates of matrices."""
    return torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)


@word
def gram(x: Tensor) -> Tensor:
    """Return ``x @ x.mT``. For updates of matrices."""
    return x @ x.mT


@word
def quadratic(x: Tensor, a: Any, b: Any, c: Any, dtype: torch.dtype) -> Tensor:
    """Return ``a + b * x + c * x @ x`` of symmetric matrices, added in ``dtype``. The numbers may differ between tensors."""
    square, wide = (x @ x).to(dtype), x.to(dtype)
    result: Tensor = (a * identity(wide) + b * wide + c * square).to(x.dtype)
    return result
