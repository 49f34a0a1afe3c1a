from __future__ import annotations

from typing import Any

from torch import Tensor


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {"momentum_buffer": param.new_zeros(param.shape)} if h.momentum else {}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = (-grad if h.maximize else grad) + h.weight_decay * param
    if h.momentum:
        buffer = state["momentum_buffer"]
        buffer.copy_(grad if t == 1 else h.momentum * buffer + (1 - h.dampening) * grad)
        grad = grad + h.momentum * buffer if h.nesterov else buffer
    param.sub_(h.lr * grad)
