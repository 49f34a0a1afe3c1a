"""Every kind of file that is read, mutated in every way: it gives the numbers that are in it, or an error that names it.

What has checksums gives its old numbers or none. The rest (JSON, safetensors, the form of torch.save before archives, the
metadata of a folder) is another valid file after some mutations. Then each number that is read is one of the file's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import pickletools
import random
import shutil
import struct
import sys
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_memory import MostAlive
from torch.distributed.checkpoint import metadata

from compiled_optim.cli import main
from compiled_optim.interop import convert as files

SLACK = 64 << 20  # bytes that reading takes besides twice the size of the files


def _state(count: int = 2, size: int = 48) -> dict[str, Any]:
    """A state dict of AdamW in which all numbers are different, with ``count`` parameters of ``size`` elements."""
    numbers = torch.arange(1.0, 2 * count * size + 1).view(count, 2, size)
    entries = [dict(zip(("exp_avg", "exp_avg_sq"), pair.clone(), strict=True)) for pair in numbers]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    group = {**options, "params": [*range(count)], "param_names": [f"layer.{i}" for i in range(count)]}
    return {"state": {i: {"step": torch.tensor(3.0), **e} for i, e in enumerate(entries)}, "param_groups": [group]}


def _deepspeed(saved: dict[str, Any], path: Path) -> None:
    (group,) = saved["param_groups"]
    for param, name in zip(group["params"], group["param_names"], strict=True):
        (path / name).mkdir(parents=True)
        for entry, value in saved["state"][param].items():
            torch.save(value if entry == "step" else {"param": value}, path / name / f"{entry}.pt")
    torch.save({"param_groups": [{k: v for k, v in group.items() if "param" not in k}]}, path / "optimizer_state.pt")


def _legacy(saved: dict[str, Any], path: Path) -> None:
    torch.save(saved, path, _use_new_zipfile_serialization=False)


KINDS: dict[str, tuple[str, Callable[[dict[str, Any], Path], object]]] = {
    "torch": ("in.pt", lambda saved, path: torch.save(saved, path)),
    "legacy": ("in.pt", _legacy),
    "safetensors": ("in.safetensors", lambda saved, path: files.write(saved, path, "safetensors")),
    "dcp": ("in", lambda saved, path: files.write(saved, path, "dcp")),
    "deepspeed": ("in", _deepspeed),
}


def _made(kind: str, folder: Path, saved: dict[str, Any] | None = None) -> Path:
    name, write = KINDS[kind]
    folder.mkdir(parents=True)
    write(_state() if saved is None else saved, folder / name)
    return folder / name


def _parts(path: Path) -> list[Path]:
    """The files that are read with ``path``."""
    return sorted(each for each in path.parent.rglob("*") if each.is_file())


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{at}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{at}/{i}")
    else:
        yield at, repr((value.dtype, value.shape, _digest(_memory(value))) if isinstance(value, torch.Tensor) else value)


LIES = (0, -1, 2**40, 2**63, 1e400, None, "", "F64", "I8", [], {}, [2**40, 2**40])


def _flipped(content: bytes, places: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(places.choice((1, 1, 2, 8))):
        changed[places.randrange(len(changed))] ^= 1 << places.randrange(8)
    return bytes(changed)


def _cut(content: bytes, places: random.Random) -> bytes:
    return content[: places.randrange(len(content))]


def _moved(content: bytes, places: random.Random) -> bytes:
    """Without a piece, with a piece twice, or with two pieces exchanged."""
    a, b, c = sorted(places.randrange(len(content) + 1) for _ in range(3))
    return places.choice(
        (content[:a] + content[b:], content[:b] + content[a:], content[:a] + content[b:c] + content[a:b] + content[c:])
    )


def _sized(content: bytes, places: random.Random) -> bytes:
    """With another number in the place of one that is small, as sizes and places are."""
    width = places.choice((1, 2, 4, 8))
    spots = [i for i in range(len(content) - width) if 0 < int.from_bytes(content[i : i + width], "little") <= len(content)]
    at = places.choice(spots or [0])
    number = places.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), len(content), 2 ** (4 * width)))
    return content[:at] + number.to_bytes(9, "little")[:width] + content[at + width :]


def _surrounded(content: bytes, places: random.Random) -> bytes:
    """With something else before or behind it, such as another file."""
    other = places.choice((content, bytes(64), places.randbytes(64), b"PK\x03\x04", b"PK\x05\x06" + bytes(18)))
    return places.choice((other + content, content + other))


def _lines(content: bytes, places: random.Random) -> bytes:
    """JSON, perhaps behind its length as in safetensors: an entry is removed, renamed, twice there or another."""
    head = 0 if content[:1] == b"{" else 8
    size = int.from_bytes(content[:8], "little") if head else len(content)
    try:
        root = json.loads(content[head : head + size])
    except ValueError:
        return _flipped(content, places)
    holders, found = [], [root]
    while found:
        value = found.pop()
        found += [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        holders += [value] if isinstance(value, (dict, list)) and value else []
    holder = places.choice(holders)
    key = places.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
    what = places.randrange(3)
    value = holder[key] if what else holder.pop(key)
    if what == 1:
        holder[key] = places.choice((*LIES, [value, value]))
    elif what == 2 and isinstance(holder, dict):
        holder[places.choice(("step", "x", "layer.0.exp_avg", "params"))] = holder.pop(key)
    text = json.dumps(root).encode()
    return (struct.pack("<Q", len(text)) if head else b"") + text + content[head + size :]


def _archive(content: bytes, places: random.Random) -> bytes:
    """Zip files with a record removed, twice there, renamed, compressed or of another length; checksums are right."""
    result, is_changed = io.BytesIO(), places.randrange(6)
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(result, "w") as new:
        chosen = places.choice(old.namelist())
        for name in old.namelist():
            record = old.read(name)
            if name != chosen:
                new.writestr(name, record)
            elif is_changed == 1:
                new.writestr(name, record, zipfile.ZIP_DEFLATED)
            elif is_changed == 2:
                new.writestr(name, places.choice((record + bytes(64), record[:-4])))
            elif is_changed == 3:
                others = (name + "0", name.upper(), f"../{name}", f"/{name}", name.rpartition("/")[2])
                new.writestr(places.choice(others), record)
            elif is_changed == 4:
                new.writestr(name, record)
                new.writestr(places.choice((name.swapcase(), f"./{name}")), bytes(len(record)))
            elif is_changed == 5:
                new.writestr(name, _opcodes(record, places) if name.endswith(".pkl") else record[::-1])
    return result.getvalue()


def _opcodes(content: bytes, places: random.Random) -> bytes:
    """A pickle without one of its operations, with one twice, or with another in its place or another argument."""
    try:
        at = [place for _, _, place in pickletools.genops(content) if place is not None] + [len(content)]
    except ValueError:
        return _flipped(content, places)
    parts = [content[a:b] for a, b in itertools.pairwise(at)] + [content[at[-1] :]]
    chosen, other = places.randrange(len(parts) - 2), places.choice(parts)
    what = places.randrange(4)
    if what < 3:
        parts[chosen : chosen + 1] = [[], [parts[chosen]] * 2, [other]][what]
    else:
        argument = places.choice((bytes(8), b"\xff" * 8, places.randbytes(8)))
        parts[chosen] = parts[chosen][:1] + argument[: len(parts[chosen]) - 1]
    return b"".join(parts)


BYTES = (_flipped, _cut, _moved, _sized, _surrounded)


def _ways(path: Path, kind: str) -> list[Callable[[bytes, random.Random], bytes]]:
    if path.suffix in (".json", ".safetensors"):
        return [*BYTES, *[_lines] * 3]
    if kind == "legacy" or path.name == ".metadata":
        return [*BYTES, *[_opcodes] * 5]
    return [*BYTES, *[_archive] * (4 if path.suffix == ".pt" else 0)]


def _tried(*arguments: object) -> tuple[int, str]:
    """The status of a command, and its one line about what is wrong."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main([str(argument) for argument in arguments])
    return status, said.getvalue()


def _check(path: Path, command: str = "inspect") -> dict[str, Any] | None:
    """What is read at ``path``, or None; it is the same for all ways to read, and nothing but the output is written."""
    top, out = path.parent.parent, path.parent.parent / "out" / "o.pt"
    out.parent.mkdir()
    before = {each: _digest(each.read_bytes()) for each in top.rglob("*") if each.is_file()}
    names = [path.name, *(each.name for each in _parts(path))]
    found, refusal = None, ""
    try:
        found = files.read(path)
    except (OSError, ValueError) as error:
        refusal = str(error)
    assert found is not None or any(name in refusal for name in names), refusal
    status, message = _tried("convert", path, out, "--to", "named")
    assert status in (0, 2)
    if status == 0:
        assert found is not None, "mapped, it is read"
        assert _numbers(files.read(out)) == _numbers(found)
        out.unlink()
    else:
        assert message.count("\n") == 1
        assert found is not None or any(name in message for name in names), message
    status, _ = _tried(command, *([path, path] if command == "diff" else [path]))
    assert (status == 2) == (found is None)
    assert {each: _digest(each.read_bytes()) for each in top.rglob("*") if each.is_file()} == before
    out.parent.rmdir()
    return found


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    """All of the state but the step counts, whose dtype changes, by parameters' names if there are names."""
    groups = [group for group in found["param_groups"] if group["params"]]
    names = {p: n for g in groups for p, n in zip(g["params"], g.get("param_names", g["params"]), strict=True)}
    state = {names.get(p, p): {k: v for k, v in e.items() if k != "step"} for p, e in found["state"].items()}
    return dict(_leaves(state))


def _is_in(tensor: torch.Tensor, contents: list[bytes]) -> bool:
    return any(bytes(_memory(tensor)) in content for content in contents)


def _mutate(kind: str, seed: int, folder: Path) -> None:
    """One mutation of files of a ``kind``, and what comes of it."""
    places = random.Random(f"{kind} {seed}")
    path = _made(kind, folder / "source")
    expected = _numbers(files.read(path))
    changed = places.choice([each for each in _parts(path) if kind != "deepspeed" or places.random() < 0.5] or _parts(path))
    way = places.choice(_ways(changed, kind))
    changed.write_bytes(way(changed.read_bytes(), places))
    found = _check(path, places.choice(("inspect", "diff")))
    if found is None:
        OUTCOMES["refused"] += 1
        return
    OUTCOMES["read"] += 1
    if way is not _archive and kind != "legacy" and changed.suffix in (".pt", ".distcp"):
        assert _numbers(found) == expected
    contents = [part.read_bytes() for part in _parts(path)]
    tensors = [v for entries in found["state"].values() for v in entries.values() if isinstance(v, torch.Tensor)]
    assert all(_is_in(tensor, contents) for tensor in tensors)


OUTCOMES: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files(kind: str, tmp_path: Path) -> None:
    for seed in range(12):
        _mutate(kind, seed, tmp_path / str(seed))


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files(kind: str, part: int, tmp_path: Path) -> None:
    OUTCOMES.clear()
    for seed in range(100 * part, 100 * part + 100):
        _mutate(kind, seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
    assert min(OUTCOMES["read"], OUTCOMES["refused"]) >= 5


# What a hostile hand makes, which chance does not.


def _storages_left_out(folder: Path) -> Path:
    """The list of the storages that follow has none, so that torch.load leaves their memory as it was."""
    path = _made("legacy", folder, _state(2, 1 << 16))
    content = path.read_bytes()
    keys = sorted({argument for op, argument, _ in _operations(content) if op == "BINUNICODE" and argument.isdigit()})
    path.write_bytes(content[: content.index(pickle.dumps(keys, 2)[:-1])] + pickle.dumps([], 2))
    return path


def _operations(content: bytes) -> Iterator[tuple[str, Any, int]]:
    """Of all pickles that stand one after the other."""
    file = io.BytesIO(content)
    for _ in range(5):
        for op, argument, place in pickletools.genops(file):
            yield op.name, argument, place or 0


def _one_storage(folder: Path) -> Path:
    """All parameters have state in the same memory."""
    saved = _state(1, 1 << 20)
    saved |= {"state": dict.fromkeys(range(24), saved["state"][0])}
    saved["param_groups"][0] |= {"params": [*range(24)], "param_names": [f"layer.{i}" for i in range(24)]}
    saved["state"] = {i: {k: v.view(v.shape) for k, v in e.items()} for i, e in saved["state"].items()}
    return _made("torch", folder, saved)


def _nested(folder: Path) -> Path:
    """A few lists, each of which has the next one many times."""
    value: Any = 0.5
    for _ in range(3):
        value = [value] * 250
    saved = _state()
    saved["param_groups"][0]["own"] = value
    return _made("torch", folder, saved)


def _before(folder: Path) -> Path:
    """An archive behind a file of the older form: the end says the one, the beginning the other."""
    path = _made("torch", folder)
    other = _made("legacy", folder / "other", _state(1))
    path.write_bytes(other.read_bytes() + path.read_bytes())
    shutil.rmtree(folder / "other")
    return path


def _twice_in_json(folder: Path) -> Path:
    path = _made("safetensors", folder)
    beside = path.with_suffix(".json")
    beside.write_text(beside.read_text().replace('"lr": 0.1', '"lr": 0.1, "lr": 0.3'))
    return path


def _described(change: Callable[[Any, dict[str, Any]], object], count: int = 24) -> Callable[[Path], Path]:
    """A folder of one large parameter and ``count`` small ones, whose metadata is changed."""

    def make(folder: Path) -> Path:
        saved = _state(count, 1)
        saved["state"][0] |= {name: torch.arange(1.0, (1 << 20) + 1) for name in ("exp_avg", "exp_avg_sq")}
        path = _made("dcp", folder, saved)
        described = pickle.loads((path / ".metadata").read_bytes())
        stored = {index.fqn: info for index, info in described.storage_data.items()}
        change(described, stored)
        (path / ".metadata").write_bytes(pickle.dumps(described))
        return path

    return make


FIRST = "optimizer.state.layer.0.exp_avg"


def _named_by_all(aliases: bool) -> Callable[[Any, dict[str, Any]], None]:
    def change(described: Any, stored: dict[str, Any]) -> None:
        for i in range(1, 24):
            name = FIRST.replace("0", str(i))
            described.state_dict_metadata[name] = described.state_dict_metadata[FIRST]
            info = stored[name]
            for field in ("offset", "length"):
                setattr(info, field, getattr(stored[FIRST], field))
            info.relative_path = aliases * ("./" * i) + stored[FIRST].relative_path

    return change


def _chunks_of_nothing(described: Any, stored: dict[str, Any]) -> None:
    """Many chunks without elements, for which one item is read again and again."""
    chunks = described.state_dict_metadata[FIRST].chunks
    for i in range(200):
        chunks.append(metadata.ChunkStorageMetadata(torch.Size([i]), torch.Size([0])))
        described.storage_data[metadata.MetadataIndex(FIRST, [i])] = stored[FIRST]


def _chunks_of_one_item(described: Any, stored: dict[str, Any]) -> None:
    """A tensor that is 64 times as large as what is stored of it, under 64 names of its file."""
    entry, size = described.state_dict_metadata[FIRST], 1 << 20
    entry.size = torch.Size([64 * size])
    entry.chunks[:] = [metadata.ChunkStorageMetadata(torch.Size([i * size]), torch.Size([size])) for i in range(64)]
    info = stored[FIRST]
    for i in range(64):
        there = type(info)("./" * i + info.relative_path, info.offset, info.length)
        described.storage_data[metadata.MetadataIndex(FIRST, [i * size])] = there


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "storages left out": _storages_left_out,
    "one storage": _one_storage,
    "nested lists": _nested,
    "behind another file": _before,
    "twice in JSON": _twice_in_json,
    "an item of all": _described(_named_by_all(aliases=False)),
    "an item of all, by other names": _described(_named_by_all(aliases=True)),
    "chunks of nothing": _described(_chunks_of_nothing),
    "chunks of one item": _described(_chunks_of_one_item),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files(kind: str, tmp_path: Path) -> None:
    """Each is refused, or right, at a cost that follows from its size."""
    path = HOSTILE[kind](tmp_path / "source")
    size = sum(part.stat().st_size for part in _parts(path))
    ways = [
        ("inspect", path),
        *(("convert", path, tmp_path / f"o.{to}", "--to", to) for to in ("named", "safetensors", "dcp")),
    ]
    for arguments in ways:
        tracemalloc.start()
        try:
            with MostAlive() as alive:
                _tried(*arguments)
            most = alive.bytes + tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most <= 2 * size + SLACK, (arguments, most, size)
    assert (_check(path) is None) == (kind != "one storage")
