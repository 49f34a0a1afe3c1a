"""Look into a checkpoint: names, dtypes, shapes, step counts, ranges of moments, state that is dead or not finite.

CHECKPOINT is a file or folder that the command convert reads. Nothing in it is executed. A parameter is dead if it took
steps and its averages are all 0, as if it never had a gradient. ASGD and SGD without momentum have no averages, so their
dead parameters are not found.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from compiled_optim.cli.checkpoints import checkpoint_argument, numbers, parameters, read
from compiled_optim.cli.output import findings, shape, show, size, table, text

_AVERAGES = {"exp_avg", "exp_avg_sq", "exp_avg_diff", "momentum_buffer", "square_avg", "sum", "prev", "prev_grad"}
_AVERAGES |= {"row_var", "col_var", "variance"}  # of gradients, 0 if they are; other entries begin elsewhere or hold weights
_FORM = re.compile(r"_(int8|scale)$")  # the end of the names of entries that are stored in 8 bits
_SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}
_FEW = 3  # names that a message lists


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a file or folder with an optimizer's state")
    parser.add_argument("--names", default="*", metavar="PATTERN", help="show only parameters that match, such as '*bias'")
    checkpoint_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Show the checkpoint. Return 1 if something in it is probably wrong."""
    checkpoint = read(options.checkpoint, options.key)
    every = [_record(*each) for each in parameters(checkpoint.content)]
    records = [r for r in every if fnmatchcase(r["name"], options.names)]
    if not records:
        raise ValueError(f"{options.checkpoint} has no parameter {options.names!r}")
    shown = {r["name"] for r in records}
    listed = {problem: [name for name in names if name in shown] for problem, names in _wrong(every).items()}
    problems = {problem: names for problem, names in listed.items() if names}
    if checkpoint.lost:
        problems["left out, as it cannot be read"] = [checkpoint.lost]
    stepped = [r for r in records if r["step"] or (r["step"] is None and r["state"])]
    told = {
        "file": str(options.checkpoint),
        "groups": [numbers(group) for group in checkpoint.content["param_groups"]],
        "parameters": records,
        "findings": problems,
        "without_averages": [r["name"] for r in stepped if not _averages(r)],
    }
    show(options, told, lambda: _drawn(told))
    return 1 if problems else 0


def _record(name: str, index: int, entries: Mapping[str, Any]) -> dict[str, Any]:
    state = {str(key): value for key, value in entries.items() if isinstance(value, Tensor) and key != "step"}
    shapes = [] if "col_var" in state else [list(value.shape) for value in state.values()]  # Adafactor's are of rows
    step: Any = entries.get("step")
    is_number = isinstance(step, (int, float)) or (isinstance(step, Tensor) and step.numel() == 1)
    return {
        "name": name,
        "group": index,
        "shape": max(shapes, key=lambda sizes: (len(sizes), sizes), default=None),
        "step": float(step) if is_number else None,
        "bytes": sum(value.nbytes for value in state.values()),
        "state": {key: _range(value) for key, value in state.items()},
    }


def _range(value: Tensor) -> dict[str, Any]:
    """Return dtype and shape of an entry, and the range of its numbers, except of codes and bits."""
    record: dict[str, Any] = {"dtype": text(value.dtype), "shape": list(value.shape)}
    if not (value.is_floating_point() or value.is_complex()) or value.numel() == 0:
        return record
    real = value.abs() if value.is_complex() else value if value.element_size() >= 4 else value.float()
    is_finite = real.isfinite()
    finite = real if bool(is_finite.all()) else real[is_finite]
    if finite.numel():
        record |= {"min": finite.min().item(), "max": finite.max().item(), "mean_abs": finite.abs().mean().item()}
    return record | {"non_finite": real.numel() - finite.numel()}


def _averages(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the averages of gradients in the state of a parameter."""
    return {key: entry for key, entry in record["state"].items() if _FORM.sub("", key) in _AVERAGES}


def _wrong(records: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of parameters that probably have a problem, by problem."""
    averages = [_averages(r) for r in records]
    stepped = [bool(entries) if r["step"] is None else r["step"] > 0 for r, entries in zip(records, averages, strict=True)]
    ranges = [[e for e in entries.values() if "max" in e] for entries in averages]
    judged = [*zip(records, stepped, ranges, strict=True)]
    dead = [r["name"] for r, ran, entries in judged if ran and entries and not any(e["min"] or e["max"] for e in entries)]
    is_counted = any(r["step"] for r in records)
    moving = {r["group"] for r, ran, _ in judged if ran or is_counted}  # a group of SGD may need no state
    still = [r["name"] for r, ran, _ in judged if not ran and r["group"] in moving and (r["step"] == 0 or not r["state"])]
    spoiled = [r["name"] for r in records if any(entry.get("non_finite") for entry in r["state"].values())]
    return {
        "dead: took steps, but their averages are all 0": dead,
        "never stepped, though others were": still,
        "not finite: their state has an infinite or NaN number": spoiled,
    }


def _drawn(told: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    records, groups = told["parameters"], told["groups"]
    total, counts = sum(r["bytes"] for r in records), sorted({r["step"] for r in records if r["step"] is not None})
    taken = "no step counts" if not counts else f"step {text(int(counts[0]))}"
    taken += f" to {text(int(counts[-1]))}" if len(counts) > 1 else ""
    head = f"{Path(told['file']).name}: {len(records):,} parameters in {len(groups)} group{'s' * (len(groups) != 1)}"
    yield Text(f"{head}, {taken}, {size(total, 'B')} of state", style="bold")
    yield _groups_table(groups)
    rows: list[tuple[Any, ...]] = []
    for r in records:
        first: tuple[str, str, int | None] = (r["name"], shape(r["shape"]), None if r["step"] is None else int(r["step"]))
        for key, entry in r["state"].items() or [("no state", {})]:
            ranges = [entry.get(number) for number in ("min", "max", "mean_abs")]
            style = "red" if entry.get("non_finite") else ""
            shown = ("" if n is None else re.sub(r"e([+-])0", r"e\1", f"{n:.1e}") if n else "0" for n in ranges)
            dtype = _SHORT.get(entry.get("dtype", ""), entry.get("dtype"))
            rows.append((*first, Text(key, style=style), dtype, *shown))
            first = ("", "", None)
    columns = {"name": "bold cyan", "shape": ".", "step": ">", "state": ".", "dtype": ".dim"}
    yield table({**columns, "min": ">", "max": ">", "mean |x|": ">"}, rows)
    problems = told["findings"].items()
    yield from findings((f"{problem}: {_first(names)}" for problem, names in problems), "nothing is wrong in it")
    if names := told["without_averages"]:
        yield Text(f"gradients of 0 cannot be seen, as state has no averages: {_first(names)}", style="dim")


def _first(names: list[str]) -> str:
    """Return the first few names and the number of others."""
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW:,} more" if len(names) > _FEW else "")


def _groups_table(groups: list[dict[str, Any]]) -> Any:
    """Build a table of options that are set in any group: a column for each of few groups, or a row for each of many."""
    keys = dict.fromkeys(key for group in groups for key in group)
    rows = [(key, *(text(group.get(key), 7) for group in groups)) for key in keys]
    set_rows = [row for row in rows if {*row[1:]} - {"", "False", "()"}]
    if len(groups) <= _FEW:
        return table({"group": "bold", **{f"#{i}": ">" for i in range(len(groups))}}, set_rows)
    turned = zip(*(row[1:] for row in set_rows), strict=True)
    rows = [(f"#{i}", *row) for i, row in enumerate(turned)]
    return table({"group": "bold", **{row[0]: ">" for row in set_rows}}, rows)
