from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * h.amsgrad
    return {name: param.new_zeros(param.shape) for name in names}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    beta1, beta2 = h.betas
    param.mul_(1 - h.lr * h.weight_decay)
    state["exp_avg"].copy_(beta1 * state["exp_avg"] + (1 - beta1) * grad)
    state["exp_avg_sq"].copy_(beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2)
    second = state["exp_avg_sq"]
    if h.amsgrad:
        second = state["max_exp_avg_sq"]
        second.copy_(torch.maximum(second, state["exp_avg_sq"]))
    deviation = second.sqrt() / math.sqrt(1 - beta2**t) + h.eps
    param.sub_(h.lr / (1 - beta1**t) * state["exp_avg"] / deviation)
