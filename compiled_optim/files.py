"""Files of optimizer state: torch's, and safetensors for the state with JSON for the groups.

Nothing that a file holds is ever executed.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.formats import check, from_optimi, indexed, is_optimi, named, to_optimi

FORMS = ("torch", "compiled_optim", "named", "optimi", "safetensors")


def read(path: Path, key: str | None = None) -> dict[str, Any]:
    """The state dict in a file, on the CPU.

    Args:
        path: a file of ``torch.save``, or a ``.safetensors`` file with its ``.json`` beside it.
        key: where the file holds a dict of several things, the state dict's key.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, holds objects other than tensors and plain values, or holds no optimizer's state.
    """
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            raise ValueError(f"{path} has no entry {key!r}")
        content = content[key]
    try:
        check(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dict(content)


def write(state_dict: Mapping[str, Any], path: Path, form: str) -> None:
    """Write ``state_dict``, of any form, to a file.

    ``"torch"``, ``"compiled_optim"`` and ``"optimi"`` are indexed, for the ``load_state_dict`` of that package; ``"named"``
    and ``"safetensors"`` have parameter names, the latter also without.

    Raises:
        ValueError: ``form`` is unknown, or the state has no counterpart in it.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    check(state_dict)
    if is_optimi(state_dict) and form != "optimi":
        state_dict = from_optimi(state_dict)
    if form == "safetensors":
        _write_safetensors(state_dict, path)
    elif form == "optimi":
        torch.save(state_dict if is_optimi(state_dict) else to_optimi(state_dict), path)
    elif form == "torch":
        plain = indexed(_with_step(state_dict, torch.float32))
        torch.save({"state": plain["state"], "param_groups": plain["param_groups"]}, path)
    else:
        torch.save((named if form == "named" else indexed)(_with_step(state_dict, torch.float64)), path)


def _with_step(state_dict: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``state_dict`` with every step count a 0-dim tensor."""
    state = {
        key: {k: torch.as_tensor(v, dtype=dtype).reshape(()) if k == "step" else v for k, v in entries.items()}
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _read_torch(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path):  # torch.load does not compare the checksums
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever a parser meets in arbitrary bytes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path} is damaged, or holds something else than tensors and plain values, which is not loaded ({reason})"
        ) from error


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    sidecar = path.with_suffix(".json")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    try:
        content = json.loads(sidecar.read_text())
        params = {str(p): p for group in content["param_groups"] for p in group["params"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{sidecar} is damaged, or not the groups of an optimizer ({error!r})") from error
    state: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        param, _, entry = name.rpartition(".")
        if param not in params:
            raise ValueError(f"{path} holds '{name}', but {sidecar} has no parameter '{param}'")
        state.setdefault(params[param], {})[entry] = tensor
    return {"state": state, **content}


def _write_safetensors(state_dict: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    has_names = all("param_names" in group for group in state_dict["param_groups"])
    state_dict = _with_step(named(state_dict) if has_names else state_dict, torch.float64)
    tensors = {
        f"{param}.{entry}": torch.as_tensor(value).detach().clone(memory_format=torch.contiguous_format)
        for param, entries in state_dict["state"].items()
        for entry, value in entries.items()
        if value is not None
    }
    save_file(tensors, path)
    numbers = {key: value for key, value in state_dict.items() if key != "state"}
    path.with_suffix(".json").write_text(json.dumps(numbers, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    raise ValueError(f"a parameter group holds a {type(value).__name__}, which JSON cannot hold: {value!r}")
