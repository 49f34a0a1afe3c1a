from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def start(param: Tensor, h: Any) -> dict[str, Tensor]:
    return {"momentum_buffer": param.new_zeros(param.shape)}


def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, h: Any) -> None:
    """In float64 throughout: the optimizer's iteration is in bfloat16, and so a few per cent away."""
    grad = -grad if h.maximize else grad
    buffer = state["momentum_buffer"]
    buffer.copy_(h.momentum * buffer + (1 - h.momentum) * grad)
    direction = h.momentum * buffer + (1 - h.momentum) * grad if h.nesterov else buffer
    rows, columns = param.shape
    x = direction.t() if rows > columns else direction
    x = x / max(torch.linalg.matrix_norm(x).item(), h.eps)
    a, b, c = h.ns_coefficients
    for _ in range(h.ns_steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.t() if rows > columns else x
    ratio = 0.2 * math.sqrt(max(rows, columns)) if h.adjust_lr_fn == "match_rms_adamw" else math.sqrt(rows / columns)
    ratio = ratio if h.adjust_lr_fn in ("match_rms_adamw", "spectral_unclamped") else max(1.0, ratio)
    param.mul_(1 - h.lr * h.weight_decay)
    param.sub_(h.lr * ratio * x)
