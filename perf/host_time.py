"""The host's time of a step on a GPU whose driver does nothing, in new processes, beside another checkout's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from perf.competitors import OURS
from perf.results import Row, percentiles
from perf.turns import kept
from perf.workloads import shapes

REPEATS = 3  # processes of each checkout
OTHER = f"{OURS}[other checkout]"
_ROOT = Path(__file__).parent.parent


def measure_host_time(workload: str, optimizer: str, *, rounds: int, against: Path | None) -> Iterator[list[Row]]:
    """Measure microseconds of processor time per step, by the kind of step: see ``perf/no_device.py``.

    The package in the checkout ``against`` is measured too, in processes in turn with this one's; ratios are of medians.
    The tensors are small, and as many as those of the ``workload``.
    """
    checkouts = {OURS: _ROOT, **({} if against is None else {OTHER: against.resolve()})}
    samples: dict[str, dict[str, list[float]]] = {}

    def take() -> None:
        for _ in range(REPEATS):
            for name, checkout in checkouts.items():
                for metric, values in _in_process(checkout, len(shapes(workload)), optimizer, rounds).items():
                    samples.setdefault(metric, {}).setdefault(name, []).extend(values)

    def rows() -> list[Row]:
        made = []
        for metric, by_checkout in samples.items():
            ours = percentiles(by_checkout[OURS])[1]
            for name, values in by_checkout.items():
                p20, p50, p80 = percentiles(values)
                label = f"{metric}, driver that does nothing"
                made.append(Row("overhead", workload, optimizer, name, label, "us", p20, p50, p80, ours / p50, len(values)))
        return made

    yield from kept(take, rows)


def _in_process(checkout: Path, count: int, optimizer: str, rounds: int) -> dict[str, list[float]]:
    command = [sys.executable, str(_ROOT / "perf" / "no_device.py"), str(count), optimizer, str(rounds)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    # Its stderr stays the terminal's, so that errors are seen.
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return seconds
