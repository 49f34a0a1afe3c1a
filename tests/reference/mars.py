from __future__ import annotations

from typing import Any

from torch import Tensor

FAR: list[dict[str, Any]] = [
    {},
    {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4, "gamma": 0.7},
    {"lr": 0.3, "betas": (0.3, 0.5), "eps": 0.1, "weight_decay": 0.9, "gamma": 2.5, "maximize": True},
    {"lr": 0.07, "betas": (0.0, 0.7), "eps": 0.3, "gamma": 0.3},
    {"lr": 0.07, "betas": (0.95, 0.0), "eps": 0.3, "gamma": 0.0},
]


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_sq", "prev_grad")}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    beta1, beta2 = h.betas
    change = grad - state["prev_grad"] if t > 1 else 0 * grad
    corrected = grad + h.gamma * beta1 / (1 - beta1) * change
    corrected = corrected / max(corrected.norm().item(), 1.0)
    state["prev_grad"].copy_(grad)
    for name, beta, value in (("exp_avg", beta1, corrected), ("exp_avg_sq", beta2, corrected**2)):
        state[name].copy_(beta * state[name] + (1 - beta) * value)
    divisor = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + h.eps
    direction = state["exp_avg"] / (1 - beta1**t) / divisor
    param.copy_((1 - h.lr * h.weight_decay) * param - h.lr * direction)
