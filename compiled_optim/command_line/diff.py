"""Compare two optimizers' defaults, or two checkpoints.

A and B are names of optimizers, or checkpoints. "torch.adamw" is torch.optim's AdamW: "diff torch.adamw adamw" tells what
changes when you switch. Of checkpoints it compares the groups' numbers, names, dtypes, shapes, step counts and state.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co
from compiled_optim.command_line.parts.checkpoints import Checkpoint, checkpoint_argument, numbers, parameters, read
from compiled_optim.command_line.parts.output import findings, show, table, text

_TORCH = "torch."
_ABSENT = "absent"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("a", metavar="A", help="an optimizer's name, or a file")
    parser.add_argument("b", metavar="B", help="another one")
    checkpoint_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Show the differences. Return 1 if there are any."""
    paths = [Path(name) for name in (options.a, options.b)]
    are_files = [os.path.exists(path) for path in paths]
    if any(are_files) and not all(are_files):
        raise ValueError(f"{paths[are_files.index(False)]} is not a file, but {paths[are_files.index(True)]} is")
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
    """Return the arguments of an optimizer with the ``repr`` of their defaults."""
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


def _files(a: Checkpoint, b: Checkpoint) -> dict[str, Any]:
    groups = [[numbers(group) for group in checkpoint.content["param_groups"]] for checkpoint in (a, b)]
    differing: dict[str, Any] = {}
    for index in range(max(map(len, groups))):
        pair = [listed[index] if index < len(listed) else {} for listed in groups]
        for key in dict.fromkeys((*pair[0], *pair[1])):
            values = [_number(side.get(key, _ABSENT)) for side in pair]
            if not _same(*values):
                differing[f"param_groups[{index}][{key!r}]"] = _shown(*values)
    first, second = _entries(a.content), _entries(b.content)
    shared: list[dict[int, list[str]]] = [{}, {}]  # by group, the names that both checkpoints have
    for by_group, content, other in zip(shared, (a.content, b.content), (second, first), strict=True):
        for name, index, _ in parameters(content):
            if name in other:
                by_group.setdefault(index, []).append(name)
    for index in sorted({*shared[0], *shared[1]}):
        for i, names in enumerate(itertools.zip_longest(*(each.get(index, []) for each in shared), fillvalue=_ABSENT)):
            if names[0] != names[1]:
                differing[f"param_groups[{index}]['params']"] = [
                    name if name == _ABSENT else f"{name}, at {i}" for name in names
                ]
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


def _drawn_files(a: str, b: str, records: Mapping[str, Any]) -> Iterator[Any]:
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
