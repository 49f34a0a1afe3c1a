from __future__ import annotations

import math
from typing import Any

from torch import Tensor

# A step count is no multiple of k: there, a synchronization jumps to another step when k changes, and has no derivative.
FAR: list[dict[str, Any]] = [
    {"lr": 0.01, "k": 2.3},
    {"lr": 0.07, "betas": (0.6, 0.95), "weight_decay": 0.4, "eps": 0.03, "k": 3.3, "alpha": 0.3},
    {"lr": 0.07, "betas": (0.0, 0.9), "weight_decay": 0.4, "eps": 0.1, "k": 1.3, "decouple_wd": False, "maximize": True},
    {"lr": 0.3, "betas": (0.9, 0.6), "eps": 0.3, "k": 6.5, "alpha": 0.9},  # never rectified
]
KEEPS = True


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_sq", "la_param")}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    given = grad
    if t == 1:
        state["la_param"].copy_(param)
    if not h.decouple_wd:
        grad = grad + h.weight_decay * param
    for name, beta, value in (("exp_avg", h.betas[0], grad), ("exp_avg_sq", h.betas[1], grad**2)):
        state[name].copy_(beta * state[name] + (1 - beta) * value)
    mean, square = (state[name] / (1 - beta**t) for name, beta in zip(("exp_avg", "exp_avg_sq"), h.betas, strict=True))
    beta2 = h.betas[1]
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    move = h.lr * mean
    if length > 5:
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        move = move * math.sqrt(ratio) / (square.sqrt() + h.eps)
    if h.decouple_wd:
        param.mul_(1 - h.decays(move, param) * h.lr * h.weight_decay)
    param.sub_(h.keep(move, given))
    if math.floor(t / h.k) > math.floor((t - 1) / h.k):
        state["la_param"].add_(h.alpha * (param - state["la_param"]))
        param.copy_(state["la_param"])
