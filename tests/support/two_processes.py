"""Checks that run on two processes with gloo, each of them on both, one after the other."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(checks: Mapping[str, Callable[[Path], None]], directory: Path) -> None:
    """Call each of ``checks``, functions of a module, with ``directory``, where :func:`passed` finds what failed."""
    torch.multiprocessing.spawn(_worker, (dict(checks), directory), nprocs=2)


def passed(check: str, directory: Path) -> None:
    """Fail with the tracebacks of a check that failed on a process."""
    errors = [(directory / f"{check}.{rank}").read_text() for rank in range(2)]
    assert errors == ["", ""], "\n".join(errors)


def _worker(rank: int, checks: Mapping[str, Callable[[Path], None]], directory: Path) -> None:
    torch.set_num_threads(1)
    rendezvous, patience = f"file://{directory}/rendezvous", datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=patience)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, function in checks.items():
        failed = ""
        try:
            function(directory)
        except Exception:
            failed = traceback.format_exc()
        (directory / f"{name}.{rank}").write_text(failed)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, failed)  # the other process would wait for this one in the next check
    dist.destroy_process_group()
