"""Compare two checkpoints: the groups' numbers, parameters' names, dtypes, shapes, step counts and state."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.cli.checkpoints import FileContent, checkpoint_argument, numbers, parameters, read
from compiled_optim.cli.output import findings, show, table, text

_ABSENT = "absent"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("a", metavar="A", help="a file or folder with an optimizer's state")
    parser.add_argument("b", metavar="B", help="another one")
    checkpoint_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Show the differences. Return 1 if there are any."""
    records = _compared(*(read(Path(name), options.key) for name in (options.a, options.b)))
    show(options, records, lambda: _drawn(options.a, options.b, records))
    return 1 if any(records.values()) else 0


def _compared(a: FileContent, b: FileContent) -> dict[str, Any]:
    groups = ((numbers(group) for group in checkpoint.content["param_groups"]) for checkpoint in (a, b))
    differing: dict[str, Any] = {}
    for index, pair in enumerate(itertools.zip_longest(*groups, fillvalue={})):
        for key in dict.fromkeys((*pair[0], *pair[1])):
            values = [_number(side.get(key, _ABSENT)) for side in pair]
            if not _same(*values):
                differing[f"param_groups[{index}][{key!r}]"] = _shown(*values)
    first, second = _entries(a.content), _entries(b.content)
    orders = _order(a.content, second), _order(b.content, first)
    for index in sorted({*orders[0], *orders[1]}):
        pairs = itertools.zip_longest(*(order.get(index, []) for order in orders), fillvalue=_ABSENT)
        for i, names in enumerate(pairs):
            if names[0] != names[1]:
                shown = [name if name == _ABSENT else f"{name}, at {i}" for name in names]
                differing[f"param_groups[{index}]['params']"] = shown
                break
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
        "left_out": [checkpoint.lost for checkpoint in (a, b) if checkpoint.lost],
    }


def _order(content: Mapping[str, Any], other: Collection[str]) -> dict[int, list[str]]:
    """Return the names in each group of those parameters that the ``other`` checkpoint has too."""
    order: dict[int, list[str]] = {}
    for name, index, _ in parameters(content):
        if name in other:
            order.setdefault(index, []).append(name)
    return order


def _entries(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter by name, and entries that belong to no parameter by their key."""
    named = {name: dict(_leaves(entries)) for name, _, entries in parameters(content)}
    listed = {param for group in content["param_groups"] for param in group["params"]}
    foreign = {f"state[{key!r}]": value for key, value in content["state"].items() if key not in listed}
    known = ("state", "param_groups", "format_version", "optimizer", "unordered")  # the last two are about the file
    foreign |= {f"[{key!r}]": value for key, value in content.items() if key not in known}
    return named | {key: dict(_leaves(value)) for key, value in foreign.items()}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts and lists, each with its path."""
    if isinstance(value, Mapping):
        pairs: Any = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(each, (Tensor, Mapping, list, tuple)) for each in value):
        pairs = enumerate(value)
    else:
        yield path, value
        return
    for key, each in pairs:
        yield from _leaves(each, f"{path}[{key!r}]" if path else str(key))


def _number(value: Any) -> Any:
    """Return a value of a group with its tensors as Python numbers."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _same(x: Any, y: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN."""
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return not [*_differences(dict(_leaves(x)), dict(_leaves(y)))]
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return isinstance(x, Tensor) and isinstance(y, Tensor) and not [*_difference(x, y)]
    return bool(x == y) or bool(x != x and y != y)


def _shown(x: Any, y: Any) -> list[str]:
    """Return the texts of two values that differ, in all digits if the short texts are equal."""
    short = [text(value, 7) for value in (x, y)]
    return short if short[0] != short[1] else [repr(value) for value in (x, y)]


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of a parameter's state that differ, each with its difference."""
    for key in dict.fromkeys((*first, *second)):
        if key not in first or key not in second:
            yield key, {"what": f"only {'A' if key in first else 'B'} has it", "max": None}
            continue
        x, y = first[key], second[key]
        if key != "step" and isinstance(x, Tensor) and isinstance(y, Tensor):
            yield from ((key, difference) for difference in _difference(x, y))
        elif not _same(_number(x), _number(y)):
            yield key, {"what": " and ".join(_shown(_number(x), _number(y))), "max": None}


def _difference(x: Tensor, y: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the difference of two tensors, if they differ."""
    if x.shape != y.shape:
        yield {"what": f"shapes {tuple(x.shape)} and {tuple(y.shape)}", "max": None}
        return
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    largest = 0.0
    if x.dtype != y.dtype or not torch.equal(x, y):
        one, other = x.to(wide), y.to(wide)
        unequal = (one != other) & ~(one.isnan() & other.isnan())
        largest = (one - other)[unequal].abs().max().item() if bool(unequal.any()) else 0.0
    dtypes = f"{text(x.dtype)} and {text(y.dtype)}" if x.dtype != y.dtype else ""
    if dtypes or largest:
        yield {"what": dtypes or "numbers", "max": largest}


def _drawn(a: str, b: str, records: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    if records["groups"]:
        rows = [(name, *values) for name, values in records["groups"].items()]
        yield table({"group": "bold", Path(a).name: "red", f"{Path(b).name} ": "green"}, rows)
    yield from findings(
        f"only {name} has {', '.join(records[key])}" for name, key in ((a, "only_a"), (b, "only_b")) if records[key]
    )
    yield from findings(f"not compared, as it cannot be read: {lost}" for lost in records["left_out"])
    if records["state"]:
        rows = [(r["name"], r["state"], r["what"], r["max"]) for r in records["state"]]
        yield table({"parameter": "bold cyan", "state": "", "differs in": "", "largest difference": ">"}, rows)
    if not any(records.values()):
        yield Text("equal groups, names and state", style="green")
