from __future__ import annotations

from typing import Any

from torch import Tensor

FAR: list[dict[str, Any]] = [
    {"lr": 0.01},
    {"lr": 0.07, "momentum": 0.6, "weight_decay": 0.4},
    {"lr": 0.3, "momentum": 0.0, "weight_decay": 2.0, "maximize": True},
    {"lr": 0.07, "momentum": 0.95},
]


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {"momentum_buffer": param.new_zeros(param.shape)}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    average = state["momentum_buffer"]
    average.copy_(h.momentum * average + (1 - h.momentum) * grad)
    param.copy_((1 - h.lr * h.weight_decay) * param - h.lr * average.sign())
