"""The project's own virtual environment: made on first use, pinned by ``constraints.txt``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Installed without its requirements. Others bring them but for torchvision, which as an index has it fits no torch for CPUs.
ALONE = {"test": ["timm"]}


def python_with(extra: str) -> Path:
    """The interpreter of a virtual environment that holds the package, editable, with one of its extras.

    The environment is made, or brought up to date, only if ``pyproject.toml`` or the constraints changed since. Processes
    that are started from here on keep their bytecode, whatever ``PYTHONDONTWRITEBYTECODE`` says: nothing was compiled at
    the installation, and torch alone takes seconds to compile.
    """
    constraints = ROOT / "tools" / "constraints.txt"
    directory = ROOT / f".venv-{extra}"
    python = directory / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp = directory / "installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + constraints.read_bytes()).hexdigest()
    with _one_at_a_time(directory.with_suffix(".lock")):
        if not stamp.exists() or stamp.read_text() != wanted:
            print(f"installing into {directory.name} (once)", flush=True)
            venv.create(directory, with_pip=True)
            install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints]
            subprocess.run([*install, "-e", f"{ROOT}[{extra}]"], check=True)
            if alone := ALONE.get(extra):
                subprocess.run([*install, "--no-deps", *alone], check=True)
            stamp.write_text(wanted)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return python


def run(extra: str, *arguments: str, modules: str = ".") -> int:
    """Run Python with ``arguments`` in :func:`python_with` an extra, in the repository's root.

    Args:
        extra: the extra.
        *arguments: Python's.
        modules: a folder of the repository to import modules from.

    Returns:
        The exit status.
    """
    python = python_with(extra)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / modules)}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment).returncode


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Keep other processes out of the ``with`` block, where the system has such locks."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
