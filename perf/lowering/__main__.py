"""The command ``tools/lowering``. Its parser needs only the standard library, since it runs before the installation."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perf.lowering.report import Report, Workload

PATH = Path(__file__).parents[1] / "results" / "lowering.csv"
LOWERINGS = ("multi_tensor", "operator", "inlined", "inductor", "torch")
LIMITS = {"operator": 148, "inlined": 148, "torch": 148}  # tensors above which compiling takes long, up to an hour
HIDDEN = ["workload", "arch", "uploads", "kernels", "sources", "shared", "accesses", "repeats"]  # on a terminal


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. --help and mistakes end the program."""
    parser = argparse.ArgumentParser(
        prog="tools/lowering",
        description="Show the code of one step of an optimizer on a GPU, without a GPU: graphs, launches, memory traffic, "
        "registers. Kernels are compiled by Triton and its assembler; nothing is run.",
    )
    shapes = "equal: 4096 elements each; mixed: four shapes in turn; gpt2: GPT-2 small's 148"
    lowerings = """multi_tensor, inductor: called as usual; operator, inlined: these two inside a function that is compiled
        whole with torch.compile; torch: torch.optim, foreach, compiled; auto: the only one of optimizers that are not
        elementwise"""
    repeats = "number of times to compile each lowering, in turn; the report has medians of the times"
    parser.add_argument("optimizer", type=str.lower, nargs="?", default="adamw", help="an optimizer of the package")
    parser.add_argument("--workload", type=int, choices=(10, 148, 1000, 20000), default=10, help="tensors")
    parser.add_argument("--shapes", choices=("equal", "mixed", "gpt2"), default="equal", help=shapes)
    parser.add_argument("--groups", type=int, choices=(1, 8), default=1)
    parser.add_argument("--arch", choices=("sm_80", "sm_90", "sm_100"), default="sm_90")
    parser.add_argument("--lowering", choices=(*LOWERINGS, "auto", "all"), nargs="+", default=["all"], help=lowerings)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clip", action="store_true", help="with max_grad_norm")
    parser.add_argument("--repeats", type=int, default=1, help=repeats)
    parser.add_argument("--source", action="store_true", help="print the kernels too")
    parser.add_argument("--save", action="store_true", help="append to perf/results/lowering.csv")
    return parser.parse_args(arguments)


def main() -> int:
    """Lower the requested steps, and print them. Return the exit status."""
    args = parse(sys.argv[1:])
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # so that the times are of all that compiles
    import torch

    from perf.competitors import exported
    from perf.lowering.report import Workload, elementwise

    if args.optimizer not in exported():
        print(f"no optimizer is called {args.optimizer}; choose one of {', '.join(exported())}", file=sys.stderr)
        return 2
    if args.shapes == "gpt2" and args.workload != 148:
        print("GPT-2 has 148 tensors: --workload 148", file=sys.stderr)
        return 2
    torch._logging.set_logs(dynamo=40)
    options, dtype = (("max_grad_norm", 1.0),) if args.clip else (), getattr(torch, args.dtype)
    workload = Workload(args.optimizer, args.workload, args.groups, dtype, options=options, shapes=args.shapes)
    lowerings, skipped = args.lowering, {}
    if lowerings == ["all"]:
        lowerings = LOWERINGS if args.optimizer in elementwise() else ["auto"]
        advice = "not run: compiling more than {} tensors takes long; ask with --lowering {}"
        slow = [name for name in lowerings if args.workload > LIMITS.get(name, sys.maxsize)]
        skipped = {name: advice.format(LIMITS[name], name) for name in slow}
    reports = _reports(lowerings, workload, int(args.arch[3:]), args.repeats, skipped)
    _show(reports, args.repeats, save=args.save)
    for name, reason in skipped.items():
        print(f"{name}: {reason}")
    for report in reports if args.source else []:
        print(*(f"\n# {report.lowering}\n{source}" for source in report.sources), sep="\n")
    return 0 if reports else 1


def _reports(lowerings: Sequence[str], workload: Workload, arch: int, repeats: int, skipped: dict[str, str]) -> list[Report]:
    """Lower ``workload`` with each lowering. Add the reasons of those that fail to ``skipped``.

    With ``repeats`` every lowering has that number of turns, and one more in which calls are counted. Each turn is a process
    of its own, forked from this one after a small workload of another optimizer has loaded the compilers: then no time
    contains this work, and none depends on what was compiled before.
    """
    from perf.lowering import report

    lower = functools.partial(report.lower, arch=arch, stand_in=workload.tensors > 1000)
    another = "adam" if workload.optimizer == "sgd" else "sgd"
    results: dict[str, list[Report]] = {name: [] for name in lowerings}
    for index in range(-1, repeats + 1) if repeats > 1 else [0]:
        lowered = workload if index >= 0 else replace(workload, optimizer=another, tensors=2, shapes="equal", options=())
        run = functools.partial(in_a_fork, lower) if repeats > 1 and index >= 0 else lower
        for name in lowerings if index % 2 == 0 else reversed(lowerings):
            if name in skipped:
                continue
            try:
                result = run(name, lowered, counted=index == repeats)
                results[name] += [result] if index >= 0 else []
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                skipped[name] = str(error).partition("\n")[0]
    found = [same for same in results.values() if same]
    return [replace(same[-1], seconds=median(r.seconds for r in same[: max(1, repeats)])) for same in found]


def in_a_fork(function: Callable[..., Report], *arguments: Any, **options: Any) -> Report:
    """Call ``function`` in a process that is forked from this one and has empty caches."""
    with tempfile.TemporaryDirectory(prefix="perf-") as folder:
        caches = {name: str(Path(folder, name)) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        with ProcessPoolExecutor(1, get_context("fork"), os.environ.update, (caches,)) as pool:
            return pool.submit(function, *arguments, **options).result()


def _show(reports: Sequence[Report], repeats: int, *, save: bool) -> None:
    """Print one column per report and one row per kernel. Append the reports to the table, with versions."""
    import pandas as pd
    import triton

    from perf import results

    if not reports:
        return
    integers = dict.fromkeys(("registers", "shared", "partitions", "copied"), "Int64")  # some are absent
    steps = pd.DataFrame([_row(r, repeats) for r in reports]).astype({"bytes_per_param": float, **integers})
    work = reports[0].workload
    tensors = f"{work.tensors} tensors ({work.shapes} shapes), {work.groups} groups"
    title = f"{work.optimizer}, {tensors}, {steps['dtype'][0]}, {reports[0].arch}"
    shown = steps.drop(columns=[*vars(work), *HIDDEN]).dropna(axis="columns", how="all").set_index("lowering").T
    results.show_table(shown.rename_axis(columns=None).reset_index(names="one step"), title)  # a terminal is not that wide
    if kernels := [{"lowering": r.lowering, **k._asdict(), **k.resources._asdict()} for r in reports for k in r.kernels]:
        results.show_table(pd.DataFrame(kernels).drop(columns=["resources", "extern", "barriers"]), "Triton kernels")
    if save:
        table = results.stamp(steps.round({"bytes_per_param": 3, "seconds": 2}).assign(triton=triton.__version__))
        results.append_table(table[pd.read_csv(results.RESULTS / PATH.name, nrows=0).columns], PATH)


def _row(report: Report, repeats: int) -> dict[str, Any]:
    """Return a report's entries, with figures of all kernels: most registers, sum of spills, widths of accesses."""
    kernels = report.kernels
    return {
        **vars(report.workload),
        **vars(report),
        "dtype": str(report.workload.dtype).removeprefix("torch."),
        "options": " ".join(f"{name}={value}" for name, value in report.workload.options),
        "registers": max((k.resources.registers for k in kernels), default=None),
        "spills": sum(k.resources.spills for k in kernels),
        "shared": max((k.resources.shared for k in kernels), default=None),
        "accesses": " ".join(sorted({width for k in kernels for width in k.widths})),
        "repeats": repeats,
    }


if __name__ == "__main__":
    sys.exit(main())
