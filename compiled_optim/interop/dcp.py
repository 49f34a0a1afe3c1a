"""Folders of torch.distributed.checkpoint, in the layouts of torch: nested, or flat with names in the keys.

A flat key is ``state.NAME.ENTRY`` or ``param_groups.NAME.OPTION``. Both layouts may have a prefix; torchtitan's is
``optimizer``. Several processes write flat keys in any order, so ours are written with ``order``, which lists the names in
each group. Folders are read without torch's reader, which does not check them.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from compiled_optim.checkpoint.read import Checkpoint
from compiled_optim.interop.bitsandbytes import WRAPPER
from compiled_optim.interop.forms import UNORDERED, with_steps
from compiled_optim.interop.replace_files import Keep, Writers, as_bytes, check_regular, keeper
from compiled_optim.interop.torch_files import Pickled, PickledReader, load_item, reason

_KEY = re.compile(r"(?:(.*?)\.)?(state|param_groups|aliases|order)(?:\.(.*))?", re.DOTALL)
_LISTED = ("params", "param_names")
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_FILES, name) for name in ("_StorageInfo", "_StoragePrefix")),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class _Metadata(PickledReader):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (dtype := _DTYPES.get(f"{module}.{name}")) is not None:
            return dtype
        if (module, name) not in _KNOWN and module.partition(".")[0] != "pathlib":  # paths of the process that saved it
            raise pickle.UnpicklingError(f"the metadata asks for {module}.{name}")
        return super().find_class(module, name)


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, Pickled) or type(record).__name__ != kind:
        raise ValueError(f"the metadata has a {type(record).__name__} where a {kind} must be")
    return record.state


def matches(path: Path) -> bool:
    """Return whether ``path`` is a folder with the metadata of torch.distributed.checkpoint."""
    return (path / ".metadata").is_file()


def read(path: Path, key: str | None = None, scratch: Path | None = None) -> dict[str, Any]:
    """Return the state dict of the optimizer in a folder, read tensor by tensor.

    Args:
        path: the folder.
        key: the prefix of the optimizer's keys, if the folder holds several optimizers.
        scratch: a directory for files of large tensors, which the result maps; None keeps them in memory.

    Raises:
        OSError: a file cannot be read.
        ValueError: the folder is damaged, or does not hold one optimizer.
    """
    try:
        entries = _entries(path, key, scratch)
    except OSError:
        raise
    except Exception as error:  # arbitrary bytes may raise any error
        raise ValueError(f"{path} is damaged, or holds no optimizer ({reason(error)})") from error
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    lists: dict[int, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for part, path_in_part, is_listed, value in entries:
        holder, _, name = path_in_part.rpartition(".")
        if part == "aliases":
            result.setdefault(part, {})[path_in_part] = value
        elif part == "state":
            result[part].setdefault(holder.removesuffix(f".{WRAPPER}"), {})[name] = value
        elif is_listed:
            lists.setdefault(int(holder), {})[name] = value
        elif path_in_part:
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
    """List part of the state dict, remaining key, whether that holds the index of a list, and value of each entry."""
    keep = keeper(scratch)
    with check_regular(path / ".metadata").open("rb") as file:
        metadata = _state(_Metadata(file).load(), "Metadata")
    entries, nested = metadata["state_dict_metadata"], metadata.get("planner_data") or {}
    parsed = {name: match for name in entries if (match := _KEY.fullmatch(name))}
    prefixes = {match[1] or "" for match in parsed.values() if match[2] == "param_groups"}
    if len(prefixes := prefixes & {key} if key is not None else prefixes) != 1:
        listed = ", ".join(sorted(map(repr, prefixes))) or "none"
        raise ValueError(f"the keys of an optimizer's groups have one prefix, got {listed}; choose by key")
    stored: dict[Any, Mapping[str, Any]] = {}
    for index, info in metadata["storage_data"].items():
        item = _state(index, "MetadataIndex")
        if (match := parsed.get(item["fqn"])) and (match[1] or "") in prefixes:
            stored[item["fqn"], item.get("offset")] = _state(info, "_StorageInfo")
    _check_disjoint(path, stored.values())
    return [
        (
            match[2],
            match[3] or "",
            any(isinstance(part, int) for part in nested.get(name, ())),
            keep(value) if isinstance(value := _value(path, name, entries[name], stored), Tensor) else value,
        )
        for name, match in parsed.items()
        if (match[1] or "") in prefixes
    ]


def _value(path: Path, name: str, entry: Any, stored: Mapping[Any, Mapping[str, Any]]) -> Any:
    """Read an entry: an object, or the chunks of a tensor, each an archive of torch.save."""
    if type(entry).__name__ == "BytesStorageMetadata":
        return _item(path, stored[name, None])
    metadata = _state(entry, "TensorStorageMetadata")
    size, dtype = torch.Size(metadata["size"]), _state(metadata["properties"], "TensorProperties")[0]
    boxes = [_state(chunk, "ChunkStorageMetadata") for chunk in metadata["chunks"]]
    chunks = [(torch.Size(box["offsets"]), torch.Size(box["sizes"])) for box in boxes]
    if not _fill(chunks, size):
        raise ValueError(f"the chunks of {name!r} do not fill {[*size]} exactly")
    chunks = [chunk for chunk in chunks if chunk[1].numel()]
    infos = [stored[name, offsets] for offsets, _ in chunks]
    if size.numel() * dtype.itemsize > sum(info["length"] for info in infos):
        raise ValueError(f"{name!r} is larger than its stored items")
    tensor = torch.empty(size, dtype=dtype, device="cpu") if len(chunks) > 1 else None
    for (offsets, sizes), info in zip(chunks, infos, strict=True):
        piece = _item(path, info)
        if not isinstance(piece, Tensor) or (piece.dtype, piece.shape, piece.layout) != (dtype, sizes, torch.strided):
            raise ValueError(f"a chunk of {name!r} is not of {dtype} and {[*sizes]}")
        if tensor is None:
            return piece
        tensor[tuple(map(slice, offsets, map(sum, zip(offsets, sizes, strict=True))))] = piece
    return tensor if tensor is not None else torch.empty(size, dtype=dtype, device="cpu")


def _file(path: Path, info: Mapping[str, Any]) -> Path:
    relative = PurePath(info["relative_path"])
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"it refers to {str(relative)!r}, outside of the folder")
    return check_regular(path / relative)


def _check_disjoint(path: Path, infos: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if two items share bytes of a file: then a small file could fill the memory."""
    files = [(_file(path, info).stat(), info["offset"], info["length"]) for info in infos]
    spans = sorted((file.st_dev, file.st_ino, offset, length) for file, offset, length in files)
    if any(a[:2] == b[:2] and a[2] + a[3] > b[2] for a, b in itertools.pairwise(spans)):
        raise ValueError("two of its items share bytes of a file")


def _item(path: Path, info: Mapping[str, Any]) -> Any:
    relative, offset, length = PurePath(info["relative_path"]), info["offset"], info["length"]
    if info.get("transform_descriptors"):
        raise ValueError(f"{relative} was saved with extensions, which are not read")
    with _file(path, info).open("rb") as file:
        if not 0 <= offset <= offset + length <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{relative} ends before the end of an item")
        file.seek(offset)
        try:
            return load_item(file.read(length))
        except Exception as error:
            raise ValueError(f"{relative}: {reason(error)}") from error


def _fill(chunks: Iterable[tuple[torch.Size, torch.Size]], size: torch.Size) -> bool:
    """Return whether ``chunks``, each of offsets and sizes, cover each element of a tensor of ``size`` exactly once."""
    boxes = [[*zip(offsets, map(sum, zip(offsets, sizes, strict=True)), strict=True)] for offsets, sizes in chunks]
    if any(len(box) != len(size) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, size, strict=True)) for box in boxes):
        return False
    if sum(math.prod(b - a for a, b in box) for box in boxes) != size.numel():
        return False
    boxes = [box for box in boxes if all(a < b for a, b in box)]
    axis = max(range(len(size)), key=lambda axis: len({box[axis] for box in boxes}), default=0)
    beside: list[Any] = []  # those that reach the box along the axis with the most cuts, to compare few
    for box in sorted(boxes, key=lambda box: box[axis:]):
        beside = [other for other in beside if not size or other[axis][1] > box[axis][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in beside):
            return False
        beside.append(box)
    return True


def _grouped(flat: Mapping[str, Mapping[str, Any]], order: Any) -> dict[str, Any]:
    """Return the groups, marked if their order is unknown. ``order`` lists the names of each group, in older folders of all.

    Without names of each group, parameters with the same options, bit for bit, form a group.
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
    """Return a key that only equal values share. The ``repr`` of a tensor is rounded."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, bytes(as_bytes(value))
    if isinstance(value, Mapping):
        return tuple((key, _exact(value[key])) for key in sorted(value, key=str) if key not in _LISTED)
    return (type(value), *map(_exact, value)) if isinstance(value, (list, tuple)) else repr(value)


def content_of(state_dict: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """Return the flat layout that torch's ``set_optimizer_state_dict`` and torchtitan read, under ``optimizer``."""
    read = Checkpoint.of(state_dict)
    read.refuse_foreign("torch.distributed.checkpoint")
    saved = with_steps(read.named().as_dict(), torch.float32)
    flat = {
        f"state.{n}.{key}": _compact(value, keep) for n, entries in saved["state"].items() for key, value in entries.items()
    }
    for i, group in enumerate(saved["param_groups"]):
        if not group["params"]:
            raise ValueError(f"param_groups[{i}] has no parameters, so torch.distributed.checkpoint cannot hold it")
        flat |= {f"param_groups.{name}.{key}": group[key] for name in group["params"] for key in group if key != "params"}
    order = [] if saved.get(UNORDERED) else [group["params"] for group in saved["param_groups"]]
    return {"optimizer": {**flat, "order": order, **({"aliases": saved["aliases"]} if saved.get("aliases") else {})}}


def _compact(value: Any, keep: Keep) -> Any:
    """Return a value, or a copy of a part of a storage. torch's writer would copy it too, but in memory."""
    is_part = isinstance(value, Tensor) and value.untyped_storage().nbytes() != value.nbytes
    return keep(value.clone()) if is_part else value


def writers(content: dict[str, Any], path: Path) -> Writers:
    """Return the function that writes the folder."""
    if path.exists():
        raise ValueError(f"{path} is in the way; a folder, which may hold a model too, is not replaced: remove or rename it")
    return {path: partial(_save, content)}


def _save(content: dict[str, Any], path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # comes with no_dist=True too
            save(content, storage_writer=FileSystemWriter(path), no_dist=True)
    except CheckpointException as error:
        raise OSError(reason(Exception(next(iter(error.failures.values()))[0]))) from error
