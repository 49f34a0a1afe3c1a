"""Files and folders that appear complete or not at all, and tensors that are mapped from files."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Keep: TypeAlias = Callable[[Tensor], Tensor]
"""A function that is applied to each tensor that a conversion makes: see :func:`keeper`."""

Writers: TypeAlias = Mapping[Path, Callable[[Path], object]]
"""The files, or the folder, of a conversion, each with the function that writes it."""

_LEAST = 1 << 16  # bytes; smaller tensors stay in memory


def in_memory(tensor: Tensor) -> Tensor:
    """Return ``tensor``: the function of a conversion that keeps all in memory."""
    return tensor


def keeper(directory: Path | None) -> Keep:
    """Return a function that moves large tensors to files in ``directory`` and maps them. If None, they stay in memory."""
    if directory is None:
        return in_memory

    def keep(tensor: Tensor) -> Tensor:
        if tensor.nbytes < _LEAST:
            return tensor
        handle, path = tempfile.mkstemp(dir=directory)
        with open(handle, "wb") as file:
            file.write(as_bytes(tensor))
        return torch.from_file(path, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)

    return keep


def as_bytes(tensor: Tensor) -> Any:
    """Return the memory of a dense tensor as a buffer, copied if it is not contiguous."""
    return tensor.contiguous().resolve_conj().resolve_neg().flatten().view(torch.uint8).numpy()


def check_regular(path: Path) -> Path:
    """Return ``path``. Raise ``ValueError`` if it exists and is no file: a device or a pipe may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path


def check_replaceable(path: Path, reader: Callable[[Path], object]) -> None:
    """Raise ``ValueError`` unless ``path`` is free, or a file that ``reader`` can read and its owner may write."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link; name its target")
        if not path.is_file():
            raise ValueError("it is not a regular file")
        if not path.stat().st_mode & stat.S_IWUSR:
            raise ValueError("it is write-protected")
        reader(path.resolve())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is in the way, and is not replaced ({error}); remove or rename it") from error


def put(files: Writers) -> None:
    """Write new files, each by its function, and replace the old ones, all of them or none.

    They share a directory. All but the last are small: if the last cannot be replaced, copies of the old ones are put back.
    A new folder is written likewise.
    """
    *others, last = files
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=last.parent) as directory:
        new = {path: Path(directory, path.name) for path in files}
        old = {path: Path(f"{new[path]}.old") for path in others if os.path.lexists(path)}
        for path, write_to in files.items():
            _write_durably(new[path], write_to, like=path)
        for path, copy in old.items():
            shutil.copy2(path, copy, follow_symlinks=False)
        try:
            for path in files:
                os.replace(new[path], path)
        except BaseException:
            if os.path.lexists(new[last]):  # an interrupt may come after the last was replaced: then all are new
                for path in others:
                    path.unlink(missing_ok=True)
                for path, copy in old.items():
                    os.replace(copy, path)
            raise


def _write_durably(path: Path, write_to: Callable[[Path], object], like: Path) -> None:
    """Write a file or folder, and wait until it is on the disk. A file gets the permissions of ``like`` if that exists."""
    write_to(path)
    if path.is_dir():  # its writer flushes it
        return
    blank = path.with_name(f"{path.name}.blank")
    blank.touch()
    path.chmod(stat.S_IMODE((like if like.exists() else blank).stat().st_mode))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
