"""Memory and time of loading a checkpoint over a live state: ``python -m perf.load``. Linux only.

Each measurement is a new process, which prints it as JSON: ``python -m perf.load --one COMPETITOR DTYPE MEBIBYTES``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import compiled_optim as co
from perf import results
from perf.results import Row, percentiles

OURS = "compiled_optim"
OPTIMIZERS = {OURS: co.AdamW, "torch": torch.optim.AdamW}
DTYPES = ("float32", "bfloat16")
TENSORS = 8
UNITS = {"peak growth": "MiB", "growth over largest tensor": "x", "load": "s"}


def measure_load(megabytes: int, repeats: int) -> list[Row]:
    """Measure growth of the peak memory, and seconds, of loading into an AdamW whose state takes ``megabytes`` MiB.

    The checkpoint is in memory before, in float32 like the state or in bfloat16.
    """
    samples: dict[tuple[str, str, str], list[float]] = {}
    for _, name, dtype in itertools.product(range(repeats), OPTIMIZERS, DTYPES):
        for metric, value in in_new_process(name, dtype, megabytes).items():
            samples.setdefault((name, dtype, metric), []).append(value)
    return [
        Row(
            "load",
            f"{megabytes} MiB from {dtype}",
            "adamw",
            name,
            metric,
            UNITS[metric],
            *percentiles(values),
            _ratio(samples, name, dtype, metric),
            repeats,
        )
        for (name, dtype, metric), values in samples.items()
    ]


def _ratio(samples: Mapping[tuple[str, str, str], Sequence[float]], name: str, dtype: str, metric: str) -> float | None:
    theirs = percentiles(samples[name, dtype, metric])[1]
    return percentiles(samples[OURS, dtype, metric])[1] / theirs if theirs and metric == "load" else None


def in_new_process(name: str, dtype: str, megabytes: int) -> dict[str, float]:
    """Make one measurement in a new process."""
    command = [sys.executable, "-m", "perf.load", "--one", name, dtype, str(megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure_one(name: str, dtype: str, megabytes: int) -> dict[str, float]:
    """Make one measurement in this process."""
    size = megabytes * 2**20 // (2 * TENSORS)  # bytes of each of the two buffers of each tensor
    params = {f"layer{i}": nn.Parameter(torch.zeros(size // 4)) for i in range(TENSORS)}
    optimizer = OPTIMIZERS[name](params.items())
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # every page of the state is in memory now, as it is in a run
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    for index, entries in saved["state"].items():
        saved["state"][index] = {
            k: v.to(getattr(torch, dtype), copy=True) if v.dim() else v.clone() for k, v in entries.items()
        }
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now
    before = _status("VmRSS")
    started = time.perf_counter()
    optimizer.load_state_dict(saved)
    seconds = time.perf_counter() - started
    growth = _status("VmHWM") - before
    return {"peak growth": growth / 2**20, "growth over largest tensor": growth / size, "load": seconds}


def _status(field: str) -> int:
    """Return a memory figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Measure, print and append to the table."""
    parser = argparse.ArgumentParser(prog="python -m perf.load", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="the directory of the tables")
    parser.add_argument("--no-save", action="store_true", help="do not append to the table")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_one(args.one[0], args.one[1], int(args.one[2]))))
        return
    rows = measure_load(args.megabytes, args.rounds)
    results.show(rows, f"load_state_dict over a live state of {args.megabytes} MiB, {TENSORS} tensors")
    if not args.no_save:
        results.append(rows, torch.device("cpu"), args.results)


if __name__ == "__main__":
    main()
