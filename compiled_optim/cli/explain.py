"""Explain a model's parameters: the rule of each, its numbers and bytes, and the reason.

MODEL is "package.module:name" of a module, or of a class or function that makes one, with plain arguments if it takes some:
"torch.nn:TransformerEncoderLayer(64, 4)" or "train:make_model". It is imported and called as in your program. By default its
parameters are on the meta device, which takes no memory.
"""

from __future__ import annotations

import argparse
import ast
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
from compiled_optim.cli.lowering import ARCHITECTURES, lowered
from compiled_optim.cli.optimizer import created, optimizer_arguments
from compiled_optim.cli.output import findings, shape, show, size, table, text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("model", metavar="MODEL", help="package.module:name")
    parser.add_argument(
        "--optimizer", default="muonadamw", metavar="NAME", help="see the command list; muonadamw by default"
    )
    optimizer_arguments(parser)
    parser.add_argument("--device", choices=("meta", "cpu"), default="meta", help="the device of the model; meta by default")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="count the launches of a step, as the command lowering does")


def run(options: argparse.Namespace) -> int:
    """Explain the model. Return 1 if there are findings."""
    model = made_model(options.model, options.device, options.dtype)
    optimizer = created(options.optimizer, model, options.set)
    explained, memory = co.explain(model, optimizer), co.memory_report(optimizer)
    step = None
    if options.arch:

        def make() -> co.CompiledOptimizer:
            device = "cpu" if options.arch == "cpu" else "cuda"
            return created(options.optimizer, made_model(options.model, device, options.dtype), options.set)

        lowered_step = lowered(make, options.arch)
        step = {"arch": options.arch, "launches": lowered_step.launches, "operators": lowered_step.operators}
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    for r in explained.records:
        r |= {"frozen": r["name"] in frozen, "gradient_bytes": 0 if r["name"] in frozen else r["parameter_bytes"]}
    gradients = sum(r["gradient_bytes"] for r in explained.records)
    sizes = {"parameters": memory.weights, "gradients": gradients, "state": dict(memory.state)}
    records = {
        "optimizer": type(optimizer).__name__,
        "elements": memory.elements,
        "bytes": sizes,
        "step": step,
        "parameters": explained.records,
        "findings": [vars(finding) for finding in explained.findings],
    }
    show(options, records, lambda: _drawn(records, [str(each) for each in explained.findings]))
    return 1 if explained.findings else 0


def made_model(source: str, device: str, dtype: str | None) -> torch.nn.Module:
    """Import ``package.module:name``, call it if it is no module, and return the module on ``device``.

    Raises:
        ValueError: the name does not exist, its call fails, or the result is no module.
    """
    module, colon, expression = source.partition(":")
    if not colon:
        hint = "; for a checkpoint there is compiled-optim inspect" if os.path.exists(source) else ""
        raise ValueError(f"{source!r} is not package.module:name, such as torch.nn:Transformer{hint}")
    name, positional, named = _call(expression)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` has it, for a console script
    try:
        with contextlib.redirect_stdout(sys.stderr):  # keeps its prints out of the records
            model: Any = importlib.import_module(module)
            for part in name.split("."):
                model = getattr(model, part)
            if not isinstance(model, torch.nn.Module) and callable(model):
                with torch.device(device):
                    model = model(*positional, **named)
    except (Exception, SystemExit) as error:  # the user's code may raise any error
        hint = "; try --device cpu" if device == "meta" and not isinstance(error, (AttributeError, ImportError)) else ""
        raise ValueError(f"{source}: {type(error).__name__}: {error}{hint}") from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{source} is a {type(model).__name__}, not a torch.nn.Module")
    for param in model.parameters() if dtype is not None else ():  # ``model.to`` swaps tensors, which fake ones refuse
        param.data = param.data.to(getattr(torch, str(dtype)) if param.is_floating_point() else param.dtype)
    return model


def _call(source: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the dotted name, and positional and named arguments, of a call with literals. A bare name has no arguments."""
    try:
        node = ast.parse(source.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{source!r} cannot be read: {error.msg}, at character {error.offset}") from error
    called, values, named = (node.func, node.args, node.keywords) if isinstance(node, ast.Call) else (node, [], [])
    name = ast.unparse(called)
    if not all(map(str.isidentifier, name.split("."))) or any(keyword.arg is None for keyword in named):
        raise ValueError(f"{source!r} is not a name with arguments, such as Linear(4, 4)")
    return name, [*map(_literal, values)], {str(keyword.arg): _literal(keyword.value) for keyword in named}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{ast.unparse(node)!r} is not a plain value: a number, quoted text, True, None, a list") from error


def _drawn(records: Mapping[str, Any], warnings: list[str]) -> Iterator[Any]:
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
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", r["name"])  # equal layers share a line
        alike.setdefault((name, sizes, _rule(r), why), []).append(r)
    rows = [(name, f"{len(rs)} x" if len(rs) > 1 else "", *others) for (name, *others), rs in alike.items()]
    yield table({"parameter": "bold", " ": ">dim", "shape": ".", "rule": ".cyan", "why": "dim"}, rows)
    yield from findings((w.removeprefix("warning ") for w in warnings), "no warnings")


def _rule(record: Mapping[str, Any]) -> str:
    return "frozen" if record["frozen"] else record["rule"] or "none"


def _elements(record: Mapping[str, Any]) -> int:
    return math.prod(record["shape"]) if record["shape"] is not None else 0
