"""C++ text as a shared library, compiled once per machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

from compiled_optim.memory.cache import load_kept

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")


class CompilerError(RuntimeError):
    """A library could not be compiled or loaded on this machine."""


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: ``$CXX``, else the first of g++, clang++ and c++ on the path; empty without one."""
    wanted = os.environ.get("CXX", "")
    for name in (wanted, "g++", "clang++", "c++"):
        if command := _command(name):
            if wanted not in ("", name):
                warnings.warn(
                    f"compiled_optim: CXX is {wanted!r}, which was not found; {name} compiles instead",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return command
    return ()


def library(text: str, flags: Sequence[str] = (), kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """The shared library that C++ ``text`` compiles to with further ``flags``, loaded as ``kind`` and kept on disk.

    A ``CompilerError`` has the compiler's or the system's message.
    """
    command = compiler()
    origin = [text, *command, *_FLAGS, *flags, _version(command), processor()]
    key = hashlib.sha256("\0".join(origin).encode(errors="surrogateescape")).hexdigest()[:32]
    try:
        return load_kept(f"{key}.so", lambda: _compiled(command, text, flags), lambda path: kind(str(path)))
    except OSError as error:
        raise CompilerError(f"a compiled library could not be loaded: {error}") from error


def _command(text: str) -> tuple[str, ...]:
    """The command in ``text``, a program and perhaps arguments; empty if there is no such program."""
    if found := shutil.which(text):
        return (found,)
    with contextlib.suppress(ValueError):
        program, *arguments = shlex.split(text)
        if found := shutil.which(program):
            return (found, *arguments)
    return ()


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
    message = textwrap.shorten(done.stderr, 500, placeholder=" ...")
    raise CompilerError(f"{shlex.join(command)} made no library (exit status {done.returncode}): {message}")


@functools.cache
def _version(command: Sequence[str]) -> str:
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return ""  # compiling says why


@functools.cache
def processor() -> str:
    """A text that differs between two kinds of processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
