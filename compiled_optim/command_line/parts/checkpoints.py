"""Files of optimizer state, read without running anything in them."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

USUAL = ("optimizer", "optimizer_state_dict")
"""What training scripts often call the optimizer's state in their files."""

FORM = re.compile(r"_(int8|scale)$")
"""What follows the name of an entry that is stored in 8 bits."""


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--key``."""
    parser.add_argument("--key", help="the state dict's key, where a file holds a dict of several things")


class Checkpoint(NamedTuple):
    """A state dict with our names and meaning; the ``form`` and the state dict of its file; why some of it is ``lost``."""

    content: dict[str, Any]
    form: str
    stored: Mapping[str, Any]
    lost: str


def read(path: Path, key: str | None = None) -> Checkpoint:
    """The state dict in a file or folder that ``convert`` reads. Large tensors are mapped, not read into memory.

    Without a ``key``, a file of several things may have it under one of :data:`USUAL`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, holds other objects than tensors and plain values, or no optimizer's state.
    """
    with tempfile.TemporaryDirectory(prefix="compiled_optim-") as scratch:  # a file that is mapped stays until it is not
        return _read(path, key, Path(scratch))


def _read(path: Path, key: str | None, scratch: Path) -> Checkpoint:
    from compiled_optim.convert import formats, whole

    form, stored = formats.as_it_is(path, key, scratch, USUAL)
    layout = formats.layout_of(stored)
    if layout is None:
        return Checkpoint(stored, form, stored, "")
    ours = partial(formats.LAYOUTS[layout].ours, stored, whole.keeper(scratch))
    try:
        return Checkpoint(ours(lossy=False), layout, stored, "")
    except ValueError as error:
        return Checkpoint(ours(lossy=True), layout, stored, str(error))


def parameters(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Each parameter of a state dict: its name, its group, and its state, which may be empty. Equal names are numbered."""
    state, seen = state_dict["state"], Counter[str]()
    for place, group in enumerate(state_dict["param_groups"]):
        names = group.get("param_names") or group["params"]
        for param, name in zip(group["params"], names, strict=False):
            entries, own = state.get(param, {}), str(name)
            seen[own] += 1
            yield own if seen[own] == 1 else f"{own} ({seen[own]})", place, entries if isinstance(entries, Mapping) else {}


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of a state dict says, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def shape_of(entries: Mapping[str, Any]) -> list[int] | None:
    """The shape of a parameter, if its state tells: its largest entry's, but Adafactor's are of rows and columns."""
    shapes = [] if "col_var" in entries else [list(value.shape) for value in tensors(entries).values()]
    return max(shapes, key=lambda sizes: (len(sizes), sizes), default=None)


def tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a parameter's state, but for its step count."""
    return {str(name): value for name, value in entries.items() if isinstance(value, Tensor) and name != "step"}


def steps(entries: Mapping[str, Any]) -> float | None:
    """The step count of a parameter's state, if it has one."""
    value = entries.get("step")
    return float(value) if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1) else None
