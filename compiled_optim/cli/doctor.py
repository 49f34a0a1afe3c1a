"""Check which parts work here, which fall back to slower ones, and what to install.

It takes a step with small tensors on each device, and compiles or loads the same kernels as your training. The exit status
is 1 if anything falls back.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import compiled_optim as co
from compiled_optim.cli.output import show, size, table

_OK, _FALLBACK, _ABSENT = "ok", "falls back", "not here"
_STYLES = {_OK: "green", _FALLBACK: "bold yellow", _ABSENT: "dim"}
_EXTRAS = {"rich": "tables", "safetensors": "convert"}
_OLDEST = (2, 11)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments."""


def run(options: argparse.Namespace) -> int:
    """Check everything. Return 1 if something falls back."""
    records = [dict(zip(("what", "status", "detail", "advice"), row, strict=True)) for row in _checks()]
    falls = [r for r in records if r["status"] == _FALLBACK]
    show(options, records, lambda: _drawn(records, falls))
    return 1 if falls else 0


def _checks() -> Iterator[tuple[str, str, str, str]]:
    """Yield the name of each check, its status, details and advice."""
    yield "compiled_optim", _OK, f"{co.__version__}, Python {platform.python_version()}", ""
    version = tuple(map(int, torch.__version__.partition("+")[0].split(".")[:2]))
    is_new = version >= _OLDEST
    yield "torch", _OK if is_new else _FALLBACK, torch.__version__, "" if is_new else "install torch 2.11 or newer"
    yield _compiler()
    yield _triton()
    has_gpu = torch.cuda.is_available()
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if has_gpu else ""
    yield "GPU", _OK if has_gpu else _ABSENT, gpus or "no CUDA device", ""
    cache = ""
    for device in ("cpu", *(["cuda"] if has_gpu else [])):
        for name in ("adamw", "muon"):  # one works element by element, the other on matrices
            report, messages = _step(name, device)
            cache = report.cache
            reasons = [*(finding.said for finding in report.findings), *messages]
            how = f"{report.lowering}, first step {report.seconds:.1f} s of compiling and loading"
            advice = "" if not reasons else "see the reason"
            yield f"{name} on {device}", _FALLBACK if reasons else _OK, "; ".join(reasons) or how, advice
    yield _directory("compiled C++", Path(cache), "XDG_CACHE_HOME")
    home = os.environ.get("TRITON_HOME") or Path.home()
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    yield _directory("Triton's cache", directory, "TRITON_CACHE_DIR")
    for name, extra in _EXTRAS.items():
        release = _version(name)
        yield name, _OK if release else _ABSENT, release or "", "" if release else f"pip install 'compiled-optim[{extra}]'"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _compiler() -> tuple[str, str, str, str]:
    requested = os.environ.get("CXX", "")
    names = [requested.split()[0]] if requested.split() else []
    compiler = next(filter(None, map(shutil.which, (*names, "g++", "clang++", "c++"))), None)
    if compiler is None:
        advice = "install g++ or clang++, or name one in CXX"
        return "C++ compiler", _FALLBACK, "none: steps on CPUs run uncompiled", advice
    try:
        printed = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace").stdout
    except OSError as error:
        return "C++ compiler", _FALLBACK, f"{compiler} does not run: {error}", "name another one in CXX"
    if names and Path(compiler).name != Path(names[0]).name:
        return "C++ compiler", _FALLBACK, f"CXX is {requested!r}, which was not found; {compiler} is used", "correct CXX"
    return "C++ compiler", _OK, printed.partition("\n")[0] or compiler, ""


def _triton() -> tuple[str, str, str, str]:
    if version := _version("triton"):
        return "Triton", _OK, version, ""
    is_needed = torch.cuda.is_available()
    return "Triton", _FALLBACK if is_needed else _ABSENT, "steps on GPUs use torch.compile's kernels", "pip install triton"


def _step(name: str, device: str) -> tuple[co.CompileReport, list[str]]:
    """Return the report of a step with small tensors, and its warnings."""
    param = torch.nn.Parameter(torch.zeros(64, 64, device=device))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = co.create(name, [param])
        param.grad = torch.ones_like(param)
        optimizer.step()
    messages = [str(w.message).removeprefix("compiled_optim: ") for w in caught if "compiled_optim" in str(w.message)]
    report = co.compile_report(optimizer)
    return report, [message for message in messages if not any(each.evidence in message for each in report.findings)]


def _directory(name: str, path: Path, variable: str) -> tuple[str, str, str, str]:
    """Check a cache: its path, its size, and whether it is writable."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    can_write = os.access(existing, os.W_OK | os.X_OK)
    bytes_used = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
    detail = f"{path}, {size(bytes_used, 'B')}" if bytes_used else f"{path}, empty"
    return name, _OK if can_write else _FALLBACK, detail, "" if can_write else f"make it writable, or set {variable}"


def _drawn(records: list[dict[str, str]], falls: list[dict[str, str]]) -> Iterator[Any]:
    from rich.text import Text

    rows = [(r["what"], Text(r["status"], style=_STYLES[r["status"]]), r["detail"], r["advice"]) for r in records]
    yield table({"": "bold", " ": ".", "  ": "", "what to do": "cyan"}, rows)
    yield Text(f"{len(falls)} fall back", style="yellow") if falls else Text("nothing falls back", style="green")
