"""Explain a model's parameters: which rule has each, with which numbers, in how many bytes, and why.

MODEL is "package.module:name" of a module or of what makes one, with plain arguments if it takes some:
"torch.nn:TransformerEncoderLayer(64, 4)" or "train:make_model". It is imported and called as your program would. By default
its parameters are on the meta device, which takes no memory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import compiled_optim as co
from compiled_optim.command_line.lowering import ARCHITECTURES, lowered
from compiled_optim.command_line.parts.expressions import call, created, optimizer_arguments, parsed
from compiled_optim.command_line.parts.output import findings, shape, show, size, table, text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("model", metavar="MODEL", help="package.module:name")
    optimizer_arguments(parser, "muonadamw")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the parameters, if not their own")
    parser.add_argument("--device", choices=("meta", "cpu"), default="meta", help="where the model is; meta by default")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="count the launches of a step, as the command lowering does")
    parser.add_argument("--each", action="store_true", help="list each parameter, not one of those that are alike")


def run(options: argparse.Namespace) -> int:
    """Explain it; 1 if there are warnings."""
    model = made_model(options.model, options.device, options.dtype)
    optimizer = created(options.optimizer, model, options.set)
    found, memory = co.explain(model, optimizer), co.memory_report(optimizer)
    step = None
    if options.arch:

        def again() -> co.CompiledOptimizer:
            place = "cpu" if options.arch == "cpu" else "cuda"
            return created(options.optimizer, made_model(options.model, place, options.dtype), options.set)

        lowered_step = lowered(again, options.arch)
        step = {"arch": options.arch, "launches": lowered_step.launches, "operators": lowered_step.operators}
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    for r in found.records:
        r |= {"frozen": r["name"] in frozen, "gradient_bytes": 0 if r["name"] in frozen else r["parameter_bytes"]}
    gradients = sum(r["gradient_bytes"] for r in found.records)
    sizes = {"parameters": memory.weights, "gradients": gradients, "state": dict(memory.state)}
    records = {
        "optimizer": type(optimizer).__name__,
        "elements": memory.elements,
        "bytes": sizes,
        "step": step,
        "parameters": found.records,
        "warnings": [finding._asdict() for finding in found.warnings],
    }
    show(options, records, lambda: _drawn(records, [str(w) for w in found.warnings], each=options.each))
    return 1 if found.warnings else 0


def made_model(source: str, device: str, dtype: str | None) -> torch.nn.Module:
    """The module that ``package.module:name`` is, or makes, on a device.

    Raises:
        ValueError: there is no such module or name, it fails, or it makes something else.
    """
    place, colon, expression = source.partition(":")
    if not colon:
        hint = "; for a checkpoint there is compiled-optim inspect" if os.path.exists(source) else ""
        raise ValueError(f"{source!r} is not package.module:name, such as torch.nn:Transformer{hint}")
    name, positional, named = call(parsed(expression), expression)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` has it, for a console script
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no record
            found: Any = importlib.import_module(place)
            for part in name.split("."):
                found = getattr(found, part)
            if not isinstance(found, torch.nn.Module) and callable(found):
                with torch.device(device):
                    found = found(*positional, **named)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        hint = "; try --device cpu" if device == "meta" and not isinstance(error, (AttributeError, ImportError)) else ""
        raise ValueError(f"{source}: {type(error).__name__}: {error}{hint}") from error
    if not isinstance(found, torch.nn.Module):
        raise ValueError(f"{source} is a {type(found).__name__}, and no torch.nn.Module")
    for param in found.parameters() if dtype is not None else ():  # ``found.to`` swaps tensors, which fake ones refuse
        param.data = param.data.to(getattr(torch, str(dtype)) if param.is_floating_point() else param.dtype)
    return found


def _drawn(records: Mapping[str, Any], warnings: list[str], *, each: bool) -> Iterator[Any]:
    from rich.text import Text

    every, sizes = records["parameters"], records["bytes"]
    state = sum(sizes["state"].values())
    total, elements = sizes["parameters"] + sizes["gradients"] + state, records["elements"]
    head = f"{records['optimizer']}: {size(elements)} parameters in {len(every):,} tensors, "
    yield Text(f"{head}{size(total, 'B')}, {total / max(elements, 1):.2f} bytes for each", style="bold")
    parts = {"weights": sizes["parameters"], "gradients": sizes["gradients"], **sizes["state"]}
    yield Text("  ".join(f"{name} {size(number, 'B')}" for name, number in parts.items()), style="dim")
    if step := records["step"]:
        yield Text(f"a step on {step['arch']}: {step['launches']} kernel launches, {step['operators']} torch operators")
    by_group: dict[Any, list[Any]] = {}
    for r in every:
        by_group.setdefault((r["group"], _rule(r), text(r["weight_decay"]), r["precision"]), []).append(r)
    rows = []
    for (_, rule, decay, precision), listed in sorted(by_group.items(), key=lambda item: -sum(map(_elements, item[1]))):
        count, rates = sum(map(_elements, listed)), [r["lr"] for r in listed]
        known = sorted({rate for rate in rates if isinstance(rate, (int, float))}) or rates[:1]
        lr = " to ".join(dict.fromkeys(map(text, (known[0], known[-1]))))
        share = f"{count / max(elements, 1):.1%}"
        rows.append((rule, len(listed), size(count), share, lr, decay, precision.replace(" state", ", state")))
    columns = dict.fromkeys(("tensors", "numbers", "share", "lr", "decay"), ">")
    yield table({"rule": "bold cyan", **columns, "precision": "dim"}, rows)
    alike: dict[Any, list[Any]] = {}
    for r in every:
        why, sizes = None if r["why"] == "default" else r["why"], "lazy" if r["shape"] is None else shape(r["shape"])
        alike.setdefault((_stem(r["name"], each=each), sizes, _rule(r), why), []).append(r)
    rows = [(name, _times(listed), *rest) for (name, *rest), listed in alike.items()]
    yield table({"parameter": "bold", " ": ">dim", "shape": ".", "rule": ".cyan", "why": "dim"}, rows)
    yield from findings((w.removeprefix("warning ") for w in warnings), "no warnings")


def _rule(record: Mapping[str, Any]) -> str:
    return "frozen" if record["frozen"] else record["rule"] or "none"


def _stem(name: str, *, each: bool) -> str:
    """A name with ``*`` for the numbers of layers, unless ``each`` is listed."""
    return name if each else re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _times(listed: list[Any]) -> str:
    return f"{len(listed)} x" if len(listed) > 1 else ""


def _elements(record: Mapping[str, Any]) -> int:
    return math.prod(record["shape"]) if record["shape"] is not None else 0
