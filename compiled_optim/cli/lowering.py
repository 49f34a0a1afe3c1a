"""Show the kernels, launches, bytes and registers of a step on a GPU, without a GPU.

Triton compiles the kernels and its assembler counts registers and spills; nothing runs. With "--arch cpu" the kernels are
C++, which is compiled and run here. Shapes are gpt2 (148 tensors), vit-tiny (152 tensors), or your own: "768x3072,768" is
two tensors, and "4096*100" a hundred. Seconds are processor time of the first step; compiled kernels may come from a cache.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import compiled_optim as co
from compiled_optim.cli.optimizer import created, optimizer_arguments
from compiled_optim.cli.output import needed, show, size, table

if TYPE_CHECKING:
    from compiled_optim.simulated.step import SimulatedStep

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "cpu")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("optimizer", nargs="?", default="adamw", metavar="OPTIMIZER", help="adamw by default")
    parser.add_argument("--shapes", default="gpt2", metavar="SHAPES", help="gpt2 by default, vit-tiny, or 768x3072,768*12")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90", help="sm_90 by default")
    parser.add_argument("--source", action="store_true", help="print the kernels, and nothing else")
    optimizer_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Lower a step and show it."""
    sizes, dtype = _parsed_shapes(options.shapes), options.dtype or "float32"

    def make() -> co.CompiledOptimizer:
        made = (torch.empty(each, dtype=getattr(torch, dtype), requires_grad=True) for each in sizes)
        params = {f"layer{i}.weight": param for i, param in enumerate(made)}
        return created(options.optimizer, params, options.set)

    simulated = lowered(make, options.arch)
    elements = sum(map(math.prod, sizes))
    records = {
        "optimizer": options.optimizer,
        "arch": options.arch,
        "dtype": dtype,
        "tensors": len(sizes),
        "parameters": elements,
        "lowering": co.compile_report(simulated.optimizer).lowering,
        "launches": simulated.launches,
        "operators": simulated.operators,
        "bytes_per_parameter": simulated.bytes_per_parameter,
        "seconds": simulated.seconds,
        "kernels": [k._asdict() | {"resources": k.resources._asdict()} for k in simulated.kernels],
        "sources": simulated.sources,
    }
    if options.source and not options.json:
        print(*simulated.sources, sep="\n\n")
        return 0
    show(options, records, lambda: _drawn(simulated, records))
    return 0


def lowered(make: Any, arch: str) -> SimulatedStep:
    """Simulate a step of the optimizer that ``make`` returns, on one of :data:`ARCHITECTURES`."""
    if arch != "cpu":
        needed("triton", "compiling for a GPU", "triton")
    from compiled_optim.simulated.step import simulated_step

    return simulated_step(make, None if arch == "cpu" else int(arch[3:]))


def _parsed_shapes(source: str) -> list[tuple[int, ...]]:
    """Return the shapes of a model's name, or of a list such as ``768x3072,768*12``."""
    from compiled_optim.simulated.shapes import MODELS

    if source in MODELS:
        return MODELS[source]()
    shapes: list[tuple[int, ...]] = []
    for part in source.split(","):
        sizes, _, count = part.partition("*")
        numbers = [*sizes.split("x"), count or "1"]
        if not all(number.strip().isdecimal() and int(number) for number in numbers):
            raise ValueError(f"--shapes must be {', '.join(MODELS)}, or such as 768x3072,768*12; got {part!r}")
        shapes += [tuple(map(int, numbers[:-1]))] * int(numbers[-1])
    return shapes


def _drawn(simulated: SimulatedStep, records: dict[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    kind = type(simulated.optimizer).__name__
    head = f"{kind} on {records['arch']}: {records['tensors']:,} tensors, {size(records['parameters'])} {records['dtype']}"
    yield Text(f"{head} parameters", style="bold")
    traffic = records["bytes_per_parameter"]
    rows = [
        ("lowering", records["lowering"], "how the step runs"),
        ("kernel launches", records["launches"], "per step, for any number of tensors" if simulated.launches < 5 else ""),
        ("torch operators", records["operators"], "per step, on the device"),
        *([] if traffic is None else [("bytes/parameter", f"{traffic:.2f}", "read and written by a step")]),
        ("first step", f"{simulated.seconds:.2f} s", "of processor time, with compiling"),
    ]
    yield table({"": "bold", " ": ">cyan", "  ": "dim"}, rows)
    if simulated.kernels:
        kernels = [
            (
                k.name,
                k.launches,
                "" if k.bytes_per_param is None else f"{k.bytes_per_param:.2f}",
                k.resources.registers,
                k.resources.spills,
                size(k.resources.shared, "B"),
                " ".join(k.widths),
            )
            for k in simulated.kernels
        ]
        columns = dict.fromkeys(("launches", "bytes", "registers", "spills", "shared"), ">")
        caption = "Bytes for each parameter. Registers of a thread. Spills in bytes. --source prints the kernels."
        yield table({"kernel": ".bold", **columns, "accesses": ""}, kernels, title="Triton kernels", caption=caption)
    elif simulated.sources:
        yield Text(f"C++ kernels: {len(simulated.sources)}; --source prints them.", style="dim")
