"""The append-only tables of measurements under ``perf/results``."""

from __future__ import annotations

import datetime
import functools
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd
import torch

from perf.competitors import OURS, PEERS

RESULTS = Path(__file__).parent / "results"
NOT_RUN = "did not run: "
"""The beginning of the metric of a row without numbers."""
OUT_OF_TIME = "out of time"
"""The reason in the row of a competitor that ran out of time, which is no failure."""


@dataclass(frozen=True)
class Row:
    """One measured quantity.

    Attributes:
        benchmark: the command that measured it.
        workload: a name from ``perf.workloads``.
        optimizer: lower-case name.
        competitor: the way to make the optimizer.
        metric: the measured quantity.
        unit: of ``p20``, ``p50`` and ``p80``.
        p20, p50, p80: percentiles over the ``n`` samples.
        ratio: p50 of this package's default divided by this ``p50``; empty if that means nothing.
        n: number of samples.
    """

    benchmark: str
    workload: str
    optimizer: str
    competitor: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    ratio: float | None
    n: int


COLUMNS = [*(f.name for f in fields(Row)), "torch", "python", "device", "threads", "commit", "date"]


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile."""
    p20, p50, p80 = pd.Series(samples, dtype="float64").quantile([0.2, 0.5, 0.8])
    return p20, p50, p80


def left_out(benchmark: str, workload: str, optimizer: str, reasons: Mapping[str, str]) -> list[Row]:
    """Return rows without numbers for competitors that did not run, with the reasons."""
    none = math.nan
    return [
        Row(benchmark, workload, optimizer, name, f"{NOT_RUN}{why}", "", none, none, none, None, 0)
        for name, why in reasons.items()
    ]


def says_failure(row: Row) -> bool:
    """Return whether a part of this package failed to run."""
    return row.competitor.startswith(OURS) and row.metric.startswith(NOT_RUN) and not row.metric.endswith(OUT_OF_TIME)


def frame(rows: Sequence[Row], device: torch.device) -> pd.DataFrame:
    """Return a table of ``rows`` with the columns of device, threads, versions and date."""
    table = pd.DataFrame([asdict(row) for row in rows])
    table["device"] = device_name(device)
    table["threads"] = torch.get_num_threads()
    table = stamp(table)
    return table[COLUMNS]


def stamp(table: pd.DataFrame) -> pd.DataFrame:
    """Return ``table`` with columns of versions and date."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return table.assign(torch=torch.__version__, python=platform.python_version(), commit=_commit(), date=now)


def append(rows: Sequence[Row], device: torch.device, directory: Path = RESULTS) -> list[Path]:
    """Append ``rows`` to ``<benchmark>.csv`` in ``directory`` and return the files written.

    Raises:
        ValueError: a file there has other columns.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for benchmark, part in frame(rows, device).groupby("benchmark", sort=False):
        path = directory / f"{benchmark}.csv"
        append_table(part, path, float_format="%.6g")
        written.append(path)
    return written


def append_table(table: pd.DataFrame, path: Path, float_format: str | None = None) -> None:
    """Append ``table`` to a file.

    Raises:
        ValueError: the file has other columns.
    """
    if path.exists() and (existing := list(pd.read_csv(path, nrows=0).columns)) != list(table.columns):
        raise ValueError(f"{path} has the columns {existing}, not {list(table.columns)}")
    table.to_csv(path, mode="a", header=not path.exists(), index=False, float_format=float_format)


def read(path: Path) -> pd.DataFrame:
    """Read a table. Revisions are text, also those of digits or like 2e01545."""
    return pd.read_csv(path, dtype={"commit": str})


def show(rows: Sequence[Row], title: str) -> None:
    """Print ``rows`` as a table."""
    lines = [
        {
            **{name: getattr(r, name) for name in ("workload", "optimizer", "competitor", "metric")},
            **{name: f"{getattr(r, name):.4g}" if r.n else "" for name in ("p20", "p50", "p80")},
            "unit": r.unit,
            "ours / it": "" if r.ratio is None else f"{r.ratio:.3f}{_in_words(r)}",
            "n": r.n,
        }
        for r in rows
    ]
    show_table(pd.DataFrame(lines), title)
    for name in dict.fromkeys(r.competitor for r in rows):
        if name in PEERS and PEERS[name].note:
            print(f"{name}: {PEERS[name].note}")


def _in_words(row: Row) -> str:
    """Describe a ratio of times."""
    if not row.ratio or row.unit not in ("s", "ms", "us") or 0.95 < row.ratio < 1.05:
        return ""
    return f", ours is {max(row.ratio, 1 / row.ratio):.1f}x {'faster' if row.ratio < 1 else 'slower'}"


def show_table(table: pd.DataFrame, title: str) -> None:
    """Print every row and column of ``table``."""
    text = table.astype(object).fillna("").to_string(index=False, max_colwidth=None, float_format="{:.2f}".format)
    print(f"{title}\n{text}\n", flush=True)


def device_name(device: torch.device) -> str:
    """Return the model of the GPU, or of the CPU with the vector instructions that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.processor() or platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"


@functools.cache  # an interrupt would end git, too
def _commit() -> str:
    """Return the short hash of the checkout, with ``-dirty`` if any file but the results differs from it."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=RESULTS.parent.parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--", ".", ":!perf/results")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
