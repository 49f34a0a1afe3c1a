"""The append-only table of what steps lower to, ``perf/results/lowering.csv``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from perf.lowering.report import Report
from perf.results import RESULTS, stamp

PATH = RESULTS / "lowering.csv"
LATER = ["shapes", "partitions", "copied", "cuda_graph", "repeats"]  # columns that old rows got


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
            "partitions": _whole(r.partitions),
            "copied": _whole(r.copied),
            "cuda_graph": r.cuda_graph,
            "repeats": repeats,
        }
        for r in reports
    ]


def _whole(number: int | None) -> str:
    """A whole number where another row has none, which pandas would make a fraction."""
    return "" if number is None else str(number)


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
