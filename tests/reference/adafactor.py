from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    if param.dim() < 2:
        return {"variance": param.new_zeros(param.shape)}
    shape = param.shape
    return {"row_var": param.new_zeros(*shape[:-1], 1), "col_var": param.new_zeros(*shape[:-2], 1, shape[-1])}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    grad = -grad if h.maximize else grad
    smallest, least_scale = h.eps
    smallest = torch.finfo(param.dtype).eps if smallest is None else smallest
    weight = t**h.beta2_decay
    rho = min(h.lr, 1 / math.sqrt(t))
    size = rho * max(least_scale, _root_mean_square(param))
    param.mul_(1 - h.lr * h.weight_decay)
    if param.dim() < 2:
        state["variance"].copy_((1 - weight) * state["variance"] + weight * grad**2)
        estimate = state["variance"]
    else:
        for name, dim in (("row_var", -1), ("col_var", -2)):
            mean = (grad**2).mean(dim, keepdim=True)
            state[name].copy_((1 - weight) * state[name] + weight * mean)
        estimate = state["row_var"] * state["col_var"] / state["row_var"].mean(-2, keepdim=True).clamp(min=smallest)
    direction = grad / estimate.clamp(min=smallest**2).sqrt()
    param.sub_(size / max(1, _root_mean_square(direction) / h.d) * direction)


def _root_mean_square(tensor: Tensor) -> float:
    return math.sqrt((tensor**2).mean().item())
