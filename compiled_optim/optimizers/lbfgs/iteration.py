"""What an iteration of L-BFGS computes: a direction from pairs of steps and gradient changes, and a length along it.

The two-loop recursion (Nocedal & Wright, Numerical Optimization, Algorithm 7.4) makes two products of vectors per pair, one
after the other. Written with the matrix of all products of steps and changes (Byrd, Nocedal and Schnabel, Mathematical
Programming 63, 1994, Theorem 2.2), the same direction takes four products of the history with a vector, whatever its length.
It does not wait for the device, which alone knows the pairs that were accepted. A line search waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST_CURVATURE = 1e-10  # torch.optim's limit: a pair with a smaller product would make the matrix indefinite
SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
SMALLEST_GROWTH, LARGEST_GROWTH = 0.01, 10.0  # of a trial that is still too short, over the last one
MARGIN = 0.1  # of a bracket's length: how near its ends a second trial in succession may lie


def new_pairs(size: int, numel: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """An empty history of up to ``size`` pairs; pair ``n`` lies in row ``n % size``, and empty rows are 0."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return {
        "old_stps": torch.zeros(size, numel, **options),  # steps; torch.optim's names
        "old_dirs": torch.zeros(size, numel, **options),  # changes of the gradient
        "products": torch.zeros(size, size, **options),  # of every step with every change that is not older
        "H_diag": torch.ones((), **options),  # the scale of the initial inverse Hessian
        "pairs": torch.zeros((), dtype=torch.int64, device=device),  # how many were ever accepted
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
    """Minus the inverse Hessian that ``pairs``, in so many ``rows`` at most, imply times ``gradient``, (numel,)."""
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


class Trial(NamedTuple):
    """A point of the line: the step length, and the function's value, gradient and slope along the direction there."""

    length: float
    value: float
    gradient: Tensor
    slope: float


def strong_wolfe(
    evaluate: Callable[[float], Trial], start: Trial, length: float, reach: float, tolerance: float, limit: int
) -> tuple[Trial, int]:
    """Search a step length with sufficient decrease and a small slope (Nocedal & Wright, Algorithms 3.5 and 3.6).

    Trials are at the minimum of the cubic through the two latest ones, as in torch.optim, whose safeguards these are too.
    They are what ``evaluate`` makes of a length, where a value of infinity stands for NaN: first of ``length``, and then of
    up to ``limit`` others. The slope of ``start``, of length 0, is negative. A bracket is not divided further where no
    element, which changes by up to ``reach`` per unit of length, changes by the ``tolerance``.

    Returns:
        The best trial, and how many there were.
    """

    def decreases(trial: Trial) -> bool:
        return trial.value <= start.value + SUFFICIENT_DECREASE * trial.length * start.slope

    def is_flat(trial: Trial) -> bool:
        return abs(trial.slope) <= -CURVATURE * start.slope

    previous, latest = start, evaluate(length)
    count = 1
    while count <= limit:
        if not decreases(latest) or (count > 2 and latest.value >= previous.value):
            break
        if is_flat(latest):
            return latest, count
        if latest.slope >= 0:
            break
        shortest = latest.length + SMALLEST_GROWTH * (latest.length - previous.length)
        length = _cubic_minimum(previous, latest, shortest, LARGEST_GROWTH * latest.length)
        previous, latest = latest, evaluate(length)
        count += 1
    else:
        return (start if start.value <= latest.value else latest), count

    ends = [previous, latest]
    best = _best(ends)
    was_near_an_end = False
    while count <= limit:
        first, last = sorted(end.length for end in ends)
        if (last - first) * reach < tolerance:
            break
        length = _cubic_minimum(ends[0], ends[1], first, last)
        margin = MARGIN * (last - first)
        is_near_an_end = min(last - length, length - first) < margin
        if is_near_an_end and (was_near_an_end or not first < length < last):
            length = last - margin if abs(length - last) < abs(length - first) else first + margin
            is_near_an_end = False
        was_near_an_end = is_near_an_end
        trial = evaluate(length)
        count += 1
        other = 1 - best
        if not decreases(trial) or trial.value >= ends[best].value:
            ends[other] = trial
            best = _best(ends)
            continue
        if not is_flat(trial) and trial.slope * (ends[other].length - ends[best].length) >= 0:
            ends[other] = ends[best]
        ends[best] = trial
        if is_flat(trial):
            break
    return ends[best], count


def _best(ends: list[Trial]) -> int:
    return 0 if ends[0].value <= ends[1].value else 1


def _cubic_minimum(a: Trial, b: Trial, lowest: float, highest: float) -> float:
    """Where the cubic with the values and slopes of both trials has its minimum, held within bounds (equation 3.59).

    The middle of the bounds if it has none, but a bound where it lies at infinity: the cubic is a straight line.
    """
    a, b = sorted((a, b), key=lambda trial: trial.length)
    span = b.length - a.length
    middle = (lowest + highest) / 2
    if span == 0:
        return middle
    mean = a.slope + b.slope - 3 * (a.value - b.value) / (a.length - b.length)
    square = mean * mean - a.slope * b.slope
    if not square >= 0:
        return middle
    root = math.sqrt(square)
    divisor, numerator = b.slope - a.slope + 2 * root, b.slope + root - mean
    part = numerator / divisor if divisor else numerator * math.inf  # NaN where both are 0
    minimum = b.length - span * part
    return middle if math.isnan(minimum) else min(max(minimum, lowest), highest)
