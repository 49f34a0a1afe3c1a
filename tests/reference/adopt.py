from __future__ import annotations

from typing import Any

from torch import Tensor

FAR: list[dict[str, Any]] = [
    {},
    {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.3, "weight_decay": 0.4},
    {"lr": 0.3, "betas": (0.0, 0.5), "eps": 0.1, "weight_decay": 0.9, "decoupled_weight_decay": True, "maximize": True},
    {"lr": 0.07, "betas": (0.95, 0.0), "eps": 0.6},
]
KEEPS = True


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {name: param.new_zeros(param.shape) for name in ("exp_avg", "exp_avg_sq")}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    """With ``t - 1`` for the step of the authors' code, which counts from 0."""
    given = grad = -grad if h.maximize else grad
    decoupled = any(getattr(h, name, False) for name in ("decoupled_weight_decay", "decouple_wd", "decouple_lr"))
    if h.weight_decay and not decoupled:
        grad = grad + h.weight_decay * param
    if t == 1:
        state["exp_avg_sq"].copy_(grad * grad)
        return
    if decoupled:
        param.copy_((1 - h.lr * h.weight_decay) * param)
    limit = (t - 1) ** 0.25
    normed = (grad / state["exp_avg_sq"].sqrt().clamp(min=h.eps)).clamp(-limit, limit)
    state["exp_avg"].lerp_(normed, 1 - h.betas[0])
    param.copy_(param - h.keep(h.lr * state["exp_avg"], given))
    state["exp_avg_sq"].copy_(h.betas[1] * state["exp_avg_sq"] + (1 - h.betas[1]) * grad * grad)
