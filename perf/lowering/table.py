"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from perf.lowering.report import Report


def show(reports: Sequence[Report], skipped: Mapping[str, str]) -> None:
    """Print one row per report, one per kernel, and why something is missing."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe has no width of its own; 80 columns would wrap every row
    if reports:
        first = reports[0]
        work = first.workload
        tensors = f"{work.tensors} tensors ({work.shapes} shapes), {work.groups} groups"
        title = f"{work.optimizer}, {tensors}, {str(work.dtype)[6:]}, {first.arch}"
        console.print(_steps(reports, title))
        console.print(_kernels(reports))
    for name, reason in skipped.items():
        console.print(f"{name}: {reason}", highlight=False)


def _steps(reports: Sequence[Report], title: str) -> Table:
    table = Table("lowering", title=title, title_justify="left")
    for heading in (
        "graphs",
        "launches",
        "operators",
        "with moved gradients",
        "C++",
        "waits",
        "bytes/param",
        "registers",
        "first step CPU s",
        "CUDA graphs",
        "copied into",
    ):
        table.add_column(heading, justify="right")
    table.add_column("hold")
    for r in reports:
        numbers = (r.graphs, r.launches, r.operators, r.moved_operators, r.cpp, r.waits)
        registers = _count(max((k.resources.registers for k in r.kernels), default=None))
        costs = (_decimals(r.bytes_per_param), registers, f"{r.seconds:.1f}")
        table.add_row(r.lowering, *map(str, numbers), *costs, _count(r.partitions), _count(r.copied), r.cuda_graph)
    return table


def _kernels(reports: Sequence[Report]) -> Table:
    table = Table("lowering", "kernel", title="Triton kernels", title_justify="left")
    for heading in ("launches", "bytes/param", "registers", "spills", "shared", "loads", "stores"):
        table.add_column(heading, justify="right")
    for r in reports:
        for k in r.kernels:
            res = k.resources
            mask = " masked" if k.masked else ""
            table.add_row(
                r.lowering,
                k.name,
                str(k.launches),
                _decimals(k.bytes_per_param),
                *map(str, (res.registers, res.spills, res.shared)),
                " ".join(k.loads) + mask,
                " ".join(k.stores) + mask,
            )
    return table


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
