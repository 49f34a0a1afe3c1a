"""Pairs of steps and gradient changes, and the direction that the inverse Hessian they imply gives to a gradient.

The two-loop recursion (Nocedal & Wright, Numerical Optimization, Algorithm 7.4) makes two products of vectors per pair, one
after the other. Written with the matrix of all products of steps and changes, whose upper triangle ``R`` it solves with in
both loops (Byrd, Nocedal and Schnabel, Mathematical Programming 63, 1994, Theorem 2.2), the same direction takes four
products of the history with a vector, whatever its length. Nothing here waits for the device: which pairs were accepted and
where they lie is known to the device alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LEAST_CURVATURE = 1e-10  # torch.optim's limit: a pair with a smaller product would make the matrix indefinite


def new_pairs(size: int, numel: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """An empty history of up to ``size`` pairs.

    Returns ``old_stps`` and ``old_dirs``, (size, numel) rings of steps and of gradient changes as torch.optim calls them;
    ``products``, (size, size), of every step with every change that is not older; ``H_diag``, the scale of the initial
    inverse Hessian; and ``pairs``, how many pairs were ever accepted. Pair ``n`` lies in row ``n % size``; empty rows are 0.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return {
        "old_stps": torch.zeros(size, numel, **options),
        "old_dirs": torch.zeros(size, numel, **options),
        "products": torch.zeros(size, size, **options),
        "H_diag": torch.ones((), **options),
        "pairs": torch.zeros((), dtype=torch.int64, device=device),
    }


def record(pairs: Mapping[str, Tensor], step: Tensor, change: Tensor, allowed: Tensor) -> None:
    """Add the pair of a step and of the gradient's change over it, in the oldest one's place if there is no other.

    Nothing changes unless ``allowed``, a 0-dim bool, is true and the pair's curvature is positive.
    """
    curvature = change.dot(step)
    accepted = (curvature > LEAST_CURVATURE) & allowed
    if size := len(pairs["products"]):
        row = (pairs["pairs"] % size).view(1)
        for name, new in (("old_stps", step), ("old_dirs", change)):
            ring = pairs[name]
            ring.index_copy_(0, row, torch.where(accepted, new, ring.index_select(0, row)))
        column = pairs["old_stps"] @ pairs["old_dirs"].index_select(0, row).view(-1)
        pairs["products"].index_copy_(1, row, column.view(-1, 1))
    pairs["H_diag"].copy_(torch.where(accepted, curvature / change.dot(change), pairs["H_diag"]))
    pairs["pairs"].add_(accepted)


def direction(pairs: Mapping[str, Tensor], gradient: Tensor, rows: int) -> Tensor:
    """Minus the inverse Hessian that ``pairs`` imply times ``gradient``, (numel,).

    ``rows`` says how many rows of the history to use: all, or as many as pairs can be there.
    """
    scale, count = pairs["H_diag"], pairs["pairs"]
    if rows == 0:
        return -scale * gradient
    steps, changes = pairs["old_stps"][:rows], pairs["old_dirs"][:rows]
    number = torch.arange(rows, device=gradient.device)
    by_age, back = (count + number) % rows, (number - count) % rows  # empty rows first, then from the oldest pair on
    products = pairs["products"].index_select(0, by_age).index_select(1, by_age)
    empty = (number < rows - count).to(products.dtype)
    triangle = products.triu() + torch.diag(empty)
    alpha = torch.linalg.solve_triangular(triangle, -(steps @ gradient)[by_age, None], upper=True)
    result = -scale * (gradient + changes.t() @ alpha[back, 0])
    right = products.diagonal()[:, None] * alpha - (changes @ result)[by_age, None]
    gamma = torch.linalg.solve_triangular(triangle.t(), right, upper=False)
    return torch.addmv(result, steps.t(), gamma[back, 0])


def rows_by_age(count: int, size: int) -> list[int]:
    """The rows of the pairs that are there, the oldest first, after ``count`` were accepted."""
    return [n % size for n in range(max(count - size, 0), count)]


def restore(
    pairs: Mapping[str, Tensor], steps: Tensor, changes: Tensor, products: Tensor, scale: Tensor, count: int | None = None
) -> None:
    """Put the newest pairs of a saved history in the places of empty ``pairs`` that they had after ``count`` pairs.

    ``steps`` and ``changes`` are (saved, numel), the oldest first; ``products``, (saved, saved), of steps with changes that
    are not older; ``scale`` is 0-dim. ``count`` is taken for ``saved`` unless so many would leave just the saved ones.
    """
    size = len(pairs["products"])
    if count is None or len(rows_by_age(count, size)) != len(steps):
        count = len(steps)
    rows = rows_by_age(count, size)
    for name, values in (("old_stps", steps), ("old_dirs", changes)):
        pairs[name][rows] = values[len(values) - len(rows) :].to(pairs[name])
    first = len(steps) - len(rows)
    row = torch.tensor(rows, dtype=torch.int64, device=scale.device)
    pairs["products"][row[:, None], row] = products[first:, first:].to(pairs["products"])
    pairs["H_diag"].copy_(scale)
    pairs["pairs"].fill_(count)
