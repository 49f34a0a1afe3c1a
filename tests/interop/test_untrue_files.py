"""Files that say something else than what is in them give the right numbers, or a ValueError that names the file."""

from __future__ import annotations

import os
import pathlib
import pickle
import pickletools
import random
import shutil
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from compiled_optim.cli import main
from compiled_optim.interop import convert as files

NAMES, SHAPES = ("fc.weight", "scale"), ((16, 12), ())


def _state() -> dict[str, Any]:
    """A state dict of AdamW with torch.optim's keys, and names."""
    state = {
        i: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.arange(64.0 if i else 192.0)[: 1 if i else None].reshape(shape) + 1,
            "exp_avg_sq": torch.full(shape, 2.0),
        }
        for i, shape in enumerate(SHAPES)
    }
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    return {"state": state, "param_groups": [{**group, "params": [0, 1], "param_names": [*NAMES]}]}


def _numbers(saved: dict[str, Any]) -> dict[tuple[Any, str], Any]:
    names = dict(enumerate(NAMES))
    return {
        (names.get(param, param), entry): torch.as_tensor(value).tolist()
        for param, entries in saved["state"].items()
        for entry, value in entries.items()
    } | {(0, "lr"): saved["param_groups"][0]["lr"]}


RIGHT = _numbers(_state())


def _outcome(path: Path, named: str | None = None) -> bool:
    """Whether what is at ``path`` is refused, read and mapped, by a message that has its name; it is right otherwise."""
    out = path.parent / "out.pt"
    refused = []
    for attempt in (lambda: files.read(path), lambda: files.convert(path, out, "named") and files.read(out)):
        out.unlink(missing_ok=True)
        message = ""
        try:
            assert _numbers(attempt()) == RIGHT
        except ValueError as error:
            message = str(error)
        assert not message or ((named or path.name) in message and not out.exists())
        refused.append(bool(message))
    assert len({*refused}) == 1
    return refused[0]


def _archive(path: Path, change: Callable[[zipfile.ZipInfo, bytes, zipfile.ZipFile], None]) -> None:
    """The archive at ``path`` written anew, each record by ``change``."""
    shutil.move(path, path.with_suffix(".old"))
    with zipfile.ZipFile(path.with_suffix(".old")) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            change(info, old.read(info), new)


ARCHIVES: dict[str, tuple[bool, Callable[[zipfile.ZipInfo, bytes, zipfile.ZipFile], None]]] = {
    "as it was": (False, lambda info, content, new: new.writestr(info.filename, content)),
    "all compressed": (True, lambda info, content, new: new.writestr(info.filename, content, zipfile.ZIP_DEFLATED)),
    "what shrinks compressed": (True, lambda i, c, new: new.writestr(i.filename, c, 8 if len(c) > 64 else 0)),
    "longer": (True, lambda i, c, new: new.writestr(i.filename, c + bytes(4) * ("/data/" in i.filename))),
    "shorter": (True, lambda i, c, new: new.writestr(i.filename, c[: 4 if len(c) == 192 * 4 else None])),
    "twice": (
        True,
        lambda i, c, new: [new.writestr(n, c) for n in {i.filename, i.filename.replace("/data/", "/DATA/")}] and None,
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", ARCHIVES)
def test_records_of_an_archive(kind: str, tmp_path: Path) -> None:
    refused, change = ARCHIVES[kind]
    torch.save(_state(), tmp_path / "a.pt")
    _archive(tmp_path / "a.pt", change)
    assert _outcome(tmp_path / "a.pt") is refused


@pytest.mark.quick
@pytest.mark.parametrize("kind", ARCHIVES)
def test_records_below_a_folder_of_deepspeed(kind: str, tmp_path: Path) -> None:
    refused, change = ARCHIVES[kind]
    _deepspeed(tmp_path / "in")
    _archive(tmp_path / "in/fc.weight/exp_avg.pt", change)
    (tmp_path / "in/fc.weight/exp_avg.old").unlink()
    assert _outcome(tmp_path / "in", "exp_avg.pt") is refused


def _deepspeed(folder: Path) -> None:
    folder.mkdir()
    saved = _state()
    torch.save(
        {"param_groups": [{k: v for k, v in saved["param_groups"][0].items() if k[:5] != "param"}]},
        folder / "optimizer_state.pt",
    )
    for i, entries in saved["state"].items():
        (folder / NAMES[i]).mkdir()
        for entry, value in entries.items():
            torch.save(value if entry == "step" else {"param": value}, folder / NAMES[i] / f"{entry}.pt")


class TestFoldersOfTorchDistributed:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        files.write(_state(), tmp_path / "in", "dcp")
        return tmp_path / "in"

    GLOBALS = (
        *((metadata.__name__, name) for name in metadata.__all__),
        (metadata.__name__, "_MEM_FORMAT_ENCODING"),
        (filesystem.__name__, "_StorageInfo"),
        (filesystem.__name__, "_StoragePrefix"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath", "Path")),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "dict"),
        ("os", "system"),
    )

    @pytest.mark.quick
    @pytest.mark.parametrize("made", [b"", b")\x81", b")R", b"K\x00\x85R"], ids=["itself", "new", "called", "called with 0"])
    @pytest.mark.parametrize("state", [(None, {"suffix": "lie"}), {"suffix": "lie"}])
    def test_the_metadata_sets_nothing(self, state: Any, made: bytes, folder: Path) -> None:
        watched = [metadata, filesystem, torch, pathlib]
        objects = [pathlib.PurePosixPath, pathlib.PosixPath, torch.serialization._get_layout, torch.Size]  # type: ignore[attr-defined]
        objects += [vars(m)[n] for m in watched[:2] for module, n in self.GLOBALS if module == m.__name__]
        objects += [*metadata._MEM_FORMAT_ENCODING]
        before = [{**vars(each)} for each in objects]
        true = (folder / ".metadata").read_bytes()
        outcomes = Counter[bool]()
        for module, name in self.GLOBALS:
            built = f"c{module}\n{name}\n".encode() + made + pickletools.optimize(pickle.dumps(state, 2))[2:-1] + b"b0"
            (folder / ".metadata").write_bytes(built + true)
            outcomes[_outcome(folder)] += 1
            assert [{**vars(each)} for each in objects] == before, name
        assert outcomes[True]
        assert outcomes[False] or not made or isinstance(state, tuple)

    CHANGES: dict[str, Callable[[Any, list[Any], Any], object]] = {
        "no chunk": lambda entry, chunks, info: chunks.clear(),
        "a chunk twice": lambda entry, chunks, info: chunks.append(chunks[0]),
        "a row less": lambda entry, chunks, info: setattr(chunks[0], "sizes", torch.Size([15, 12])),
        "a row more": lambda entry, chunks, info: setattr(chunks[0], "sizes", torch.Size([17, 12])),
        "elsewhere": lambda entry, chunks, info: setattr(chunks[0], "offsets", torch.Size([1, 0])),
        "negative": lambda entry, chunks, info: setattr(chunks[0], "offsets", torch.Size([-1, 0])),
        "a larger tensor": lambda entry, chunks, info: setattr(entry, "size", torch.Size([32, 12])),
        "an endless tensor": lambda entry, chunks, info: [
            setattr(entry, "size", torch.Size([2**40, 12])),
            setattr(chunks[0], "sizes", entry.size),
        ],
        "another dtype": lambda entry, chunks, info: setattr(entry.properties, "dtype", torch.int8),
        "outside": lambda entry, chunks, info: setattr(info, "relative_path", "../other/__0_0.distcp"),
        "an absolute path": lambda entry, chunks, info: setattr(info, "relative_path", "/dev/zero"),
        "a longer item": lambda entry, chunks, info: setattr(info, "length", info.length + 1),
        "a shorter item": lambda entry, chunks, info: setattr(info, "length", info.length - 1),
        "an endless item": lambda entry, chunks, info: setattr(info, "length", 2**62),
        "the rest of the file": lambda entry, chunks, info: setattr(info, "length", -1),
        "an item elsewhere": lambda entry, chunks, info: setattr(info, "offset", info.offset + 64),
        "the same size in two chunks that overlap": lambda entry, chunks, info: [
            setattr(chunks[0], "sizes", torch.Size([8, 12])),
            chunks.append(metadata.ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([8, 12]))),
        ],
    }

    @pytest.mark.quick
    @pytest.mark.parametrize("kind", CHANGES)
    def test_chunks(self, kind: str, folder: Path) -> None:
        shutil.copytree(folder, folder.with_name("other"))
        described = pickle.loads((folder / ".metadata").read_bytes())
        name = "optimizer.state.fc.weight.exp_avg"
        entry = described.state_dict_metadata[name]
        [info] = [info for index, info in described.storage_data.items() if index.fqn == name]
        for index in [*described.storage_data]:
            if index.fqn == name:  # where a lie has its chunk
                for offset in ([1, 0], [4, 0], [-1, 0]):
                    described.storage_data[metadata.MetadataIndex(name, offset)] = info
        self.CHANGES[kind](entry, entry.chunks, info)
        (folder / ".metadata").write_bytes(pickle.dumps(described))
        assert _outcome(folder) or kind == "a longer item"  # in which the archive is whole

    @pytest.mark.quick
    @pytest.mark.parametrize("cuts", [(1, 1), (4, 1), (1, 5), (4, 3), (16, 12)])
    def test_a_tensor_in_chunks(self, cuts: tuple[int, int], folder: Path) -> None:
        """Which torch writes in this way from several processes."""
        described = pickle.loads((folder / ".metadata").read_bytes())
        name = "optimizer.state.fc.weight.exp_avg"
        entry, value = described.state_dict_metadata[name], _state()["state"][0]["exp_avg"]
        entry.chunks.clear()
        rows = [part.tolist() for part in torch.arange(16).tensor_split(cuts[0])]
        columns = [part.tolist() for part in torch.arange(12).tensor_split(cuts[1])]
        boxes = [([r[0], c[0]], [len(r), len(c)]) for r in rows for c in columns] + [([16, 0], [0, 12])]
        random.Random(0).shuffle(boxes)
        for i, (offsets, sizes) in enumerate(boxes):
            piece = value[offsets[0] :, offsets[1] :][: sizes[0], : sizes[1]].clone()
            torch.save(piece, folder / f"{i}.distcp")
            entry.chunks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            info = filesystem._StorageInfo(f"{i}.distcp", 0, (folder / f"{i}.distcp").stat().st_size)
            described.storage_data[metadata.MetadataIndex(name, offsets, i)] = info
        (folder / ".metadata").write_bytes(pickle.dumps(described))
        assert not _outcome(folder)
        lost = random.Random(1).choice([chunk for chunk in entry.chunks if chunk.sizes.numel()])
        entry.chunks.remove(lost)
        (folder / ".metadata").write_bytes(pickle.dumps(described))
        assert _outcome(folder)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_flipped_bit(self, seed: int, folder: Path) -> None:
        places = random.Random(seed)
        [file] = folder.glob("*.distcp")
        content = file.read_bytes()
        numbers = content.index(_state()["state"][0]["exp_avg"].numpy().tobytes())
        outcomes = Counter[bool]()
        for i in range(40):
            damaged = bytearray(content)
            place = numbers + places.randrange(192 * 4) if i % 2 else places.randrange(len(content))
            damaged[place] ^= 1 << places.randrange(8)
            file.write_bytes(damaged)
            outcomes[_outcome(folder)] += 1
        assert outcomes[True] >= 20


@pytest.mark.quick
@pytest.mark.parametrize("made", ["pipe", "device", "folder"])
@pytest.mark.parametrize(
    ("form", "place"),
    [
        ("torch", "in.pt"),
        ("safetensors", "in.safetensors"),
        ("safetensors", "in.json"),
        ("dcp", "in/.metadata"),
        ("dcp", "in/__0_0.distcp"),
        ("deepspeed", "in/optimizer_state.pt"),
        ("deepspeed", "in/fc.weight/exp_avg.pt"),
        ("deepspeed", "mp_rank_00_model_states.pt"),
    ],
)
def test_what_is_no_regular_file(
    form: str, place: str, made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have no end, or never begin."""
    monkeypatch.chdir(tmp_path)
    path = Path({"torch": "in.pt", "safetensors": "in.safetensors"}.get(form, "in"))
    torch.save(_state(), "good.pt")
    _deepspeed(path) if form == "deepspeed" else files.write(_state(), path, form)
    Path(place).unlink(missing_ok=True)
    if made == "pipe":
        os.mkfifo(place)
    elif made == "device":
        Path(place).symlink_to("/dev/zero")
    else:
        Path(place).mkdir()
    for arguments in (
        ["inspect", path],
        ["convert", path, "o.pt", "--to", "torch"],
        ["diff", path, "good.pt"],
    ):
        assert main([*map(str, arguments)]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert "not a regular file" in message or "is a folder, and neither" in message
        assert path.name in message or Path(place).name in message
    assert not Path("o.pt").exists()


@pytest.mark.quick
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_interrupt_beside_a_replacement(
    done: bool, suffix: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files are of the old conversion, or both of the new."""
    path, beside = tmp_path / "a.safetensors", tmp_path / "a.json"
    old = _state()
    old["param_groups"][0]["lr"] = 0.7
    old["state"][0]["exp_avg"] += 1
    if exists:
        files.write(old, path, "safetensors")
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if Path(target).suffix != suffix:
            return replace(source, target)
        monkeypatch.undo()
        if done:
            replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write(_state(), path, "safetensors")
    is_new = done and suffix == ".safetensors"
    assert path.exists() == beside.exists() == (exists or is_new)
    if path.exists():
        assert _numbers(files.read(path)) == (RIGHT if is_new else _numbers({**old}))


def test_a_number_in_a_pickle_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}r" + (4_000_000).to_bytes(4, "little") + b".")
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")
    tracemalloc.start()
    try:
        _outcome(file)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
