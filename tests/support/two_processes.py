"""Checks that run on two processes with gloo, or more, each of them on all, one after the other."""

from __future__ import annotations

import faulthandler
import gc
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

LIMIT = 250
"""Seconds after which a process that is still in the same check says where it is and ends."""


def run(
    checks: Mapping[str, Callable[[Path], None]], request: pytest.FixtureRequest, directory: Path, processes: int = 2
) -> None:
    """Call those of ``checks``, functions of a module, that selected tests of the module have as their argument ``check``.

    They are called with ``directory``, where :func:`passed` finds what failed. A check that fails on one process ends all of
    them, since the others may wait for that one; new processes go on with the next check.
    """
    own = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    selected = {callspec.params.get("check") for callspec in own if callspec}
    left = {name: check for name, check in checks.items() if name in selected}
    while left:
        try:
            torch.multiprocessing.spawn(_worker, (left, directory, processes), nprocs=processes)
            break
        except (ProcessExitedException, ProcessRaisedException) as error:
            failed = next((name for name in left if _errors(name, directory, processes)), None)
            if failed is None:
                raise
            for path in _outcomes(failed, directory, processes):
                if not path.exists() or not path.read_text():
                    path.write_text(str(error))
            names = [*left]
            left = {name: left[name] for name in names[names.index(failed) + 1 :]}


def passed(check: str, directory: Path, processes: int = 2) -> None:
    """Fail with what is known of a check that failed on a process."""
    assert not (errors := _errors(check, directory, processes)), "\n".join(errors)


def _outcomes(check: str, directory: Path, processes: int) -> list[Path]:
    return [directory / f"{check}.{rank}" for rank in range(processes)]


def _errors(check: str, directory: Path, processes: int) -> list[str]:
    texts = [path.read_text() if path.exists() else "" for path in _outcomes(check, directory, processes)]
    return [text for text in texts if text != "passed"]


def _worker(rank: int, checks: Mapping[str, Callable[[Path], None]], directory: Path, processes: int) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/rendezvous-{len(checks)}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    for name, function in checks.items():
        with _outcomes(name, directory, processes)[rank].open("w") as outcome:
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=outcome)
            try:
                function(directory)
            except Exception:
                traceback.print_exc(file=outcome)
                raise
            outcome.write("passed")
            outcome.flush()
            dist.barrier()  # nobody begins the next check, in which all may be ended, before all have passed this one
            faulthandler.cancel_dump_traceback_later()
    gc.collect()  # a DistributedDataParallel that outlives the group may wait for its threads for ever
    dist.destroy_process_group()
