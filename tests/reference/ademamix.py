from __future__ import annotations

import math
from typing import Any

from torch import Tensor

FAR: list[dict[str, Any]] = [
    {},
    {"lr": 0.07, "betas": (0.6, 0.8, 0.97), "eps": 0.03, "weight_decay": 0.4, "alpha": 2.3, "t_alpha": 5.5, "t_beta3": 6.5},
    {"lr": 0.3, "betas": (0.3, 0.5, 0.9), "eps": 0.1, "weight_decay": 0.9, "alpha": 0.7, "t_alpha": 2.5, "maximize": True},
    {"lr": 0.07, "betas": (0.6, 0.0, 0.2), "eps": 0.3, "alpha": 1.3, "t_beta3": 3.5},
    {"lr": 0.07, "betas": (0.0, 0.7, 0.8), "eps": 0.3, "alpha": 1.3, "t_beta3": 30.5},
]


def _steps(beta: float) -> float:
    """In how many steps an average decays by 1/e."""
    return -1 / math.log(beta) if beta else 0.0


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_sq", "exp_avg_slow")}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    beta1, beta2, beta3 = h.betas
    alpha = h.alpha * (t / h.t_alpha if t < h.t_alpha else 1)
    if t < h.t_beta3:
        share = t / h.t_beta3
        beta3 = math.exp(-1 / ((1 - share) * _steps(beta1) + share * _steps(beta3)))
    for name, beta, value in (("exp_avg", beta1, grad), ("exp_avg_sq", beta2, grad**2), ("exp_avg_slow", beta3, grad)):
        state[name].copy_(beta * state[name] + (1 - beta) * value)
    divisor = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + h.eps
    direction = (state["exp_avg"] / (1 - beta1**t) + alpha * state["exp_avg_slow"]) / divisor
    param.copy_((1 - h.lr * h.weight_decay) * param - h.lr * direction)
