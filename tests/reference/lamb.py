from __future__ import annotations

from typing import Any

from torch import Tensor

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
    direction = mean / (square.sqrt() + h.eps)
    direction = direction + h.decays(direction, param) * h.weight_decay * param
    lengths = param.norm().item(), direction.norm().item()
    trust = lengths[0] / lengths[1] if all(lengths) else 1.0
    param.sub_(h.keep(h.lr * trust * direction, grad))
