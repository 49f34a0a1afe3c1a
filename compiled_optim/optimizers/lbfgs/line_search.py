"""A step length that satisfies the strong Wolfe conditions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
SMALLEST_GROWTH, LARGEST_GROWTH = 0.01, 10.0  # of a trial that is still too short, over the last one
MARGIN = 0.1  # of a bracket's length: how near its ends a second trial in succession may lie


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

    Args:
        evaluate: the function at a step length; a value of infinity stands for NaN.
        start: the trial of length 0; its slope is negative.
        length: the first length to try.
        reach: the largest change of an element per unit of length.
        tolerance: a bracket in which no element changes more than this is not divided further.
        limit: how many trials may follow the first.

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
