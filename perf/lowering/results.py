"""Reports as rows: in tables for a terminal, and in the append-only ``perf/results/lowering.csv``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from perf.lowering.report import Report
from perf.results import RESULTS, stamp

PATH = RESULTS / "lowering.csv"
LATER = ["shapes", "partitions", "copied", "cuda_graph", "repeats"]  # columns that old rows got
SHOWN = {
    "graphs": "graphs",
    "launches": "launches",
    "operators": "operators",
    "moved_operators": "with moved gradients",
    "cpp": "C++",
    "waits": "waits",
    "bytes_per_param": "bytes/param",
    "registers": "registers",
    "seconds": "first step CPU s",
    "partitions": "CUDA graphs",
    "copied": "copied into",
    "cuda_graph": "hold",
}


def rows(reports: Sequence[Report], repeats: int = 1) -> list[dict[str, Any]]:
    """One row per report, its kernels' figures taken together: most registers, all spills, narrowest accesses.

    ``repeats`` says of how many times ``seconds`` are the median.
    """
    return [
        {
            "optimizer": r.workload.optimizer,
            "tensors": r.workload.tensors,
            "groups": r.workload.groups,
            "dtype": str(r.workload.dtype)[6:],
            "options": " ".join(f"{name}={value}" for name, value in r.workload.options),
            "arch": r.arch,
            "lowering": r.lowering,
            "graphs": r.graphs,
            "launches": r.launches,
            "operators": r.operators,
            "cpp": r.cpp,
            "waits": r.waits,
            "uploads": r.uploads,
            "moved_operators": r.moved_operators,
            "bytes_per_param": None if r.bytes_per_param is None else round(r.bytes_per_param, 3),
            "registers": max((k.resources.registers for k in r.kernels), default=None),
            "spills": sum(k.resources.spills for k in r.kernels),
            "shared": max((k.resources.shared for k in r.kernels), default=None),
            "accesses": " ".join(sorted({w for k in r.kernels for w in (*k.loads, *k.stores)})),
            "seconds": round(r.seconds, 2),
            "shapes": r.workload.shapes,
            "partitions": _text(r.partitions),
            "copied": _text(r.copied),
            "cuda_graph": r.cuda_graph,
            "repeats": repeats,
        }
        for r in reports
    ]


def append(reports: Sequence[Report], repeats: int = 1, path: Path = PATH) -> None:
    """Append ``reports`` to the table, with the versions that made them.

    Raises:
        ValueError: the file has other columns.
    """
    import triton

    table = stamp(pd.DataFrame(rows(reports, repeats)))
    table["triton"] = triton.__version__
    table = table[[name for name in table.columns if name not in LATER] + LATER]
    if path.exists() and (there := list(pd.read_csv(path, nrows=0).columns)) != list(table.columns):
        raise ValueError(f"{path} has the columns {there}, not {list(table.columns)}")
    table.to_csv(path, mode="a", header=not path.exists(), index=False)


def show(reports: Sequence[Report], skipped: Mapping[str, str]) -> None:
    """Print one row per report, one per kernel, and why something is missing."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe has no width of its own; 80 columns would wrap every row
    if reports:
        first, work = reports[0], reports[0].workload
        tensors = f"{work.tensors} tensors ({work.shapes} shapes), {work.groups} groups"
        title = f"{work.optimizer}, {tensors}, {str(work.dtype)[6:]}, {first.arch}"
        steps = Table("lowering", *SHOWN.values(), title=title, title_justify="left")
        for row in rows(reports):
            steps.add_row(row["lowering"], *(_text(row[name]) for name in SHOWN))
        headings = ("launches", "bytes/param", "registers", "spills", "shared", "loads", "stores")
        kernels = Table("lowering", "kernel", *headings, title="Triton kernels", title_justify="left")
        for r in reports:
            for k in r.kernels:
                figures = (k.launches, k.bytes_per_param, k.resources.registers, k.resources.spills, k.resources.shared)
                accesses = (" ".join(widths) + " masked" * k.masked for widths in (k.loads, k.stores))
                kernels.add_row(r.lowering, k.name, *map(_text, figures), *accesses)
        for table in (steps, kernels):
            for column in table.columns[1:]:
                column.justify = "left" if column.header in ("kernel", "hold") else "right"
            console.print(table)
    for name, reason in skipped.items():
        console.print(f"{name}: {reason}", highlight=False)


def _text(value: Any) -> str:
    """A number as text, empty where there is none; pandas would make a fraction of a whole number beside nothing."""
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
