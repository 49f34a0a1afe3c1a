"""Compiled code on disk, where only this user can write. A file is checked before it is loaded."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compiled_optim.torch_internals import default_cache_directory

T = TypeVar("T")


@dataclass
class Uses:
    """How many files this process took from the cache as they were, and how many it had to make."""

    taken: int = 0
    made: int = 0


uses = Uses()
_refused: set[Path] = set()  # directories that could not be trusted or used in this process


def cache_directory() -> Path:
    """Where compiled code is kept: the user's cache, or a directory of this process if that cannot be used."""
    wanted = _wanted()
    return _private_directory() if wanted in _refused else wanted


def load_kept(name: str, make: Callable[[], bytes], load: Callable[[Path], T]) -> T:
    """What ``load`` returns for the file ``name`` of the cache; ``load`` must ignore the checksum at the file's end.

    Where the file is missing, damaged, not the user's own, or cannot be loaded, it is written anew with what ``make``
    returns, which is called at most once. The name must identify the content.

    Raises:
        OSError: the file can neither be kept in the user's cache nor in a directory of this process, or cannot be loaded.
    """
    directory = cache_directory()
    once = functools.cache(make)
    try:
        return _load(directory, name, once, load)
    except OSError as error:
        loaded = _load(_private_directory(), name, once, load)
        _refuse(directory, error)
        return loaded


def _wanted() -> Path:
    placed = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if placed and os.path.abspath(placed) != default_cache_directory():
        return Path(placed).absolute() / "compiled_optim"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "compiled_optim"


@functools.cache
def _private_directory() -> Path:
    path = tempfile.mkdtemp(prefix="compiled_optim-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _refuse(directory: Path, error: OSError) -> None:
    if directory in _refused:
        return
    _refused.add(directory)
    warnings.warn(
        f"compiled_optim: compiled code is not kept in {directory}: {error.strerror or error}; every process compiles it "
        "again. Make it a directory of yours that nobody else can write to, or name another place in XDG_CACHE_HOME or "
        "TORCHINDUCTOR_CACHE_DIR",
        RuntimeWarning,
        stacklevel=2,
    )


def _load(directory: Path, name: str, make: Callable[[], bytes], load: Callable[[Path], T]) -> T:
    with _opened(directory) as opened:
        path = opened / name
        if _is_sound(path):
            with contextlib.suppress(OSError):
                loaded = load(path)
                uses.taken += 1
                return loaded
        uses.made += 1
        _write(path, make())
        return load(path)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[Path]:
    """``directory``, made if it is missing, under a name that stays its own whoever renames directories above it.

    They cannot put one of their own in its place: the one that was opened must be this user's.
    """
    if not directory.is_absolute():
        raise OSError("there is no home directory, or XDG_CACHE_HOME is a relative path")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if reason := _distrust(os.fstat(descriptor)):
            raise OSError(reason)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _distrust(status: os.stat_result) -> str:
    """Why somebody else may have written the file with this ``status``; empty if only this user can have."""
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    return "other users can write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def _is_sound(path: Path) -> bool:
    """Whether ``path`` is this user's file, as it was written: a damaged library kills the process that loads it."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or _distrust(status):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == _seal(path, content[:-size])


def _write(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` and its checksum in one move: other processes may be reading or writing it."""
    descriptor, scratch = tempfile.mkstemp(dir=path.parent)  # a file that no other user can read or write
    try:
        with open(descriptor, "wb") as file:
            file.write(content + _seal(path, content))
            file.flush()
            os.fsync(descriptor)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _seal(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()
