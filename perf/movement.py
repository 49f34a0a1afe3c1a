"""Shares of bfloat16 weights that training moves at all, by learning rate: ``python -m perf.movement``.

A norm and a linear map, which begin as torch makes them, learn to give zeros, by AdamW with each package's defaults.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perf import results
from perf.competitors import OURS, PEERS, reason
from perf.results import Row, left_out, percentiles

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: (OURS, {}),
    f"{OURS}[auto]": (OURS, {"weights": "auto"}),
    f"{OURS}[stochastic]": (OURS, {"weights": "stochastic"}),
    "torch": ("torch", {}),
    "optimi": ("optimi", {}),
    "heavyball": ("heavyball", {}),
}
"""By name, one of :data:`~perf.competitors.PEERS` and the options that are not its defaults."""

RATES = [mantissa * 10.0**power for power in range(-7, -3) for mantissa in (1, 3)] + [1e-3]
WIDTH, BATCH, STEPS, SEEDS = 128, 64, 200, range(5)


def shares_moved(optimizer: type[Any], options: Mapping[str, Any], lr: float, steps: int, seed: int) -> dict[str, float]:
    """Train, and return for each parameter the share of elements that had another value after any step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)).bfloat16()
    inputs = torch.randn(BATCH, WIDTH).bfloat16()
    params = dict(zip(("norm", "matrix"), model.parameters(), strict=True))
    before = {name: param.detach().clone() for name, param in params.items()}
    moved = {name: torch.zeros_like(param, dtype=torch.bool) for name, param in params.items()}
    stepped = optimizer(list(params.values()), lr=lr, **options)
    for _ in range(steps):
        model(inputs).float().square().mean().backward()
        stepped.step()
        stepped.zero_grad()
        for name, param in params.items():
            moved[name] |= param.detach() != before[name]
    return {name: each.double().mean().item() for name, each in moved.items()}


def measure_movement(
    rates: Sequence[float] = RATES, steps: int = STEPS, seeds: Sequence[int] = SEEDS
) -> Iterator[list[Row]]:
    """Measure, in every way of :data:`WAYS` at each of ``rates``, the shares of elements that ``steps`` move."""
    for name, (peer, options) in WAYS.items():
        try:
            optimizer = PEERS[peer].find("adamw")
        except ImportError as error:
            yield left_out("movement", f"{steps} steps", "adamw", {name: reason(error)})
            continue
        for lr in rates:
            runs = [shares_moved(optimizer, options, lr, steps, seed) for seed in seeds]
            yield [
                Row(
                    "movement",
                    f"{which}, {steps} steps",
                    "adamw",
                    name,
                    f"share moved, lr {lr:.0e}",
                    "share",
                    *percentiles([run[which] for run in runs]),
                    None,
                    len(runs),
                )
                for which in runs[0]
            ]


def main() -> None:
    """Measure, print and append to the table."""
    parser = argparse.ArgumentParser(prog="python -m perf.movement", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="the directory of the tables")
    parser.add_argument("--no-save", action="store_true", help="do not append to the table")
    args = parser.parse_args()
    rows = list(itertools.chain.from_iterable(measure_movement(args.rates, args.steps)))
    results.show(rows, f"shares of bfloat16 weights that {args.steps} steps of AdamW move")
    if not args.no_save:
        results.append(rows, torch.device("cpu"), args.results)


if __name__ == "__main__":
    main()
