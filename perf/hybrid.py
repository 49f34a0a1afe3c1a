"""AdamW and MuonAdamW on one small language model, over equal steps, each with its own best learning rate.

The claim is about this model and these steps alone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compiled_optim as co
from perf.convergence import trained
from perf.interrupts import let_in
from perf.results import Row, percentiles
from perf.turns import kept

SEEDS = range(4)
TUNING_SEED = 100  # not reported
RATES = tuple(8e-3 * 2**i for i in range(5))


def _adamw(model: nn.Module) -> co.AdamW:
    return co.AdamW(model.named_parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)


def _hybrid(model: nn.Module) -> co.MuonAdamW:
    return co.MuonAdamW(model, lr=0.0, weight_decay=0.1)


SIDES = {"AdamW": _adamw, "MuonAdamW": _hybrid}
"""Equal betas and weight decay. MuonAdamW scales Muon's updates, so that one learning rate suits both of its rules."""


def measure_hybrid(
    task: str, *, steps: int, seeds: Sequence[int] = SEEDS, rates: Sequence[float] = RATES, picture: Path | None = None
) -> Iterator[list[Row]]:
    """Measure final losses with every learning rate, then with each side's best one over the seeds, drawn in ``picture``."""
    curves = {}
    where = f"{task}, {steps} steps"
    for name, make in SIDES.items():
        tuned = {}
        for lr in rates:
            with let_in():
                tuned[lr] = loss = trained(task, TUNING_SEED, steps, make, lr)[1]
            yield [Row("hybrid", where, name.lower(), name, f"tuning, lr {lr:.3g}", "nats", *(loss,) * 3, None, 1)]
        best = min(tuned, key=lambda lr: tuned[lr])
        if best in (rates[0], rates[-1]) and len(rates) > 2:
            warnings.warn(f"{name} is best at {best}, an end of the learning rates that were tried", stacklevel=2)
        runs: list[tuple[list[float], float]] = []
        yield from kept(
            functools.partial(_run, task, seeds, steps, make, best, runs),
            functools.partial(_final, where, name, best, runs),
        )
        curves[f"{name}, lr {best:.3g}"] = [losses for losses, _ in runs]
    if picture is not None:
        _draw(curves, where, picture)


def _run(task: str, seeds: Sequence[int], steps: int, make: Callable[[nn.Module], Any], lr: float, runs: list[Any]) -> None:
    for seed in seeds:
        runs.append(trained(task, seed, steps, make, lr))


def _final(where: str, name: str, best: float, runs: Sequence[tuple[list[float], float]]) -> list[Row]:
    if not runs:
        return []
    values = {("final loss", "nats"): percentiles([final for _, final in runs]), ("learning rate", "1"): (best,) * 3}
    return [Row("hybrid", where, name.lower(), name, *key, *numbers, None, len(runs)) for key, numbers in values.items()]


def _draw(curves: dict[str, list[list[float]]], title: str, path: Path) -> None:
    """Draw the loss of each step: a thin line for each seed, a thick one for their mean of 10 steps."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for color, (label, runs) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        losses = torch.tensor(runs)
        for run in losses.tolist():
            axes.plot(run, color=color, alpha=0.2, linewidth=0.5)
        width = min(10, losses.shape[1])
        smooth = losses.mean(0).unfold(0, width, 1).mean(1).tolist()
        axes.plot(range(width - 1, losses.shape[1]), smooth, color=color, label=label)
    axes.set(title=title, xlabel="step", ylabel="training loss, nats")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
