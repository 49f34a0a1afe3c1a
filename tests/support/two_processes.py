"""Checks that run on two processes with gloo, or more, each of them on all, one after the other."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


def run(
    checks: Mapping[str, Callable[[Path], None]], request: pytest.FixtureRequest, directory: Path, processes: int = 2
) -> None:
    """Call those of ``checks``, functions of a module, that selected tests of the module have as their argument ``check``.

    They are called with ``directory``, where :func:`passed` finds what failed.
    """
    own = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    selected = {callspec.params.get("check") for callspec in own if callspec}
    chosen = {name: check for name, check in checks.items() if name in selected}
    torch.multiprocessing.spawn(_worker, (chosen, directory, processes), nprocs=processes)


def passed(check: str, directory: Path, processes: int = 2) -> None:
    """Fail with the tracebacks of a check that failed on a process."""
    errors = [(directory / f"{check}.{rank}").read_text() for rank in range(processes)]
    assert not any(errors), "\n".join(errors)


def _worker(rank: int, checks: Mapping[str, Callable[[Path], None]], directory: Path, processes: int) -> None:
    torch.set_num_threads(1)
    rendezvous, patience = f"file://{directory}/rendezvous", datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes, timeout=patience)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    for name, function in checks.items():
        failed = ""
        try:
            function(directory)
        except Exception:
            failed = traceback.format_exc()
        (directory / f"{name}.{rank}").write_text(failed)
        every: list[Any] = [None] * processes
        dist.all_gather_object(every, failed)  # the others would wait for this one in the next check
    dist.destroy_process_group()
