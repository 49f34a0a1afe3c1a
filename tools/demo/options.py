"""The command line. Standard library only, since ``tools/run`` reads it before anything is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("eager", "model", "whole-step", "captured")


@dataclass(frozen=True)
class Options:
    """What a run is asked to do; ``minimum_accuracy`` is a percentage, ``compare`` are the modes to compare at the end."""

    epochs: int
    seed: int
    out: Path
    minimum_accuracy: float
    mode: str
    compare: tuple[str, ...]


def parse(arguments: Sequence[str]) -> Options:
    """The options that ``arguments`` ask for; exits after ``--help`` or a mistake."""
    parser = argparse.ArgumentParser(
        prog="tools/run",
        description="Train a small vision transformer on scikit-learn's handwritten digits with compiled_optim.AdamW, "
        "on the CPU. Half-way, a checkpoint is saved and resumed by name: by a new model and a new optimizer that "
        "lists its parameters in another order. Afterwards the ways to run a step are compared, and the optimizer's step is "
        "timed against torch.optim.AdamW.",
        epilog="The first run makes a virtual environment in .venv-demo and installs PyTorch there. The exit status is "
        "1 if the test accuracy is below the minimum or anything fails.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=_positive, default=25, help="passes over the 1,437 training images")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the images' order and distortion")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help="folder for report.json, training.png and checkpoint.pt, relative to the repository",
    )
    parser.add_argument(
        "--min-accuracy",
        dest="minimum_accuracy",
        type=float,
        default=97.0,
        metavar="PERCENT",
        help="test accuracy that the run must reach",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="whole-step",
        help="how to run a training step: all of it eagerly, with the model compiled, as one compiled graph, or captured in "
        "a CUDA graph; without CUDA, captured runs eagerly and says so",
    )
    parser.add_argument(
        "--compare", nargs="*", choices=MODES, default=list(MODES), metavar="MODE", help="modes to time in turn at the end"
    )
    values = vars(parser.parse_args(arguments))
    return Options(**{**values, "compare": tuple(values["compare"])})


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
