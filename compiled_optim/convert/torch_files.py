"""Files of ``torch.save``. Nothing that a file holds is ever executed."""

from __future__ import annotations

import errno
import importlib
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled_optim.convert.forms import listed
from compiled_optim.convert.whole import Writers

_IS_FOLDER = 0x10  # of the attributes of a file in a zip archive, as MS-DOS has them


def read(path: Path, key: str | None = None, scratch: Path | None = None) -> Any:
    """What a file holds, on the CPU: in memory, or with a ``scratch`` directory mapped from the file, if it is a zip file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, holds objects other than tensors and plain values, or has no entry ``key``.
    """
    try:
        content = _load(path, is_mapped=scratch is not None)
    except Exception as error:  # whatever a parser meets in arbitrary bytes
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a damaged archive points outside of itself
            raise
        raise ValueError(
            f"{path} is damaged, or holds something else than tensors and plain values, which is not loaded "
            f"({reason(error)})"
        ) from error
    if key is None:
        return content
    if not isinstance(content, Mapping) or key not in content:
        found = listed(content) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(f"{path} has no entry {key!r}; it holds {found}")
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
        return load()
    except Exception as error:
        if "torchao" not in str(error):
            raise
        _know_torchao()
        return load()


def _check_archive(path: Path) -> None:
    """Refuse what torch.load reads: wrong checksums, and records whose memory it leaves unset."""
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {damaged!r} is wrong")
        for record in archive.infolist():
            if record.file_size and (record.external_attr & _IS_FOLDER or not record.compress_size):
                raise ValueError(f"{record.filename!r} is marked as a folder, or as empty")


def _load_opened(path: Path) -> Any:
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def _know_torchao() -> None:
    """Let torch.load read torchao's tensors: torchao's import says that they are safe."""
    try:
        importlib.import_module("torchao.optim")
    except ImportError as error:
        raise ValueError("torchao's tensors need torchao: pip install 'compiled-optim[convert]'") from error


def reason(error: Exception) -> str:
    """The line of a message that says what is wrong. torch.load begins with advice to load the file unsafely."""
    text = str(error).strip()
    return (text.partition("WeightsUnpickler error: ")[2] or text).partition("\n")[0] or type(error).__name__


def writers(content: Any, path: Path) -> Writers:
    """How to write ``content`` to ``path``."""
    return {path: partial(_save, content)}


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's writer hides what the system said
            raise OSError("it could not be written completely") from error
