"""List optimizers, with bytes per parameter; or all arguments of one.

"compiled-optim list" lists all, "list '*adam*'" those that match, and "list adamw" describes one. Bytes are of weight,
gradient and state together, for each element of a large matrix.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
from collections.abc import Iterator
from typing import Any

import compiled_optim as co
from compiled_optim.cli.output import show, table

_BAR = 30  # characters of the longest bar
_ROOM = 80  # columns of a window that has room for every column of the list
_SOURCE = re.compile(r" \((?:[^()]|\([^()]*\))*\)|^\w+: ")  # a source, and the name, which has a column already
_FORMS = re.compile(r".*_(int8|scale)$|kahan_comp|remainder|master_param")  # entries that depend on arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="a name, or a pattern such as '*adam*'")


def run(options: argparse.Namespace) -> int:
    """List the optimizers that match."""
    names = _matching(options.pattern)
    infos = [co.optimizer_info(name) for name in names]
    records = [_record(info) for info in infos]
    show(options, records, lambda: _one(infos[0]) if len(infos) == 1 else [_many(infos)])
    return 0


def _matching(pattern: str) -> list[str]:
    if names := co.list_optimizers(pattern) if any(c in pattern for c in "*?[") else co.list_optimizers(f"*{pattern}*"):
        return [pattern.lower()] if pattern.lower() in names else names
    return [co.optimizer_info(pattern).name]  # raises an error that lists similar names


def _record(info: co.OptimizerInfo) -> dict[str, Any]:
    known = [a._asdict() | {"required": a.default is inspect.Parameter.empty} for a in info.arguments]
    return vars(info) | {
        "cls": info.cls.__name__,
        "arguments": [{**a, "default": None} if a["required"] else a for a in known],
    }


def _many(infos: list[co.OptimizerInfo]) -> Any:
    rows, has_room = [], shutil.get_terminal_size().columns >= _ROOM
    for info in infos:
        smallest = min(info.bytes_per_parameter.items(), key=lambda item: item[1], default=("", None))
        sizes = [info.bytes_per_parameter.get(name) for name in ("float32", "bfloat16")]
        wide, half, least = (None if number is None else f"{number:.1f}" for number in (*sizes, smallest[1]))
        numbers = (info.kind, wide, half, least) if has_room else (None, wide, None, least)
        summary = _SOURCE.sub("", info.summary).replace("``", "")
        rows.append((info.name, *numbers, summary[:1].upper() + summary[1:]))
    columns = {"optimizer": ".bold cyan", "works on": ".dim", "float32": ">", "bfloat16": ">", "least": ">green", "": "~"}
    caption = "Bytes for each parameter: weight, gradient and state. Least: with the best of weights= and state_dtype=."
    return table(columns, rows, caption=caption)


def _one(info: co.OptimizerInfo) -> Iterator[Any]:
    from rich.text import Text

    summary = info.summary.removeprefix(f"{info.cls.__name__}: ")
    yield Text.assemble((info.cls.__name__, "bold cyan"), (f"  {summary}", ""))
    states = [name for name in info.states if not _FORMS.fullmatch(name)]
    facts = {"papers": info.sources, "state": states, "takes over state of": info.counterparts}
    for name, values in facts.items():
        if values:
            yield Text.assemble((f"{name}: ", "dim"), ", ".join(values))
    if info.bytes_per_parameter:
        largest = max(info.bytes_per_parameter.values())
        rows = [
            (name.removeprefix("bfloat16, "), f"{number:.2f}", "█" * round(_BAR * number / largest))
            for name, number in sorted(info.bytes_per_parameter.items(), key=lambda item: -item[1])
        ]
        caption = "All but float32 are bfloat16 parameters."
        yield table({"precision": "", "bytes": ">", "for each parameter": ".green"}, rows, title="Memory", caption=caption)
    common = inspect.get_annotations(co.CompiledOptimizer)
    specific = [(*_start(a), _said(a.help)) for a in info.arguments if a.name not in common]
    shared = [(*_start(a), _said(a.help).partition(". ")[0].rstrip(".") + ".") for a in info.arguments if a.name in common]
    columns = {"argument": ".bold", "default": "cyan", "": ""}
    yield table(columns, specific, title="Its arguments")
    caption = f"help(co.{info.cls.__name__}) says more." if "." not in info.name else ""
    yield table(columns, shared, title="Arguments of many optimizers", caption=caption)


def _start(argument: Any) -> tuple[str, str]:
    return argument.name, "required" if argument.default is inspect.Parameter.empty else repr(argument.default)


def _said(help_text: str) -> str:
    """Return the text of a docstring without its markup."""
    return re.sub(r":\w+:`~?\.?(\w+)`", r"\1", help_text).replace("``", "")
