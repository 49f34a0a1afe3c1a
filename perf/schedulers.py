"""Times of torch's schedulers, with this package's optimizers and with torch.optim's: ``measure_schedulers``."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

from perf.competitors import OURS, competitor
from perf.measure import make_params
from perf.results import Row, percentiles
from perf.turns import Samples, kept

GROUPS = (2, 24)
STEPS = 50
"""Scheduler steps in a sample."""

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "StepLR": lambda optimizer: StepLR(optimizer, 10),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 1000),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10**9),  # changes momentum too
}


def measure_schedulers(optimizer: str, device: torch.device, *, rounds: int) -> Iterator[list[Row]]:
    """Measure microseconds of processor time of a scheduler's step over each of :data:`GROUPS`, in turn in one process."""
    for count, (metric, schedule) in itertools.product(GROUPS, SCHEDULERS.items()):
        schedulers, samples = {}, {}
        for name in (OURS, "torch fused"):
            groups = [{"params": [param]} for param in make_params([(2,)] * count, device)]
            stepped = competitor(optimizer, name).make(groups)
            schedulers[name], samples[name] = schedule(stepped), []
            stepped.step()  # or schedulers warn
        rows = functools.partial(_rows, f"{count} groups", optimizer, metric, samples)
        yield from kept(functools.partial(_take, schedulers, samples, rounds), rows)


def _take(schedulers: Mapping[str, Any], samples: Samples, rounds: int) -> None:
    for _ in range(rounds):
        for name, scheduler in schedulers.items():
            started = time.process_time()
            for _ in range(STEPS):
                scheduler.step()
            samples[name].append(1e6 * (time.process_time() - started) / STEPS)


def _rows(workload: str, optimizer: str, metric: str, samples: Samples) -> list[Row]:
    rows = []
    for name, values in samples.items():
        if values:
            p20, p50, p80 = percentiles(values)
            ratio = percentiles(samples[OURS])[1] / p50
            rows.append(Row("schedulers", workload, optimizer, name, metric, "us", p20, p50, p80, ratio, len(values)))
    return rows
