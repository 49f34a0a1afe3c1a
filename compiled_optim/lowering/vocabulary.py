"""The words a rule may use besides ``+ - * /``, comparisons and ``if`` on static choices.

A rule imports them from here. As they stand they are torch operations, which serve eager execution, autograd and Inductor;
a lowering to another language re-binds the same names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return torch.sqrt(x)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """The larger of two numbers; NaN if either is."""
    return torch.maximum(x, y)


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """``x`` where ``condition`` holds, else ``y``."""
    return torch.where(condition, x, y)


def bias_correction(beta: Tensor, step: Tensor) -> Tensor:
    """``1 - beta**step`` without the cancellation: within 2 ulp for every ``beta`` in [0, 1) and ``step`` >= 1."""
    return -torch.expm1(step * torch.log(beta))
