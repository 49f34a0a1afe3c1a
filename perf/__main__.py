"""The command line: ``python -m perf``, with one of the commands that ``--help`` lists."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from perf import checks, distributed, first_step, gates, loops, results, train, workspaces
from perf.budget import Deadline
from perf.changed import measure_changed
from perf.competitors import FUSED, OURS, PEERS, end_mesh, entered, optimizers
from perf.compiled_steps import measure_compiled_step, measure_training_step
from perf.convergence import SEEDS, TASKS, measure_convergence
from perf.host_time import measure_host_time
from perf.hybrid import RATES, measure_hybrid
from perf.interrupts import postponed
from perf.low_memory import measure_low_memory
from perf.measure import dtype_name, measure_bandwidth, measure_overhead, measure_step
from perf.results import Row
from perf.schedulers import measure_schedulers
from perf.workloads import TINY, WORKLOADS, shapes

REHEARSAL = {"workload": [TINY], "rounds": 2, "tries": 1, "competitors": [OURS, FUSED]}
"""The arguments that ``--rehearse`` sets instead of others. Competitors that were named stay."""

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    args = _parser().parse_args(arguments)
    if args.rehearse:
        requested = getattr(args, "competitors", None)
        vars(args).update(REHEARSAL | ({"competitors": requested} if requested else {}))
    if args.threads:
        torch.set_num_threads(args.threads)
    args.deadline = Deadline(args.seconds)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


FAILED = (checks.failed, workspaces.failed, train.failed, distributed.failed, results.says_failure)
"""Functions that return whether a row is a failure, with which the command fails too."""

Measured: TypeAlias = Iterable[list[Row]]
"""Rows as soon as there are some."""


def _saved(measure: Callable[[argparse.Namespace], Measured], title: str, *, alone: bool = True) -> Callable[..., int]:
    """Return a command that shows and saves rows as soon as they are measured, even if it is interrupted.

    Args:
        measure: yields the rows.
        title: the title of a table.
        alone: warn if other work runs on this machine.
    """

    def run(args: argparse.Namespace) -> int:
        if alone:
            _warn_if_busy()
        has_failed = False
        try:
            with postponed():
                for rows in measure(args):
                    if rows:
                        where = f"{results.device_name(args.device)}, {torch.get_num_threads()} threads"
                        results.show(rows, f"{title} on {where}")
                        _save(rows, args)
                    has_failed |= any(failed(row) for row in rows for failed in FAILED)
        finally:
            end_mesh()
        return 1 if has_failed else 0

    return run


def _step(args: argparse.Namespace) -> Measured:
    for workload in args.workload:
        entrants, reasons = entered(args.optimizer, args.competitors, len(shapes(workload)))
        options = {"rounds": args.rounds, "reasons": reasons, "deadline": args.deadline}
        yield from measure_step(workload, args.optimizer, entrants, args.device, **options)


def _first_step(args: argparse.Namespace) -> Measured:
    names = args.competitors or first_step.COMPETITORS
    return first_step.measure_first_step(args.workload, args.optimizer, names, args.device, repeats=args.rounds)


def _overhead(args: argparse.Namespace) -> Measured:
    for workload in args.workload:
        yield from measure_overhead(workload, args.optimizer, rounds=args.rounds)
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: no step of a GPU is timed", file=sys.stderr)
        return
    for workload in args.workload:
        yield from measure_host_time(workload, args.optimizer, rounds=args.rounds, against=args.against)


def _schedulers(args: argparse.Namespace) -> Measured:
    return measure_schedulers(args.optimizer, args.device, rounds=args.rounds)


def _bandwidth(args: argparse.Namespace) -> Measured:
    for workload, dtype in itertools.product(args.workload, args.dtype):
        yield from measure_bandwidth(workload, args.optimizer, args.device, dtype=DTYPES[dtype], rounds=args.rounds)


def _changed(args: argparse.Namespace) -> Measured:
    for workload in args.workload:
        yield from measure_changed(workload, args.device, rounds=args.rounds, deadline=args.deadline)


def _low_memory(args: argparse.Namespace) -> Measured:
    for workload in args.workload:
        yield from measure_low_memory(workload, args.device, rounds=args.rounds, deadline=args.deadline)


def _training_step(args: argparse.Namespace) -> Measured:
    return measure_training_step(args.device, rounds=args.rounds, names=args.competitors, deadline=args.deadline)


def _compiled_step(args: argparse.Namespace) -> Measured:
    options = {"rounds": args.rounds, "modes": args.modes, "deadline": args.deadline}
    for workload in args.workload:
        yield from measure_compiled_step(workload, args.device, **options)


def _convergence(args: argparse.Namespace) -> Measured:
    steps, seeds = (4, SEEDS[:2]) if args.rehearse else (args.steps, SEEDS)
    for task in args.task:
        yield from measure_convergence(task, steps=steps, seeds=seeds)


def _hybrid(args: argparse.Namespace) -> Measured:
    few = {"seeds": [0], "rates": RATES[:1]} if args.rehearse else {}
    picture = None if args.no_save else args.results / "hybrid.png"
    return measure_hybrid("text", steps=4 if args.rehearse else args.steps, picture=picture, **few)


def _loops(args: argparse.Namespace) -> Measured:
    for size in ["tiny"] if args.rehearse else args.model:
        yield from loops.measure_loops(size, args.device, rounds=args.rounds, deadline=args.deadline)


def _train(args: argparse.Namespace) -> Measured:
    for model in ["small"] if args.rehearse else args.model:
        yield from train.measure_training(model, args.device, deadline=args.deadline)


def _distributed(args: argparse.Namespace) -> Measured:
    if args.rehearse:
        args.device = torch.device("cpu")  # so that processes need no GPUs
    options = {"processes": args.processes, "layouts": args.layouts, "deadline": args.deadline}
    return distributed.measure_distributed(args.device, size="small" if args.rehearse else args.model, **options)


def _host(args: argparse.Namespace) -> Measured:
    for workload in args.workload:
        yield from checks.measure_host(workload, args.device, rounds=args.rounds)


def _kernels(args: argparse.Namespace) -> Measured:
    for workload in args.workload:
        others = args.competitors or [FUSED]
        yield from checks.measure_kernels(workload, args.optimizer, others, args.device, rounds=args.rounds)


def _checks(args: argparse.Namespace) -> Measured:
    count, steps = (3 * checks.WINDOW, 20) if args.rehearse else (checks.HUGE, args.steps)
    calls = {
        "long": lambda: checks.long_run(args.device, steps),
        "huge": lambda: checks.huge(args.device, count),
        "sanitized": lambda: checks.sanitized(args.device),
        **{mode: functools.partial(workspaces.measure, mode, args.device) for mode in workspaces.MODES},
    }
    for name in args.only:
        yield from calls[name]()


def _gates(args: argparse.Namespace) -> int:
    _warn_if_busy()
    promised = (gates.rehearsal if args.rehearse else gates.checks)(args.device, lambda rows: _save(rows, args, quiet=True))
    with postponed():
        verdicts = gates.judge([check for check in promised if check.benchmark in args.only], args.tries)
    gates.show(verdicts)
    return 0 if args.rehearse or all(verdict.kept for verdict in verdicts) else 1


def _report(args: argparse.Namespace) -> int:
    from perf import report  # matplotlib is needed here only

    try:
        report.write(args.results, args.optimizer, args.device, 2 if args.rehearse else args.steps, args.output)
    except report.RedTestsError as error:
        print(error, file=sys.stderr)
        return 1
    print(args.output)
    return 0


def _warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        message = f"load average {load:.1f} on {cores} cores: other work runs here, and slows the timed steps"
        print(message, file=sys.stderr)


def _save(rows: Sequence[Row], args: argparse.Namespace, *, quiet: bool = False) -> None:
    if rows and not args.no_save:
        for path in results.append(rows, args.device, args.results):
            if not quiet:
                print(f"appended to {path}")


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--results", type=Path, default=results.RESULTS, help="the directory of the tables")
    common.add_argument("--no-save", action="store_true", help="do not append to the tables")
    common.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    common.add_argument("--rehearse", action="store_true", help="tiny tensors and two rounds, to see that the command works")
    common.add_argument("--threads", type=int, help="torch.set_num_threads")
    common.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="limit: nothing begins after it, nor what would probably exceed it",
    )
    optimizer = argparse.ArgumentParser(add_help=False)
    optimizer.add_argument("--optimizer", choices=[*sorted(optimizers()), "muonadamw"], default="adamw")

    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: object, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, parents=[common, *parents])
        made.set_defaults(run=run)
        return made

    def workloads(made: argparse.ArgumentParser, default: Sequence[str]) -> None:
        made.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(default))

    def competitors(made: argparse.ArgumentParser, default: str) -> None:
        made.add_argument("--competitors", nargs="+", choices=list(PEERS), default=[], help=f"default: {default}")

    step = command("step", _saved(_step, "step"), "time steps of all competitors, in turn in one process", optimizer)
    workloads(step, ["small-148"])
    step.add_argument("--rounds", type=int, default=101)
    competitors(step, "all that have it")

    first = command(
        "first-step",
        _saved(_first_step, "construction and first step, in a new process each,"),
        "time construction and first step in new processes",
        optimizer,
    )
    workloads(first, first_step.WORKLOADS)
    first.add_argument("--rounds", type=int, default=3)
    competitors(first, ", ".join(first_step.COMPETITORS))

    overhead = command(
        "overhead",
        _saved(_overhead, "Python per step"),
        "time the Python part of a step, on the CPU and for a GPU",
        optimizer,
    )
    workloads(overhead, ["small-10", "small-148", "small-1000"])
    overhead.add_argument("--rounds", type=int, default=101)
    overhead.add_argument("--against", type=Path, help="another checkout, whose steps for GPUs are timed in turn with these")

    schedulers = command(
        "schedulers", _saved(_schedulers, "scheduler step"), "time a step of torch's schedulers over many groups", optimizer
    )
    schedulers.add_argument("--rounds", type=int, default=21)

    bandwidth = command(
        "bandwidth", _saved(_bandwidth, "bandwidth"), "compare the bandwidth of a step with a copy's", optimizer
    )
    workloads(bandwidth, ["half-billion"])
    bandwidth.add_argument("--rounds", type=int, default=21)
    bandwidth.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["float32"], help="of the parameters")

    low = command(
        "low-memory",
        _saved(_low_memory, "low precision"),
        "time steps of low precision beside torch's on float32, and count bytes",
    )
    workloads(low, ["gpt2-124m"])
    low.add_argument("--rounds", type=int, default=21)

    changed = command(
        "changed", _saved(_changed, "tracked changes"), "time steps that track changed weights, and count bytes of changes"
    )
    workloads(changed, ["30-million"])
    changed.add_argument("--rounds", type=int, default=201)

    training = command(
        "training-step",
        _saved(_training_step, "compiled training step"),
        "time a training step that is compiled as one graph",
    )
    training.add_argument("--rounds", type=int, default=201)
    competitors(training, "all that have AdamW")

    compiled = command(
        "compiled-step",
        _saved(_compiled_step, "compiled step"),
        "time compiled steps, with the compiler's CUDA graphs on a GPU too",
    )
    workloads(compiled, ["small-10"])
    compiled.add_argument("--rounds", type=int, default=51)

    compiled.add_argument(
        "--modes", nargs="+", default=[], help="of torch.compile; default: default, on a GPU reduce-overhead"
    )

    looped = command(
        "loops", _saved(_loops, "training loops", alone=False), "time training loops of GPTs: eager, compiled, captured"
    )
    looped.add_argument("--model", nargs="+", choices=list(loops.SIZES), default=["small", "gpt2"])
    looped.add_argument("--rounds", type=int, default=31)

    trained = command(
        "train", _saved(_train, "training"), "train a GPT from random weights in every way; exit status 1 if losses differ"
    )
    trained.add_argument("--model", nargs="+", choices=list(train.MODELS), default=["gpt2"], help="small: for a CPU")

    spread = command(
        "distributed",
        _saved(_distributed, "training on several processes", alone=False),
        "train on several processes with nccl, or gloo on a CPU; exit status 1 if parameters are not those of one process",
    )
    spread.add_argument("--processes", nargs="+", type=int, default=[2, 4], help="on a GPU each")
    spread.add_argument("--layouts", nargs="+", choices=list(distributed.LAYOUTS), default=list(distributed.LAYOUTS))
    spread.add_argument("--model", choices=list(distributed.SIZES), default="large")

    hosted = command(
        "host",
        _saved(_host, "until the call returns,", alone=False),
        "time until the call of a step returns: called, captured, torch's",
    )
    workloads(hosted, ["tiny-10", "small-148", "small-1000", "gpt2-124m"])
    hosted.add_argument("--rounds", type=int, default=51)

    listed = command(
        "kernels",
        _saved(_kernels, "kernels", alone=False),
        "list the kernels of a step with their times, and its bandwidth",
        optimizer,
    )
    workloads(listed, ["gpt2-124m", "small-1000"])
    competitors(listed, FUSED)
    listed.add_argument("--rounds", type=int, default=10)

    checked = command(
        "checks",
        _saved(_checks, "checks", alone=False),
        "huge tensors, long captured runs, compute-sanitizer; exit status 1 if bits differ",
    )
    names = ["long", "huge", "sanitized"]
    checked.add_argument("--only", nargs="+", choices=[*names, *workspaces.MODES], default=names)
    checked.add_argument("--steps", type=int, default=10000, help="of the long run")

    ends = command(
        "convergence",
        _saved(_convergence, "losses at the end of training", alone=False),
        "compare the ends of training with low precision and in float32",
    )
    ends.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    ends.add_argument("--steps", type=int, default=220)

    both = command(
        "hybrid",
        _saved(_hybrid, "losses of AdamW and of MuonAdamW, each with its best learning rate,", alone=False),
        "compare the losses of AdamW and MuonAdamW, learning rates tuned on both sides",
    )
    both.add_argument("--steps", type=int, default=400)

    checked = command("gates", _gates, "check the promised numbers; exit status 1 if one is missed")
    benchmarks = ["step", "bandwidth", "first-step", "overhead", "schedulers"]
    checked.add_argument("--only", nargs="+", choices=benchmarks, default=benchmarks, help="the promises about these")
    checked.add_argument("--tries", type=int, default=gates.TRIES, help="how often to measure after a missed limit")
    told = command("report", _report, "write one HTML page of all tables, and of a training loop")
    told.add_argument(
        "--optimizer", nargs="+", choices=sorted(optimizers()), default=["adamw"], help="optimizers; their tests must pass"
    )
    told.add_argument("--steps", type=int, default=200, help="of the training loop")
    told.add_argument("--output", type=Path, default=Path("report.html"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
