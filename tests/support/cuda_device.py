"""Where the tests marked ``cuda`` run, and how one of them leaves nothing behind for the next."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from new_process import ROOT, environment

DEVICE = "cuda"
"""``"cpu"`` with ``--cuda-on-cpu``."""


def needs_cuda() -> list[pytest.MarkDecorator]:
    """The marks of a test that runs on ``DEVICE``."""
    absent = DEVICE == "cuda" and not torch.cuda.is_available()
    return [pytest.mark.cuda, pytest.mark.skipif(absent, reason="no CUDA device")]


@contextlib.contextmanager
def no_host_waits() -> Iterator[None]:
    """Make it an error to wait for the device."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """``torch.cuda.graph``, which leaves its own stream behind where the end of a capture fails."""
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        yield


def in_new_process(function: Callable[[], object]) -> None:
    """Call a function of a test module where it cannot do harm: a failed capture may be the last one of its process."""
    lines = [
        f"import sys; sys.path.append({str(Path(inspect.getfile(function)).parent)!r})",
        *(["import cuda_on_cpu; cuda_on_cpu.install(); cuda_on_cpu.simulate_graphs()"] if DEVICE == "cpu" else []),
        f"import {function.__module__}; {function.__module__}.{function.__name__}()",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
