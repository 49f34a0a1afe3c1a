from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from reference.muon import orthogonalized

FAR: list[dict[str, Any]] = [
    {},
    {"lr": 0.3, "weight_decay": 0.4, "betas": (0.5, 0.7), "eps": 0.05},
    {"lr": 0.07, "betas": (0.0, 0.0), "ns_coefficients": (3.0, -4.0, 1.8), "ns_steps": 3, "nesterov": True},
    {"lr": 0.3, "betas": (0.6, 0.99), "ns_coefficients": "polar_express", "nesterov": True},
]


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {"momentum_buffer": param.new_zeros(param.shape), "row_var": param.new_zeros(len(param), 1)}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    """In float64 throughout, row by row; a step that only sees zeros moves nothing."""
    grad = -grad if h.maximize else grad
    beta1, beta2 = h.betas
    buffer, row_var = state["momentum_buffer"], state["row_var"]
    buffer.copy_(beta1 * buffer + (1 - beta1) * grad)
    direction = beta1 * buffer + (1 - beta1) * grad if h.nesterov else buffer
    names = SimpleNamespace(eps=1e-7, ns_coefficients=h.ns_coefficients, ns_steps=h.ns_steps)
    o = orthogonalized(direction, names).clone()
    rows, columns = param.shape
    for row in range(rows):
        row_var[row] = beta2 * row_var[row] + (1 - beta2) * sum(x * x for x in o[row]) / columns
        o[row] /= math.sqrt(row_var[row].item()) + h.eps
    norm = math.sqrt(sum((o[row] ** 2).sum().item() for row in range(rows)))
    rate = 0.2 * h.lr * math.sqrt(rows * columns) / max(norm, 1e-7)
    param.mul_(1 - h.lr * h.weight_decay)
    param.sub_(rate * o)
