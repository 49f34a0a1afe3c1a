"""The command line. Only the standard library is used, since ``tools/run`` reads it before anything is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

MODES = {
    "eager": "operation by operation",
    "model": "the model compiled",
    "whole-step": "forward, backward, step and zero_grad as one compiled graph",
    "captured": "all of it in one CUDA graph",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse ``arguments``. ``--help`` and mistakes end the program."""
    parser = argparse.ArgumentParser(
        prog="tools/run",
        description="Train a small vision transformer on scikit-learn's 1,797 handwritten digits with compiled_optim.AdamW, "
        "in one mode after the other. After each a checkpoint is resumed by name, by a new model and a new optimizer that "
        "lists its parameters in the opposite order. At the end the optimizer's step is timed beside torch.optim.AdamW's.",
        epilog=f"Modes: {'; '.join(f'{mode}, {meaning}' for mode, meaning in MODES.items())}. The first run installs "
        "PyTorch into .venv-demo. The exit status is 1 if the test accuracy is below the minimum or anything fails.",
    )
    parser.add_argument("--epochs", type=_positive, default=8, help="passes over the images in each mode (8)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of the images' order and distortion (0)")
    parser.add_argument("--min-accuracy", type=float, default=97.0, metavar="PERCENT", help="to reach on test images (97)")
    parser.add_argument("--modes", nargs="+", choices=MODES, metavar="MODE", help="in turn (all that the device has)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
