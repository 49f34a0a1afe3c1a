"""The options of ``tools/lowering``; needs nothing that is not in the standard library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
LOWERINGS = ("multi_tensor", "region", "inductor", "torch")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; --help and mistakes end the program."""
    parser = argparse.ArgumentParser(
        prog="tools/lowering",
        description="Show what one step of an optimizer lowers to on a GPU, without one: graphs, launches, memory traffic, "
        "registers. Kernels are compiled by Triton's own assembler; nothing is run.",
    )
    parser.add_argument("optimizer", type=str.lower, nargs="?", default="adamw", help="an optimizer of the package")
    parser.add_argument("--workload", type=int, choices=(10, 148, 1000, 20000), default=10, help="tensors of 4096 elements")
    parser.add_argument("--groups", type=int, choices=(1, 8), default=1)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90")
    parser.add_argument(
        "--lowering",
        choices=(*LOWERINGS, "auto", "all"),
        default="all",
        help="region: the step inside a function compiled whole with torch.compile; torch: torch.optim, foreach, compiled; "
        "auto: the only one of optimizers that are not elementwise",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clip", action="store_true", help="with max_grad_norm")
    parser.add_argument("--source", action="store_true", help="print the kernels too")
    parser.add_argument("--save", action="store_true", help="append to perf/results/lowering.csv")
    return parser.parse_args(arguments)
