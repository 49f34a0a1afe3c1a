from __future__ import annotations

from typing import Any

from torch import Tensor

FAR: list[dict[str, Any]] = [
    {"lr": 0.01},
    {"lr": 0.07, "betas": (0.6, 0.8), "weight_decay": 0.4},
    {"lr": 0.3, "betas": (0.0, 0.5), "weight_decay": 2.0, "maximize": True},
    {"lr": 0.07, "betas": (0.95, 0.0)},
]


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {"exp_avg": param.new_zeros(param.shape)}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    (beta1, beta2), exp_avg = h.betas, state["exp_avg"]
    param.mul_(1 - h.lr * h.weight_decay)
    param.sub_(h.lr * (beta1 * exp_avg + (1 - beta1) * grad).sign())
    exp_avg.copy_(beta2 * exp_avg + (1 - beta2) * grad)
