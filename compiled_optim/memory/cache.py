"""C++ text as a shared library, compiled once per machine, and files of compiled code that only this user can write.

A file is checked before it is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from compiled_optim.memory.torch_internals import default_cache_directory

T = TypeVar("T")


uses = Counter[str]()  # the number of files that this process has "taken" from the cache, and "made"
_refused: set[Path] = set()  # directories that could not be trusted or used in this process


def cache_directory() -> Path:
    """Return the directory of compiled code: the user's cache, or one of this process if that cannot be used."""
    inductor_directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor_directory and os.path.abspath(inductor_directory) != default_cache_directory():
        wanted = Path(inductor_directory).absolute() / "compiled_optim"
    else:
        wanted = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "compiled_optim"
    return _private_directory() if wanted in _refused else wanted


def load_kept(name: str, make: Callable[[], bytes], load: Callable[[Path], T]) -> T:
    """Return ``load`` of the file ``name`` of the cache; ``load`` must ignore the checksum at the file's end.

    If the file is missing, damaged, not the user's own, or cannot be loaded, it is written anew with the result of ``make``,
    which is called at most once. The name must identify the content.

    Raises:
        OSError: the file can be written neither to the user's cache nor to a directory of this process, or not loaded.
    """
    directory = cache_directory()
    once = functools.cache(make)
    try:
        return _load(directory, name, once, load)
    except OSError as error:
        loaded = _load(_private_directory(), name, once, load)
        if directory not in _refused:
            _refused.add(directory)
            warnings.warn(
                f"compiled_optim: compiled code is not kept in {directory}: {error.strerror or error}; every process "
                "compiles it again. Make it a directory of yours that nobody else can write to, or name another one in "
                "XDG_CACHE_HOME or TORCHINDUCTOR_CACHE_DIR",
                RuntimeWarning,
                stacklevel=2,
            )
        return loaded


@functools.cache
def _private_directory() -> Path:
    path = tempfile.mkdtemp(prefix="compiled_optim-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _load(directory: Path, name: str, make: Callable[[], bytes], load: Callable[[Path], T]) -> T:
    with _opened(directory) as opened:
        path = opened / name
        if _is_sound(path):
            with contextlib.suppress(OSError):
                loaded = load(path)
                uses["taken"] += 1
                return loaded
        uses["made"] += 1
        _write(path, make())
        return load(path)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[Path]:
    """Yield ``directory``, created if missing, by a path that stays valid if directories above it are renamed.

    No other user can replace it: the opened directory must belong to this user.
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
    """Return why another user may have written the file with this ``status``; empty if only this user can have."""
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    return "other users can write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def _is_sound(path: Path) -> bool:
    """Return whether ``path`` is this user's file, unchanged: a damaged library kills the process that loads it."""
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


_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")


class CompilerError(RuntimeError):
    """Raised where a library cannot be compiled or loaded on this machine. ``advice`` is for the user."""

    def __init__(self, message: str, advice: str = "name another compiler in the environment variable CXX") -> None:
        super().__init__(message)
        self.advice = advice


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: ``$CXX``, or the first of g++, clang++ and c++ on the path; empty if none."""
    wanted = os.environ.get("CXX", "")
    with contextlib.suppress(ValueError):  # a program with spaces in its name, or with arguments
        program, *arguments = (wanted,) if shutil.which(wanted) else shlex.split(wanted)
        if path := shutil.which(program):
            return (path, *arguments)
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            if wanted:
                message = f"compiled_optim: CXX is {wanted!r}, which was not found; {name} compiles instead"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return (path,)
    return ()


def library(text: str, flags: Sequence[str] = (), kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Compile C++ ``text`` with further ``flags`` to a shared library, kept on disk, and load it as ``kind``.

    Raise ``CompilerError`` with the compiler's or the system's message.
    """
    command = compiler()
    origin = [text, *command, *_FLAGS, *flags, _version(command), processor()]
    key = hashlib.sha256("\0".join(origin).encode(errors="surrogateescape")).hexdigest()[:32]
    try:
        return load_kept(f"{key}.so", lambda: _compiled(command, text, flags), lambda path: kind(str(path)))
    except OSError as error:
        advice = "name a directory in XDG_CACHE_HOME from which libraries may be loaded, or another compiler in CXX"
        advice = advice if os.path.isdir("/proc/self/fd") else "mount /proc, by whose paths libraries are loaded"
        raise CompilerError(f"a compiled library could not be loaded: {error}", advice) from error


def _compiled(command: Sequence[str], text: str, flags: Sequence[str]) -> bytes:
    try:
        with tempfile.TemporaryDirectory(prefix="compiled_optim-") as scratch:
            source, result = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
            source.write_text(text, encoding="utf-8")
            done = subprocess.run(
                [*command, *_FLAGS, str(source), *flags, "-o", str(result)], capture_output=True, text=True, errors="replace"
            )
            if done.returncode == 0 and result.is_file():
                return result.read_bytes()
    except OSError as error:
        raise CompilerError(f"{shlex.join(command)} could not run: {error}") from error
    message = textwrap.shorten(done.stderr, 500, placeholder=" ...") or "it says nothing"
    raise CompilerError(f"{shlex.join(command)} made no library (exit status {done.returncode}): {message}")


@functools.cache
def _version(command: Sequence[str]) -> str:
    with contextlib.suppress(OSError):  # the compilation raises the reason
        return subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace").stdout
    return ""


@functools.cache
def processor() -> str:
    """Return a text that differs between two kinds of processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
