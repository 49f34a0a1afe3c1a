"""The output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

_UNITS = ("", "k", "M", "G", "T")
_WIDE = 500  # columns of a file or pipe
_NAME = 12  # columns that a name has even in a narrow window
_LONG = 1000  # rows of a table that rich draws; thousands take it seconds


def needed(module: str, purpose: str, install: str) -> Any:
    """Import ``module``. If it is missing, the error names the ``purpose`` that needs it, and the package to ``install``."""
    name = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise ModuleNotFoundError(f"{purpose} needs {name}: pip install {install}") from error


def show(options: argparse.Namespace, records: Any, draw: Callable[[], Iterable[Any]]) -> None:
    """Print ``records`` as JSON if the options ask for it, else the texts and tables that ``draw`` yields."""
    if options.json:
        print(json.dumps(_plain(records), indent=1, allow_nan=False))
        return
    is_free = not sys.stdout.isatty() and "COLUMNS" not in os.environ  # no window: names need not wrap
    rich_console = needed("rich.console", "a table", "'compiled-optim[cli]'")
    console = rich_console.Console(highlight=False, width=_WIDE if is_free else None)
    console.on_broken_pipe = _closed  # rich would exit with 1
    usual = console.width
    for each in draw():
        if columns := getattr(each, "columns", ()):
            each.expand = each.expand and not is_free
            console.width = max(usual, sum(column.min_width + 2 for column in columns))  # rich drops columns that do not fit
        if isinstance(each, str):
            console.out(each, highlight=False)
        else:
            console.print(each)
        console.width = usual


def _closed() -> None:
    raise BrokenPipeError


def _plain(value: Any) -> Any:
    """Return ``value`` in JSON's types. Values that JSON lacks, such as NaN, become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    is_plain = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else text(value)


def table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]], *, title: str = "", caption: str = "") -> Any:
    """Build a table without empty columns, or if it is long the text of one.

    Styles: ``>`` to the right, ``.`` in one line, ``~`` cut to fit, or a colour. Text ignores colours and the window.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if len(listed := [*rows]) > _LONG:
        plain = [[cell.plain if isinstance(cell, Text) else text(cell) for cell in row] for row in listed]
        return "\n".join(filter(None, [title, *_lines(columns, plain), caption]))
    cells = [
        [cell if isinstance(cell, Text) else Text(text(cell)) for cell in row] for row in listed
    ]  # a Text, so that rich takes no brackets for markup
    filled = [i for i in range(len(columns)) if not cells or any(row[i].plain for row in cells)]
    result = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold")
    result.pad_edge, result.collapse_padding = False, True
    result.expand, result.show_header = any("~" in style for style in columns.values()), any(map(str.strip, columns))
    result.caption, result.caption_justify, result.caption_style = caption or None, "left", "dim"
    for i, (name, style) in [(i, list(columns.items())[i]) for i in filled]:
        widest = max(len(name), *(row[i].cell_len for row in cells), 0)
        colour = style.strip(">.~")
        result.add_column(
            name,
            justify="right" if ">" in style else "left",
            style=colour or None,
            no_wrap=any(mark in style for mark in ">.~"),
            overflow="ellipsis" if "~" in style or "." in style else "fold",
            ratio=1 if "~" in style else None,
            min_width=widest if ">" in style else min(widest, _NAME),
        )
    for row in cells:
        result.add_row(*(row[i] for i in filled))
    return result


def _lines(columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table without its empty columns, aligned, the names first."""
    listed = [
        [cell.rjust(widest) if ">" in style else cell.ljust(widest) for cell in (name, *column)]
        for (name, style), column in zip(columns.items(), zip(*rows, strict=True), strict=True)
        if any(column) and (widest := max(map(len, (name, *column))))
    ]
    return ("  ".join(line).rstrip() for line in zip(*listed, strict=True))


def text(value: Any, digits: int = 4) -> str:
    """Return ``value`` as text for tables, floats with this number of ``digits``."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(text(each, digits) for each in value)})"
    return str(value).removeprefix("torch.")


def shape(sizes: Sequence[int] | None) -> str:
    """Return the text of a shape: ``768 x 3072``, ``scalar``, or nothing if it is not known."""
    return "" if sizes is None else " x ".join(map(str, sizes)) or "scalar"


def size(number: float, unit: str = "") -> str:
    """Return the text of a count or of bytes in three figures: ``124 M``, ``1.49 GB``."""
    power = min(len(_UNITS) - 1, int(math.log10(number) // 3)) if number >= 1 else 0
    scaled = number / 1000**power
    figures = f"{scaled:.3g}" if power and scaled < 999.5 else f"{scaled:.0f}"
    return f"{figures} {_UNITS[power]}{unit}".rstrip()


def findings(messages: Iterable[str], well: str = "") -> list[Any]:
    """Return a line for each message, or without messages the line ``well``."""
    from rich.text import Text

    lines = [Text(f"! {message}", style="yellow") for message in messages]
    return lines or ([Text(well, style="green")] if well else [])
