"""Files of optimizer state, read without running anything in them."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.command_line.parts.output import needed


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--key``."""
    parser.add_argument("--key", help="the state dict's key, where a file holds a dict of several things")


def read(path: Path, key: str | None = None) -> dict[str, Any]:
    """The state dict in a file of ``torch.save``, or of safetensors with the ``.json`` of its groups beside it.

    Tensors stay in the file until they are used.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, holds other objects than tensors and plain values, or no optimizer's state.
    """
    with path.open("rb") as file:
        is_safetensors = file.read(9)[8:] == b"{"
    content = _read_safetensors(path) if is_safetensors else _read_torch(path)
    found = [name for name, value in content.items() if is_state(value)] if isinstance(content, Mapping) else []
    if key is None and not is_state(content) and len(found) == 1:
        key = found[0]
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            raise ValueError(f"{path} has no entry {key!r}")
        content = content[key]
    if not is_state(content):
        hint = f"; --key may be one of {', '.join(map(str, found))}" if found else ""
        raise ValueError(f"{path} holds no optimizer's state, which is a dict with 'state' and 'param_groups'{hint}")
    return dict(content)


def is_state(content: Any) -> bool:
    """Whether ``content`` is the state dict of an optimizer."""
    return isinstance(content, Mapping) and all(isinstance(content.get(key), kind) for key, kind in _PARTS.items())


_PARTS: dict[str, Any] = {"state": Mapping, "param_groups": (list, tuple)}


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # whatever a parser meets in arbitrary bytes
        said = str(error).strip()
        reason = (said.partition("WeightsUnpickler error: ")[2] or said).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path} is damaged, or holds something else than tensors and plain values, which is not loaded ({reason})"
        ) from error


def _read_safetensors(path: Path) -> dict[str, Any]:
    import json

    opened = needed("safetensors", "a file of safetensors", "convert").safe_open
    content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    params = {str(p): p for group in content["param_groups"] for p in group["params"]}
    state: dict[Any, dict[str, Any]] = {}
    with opened(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            param, _, entry = name.rpartition(".")
            state.setdefault(params.get(param, param), {})[entry] = file.get_tensor(name)
    return {**content, "state": state}


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
    """The shape of a parameter, as far as its state tells: that of its largest entry."""
    return max((tuple(v.shape) for v in tensors(entries).values()), key=lambda sizes: (len(sizes), sizes), default=())


def tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a parameter's state, but for its step count."""
    return {str(name): value for name, value in entries.items() if isinstance(value, Tensor) and name != "step"}


def steps(entries: Mapping[str, Any]) -> float | None:
    """The step count of a parameter's state, if it has one."""
    value = entries.get("step")
    return float(value) if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1) else None
