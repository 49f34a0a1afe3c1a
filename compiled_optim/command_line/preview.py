"""Draw a schedule: lr, momentum and decay over the steps.

SCHEDULE is a scheduler of torch with its arguments, such as "OneCycleLR(max_lr=3e-3, total_steps=500)". "A + B" runs A, then
B: A must say how many steps it takes, by total_iters, T_max or total_steps, or as "A[100] + B". "A * B" runs both together.
Arguments are plain values; nothing is evaluated. Each step of the optimizer is followed by one of the schedule.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from compiled_optim.command_line.parts.expressions import call, created, optimizer_arguments, parsed
from compiled_optim.command_line.parts.output import findings, needed, show, table, text

_LENGTHS = ("total_steps", "total_iters", "T_max", "T_0")  # arguments that say how many steps a scheduler takes
_COLOURS = {"lr": "cyan", "weight_decay": "yellow"}
_SIZE = (100, 14)  # the most columns of a picture, and its rows
_MOST = 10**6
_APART = {"LRScheduler", "_LRScheduler", "SequentialLR", "ChainedScheduler"}  # bases, and what + and * are for
_APART |= {"LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau"}  # of functions, and of losses


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("schedule", metavar="SCHEDULE", help='such as "CosineAnnealingLR(T_max=500)"')
    parser.add_argument("--steps", type=int, help="how many; by default what the schedule takes")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture into this file too")
    optimizer_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the schedule and draw it."""
    source = options.schedule
    node = parsed(source)
    steps = options.steps if options.steps is not None else _length(node) or 1000
    if not 0 < steps <= _MOST:
        raise ValueError(f"--steps must be in [1, {_MOST:,}], got {steps:,}")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = created(options.optimizer, model, options.set, lowering="eager")
    scheduler = _made(node, optimizer, source)
    curves: dict[str, list[float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's scheduler misses the optimizer's steps
        for step in range(steps):
            for name, value in _numbers(optimizer):
                curves.setdefault(name, []).append(value)
            if step + 1 < steps:
                try:
                    scheduler.step()
                except ArithmeticError as error:
                    raise ValueError(f"step {step + 1} of {source!r} fails: {error}") from error
    moving = {name: values for name, values in curves.items() if min(values) != max(values)}
    constant = {name: values[0] for name, values in curves.items() if name not in moving and name not in ("lr",)}
    moving = {"lr": curves["lr"], **moving}
    if options.png is not None:
        _save(moving, source, options.png)
    records = {"schedule": source, "optimizer": options.optimizer, "steps": steps}
    records |= {"groups": len(optimizer.param_groups), "curves": moving, "constant": constant}
    spoiled = [name for name, values in curves.items() if not all(map(math.isfinite, values))]
    show(options, records | {"not_finite": spoiled}, lambda: _drawn(records, options.png, spoiled))
    return 1 if spoiled else 0


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
    """The numbers of the first group that schedulers write, by name."""
    group: Mapping[str, Any] = optimizer.param_groups[0]
    for name in ("lr", "momentum", "betas", "weight_decay"):
        value = group.get(name)
        if isinstance(value, tuple):
            yield from ((f"beta{i}", float(each)) for i, each in enumerate(value, 1))
        elif value is not None:
            yield name, float(value)


def _made(node: ast.AST, optimizer: torch.optim.Optimizer, source: str) -> LRScheduler:
    """The scheduler that an expression describes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = _parts(node)
        lengths = [_length(part) for part in parts[:-1]]
        for part, length in zip(parts, lengths, strict=False):
            if not length:
                raise ValueError(f"{ast.unparse(part)} does not say how many steps it takes: write {ast.unparse(part)}[100]")
        if product := next((ast.unparse(part) for part in parts[1:] if isinstance(part, ast.BinOp)), None):
            raise ValueError(f"torch's SequentialLR cannot run {product} after another schedule: multiply the sum")
        ends = list(itertools.accumulate(length or 0 for length in lengths))
        return lr_scheduler.SequentialLR(optimizer, [_made(part, optimizer, source) for part in parts], ends)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return lr_scheduler.ChainedScheduler([_made(part, optimizer, source) for part in (node.left, node.right)], optimizer)
    if isinstance(node, ast.Subscript):
        node = node.value
    name, positional, named = call(node, source)
    known = {n: kind for n, kind in vars(lr_scheduler).items() if isinstance(kind, type) and issubclass(kind, LRScheduler)}
    if name not in known or name in _APART:
        raise ValueError(f"{name!r} is no scheduler that can be drawn; there are {', '.join(sorted({*known} - _APART))}")
    made: LRScheduler = known[name](optimizer, *positional, **named)
    return made


def _parts(node: ast.AST) -> list[ast.AST]:
    """What an expression adds."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_parts(node.left), *_parts(node.right)]
    return [node]


def _length(node: ast.AST) -> int | None:
    """How many steps an expression takes, if it says so."""
    if isinstance(node, ast.BinOp):
        lengths = [_length(part) for part in (node.left, node.right)]
        known = [length for length in lengths if length]
        is_sum = isinstance(node.op, ast.Add)
        return (sum(known) if is_sum else max(known)) if len(known) == 2 or (known and not is_sum) else None
    if isinstance(node, ast.Subscript):
        value = ast.literal_eval(node.slice) if isinstance(node.slice, ast.Constant) else None
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{ast.unparse(node)}: the brackets take a number of steps")
        return value
    name, positional, named = call(node, ast.unparse(node))
    if isinstance(kind := vars(lr_scheduler).get(name), type):
        named = inspect.signature(kind).bind_partial(None, *positional, **named).arguments
    if isinstance(named.get("epochs"), int) and isinstance(named.get("steps_per_epoch"), int):
        return int(named["epochs"] * named["steps_per_epoch"])
    return next((int(named[name]) for name in _LENGTHS if isinstance(named.get(name), int)), None)


def _drawn(records: dict[str, Any], png: Path | None, spoiled: Sequence[str]) -> Iterator[Any]:
    from rich.text import Text

    yield Text(f"{records['schedule']}  {records['steps']:,} steps of {records['optimizer']}", style="bold")
    if records["groups"] > 1:
        yield Text(f"the first of {records['groups']} groups", style="dim")
    for name, values in records["curves"].items():
        if name in spoiled:
            continue
        drawn = Text.from_ansi(_picture(name, values))
        drawn.highlight_regex("[\u2801-\u28ff]+", _COLOURS.get(name, "magenta"))
        yield drawn
    rows = []
    for name, values in records["curves"].items():
        peak, low = max(values), min(values)
        marks = (values[0], peak, values.index(peak), low, values.index(low), values[-1])
        rows.append((name, *(f"{n:.4g}" if isinstance(n, float) else n for n in marks)))
    heads = ("first", "highest", "at step", "lowest", "at step ", "last")
    held = ", ".join(f"{name} {text(value)}" for name, value in records["constant"].items())
    yield table({"": "bold", **dict.fromkeys(heads, ">")}, rows, caption=f"Constant: {held}." if held else "")
    yield from findings(f"not finite: {name}" for name in spoiled)
    if png is not None:
        yield Text(f"drawn into {png}", style="dim")


def _picture(name: str, values: Sequence[float]) -> str:
    """A curve, in characters and colours of a terminal."""
    plotext = needed("plotext", "a drawing")
    columns = min(_SIZE[0], needed("rich.console", "a drawing").Console().width)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(columns - 1, _SIZE[1])
    figure.title(name)
    figure.draw(figure.signal(list(range(len(values))), list(values), marker="braille"))
    low, high, last = min(values), max(values), len(values) - 1
    places = [low + (high - low) * i / 4 for i in range(5)] if low < high else [low]
    figure.ruler("y").ticks(places, [f"{place:.3g}" for place in places])
    spacing = next(10**power * digit for power in range(8) for digit in (1, 2, 5) if 10**power * digit * 6 > last)
    at = list(range(0, last + 1, spacing))
    figure.ruler("x").ticks(at, [f"{place:,}" for place in at])
    return str(figure.build())


def _save(curves: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Draw all curves into a file, one above the other."""
    figure = needed("matplotlib.figure", "a picture").Figure(figsize=(8, 1 + 2 * len(curves)), layout="constrained")
    axes = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, values) in zip(axes, curves.items(), strict=True):
        ax.plot(values, color="tab:blue", linewidth=1.8)
        ax.set_ylabel(name)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0)
    axes[0].set_title(title, fontsize=10)
    axes[-1].set_xlabel("step")
    if path.suffix.lower() != ".png":
        raise ValueError(f"--png takes a file that ends in .png, got {path}")
    figure.savefig(path, dpi=150)
