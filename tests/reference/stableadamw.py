from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# eps is no gradient of the derivatives' test: where one equals it in the first step, the maximum has no derivative.
FAR: list[dict[str, Any]] = [
    {"lr": 0.01},
    {"lr": 0.07, "betas": (0.6, 0.8), "weight_decay": 0.4, "eps": 0.03},
    {"lr": 0.3, "betas": (0.0, 0.5), "weight_decay": 2.0, "eps": 0.6, "maximize": True},
    {"lr": 0.07, "betas": (0.95, 0.0), "weight_decay": 0.0, "eps": 0.3},
]
KEEPS = True


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_sq")}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    for name, beta, value in (("exp_avg", h.betas[0], grad), ("exp_avg_sq", h.betas[1], grad**2)):
        state[name].copy_(beta * state[name] + (1 - beta) * value)
    mean, square = (state[name] / (1 - beta**t) for name, beta in zip(("exp_avg", "exp_avg_sq"), h.betas, strict=True))
    rms = (grad**2 / square.maximum(torch.full_like(square, h.eps**2))).mean().sqrt().item() if param.numel() else 0.0
    lr = h.lr / max(1.0, rms)
    move = h.keep(lr * mean / (square.sqrt() + h.eps), grad)
    param.copy_(param * (1 - lr * h.weight_decay) - move)
