"""The line search of L-BFGS, which waits for the device after each trial."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
_SMALLEST_GROWTH, _LARGEST_GROWTH = 0.01, 10.0  # factors of the next trial's length, after one that is too short
_MARGIN = 0.1  # the least distance, over a bracket's length, of a second successive trial from its ends


class Point(NamedTuple):
    """A point of the line: the step length, and the function's value, gradient and slope along the direction there."""

    length: float
    value: float
    gradient: Tensor
    slope: float


def strong_wolfe(
    evaluate: Callable[[float], Point], start: Point, length: float, reach: float, tolerance: float, limit: int
) -> tuple[Point, int]:
    """Search a step length with sufficient decrease and a small slope (Nocedal & Wright, Algorithms 3.5 and 3.6).

    Return the best trial, and the number of trials.

    Trials are at the minimum of the cubic through the two latest ones, with the safeguards of torch.optim. They are
    results of ``evaluate`` for a length, with infinity for NaN: first for ``length``, and then for up to ``limit`` others.
    The slope of ``start``, of length 0, is negative. A bracket is not divided further if no element, which changes by up to
    ``reach`` per unit of length, changes by the ``tolerance``.
    """

    def decreases(trial: Point) -> bool:
        return trial.value <= start.value + SUFFICIENT_DECREASE * trial.length * start.slope

    def is_flat(trial: Point) -> bool:
        return abs(trial.slope) <= -CURVATURE * start.slope

    previous, latest, count = start, evaluate(length), 1
    while count <= limit and decreases(latest) and (count <= 2 or latest.value < previous.value):
        if is_flat(latest):
            return latest, count
        if latest.slope >= 0:
            break
        shortest = latest.length + _SMALLEST_GROWTH * (latest.length - previous.length)
        length = _cubic_minimum(previous, latest, shortest, _LARGEST_GROWTH * latest.length)
        previous, latest, count = latest, evaluate(length), count + 1
    if count > limit:
        return (start if start.value <= latest.value else latest), count

    ends, was_near_an_end = [previous, latest], False  # of a bracket
    best = 0 if previous.value <= latest.value else 1
    while count <= limit:
        first, last = sorted(end.length for end in ends)
        if (last - first) * reach < tolerance:
            break
        length, margin = _cubic_minimum(ends[0], ends[1], first, last), _MARGIN * (last - first)
        is_near_an_end = min(last - length, length - first) < margin
        if is_near_an_end and (was_near_an_end or length in (first, last)):
            length = last - margin if last - length < length - first else first + margin
            is_near_an_end = False
        was_near_an_end = is_near_an_end
        trial, count = evaluate(length), count + 1
        if not decreases(trial) or trial.value >= ends[best].value:
            ends[1 - best] = trial
            best = 0 if ends[0].value <= ends[1].value else 1
        elif is_flat(trial):
            return trial, count
        else:
            if trial.slope * (ends[1 - best].length - ends[best].length) >= 0:
                ends[1 - best] = ends[best]
            ends[best] = trial
    return ends[best], count


def _cubic_minimum(a: Point, b: Point, lowest: float, highest: float) -> float:
    """Return the position of the minimum of the cubic through both trials, limited to bounds (equation 3.59).

    Without a minimum, return the middle of the bounds. If the cubic is a straight line, return a bound.
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
