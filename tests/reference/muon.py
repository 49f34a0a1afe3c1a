from __future__ import annotations

import functools
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
    param.mul_(1 - h.lr * h.weight_decay)
    param.sub_(h.lr * ratio(param.shape, h.adjust_lr_fn) * orthogonalized(direction, h))


def ratio(shape: Any, name: str | None) -> float:
    """What the learning rate of a matrix is multiplied by."""
    rows, columns = shape
    if name in ("match_rms_adamw", "spectral"):
        return 0.2 * math.sqrt(max(rows, columns))
    root = math.sqrt(rows / columns)
    return root if name in ("spectral_unclamped", "unit_rms_norm") else max(1.0, root)


def triples(h: Any) -> list[tuple[float, float, float]]:
    """The coefficients of each iteration."""
    if h.ns_coefficients == "polar_express":
        return polar_express(h.ns_steps)
    if isinstance(h.ns_coefficients[0], (tuple, list)):
        return list(h.ns_coefficients)
    return [h.ns_coefficients] * h.ns_steps


def orthogonalized(matrix: Tensor, h: Any) -> Tensor:
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(torch.linalg.matrix_norm(x).item(), h.eps)
    for a, b, c in triples(h):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


@functools.cache
def polar_express(steps: int) -> list[tuple[float, float, float]]:
    """The polynomials of arXiv:2505.16932, Algorithm 1, each by a minimax problem; the eighth and later ones are the limit.

    Each is the best on the part of the interval that is above the paper's cushion, and then centred on all of it.
    """
    low, high, found = 1e-3, 1.0, []
    for _ in range(min(steps, 7)):
        a, b, c = _best(max(low, 0.02407327424182761 * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        a, b, c = (2 / sum(ends) * k for k in (a, b, c))
        found.append((a / 1.01, b / 1.01**3, c / 1.01**5))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return [*found, *[(1.875, -1.25, 0.375)] * (steps - 7)]


def _best(low: float, high: float) -> tuple[float, float, float]:
    """The odd polynomial of degree 5 nearest to 1: its error is the same at four points, by turns above and below."""
    if high - low < 1e-5:  # where rounding exceeds the error
        return 1.875 / high, -1.25 / high**3, 0.375 / high**5
    points = [low, (3 * low + high) / 4, (low + 3 * high) / 4, high]
    for _ in range(100):
        rows = [[x, x**3, x**5, (-1.0) ** i] for i, x in enumerate(points)]
        solved = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
        a, b, c, _ = solved.tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        points[1:3] = sorted(math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
    return a, b, c
