"""The command line of ``tools/convert``. Standard library only, since it is read before anything is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

FORMS = ("torch", "compiled_optim", "named", "optimi", "safetensors")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options that ``arguments`` ask for; exits after ``--help`` or a mistake."""
    parser = argparse.ArgumentParser(
        prog="tools/convert",
        description="Convert a file of optimizer state to another form. IN is a file of torch.save with the state dict of "
        "torch.optim, optimi or compiled_optim, or a .safetensors file with the .json of its groups beside it. Nothing in a "
        "file is executed. OUT is written completely or not at all, and may be IN.",
        epilog="A file is replaced only if it holds an optimizer's state; no option forces it, as removing the file does. "
        "The first run makes a virtual environment in .venv-convert and installs PyTorch there. The exit status is 1 if IN "
        "cannot be converted.",
    )
    parser.add_argument("source", metavar="IN", type=Path)
    parser.add_argument("target", metavar="OUT", type=Path, help="for safetensors, NAME.safetensors, with NAME.json")
    parser.add_argument("--to", required=True, choices=FORMS, help="whose load_state_dict is to load it, or the form")
    parser.add_argument("--key", help="the state dict's key, where IN holds a dict of several things")
    return parser.parse_args(arguments)
