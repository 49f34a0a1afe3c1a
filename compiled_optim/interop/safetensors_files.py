"""Files of safetensors for the state, each with a JSON file for the groups beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import Checkpoint
from compiled_optim.interop.forms import checked, with_steps
from compiled_optim.interop.replace_files import Keep, Writers, as_bytes, check_regular
from compiled_optim.interop.torch_files import reason


def matches(path: Path) -> bool:
    """Return whether the file begins like one of safetensors: eight bytes of the header's length, then a JSON object."""
    if path.is_dir():
        return False
    with check_regular(path).open("rb") as file:
        return file.read(9)[8:] == b"{"


def read(path: Path, key: str | None = None, scratch: Path | None = None) -> dict[str, Any]:
    """Return the state dict in a file and the JSON beside it. With a ``scratch`` directory, tensors are mapped, not copied.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, or ``key`` is not None.
    """
    with _available():
        from safetensors import safe_open
    if key is not None:
        raise ValueError(f"{path} has no entry {key!r}")
    sidecar = path.with_suffix(".json")
    content = read_groups(sidecar)
    detach = torch.clone if scratch is None else _separate
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: detach(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception as error:  # arbitrary bytes may raise any error
        raise ValueError(f"{path} is damaged ({reason(error)})") from error
    params = {str(p): p for group in content["param_groups"] for p in group["params"]}
    state: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        param, _, entry = name.rpartition(".")
        if param not in params:
            raise ValueError(f"{path} holds {name!r}, but {sidecar} has no parameter {param!r}")
        state.setdefault(params[param], {})[entry] = tensor
    return {**content, "state": state}


@contextlib.contextmanager
def _available() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError("safetensors is not installed: pip install 'compiled-optim[convert]'") from error


def _separate(tensor: Tensor) -> Tensor:
    """Return ``tensor`` at the same address with a storage of its size: torch.save writes whole storages."""
    return torch.frombuffer(as_bytes(tensor), dtype=tensor.dtype).view(tensor.shape) if tensor.numel() else tensor.clone()


def read_groups(path: Path) -> dict[str, Any]:
    """Return the state dict without state in the JSON beside a file of safetensors."""
    try:
        content = json.loads(check_regular(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
        return checked({**content, "state": {}} if isinstance(content, dict) else content)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or not the groups of an optimizer ({error})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(entries := dict(pairs)) < len(pairs):
        raise ValueError("it has an entry twice")
    return entries


def content_of(state_dict: dict[str, Any], keep: Keep) -> tuple[str, dict[str, Tensor]]:
    """Return the JSON text of the groups, and the tensors by name."""
    saved = Checkpoint.of(state_dict)
    saved.refuse_foreign("safetensors")
    has_names = all(group.names is not None for group in saved.groups)
    state_dict = with_steps(saved.named().as_dict() if has_names else state_dict, torch.float64)
    memory: set[int] = set()
    tensors = {
        _tensor_name(param, entry): _tensor(value, f"the state {entry!r} of {param!r}", memory, keep)
        for param, entries in state_dict["state"].items()
        for entry, value in entries.items()
        if value is not None
    }
    numbers = {key: value for key, value in state_dict.items() if key != "state"}
    return json.dumps(numbers, indent=1, default=_json_value) + "\n", tensors


def writers(content: tuple[str, dict[str, Tensor]], path: Path) -> Writers:
    """Return the functions that write the groups and the state, by path."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors, since the groups go to the .json beside it")
    text, tensors = content
    return {
        path.with_suffix(".json"): partial(Path.write_text, data=text, encoding="utf-8"),
        path: partial(_save, tensors),
    }


def _tensor_name(param: int | str, entry: int | str) -> str:
    if "." in str(entry):
        raise ValueError(f"the state {entry!r} of {param!r} has a dot in its name, which separates names in safetensors")
    return f"{param}.{entry}"


def _tensor(value: Any, where: str, memory: set[int], keep: Keep) -> Tensor:
    """Return ``value`` contiguous, with a storage that no other tensor uses. Add its address to ``memory``."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if isinstance(value, (bool, int)):
        return torch.tensor(value, device="cpu")
    if not isinstance(value, Tensor) or value.dtype == torch.complex128:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{where} is a {kind}, which safetensors cannot hold")
    storage = value.untyped_storage()
    is_separate = storage.nbytes() == value.nbytes and storage.data_ptr() not in memory
    memory.add(storage.data_ptr())
    is_plain = value.is_contiguous() and not value.is_neg() and not value.is_conj()
    return value if is_separate and is_plain else keep(value.clone(memory_format=torch.contiguous_format))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    with _available():
        from safetensors import SafetensorError
        from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _json_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype):  # of state_dtype, which loads ignore
        return str(value)
    raise ValueError(f"a parameter group holds a {type(value).__name__}, which JSON cannot hold: {value!r}")
