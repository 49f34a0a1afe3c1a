"""Files of optimizer state, read without running anything in them."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

USUAL = ("optimizer", "optimizer_state_dict")
"""Usual keys of the optimizer's state in files of training scripts."""


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--key``."""
    parser.add_argument("--key", help="the state dict's key, where a file holds a dict of several things")


class FileContent(NamedTuple):
    """The state dict of a file in this package's form, and the reason if a part is ``lost``, or ''."""

    content: dict[str, Any]
    lost: str


def read(path: Path, key: str | None = None) -> FileContent:
    """Return the state dict in a file or folder that ``convert`` reads. Large tensors are mapped, not read into memory.

    Without a ``key``, a file of several things is searched for the keys of :data:`USUAL`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or holds no optimizer's state, or objects other than tensors and plain values.
    """
    from compiled_optim.interop import convert, replace_files

    with tempfile.TemporaryDirectory(prefix="compiled_optim-") as scratch:  # maps of its files outlive it
        _, stored = convert.read_stored(path, key, Path(scratch), USUAL)
        if (layout := convert.layout_of(stored)) is None:
            return FileContent(stored, "")
        decode = partial(convert.LAYOUTS[layout].decode, stored, replace_files.keeper(Path(scratch)))
        try:
            return FileContent(decode(lossy=False), "")
        except ValueError as error:
            return FileContent(decode(lossy=True), str(error))


def parameters(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield name, index of the group, and state, perhaps empty, of each parameter. Equal names are numbered."""
    state, seen = state_dict["state"], Counter[str]()
    for index, group in enumerate(state_dict["param_groups"]):
        names = group.get("param_names") or group["params"]
        for param, name in zip(group["params"], names, strict=False):
            entries, key = state.get(param, {}), str(name)
            seen[key] += 1
            yield key if seen[key] == 1 else f"{key} ({seen[key]})", index, entries if isinstance(entries, Mapping) else {}


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group in a state dict."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
