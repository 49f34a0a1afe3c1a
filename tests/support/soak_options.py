"""The command ``tools/soak``'s options. Its parser needs the standard library alone, before anything is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 0.01, "momentum": 0.7, "weight_decay": 0.1, "nesterov": True},
    "Muon": {"lr": 0.01, "momentum": 0.7, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.01, "weight_decay": 0.1, "eps": (1e-4, 1e-3)},
    "SparseAdam": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3},
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; --help and mistakes end the program."""
    description = "Thousands of steps while everything around them goes wrong, each compared with a reference in float64."
    parser = argparse.ArgumentParser(prog="tools/soak", description=description)
    parser.add_argument("--steps", type=int, default=10_000, help="of each optimizer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--lowering", default="auto", choices=("auto", "multi_tensor", "inductor", "eager"))
    parser.add_argument("--walks", type=int, default=0, help="go so many random walks, from --seed on, in place of that")
    return parser.parse_args(arguments)
