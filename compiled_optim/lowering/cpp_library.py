"""C++ text as a shared library, compiled once per machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from compiled_optim.lowering.cache import cache_directory

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")


@functools.cache
def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of g++, clang++ and c++ on the path; None if there is none."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for c in candidates if (found := shutil.which(c))), None)


def library(text: str, flags: Sequence[str] = ()) -> Path:
    """The shared library that C++ ``text`` compiles to with further ``flags``, kept on disk.

    Raises:
        RuntimeError: the compiler refused, with its message.
    """
    command = [str(compiler()), *_FLAGS]
    origin = [text, *command, *flags, _compiler_version(), _processor()]
    key = hashlib.sha256("\0".join(origin).encode()).hexdigest()[:32]
    path = cache_directory() / f"{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            written = Path(scratch, "kernel.cpp")
            written.write_text(text)
            wanted = [str(written), *flags, "-o", f"{scratch}/kernel.so"]
            done = subprocess.run([*command, *wanted], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            os.replace(f"{scratch}/kernel.so", path)  # atomic: another process may be doing the same
    return path


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([str(compiler()), "--version"], capture_output=True, text=True).stdout


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
