from __future__ import annotations

import math
from typing import Any

from torch import Tensor

FAR: list[dict[str, Any]] = [
    {"d0": 0.5},
    {"lr": 0.7, "betas": (0.6, 0.8), "weight_decay": 0.4, "eps": 0.03, "d0": 0.02, "d_coef": 1.2},
    {"lr": 0.9, "betas": (0.0, 0.5), "weight_decay": 0.9, "eps": 0.6, "d0": 0.05, "maximize": True},
    {"lr": 0.7, "betas": (0.95, 0.3), "weight_decay": 0.0, "eps": 0.3, "d0": 0.03, "d_coef": 0.4},
]
KEEPS = True
SHARED = ("d", "d_numerator")


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    zeros = {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_sq", "s")}
    return {**zeros, "p0": param.clone()}


def share(given: list[tuple[Tensor, Tensor, dict[str, Tensor], Any]], first: Any, shared: dict[str, float]) -> None:
    """Estimate ``d`` for the step after this one."""
    d = shared["d_now"] = shared.setdefault("d", first.d0)
    shared.setdefault("d_numerator", 0.0)
    gain = size = 0.0
    for param, grad, state, h in given:
        grad = -grad if h.maximize else grad
        beta3 = math.sqrt(h.betas[1])
        weight = (1 - beta3) * h.lr * d * d
        gain += (weight * grad * (state["p0"] - param)).nan_to_num(nan=0.0).sum().item()
        size += (beta3 * state["s"] + weight * grad).abs().sum().item()
    if size > 0:
        shared["d_numerator"] = math.sqrt(first.betas[1]) * shared["d_numerator"] + gain
        shared["d"] = max(d, first.d_coef * shared["d_numerator"] / size)


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    d, (beta1, beta2) = h.shared["d_now"], h.betas
    beta3 = math.sqrt(beta2)
    state["exp_avg"].copy_(beta1 * state["exp_avg"] + (1 - beta1) * d * grad)
    state["exp_avg_sq"].copy_(beta2 * state["exp_avg_sq"] + (1 - beta2) * d**2 * grad**2)
    state["s"].copy_(beta3 * state["s"] + (1 - beta3) * h.lr * d**2 * grad)
    move = h.lr * d * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + d * h.eps)
    move = move + h.lr * d * h.weight_decay * param if h.weight_decay else move
    param.sub_(h.keep(move, grad))
