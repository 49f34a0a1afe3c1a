"""Files and folders that appear complete or not at all, and tensors that lie in files."""

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
"""What is done to each tensor that a conversion makes."""

Writers: TypeAlias = Mapping[Path, Callable[[Path], object]]
"""The files, or the folder, that a conversion makes, each with what writes it."""

_LEAST = 1 << 16  # bytes; smaller tensors stay in memory


def keeper(directory: Path | None) -> Keep:
    """A function that moves a large tensor to a file in ``directory``, which the result maps; with None it stays."""
    if directory is None:
        return lambda tensor: tensor

    def keep(tensor: Tensor) -> Tensor:
        if tensor.nbytes < _LEAST:
            return tensor
        handle, path = tempfile.mkstemp(dir=directory)
        with open(handle, "wb") as file:
            file.write(as_bytes(tensor))
        return torch.from_file(path, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)

    return keep


def as_bytes(tensor: Tensor) -> Any:
    """The memory of a dense tensor, as a buffer; of a copy, where the tensor's own is not in its order."""
    return tensor.contiguous().resolve_conj().resolve_neg().flatten().view(torch.uint8).numpy()


def check_regular(path: Path) -> Path:
    """Return ``path``, or raise ``ValueError`` if it is there and no file: a device or a pipe may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")
    return path


def check_replaceable(path: Path, reader: Callable[[Path], object]) -> None:
    """Raise ``ValueError`` unless ``path`` is free, or a file that ``reader`` can read and its owner may write."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link; name the file that it leads to")
        if not path.is_file():
            raise ValueError("it is no regular file")
        if not path.stat().st_mode & stat.S_IWUSR:
            raise ValueError("it is write-protected")
        reader(path.resolve())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is in the way, and not of a kind to be replaced ({error}); remove or rename it") from error


def put(files: Writers) -> None:
    """Write new files, each by its function, and replace the old ones: by all of them, complete, or by none.

    They share a directory. All but the last are small: copies of the old ones are put back if the last cannot follow. A
    folder is written likewise, where there is none.
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
    """Write what is on the disk when this returns, a file with the permissions of ``like`` if that exists."""
    write_to(path)
    if path.is_dir():  # whose writer sees to it
        return
    blank = path.with_name(f"{path.name}.blank")
    blank.touch()
    path.chmod(stat.S_IMODE((like if like.exists() else blank).stat().st_mode))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
