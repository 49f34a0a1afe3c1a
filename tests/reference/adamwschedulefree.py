from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FAR: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.2, "betas": (0.6, 0.8), "weight_decay": 0.4, "eps": 0.03, "warmup_steps": 3.5},
    {"lr": 0.3, "betas": (0.2, 0.5), "weight_decay": 0.9, "eps": 0.6, "maximize": True},
    {"lr": 0.1, "betas": (0.95, 0.3), "weight_decay": 0.0, "eps": 0.3, "warmup_steps": 2.5},
]


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    zeros = param.new_zeros(param.shape)
    return {"z": param.clone(), "exp_avg_sq": zeros, "weight_sum": torch.zeros((), dtype=torch.float64)}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    """The parameter is the paper's y, between z and their average x."""
    grad = -grad if h.maximize else grad
    beta1, beta2 = h.betas
    average = (param - (1 - beta1) * state["z"]) / beta1
    state["exp_avg_sq"].copy_(beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2)
    rate = h.lr * math.sqrt(1 - beta2**t) * (min(1.0, t / h.warmup_steps) if h.warmup_steps else 1.0)
    move = rate * grad / (state["exp_avg_sq"].sqrt() + h.eps)
    move = move + rate * h.weight_decay * param if h.weight_decay else move
    state["z"].sub_(move)
    state["weight_sum"].add_(rate**2)
    share = rate**2 / state["weight_sum"].item() if rate else 0.0
    average = (1 - share) * average + share * state["z"]
    param.copy_((1 - beta1) * state["z"] + beta1 * average)
