"""The project's virtual environments: made on first use, pinned by ``constraints.txt``."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import progress

ROOT = Path(__file__).resolve().parent.parent

# Installed without requirements. Other packages bring them, except torchvision: the index has none for torch on CPUs.
ALONE = {"full": ["timm"]}

# The tests of compiled code need these with another torch than the constraints'. Triton 3.6's interpreter needs this numpy.
FEW = ("expecttest", "hypothesis", "pandas", "pytest", "pytest-xdist", "numpy<2.4")


class Release(NamedTuple):
    """A torch to test with, the triton that goes with it (empty: torch chooses it), and a Python."""

    torch: str
    triton: str
    python: str


RELEASES = (
    Release("2.11.0", "3.6.0", "3.12"),
    Release("2.12.1", "3.7.1", "3.10"),
    Release("2.13.0", "3.7.1", "3.11"),
    Release("2.14.1", "3.8.0", "3.11"),
    Release("2.15.0", "3.9.0", "3.13"),
)
"""The oldest one is the oldest that the package supports. Together they have each Python."""


def release(torch: str) -> Release:
    """Return the triton and Python for a version of ``torch``; of its series in the table, or else the newest."""
    series = [r for r in RELEASES if r.torch.rpartition(".")[0] == torch.rpartition(".")[0]]
    return (series or [RELEASES[-1]._replace(triton="")])[0]._replace(torch=torch)


def interpreters(passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the path of each version of Python, such as "3.12": of ``passed`` ones first, then this one, PATH's, pyenv's.

    Raises:
        ValueError: a ``passed`` path is no Python.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = sorted(
        pyenv.glob("3.*/bin/python"), key=lambda path: [*map(int, re.findall(r"\d+", path.parts[-3]))], reverse=True
    )
    on_path = filter(None, (shutil.which(f"python3.{minor}") for minor in range(10, 30)))
    paths: dict[str, str] = {}
    for path in (*passed, sys.executable, *on_path, *of_pyenv):
        ask = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        try:  # pyenv's shims on PATH may name a version that is not installed
            version, binary = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip().split(" ", 1)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            if path in passed:
                raise ValueError(f"{path} is no Python: {error}") from error
            continue
        paths.setdefault(version, binary)
    return paths


def python_with(extra: str, torch: str = "", interpreter: str | None = None) -> Path:
    """Return the interpreter of a virtual environment that holds the package, editable, with one of its extras.

    With a version of ``torch`` it has that one, the triton that goes with it, and :data:`FEW` instead of the extra. It is
    made with the Python that :func:`release` names, if that exists. The torch of the constraints has no other environment.

    The environment is made, or brought up to date, only if ``pyproject.toml`` or the constraints changed since. Processes
    that are started from here on keep their bytecode, even with ``PYTHONDONTWRITEBYTECODE``: nothing was compiled at the
    installation, and torch alone takes seconds to compile.
    """
    constraints = ROOT / "tools" / "constraints.txt"
    packages, alone, pins = [f"{ROOT}[{extra}]"], ALONE.get(extra, []), constraints.read_text()
    if f"\ntorch=={torch}\n" in pins:
        torch, interpreter = "", None
    directory = ROOT / (f".venv-{extra}-{torch}" if torch else f".venv-{extra}")
    python = directory / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp = directory / "installed"
    is_other, maker = False, interpreter or sys.executable
    if torch:
        beside = release(torch)
        maker = interpreter or interpreters().get(beside.python, sys.executable)
        packages, alone = [str(ROOT), *FEW], []
        pins = re.sub(r"^(torch|triton|numpy)==.*\n", "", pins, flags=re.MULTILINE)
        pins += f"torch=={torch}\n" + f"triton=={beside.triton}\n" * bool(beside.triton)
        is_other = python.exists() and sys.platform != "win32" and not python.samefile(maker)
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr((pins, packages[1:])).encode()).hexdigest()
    with _one_at_a_time(directory.parent / f"{directory.name}.lock"):
        if is_other or not stamp.exists() or stamp.read_text() != digest:
            directory.mkdir(exist_ok=True)
            (directory / "constraints.txt").write_text(pins)
            install = [python, "-m", "pip", "install", "--no-compile", "-c", directory / "constraints.txt"]
            clear = ["--clear"] * is_other
            commands = [[maker, "-m", "venv", *clear, directory], [*install, "-e", *packages]]
            commands += [[*install, "--no-deps", package] for package in alone]
            _run_quietly(commands, f"installing into {directory.name} (once)", directory / "install.log")
            stamp.write_text(digest)
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


def _run_quietly(commands: Sequence[Sequence[str | Path]], title: str, log: Path) -> None:
    """Run ``commands`` behind one line of progress. Their output goes to ``log``, which is shown if one fails."""
    started = time.monotonic()
    line = progress.Line(every=math.inf)
    line.show(title)
    with log.open("w") as file:
        for command in commands:
            with subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(1)
                    line.show(f"{title}: {time.monotonic() - started:.0f} s")
            if process.returncode:
                break
    line.clear()
    if process.returncode:
        sys.exit(f"{log.read_text()}{title} failed; its output is in {log}")


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Keep other processes out of the ``with`` block, on systems with such locks."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
