from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_sq")}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    """``grad`` is sparse."""
    beta1, beta2 = h.betas
    summed: dict[tuple[int, ...], Tensor] = {}
    for place, value in zip(grad._indices().t().tolist(), grad._values().double(), strict=True):
        summed[tuple(place)] = summed.get(tuple(place), torch.zeros_like(value)) + value
    for place, value in summed.items():
        g = -value if h.maximize else value
        first, second = state["exp_avg"][place], state["exp_avg_sq"][place]
        first.copy_(beta1 * first + (1 - beta1) * g)
        second.copy_(beta2 * second + (1 - beta2) * g**2)
        size = h.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        param[place] -= size * first / (second.sqrt() + h.eps)
