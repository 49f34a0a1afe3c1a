"""The options of ``tools/lowering``; needs nothing that is not in the standard library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
LOWERINGS = ("multi_tensor", "operator", "inlined", "inductor", "torch")
LIMITS = {"operator": 148, "inlined": 148, "torch": 148}
"""Tensors above which compiling takes long, up to an hour."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; --help and mistakes end the program."""
    parser = argparse.ArgumentParser(
        prog="tools/lowering",
        description="Show what one step of an optimizer lowers to on a GPU, without one: graphs, launches, memory traffic, "
        "registers. Kernels are compiled by Triton's own assembler; nothing is run.",
    )
    parser.add_argument("optimizer", type=str.lower, nargs="?", default="adamw", help="an optimizer of the package")
    parser.add_argument("--workload", type=int, choices=(10, 148, 1000, 20000), default=10, help="tensors")
    parser.add_argument(
        "--shapes",
        choices=("equal", "mixed", "gpt2"),
        default="equal",
        help="equal: 4096 elements each; mixed: four shapes in turn; gpt2: GPT-2 small's, of which there are 148",
    )
    parser.add_argument("--groups", type=int, choices=(1, 8), default=1)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90")
    parser.add_argument(
        "--lowering",
        choices=(*LOWERINGS, "auto", "all"),
        nargs="+",
        default=["all"],
        help="multi_tensor, inductor: called as usual; operator, inlined: these two inside a function that is compiled "
        "whole with torch.compile; torch: torch.optim, foreach, compiled; auto: the only one of optimizers that are not "
        "elementwise",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clip", action="store_true", help="with max_grad_norm")
    parser.add_argument(
        "--repeats", type=int, default=1, help="compile each lowering so often, in turn, and report the median of the times"
    )
    parser.add_argument("--source", action="store_true", help="print the kernels too")
    parser.add_argument("--save", action="store_true", help="append to perf/results/lowering.csv")
    return parser.parse_args(arguments)
