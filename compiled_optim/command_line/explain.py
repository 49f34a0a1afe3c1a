"""Explain a model's parameters, or a checkpoint's: the rule of each, its numbers and bytes, and the reason.

MODEL is "package.module:name" of a module, or of a class or function that makes one, with plain arguments if it takes some:
"torch.nn:TransformerEncoderLayer(64, 4)" or "train:make_model". It is imported and called as in your program. By default its
parameters are on the meta device, which takes no memory. MODEL may also be a file or folder with an optimizer's state.
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
from pathlib import Path
from typing import Any

import torch

import compiled_optim as co
from compiled_optim.command_line.lowering import ARCHITECTURES, lowered
from compiled_optim.command_line.parts.checkpoints import (
    FORM,
    Checkpoint,
    checkpoint_argument,
    numbers,
    parameters,
    read,
    shape_of,
    steps,
    tensors,
)
from compiled_optim.command_line.parts.expressions import call, created, optimizer_arguments, parsed
from compiled_optim.command_line.parts.output import findings, shape, show, size, table, text

_COUPLED = "decoupled_weight_decay"  # False for Adam, True for AdamW
_NO_LAMB = {"bitsandbytes", "fused", "flashoptim"}  # forms that save the averages of Adam and AdamW without the name
_PARTS = {"kahan_comp", "remainder", "master_param"}  # entries of the state that every optimizer may have


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("model", metavar="MODEL", help="package.module:name, or a checkpoint")
    optimizer_arguments(parser, "muonadamw")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the parameters, if not the model's")
    parser.add_argument("--device", choices=("meta", "cpu"), default="meta", help="the device of the model; meta by default")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="count the launches of a step, as the command lowering does")
    parser.add_argument("--each", action="store_true", help="list each parameter; by default equal layers share a line")
    checkpoint_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Explain the model or checkpoint. Return 1 if there are warnings."""
    path = Path(options.model)
    if os.path.exists(path):  # of a name that is too long, Path.exists raises
        return _explain_file(options, path)
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
        "warnings": [finding._asdict() for finding in explained.warnings],
    }
    show(options, records, lambda: _drawn(records, [str(w) for w in explained.warnings], each=options.each))
    return 1 if explained.warnings else 0


def made_model(source: str, device: str, dtype: str | None) -> torch.nn.Module:
    """Import ``package.module:name``, call it if it is no module, and return the module on ``device``.

    Raises:
        ValueError: the name does not exist, its call fails, or the result is no module.
    """
    module, colon, expression = source.partition(":")
    if not colon:
        raise ValueError(f"{source!r} is neither a file nor package.module:name, such as torch.nn:Transformer")
    name, positional, named = call(parsed(expression), expression)
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
    except (Exception, SystemExit) as error:  # the user's code may raise any
        hint = "; try --device cpu" if device == "meta" and not isinstance(error, (AttributeError, ImportError)) else ""
        raise ValueError(f"{source}: {type(error).__name__}: {error}{hint}") from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{source} is a {type(model).__name__}, not a torch.nn.Module")
    for param in model.parameters() if dtype is not None else ():  # ``model.to`` swaps tensors, which fake ones refuse
        param.data = param.data.to(getattr(torch, str(dtype)) if param.is_floating_point() else param.dtype)
    return model


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
    rows = [(name, _times(listed), *others) for (name, *others), listed in alike.items()]
    yield table({"parameter": "bold", " ": ">dim", "shape": ".", "rule": ".cyan", "why": "dim"}, rows)
    yield from findings((w.removeprefix("warning ") for w in warnings), "no warnings")


def _rule(record: Mapping[str, Any]) -> str:
    return "frozen" if record["frozen"] else record["rule"] or "none"


def _stem(name: str, *, each: bool) -> str:
    """Return a name with ``*`` for the numbers of layers, or with ``each`` the name itself."""
    return name if each else re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _times(listed: list[Any]) -> str:
    return f"{len(listed)} x" if len(listed) > 1 else ""


def _elements(record: Mapping[str, Any]) -> int:
    return math.prod(record["shape"]) if record["shape"] is not None else 0


def _explain_file(options: argparse.Namespace, path: Path) -> int:
    checkpoint = read(path, options.key)
    state_dict = checkpoint.content
    groups = [numbers(group) for group in state_dict["param_groups"]]
    known = list(parameters(state_dict))
    entry_names: list[set[str]] = [set() for _ in groups]
    for _, index, entries in known:
        entry_names[index].update(tensors(entries))
    rules = [_rules(names, group, checkpoint.form) for names, group in zip(entry_names, groups, strict=True)]
    stored = {name: entries for name, _, entries in parameters(checkpoint.stored)}
    records = []
    for name, index, entries in known:
        saved = stored.get(name) or entries  # 8-bit codes, where ``entries`` are float32
        stored_tensors = tensors(saved)
        for inner in saved.values():  # bitsandbytes nests them
            stored_tensors |= tensors(inner) if isinstance(inner, Mapping) else {}
        records.append(
            {
                "name": name,
                "group": index,
                "shape": shape_of(entries),
                "step": steps(entries),
                "rules": rules[index],
                "state_bytes": sum(value.nbytes for value in stored_tensors.values()),
                "state": {key: text(value.dtype) for key, value in stored_tensors.items()},
            }
        )
    content = {
        "file": str(path),
        "form": checkpoint.form,
        "groups": groups,
        "parameters": records,
        "left_out": checkpoint.lost,
    }
    show(options, content, lambda: _drawn_file(path, checkpoint, records, each=options.each))
    return 1 if checkpoint.lost else 0


def _rules(entries: set[str], group: Mapping[str, Any], form: str) -> list[str]:
    """Return the optimizers that have the state and options of a group, and the fewest other options."""
    if named := group.get("rule"):
        return [str(named)]
    kinds = {name: co.optimizer_info(name) for name in co.list_optimizers() if "." not in name}
    takes = {name: {argument.name for argument in info.arguments} for name, info in kinds.items()}
    takes["adamw"].add(_COUPLED)
    options = (group.keys() & set[str]().union(*takes.values())) - {"max_lr"}  # OneCycleLR writes it into any group
    states = {FORM.sub("", name) for name in entries} - _PARTS
    fits = {n: len(takes[n] - options) for n, info in kinds.items() if states <= {*info.states} and options <= takes[n]}
    adams = [name for name in ("adam", "adamw") if name in fits]
    is_optimi = form == "optimi" and _COUPLED in options  # its RAdam saves the same options as its Adam
    is_foreign = form in _NO_LAMB or (form != "optimi" and "maximize" not in options)  # torch and we save it
    if adams and (is_foreign or is_optimi or "amsgrad" in options):
        decouples = None if form in _NO_LAMB else group.get(_COUPLED)
        return [*(adams if decouples is None else ["adamw" if decouples else "adam"]), *["radam"] * is_optimi]
    if _COUPLED in options:
        fits = {name: extra for name, extra in fits.items() if name not in adams} or fits  # those have amsgrad too
    least = min(fits.values(), default=0)
    return [name for name, extra in fits.items() if extra == least]


def _drawn_file(path: Path, checkpoint: Checkpoint, records: list[Any], *, each: bool) -> Iterator[Any]:
    from rich.text import Text

    total = sum(r["state_bytes"] for r in records)
    yield Text(
        f"{path.name}: state of {len(records):,} parameters, {size(total, 'B')}, in the form {checkpoint.form}", style="bold"
    )
    alike: dict[Any, list[Any]] = {}
    for r in records:
        state = ", ".join(f"{key} {dtype}" for key, dtype in r["state"].items()) or "none"
        rule = " or ".join(r["rules"]) or "not known"
        sizes = shape(r["shape"])
        alike.setdefault((_stem(r["name"], each=each), sizes, rule, state), []).append(r)
    rows = [
        (name, _times(listed), sizes, rule, size(sum(r["state_bytes"] for r in listed), "B"), state)
        for (name, sizes, rule, state), listed in alike.items()
    ]
    yield table({"parameter": "bold", " ": ">dim", "shape": ".", "rule": "cyan", "state": ">", "entries": "dim"}, rows)
    yield from findings([f"left out, as it cannot be read: {checkpoint.lost}"] if checkpoint.lost else [])
