"""Compare two optimizers' defaults, or two checkpoints.

A and B are names of optimizers, or checkpoints. "torch.adamw" is torch.optim's AdamW: "diff torch.adamw adamw" tells what
changes when you switch. Of checkpoints it compares the groups' numbers, names, dtypes, shapes, step counts and state.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co
from compiled_optim.command_line.parts.checkpoints import checkpoint_argument, numbers, parameters, read, steps, tensors
from compiled_optim.command_line.parts.output import findings, show, table, text

_TORCH = "torch."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("a", metavar="A", help="an optimizer's name, or a file")
    parser.add_argument("b", metavar="B", help="another one")
    checkpoint_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Show what differs; 1 if something does."""
    paths = [Path(name) for name in (options.a, options.b)]
    are_files = [path.exists() for path in paths]
    if any(are_files) and not all(are_files):
        raise ValueError(f"{paths[are_files.index(False)]} is no file, and {paths[are_files.index(True)]} is one")
    if any(len(path.parts) > 1 for path in paths) and not all(are_files):
        raise FileNotFoundError(f"there is no file {paths[are_files.index(False)]}")
    if all(are_files):
        records = _files(*(read(path, options.key) for path in paths))
        drawn = lambda: _drawn_files(options.a, options.b, records)  # noqa: E731
    else:
        records = _names(options.a, options.b)
        drawn = lambda: _drawn_names(options.a, options.b, records)  # noqa: E731
    show(options, records, drawn)
    return 1 if any(value for value in records.values()) else 0


def _names(a: str, b: str) -> dict[str, Any]:
    first, second = map(_defaults, (a, b))
    both = [name for name in first if name in second]
    return {
        "defaults": {name: [first[name], second[name]] for name in both if first[name] != second[name]},
        "only_a": {name: value for name, value in first.items() if name not in second},
        "only_b": {name: value for name, value in second.items() if name not in first},
    }


def _defaults(name: str) -> dict[str, str]:
    """The arguments of an optimizer with their defaults, as Python writes them."""
    if name.lower().startswith(_TORCH):
        wanted = name.rpartition(".")[2].lower()
        kinds = {n.lower(): k for n, k in vars(torch.optim).items() if isinstance(k, type) and n != "Optimizer"}
        if wanted not in kinds:
            raise ValueError(f"torch.optim has no {wanted!r}")
        pairs = [(p.name, p.default) for p in inspect.signature(kinds[wanted]).parameters.values() if p.name != "params"]
    else:
        pairs = [(argument.name, argument.default) for argument in co.optimizer_info(name).arguments]
    return {name: "required" if value is inspect.Parameter.empty else repr(value) for name, value in pairs}


def _drawn_names(a: str, b: str, records: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    if records["defaults"]:
        rows = [(name, *values) for name, values in records["defaults"].items()]
        yield table({"default of": "bold", a: "red", b: "green"}, rows)
    for name, key, style in ((a, "only_a", "red"), (b, "only_b", "green")):
        if records[key]:
            listed = ", ".join(f"{argument}={value}" for argument, value in records[key].items())
            yield Text.assemble((f"only {name}: ", f"bold {style}"), listed)
    if not records["defaults"]:
        yield Text("equal defaults of all arguments that both have", style="green")


def _files(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    groups = [[numbers(group) for group in content["param_groups"]] for content in (a, b)]
    differing: dict[str, Any] = {}
    for place in range(max(map(len, groups))):
        pair = [found[place] if place < len(found) else {} for found in groups]
        for key in dict.fromkeys((*pair[0], *pair[1])):
            values = [text(_number(side.get(key))) if key in side else "absent" for side in pair]
            if values[0] != values[1]:
                differing[f"param_groups[{place}][{key!r}]"] = values
    first, second = ({name: entries for name, _, entries in parameters(content)} for content in (a, b))
    changed = [
        {"name": name, "state": key, **difference}
        for name in first
        if name in second
        for key, difference in _differences(first[name], second[name])
    ]
    return {
        "groups": differing,
        "only_a": [name for name in first if name not in second],
        "only_b": [name for name in second if name not in first],
        "state": changed,
    }


def _number(value: Any) -> Any:
    """A value of a group, without tensors."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a parameter's state that differ, and how."""
    if steps(first) != steps(second):
        yield "step", {"what": f"{text(steps(first))} and {text(steps(second))}", "max": None}
    one, other = tensors(first), tensors(second)
    for key in dict.fromkeys((*one, *other)):
        if key not in one or key not in other:
            yield key, {"what": f"only {'A' if key in one else 'B'} has it", "max": None}
            continue
        x, y = one[key], other[key]
        if x.shape != y.shape:
            yield key, {"what": f"shapes {tuple(x.shape)} and {tuple(y.shape)}", "max": None}
            continue
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        unequal = [] if torch.equal(x, y) or not x.numel() else [(x.to(wide) - y.to(wide)).abs().max().item()]
        dtypes = f"{text(x.dtype)} and {text(y.dtype)}" if x.dtype != y.dtype else ""
        if dtypes or any(unequal):
            yield key, {"what": dtypes or "numbers", "max": unequal[0] if unequal else 0.0}


def _drawn_files(a: str, b: str, records: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    if records["groups"]:
        rows = [(name, *values) for name, values in records["groups"].items()]
        yield table({"group": "bold", Path(a).name: "red", f"{Path(b).name} ": "green"}, rows)
    yield from findings(
        f"only {name} has {', '.join(records[key])}" for name, key in ((a, "only_a"), (b, "only_b")) if records[key]
    )
    if records["state"]:
        rows = [(r["name"], r["state"], r["what"], r["max"]) for r in records["state"]]
        yield table({"parameter": "bold cyan", "state": "", "differs in": "", "largest difference": ">"}, rows)
    if not any(records.values()):
        yield Text("equal groups, names and state", style="green")
