from __future__ import annotations

from typing import Any

from torch import Tensor

FAR: list[dict[str, Any]] = [
    {"lr": 0.01},
    {"lr": 0.07, "betas": (0.6, 0.7, 0.8), "weight_decay": 0.4, "eps": 0.03},
    {"lr": 0.3, "betas": (0.0, 0.5, 0.9), "weight_decay": 2.0, "eps": 0.1, "adam_wd": True, "maximize": True},
    {"lr": 0.07, "betas": (0.9, 0.0, 0.3), "weight_decay": 0.0, "eps": 0.3},
]
KEEPS = True


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "prev_grad")}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    beta1, beta2, beta3 = h.betas
    diff = grad - (state["prev_grad"] if t > 1 else grad)
    looked_ahead = (grad + beta2 * diff) ** 2
    for name, beta, value in (("exp_avg", beta1, grad), ("exp_avg_diff", beta2, diff), ("exp_avg_sq", beta3, looked_ahead)):
        state[name].copy_(beta * state[name] + (1 - beta) * value)
    mean, change, square = (
        state[name] / (1 - beta**t) for name, beta in zip(("exp_avg", "exp_avg_diff", "exp_avg_sq"), h.betas, strict=True)
    )
    state["prev_grad"].copy_(grad)
    move = h.keep(h.lr * (mean + beta2 * change) / (square.sqrt() + h.eps), grad)
    if h.adam_wd:
        param.copy_(param * (1 - h.lr * h.weight_decay) - move)
    else:
        param.copy_((param - move) / (1 + h.lr * h.weight_decay))
