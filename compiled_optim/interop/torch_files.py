"""Files of ``torch.save``. Nothing that a file holds is ever executed."""

from __future__ import annotations

import errno
import importlib
import io
import pickle
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from compiled_optim.groups.parameters import first_few
from compiled_optim.interop.forms import MOST_KEYS
from compiled_optim.interop.replace_files import Writers, check_regular

_IS_FOLDER = 0x10  # MS-DOS attribute of a file in a zip archive
_WIDTHS = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QUInt8", "QInt8", "QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of an element, by the kind of its storage."""


class Pickled:
    """A description of a pickled object: its arguments and its state. A subclass has the name of the object's class."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Pickled:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:  # also for a class, so that a pickle cannot set its attributes
        self.state = state


class _Items(dict[Any, Any]):
    def __setstate__(self, state: Any) -> None:  # drops attributes, such as ``_metadata`` of a module's state dict
        pass


class PickledReader(pickle._Unpickler):
    """A reader of pickles that creates a :class:`Pickled` instead of each object, and lists the storages.

    It is Python's reader: C's allocates memory for as many values as the largest number in the pickle.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.classes: dict[str, type] = {}
        self.storages: list[tuple[Any, ...]] = []

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of records instead of any class or function."""
        if module == "collections":  # such as OrderedDict, which is filled like a dict
            return _Items
        return self.classes.setdefault(name, type(name, (Pickled,), {}))

    def persistent_load(self, pid: Any) -> Any:
        """Record a storage: its kind, key, device and number of elements."""
        self.storages.append(pid)
        return Pickled()


def read(path: Path, key: str | None = None, scratch: Path | None = None) -> Any:
    """Return the content of a file, on the CPU. With a ``scratch`` directory, tensors of zip files are mapped, not copied.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, holds objects other than tensors and plain values, or has no entry ``key``.
    """
    try:
        content = _load(check_regular(path), is_mapped=scratch is not None)
    except Exception as error:  # arbitrary bytes may raise any error
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a damaged archive points outside of itself
            raise
        raise ValueError(
            f"{path} is damaged, or holds objects other than tensors and plain values, which are not loaded "
            f"({reason(error)})"
        ) from error
    if key is None:
        return content
    if not isinstance(content, Mapping) or key not in content:
        keys = first_few(map(repr, content), MOST_KEYS) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(f"{path} has no entry {key!r}; it holds {keys}")
    return content[key]


def _load(path: Path, *, is_mapped: bool) -> Any:
    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        _check_archive(path)
    if is_zip and is_mapped and path.suffix != ".safetensors":  # for a path, torch.load goes by its suffix
        load = partial(torch.load, str(path), mmap=True, map_location="cpu", weights_only=True)
    else:
        load = partial(_load_opened, path)
    try:
        content = load()
    except Exception as error:
        if "torchao" not in str(error):
            raise
        _import_torchao()
        content = load()
    if not is_zip:
        _check_storages(path)
    return content


def _check_archive(file: Path | IO[bytes]) -> None:
    """Raise ``ValueError`` for damage that torch.load accepts: wrong checksums, and records of other kinds and sizes."""
    with zipfile.ZipFile(file) as archive:
        sizes: dict[str, int] = {}
        for record in archive.infolist():
            if record.file_size and (record.external_attr & _IS_FOLDER or not record.compress_size):
                raise ValueError(f"{record.filename!r} is marked as a folder, or as empty")
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{record.filename!r} is compressed; torch.save does not compress")
            if record.filename.lower() in sizes:  # torch looks for names without regard to their case
                raise ValueError(f"it has more than one {record.filename!r}")
            sizes[record.filename.lower()] = record.file_size
        if archive.comment or min(record.header_offset for record in archive.infolist()):
            raise ValueError("it has other bytes before or behind the archive")
        if (damaged := archive.testzip()) is not None:  # after the sizes: a compressed record may be endless
            raise ValueError(f"the checksum of {damaged!r} is wrong")
        root = archive.namelist()[0].partition("/")[0]
        with archive.open(f"{root}/data.pkl") as pickled:
            records = PickledReader(pickled)
            records.load()
        for _, kind, key, _, count in records.storages:
            size = sizes[f"{root}/data/{key}".lower()]
            if count * _WIDTHS[kind.__name__.removesuffix("Storage")] != size:
                raise ValueError(f"the storage {key!r} does not have the record size of {size} bytes")


def _check_storages(path: Path) -> None:
    """Raise ``ValueError`` if storages are missing in a file without zip: torch.load leaves their memory unset."""
    with path.open("rb") as file:
        parts = [PickledReader(file) for _ in range(5)]
        *_, keys = [part.load() for part in parts]
    if missing := {key for _, _, key, *_ in parts[3].storages} - {*keys}:
        raise ValueError(f"the storage {min(missing)!r} is not in it")


def load_item(content: bytes) -> Any:
    """Return the content of an archive in memory, on the CPU."""
    file = io.BytesIO(content)
    _check_archive(file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _load_opened(path: Path) -> Any:
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def _import_torchao() -> None:
    """Let torch.load read torchao's tensors: importing torchao registers them as safe."""
    try:
        importlib.import_module("torchao.optim")
    except ImportError as error:
        raise ValueError("torchao's tensors need torchao: pip install 'compiled-optim[convert]'") from error


def reason(error: Exception) -> str:
    """Return the line of a message that has the reason. torch.load begins with advice to load the file unsafely."""
    text = str(error).strip()
    return (text.partition("WeightsUnpickler error: ")[2] or text).partition("\n")[0] or type(error).__name__


def writers(content: Any, path: Path) -> Writers:
    """Return the function that writes ``content``, by path."""
    return {path: partial(_save, content)}


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's writer hides the system's error
            raise OSError("it could not be written completely") from error
