"""Files of optimizer state, read without running anything in them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

USUAL = ("optimizer", "optimizer_state_dict")
"""What training scripts often call the optimizer's state in their files."""


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--key``."""
    parser.add_argument("--key", help="the state dict's key, where a file holds a dict of several things")


def read(path: Path, key: str | None = None) -> dict[str, Any]:
    """The state dict in a file or folder that ``convert`` reads. Large tensors are mapped, not read into memory.

    Without a ``key``, a file of several things may have it under one of :data:`USUAL`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, holds other objects than tensors and plain values, or no optimizer's state.
    """
    from compiled_optim import convert

    with tempfile.TemporaryDirectory(prefix="compiled_optim-") as scratch:  # a file that is mapped stays until it is not
        return convert.read(path, key, lossy=True, scratch=Path(scratch), usual=USUAL)


def parameters(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Each parameter of a state dict: its name, its group, and its state, which may be empty."""
    state = state_dict["state"]
    for place, group in enumerate(state_dict["param_groups"]):
        names = group.get("param_names") or group["params"]
        for param, name in zip(group["params"], names, strict=False):
            entries = state.get(param, {})
            yield str(name), place, entries if isinstance(entries, Mapping) else {}


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of a state dict says, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def shape_of(entries: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a parameter, as far as its state tells: its largest entry's."""
    return max((tuple(v.shape) for v in tensors(entries).values()), key=lambda sizes: (len(sizes), sizes), default=())


def tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a parameter's state, but for its step count."""
    return {str(name): value for name, value in entries.items() if isinstance(value, Tensor) and name != "step"}


def steps(entries: Mapping[str, Any]) -> float | None:
    """The step count of a parameter's state, if it has one."""
    value = entries.get("step")
    return float(value) if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1) else None
