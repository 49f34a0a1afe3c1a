"""Folders of torch.distributed.checkpoint, in the layouts of torch: nested, or flat with names in the keys.

A flat key is ``state.NAME.ENTRY`` or ``param_groups.NAME.OPTION``. Both layouts may have a prefix; torchtitan's is
``optimizer``. Several processes write flat keys in any order, so ours are written with ``order``, which lists the names in
each group. The pickled metadata of a folder makes only what describes tensors.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from compiled_optim.checkpoint.read import named, refuse_foreign
from compiled_optim.convert.forms import UNORDERED, with_steps
from compiled_optim.convert.quantized import WRAPPER
from compiled_optim.convert.torch_files import reason
from compiled_optim.convert.whole import Keep, Writers, as_bytes, keeper

_PLACE = re.compile(r"(?:(.*?)\.)?(state|param_groups|aliases|order)(?:\.(.*))?", re.DOTALL)
_LISTED = ("params", "param_names")
_FEW = 1 << 20  # bytes; smaller entries are read together
_OTHERS = {
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    ("collections", "OrderedDict"),
}


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":  # where it was saved, perhaps on another system
            return PurePosixPath
        is_known = module == described.__name__ and isinstance(vars(described).get(name), type)
        if not is_known and (module, name) not in _OTHERS:
            raise pickle.UnpicklingError(f"the metadata asks for {module}.{name}")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with (path / ".metadata").open("rb") as file:
            self.metadata: described.Metadata = _Metadata(file).load()

    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        return self.metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def matches(path: Path) -> bool:
    """Whether ``path`` is a folder with the metadata of torch.distributed.checkpoint."""
    return (path / ".metadata").is_file()


def read(path: Path, key: str | None = None, scratch: Path | None = None) -> dict[str, Any]:
    """The state dict of the optimizer in a folder, read tensor by tensor, and with ``scratch`` kept there.

    Args:
        path: the folder.
        key: the prefix, where several optimizers have one.
        scratch: a directory for large tensors.

    Raises:
        OSError: a file cannot be read.
        ValueError: the folder is damaged, or does not hold one optimizer.
    """
    try:
        entries = _entries(path, key, scratch)
    except OSError:
        raise
    except (Exception, CheckpointException) as error:  # whatever a parser meets in arbitrary bytes
        failure = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ValueError(f"{path} is damaged, or holds no optimizer ({reason(Exception(failure))})") from error
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    lists: dict[int, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for part, rest, is_listed, value in entries:
        holder, _, name = rest.rpartition(".")
        if part == "aliases":
            result.setdefault(part, {})[rest] = value
        elif part == "state":
            result[part].setdefault(holder.removesuffix(f".{WRAPPER}"), {})[name] = value
        elif is_listed:
            lists.setdefault(int(holder), {})[name] = value
        elif rest:
            flat.setdefault(holder, {})[name] = value
        else:
            result[part] = value
    if lists:
        result["param_groups"] = [lists[i] for i in sorted(lists)]
    elif flat:
        result |= _grouped(flat, result.pop("order", None))
    params = {str(param): param for group in result["param_groups"] for param in group["params"]}
    return {**result, "state": {params.get(param, param): entries for param, entries in result["state"].items()}}


def _entries(path: Path, key: str | None, scratch: Path | None) -> list[tuple[str, str, bool, Any]]:
    """Of each entry its part of the state dict, the rest of its key, whether that is an index of a list, and its value."""
    reader, keep = _Reader(path), keeper(scratch)
    places = {name: match for name in reader.metadata.state_dict_metadata if (match := _PLACE.fullmatch(name))}
    prefixes = {match[1] or "" for match in places.values() if match[2] == "param_groups"}
    if len(prefixes := prefixes & {key} if key is not None else prefixes) != 1:
        found = ", ".join(sorted(map(repr, prefixes))) or "none"
        raise ValueError(f"the keys of an optimizer's groups have one prefix, got {found}; choose by key")
    names = [name for name, match in places.items() if (match[1] or "") in prefixes]
    described_as = reader.metadata.state_dict_metadata
    sizes = {name: _size(described_as[name]) for name in names}
    values: dict[str, Any] = {}
    for batch in [[name for name in names if sizes[name] < _FEW], *([name] for name in names if sizes[name] >= _FEW)]:
        targets = {name: _blank(described_as[name]) for name in batch}
        with _alone():
            load(targets, storage_reader=reader, planner=_Planner(False, False), no_dist=True)
        values |= {name: keep(value) if sizes[name] >= _FEW else value for name, value in targets.items()}
    nested = reader.metadata.planner_data or {}
    return [
        (places[name][2], places[name][3] or "", any(isinstance(part, int) for part in nested.get(name, ())), values[name])
        for name in names
    ]


def _size(entry: Any) -> int:
    return entry.size.numel() * entry.properties.dtype.itemsize if isinstance(entry, described.TensorStorageMetadata) else 0


def _blank(entry: Any) -> Any:
    is_tensor = isinstance(entry, described.TensorStorageMetadata)
    return torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None


def _grouped(flat: Mapping[str, Mapping[str, Any]], order: Any) -> dict[str, Any]:
    """The groups, and a mark if their order is unknown. ``order`` lists the names in each group, or in older folders all.

    Without names in each group, parameters whose options are the same, bit for bit, are in one group.
    """
    order = order if isinstance(order, list) else []
    parts = [[*map(str, entry if isinstance(entry, list) else [entry])] for entry in order]
    names = dict.fromkeys(name for part in parts for name in part)
    is_listed = names.keys() == flat.keys()
    if not is_listed or not all(isinstance(entry, list) for entry in order):
        same: dict[Any, list[str]] = {}
        for name in names if is_listed else flat:
            same.setdefault(_exact(flat[name]), []).append(name)
        parts = [*same.values()]
    groups = [{k: v for k, v in flat[part[0]].items() if k not in _LISTED} | {"params": part} for part in parts if part]
    is_ordered = is_listed and [*names] == [*dict.fromkeys(name for group in groups for name in group["params"])]
    return {"param_groups": groups, **({} if is_ordered else {UNORDERED: True})}


def _exact(value: Any) -> Any:
    """What is equal for equal values only; the repr of a tensor is rounded."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, bytes(as_bytes(value))
    if isinstance(value, Mapping):
        return tuple((key, _exact(value[key])) for key in sorted(value, key=str) if key not in _LISTED)
    return (type(value), *map(_exact, value)) if isinstance(value, (list, tuple)) else repr(value)


def content_of(state_dict: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """The flat layout of torch, as its ``set_optimizer_state_dict`` and torchtitan read it, under ``optimizer``."""
    refuse_foreign(state_dict, "torch.distributed.checkpoint")
    saved = with_steps(named(state_dict), torch.float32)
    flat = {f"state.{name}.{key}": value for name, entries in saved["state"].items() for key, value in entries.items()}
    for i, group in enumerate(saved["param_groups"]):
        if not group["params"]:
            raise ValueError(f"param_groups[{i}] has no parameters, so it has no place in torch.distributed.checkpoint")
        flat |= {f"param_groups.{name}.{key}": group[key] for name in group["params"] for key in group if key != "params"}
    order = [] if saved.get(UNORDERED) else [group["params"] for group in saved["param_groups"]]
    return {"optimizer": {**flat, "order": order, **({"aliases": saved["aliases"]} if saved.get("aliases") else {})}}


def writers(content: dict[str, Any], path: Path) -> Writers:
    """How to write the folder."""
    if path.exists():
        raise ValueError(f"{path} is in the way; a folder, which may hold a model too, is not replaced: remove or rename it")
    return {path: partial(_save, content)}


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No warning that there is one process, which torch gives for ``no_dist`` too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _save(content: dict[str, Any], path: Path) -> None:
    try:
        with _alone():
            save(content, storage_writer=FileSystemWriter(path), no_dist=True)
    except CheckpointException as error:
        raise OSError(reason(Exception(next(iter(error.failures.values()))[0]))) from error
