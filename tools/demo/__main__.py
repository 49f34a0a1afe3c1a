"""Train, save half-way, resume by name, train on, report."""

from __future__ import annotations

import sys
import time
from itertools import islice

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import compiled_optim as co

from . import checkpoint, data
from .modes import Stepper, compare
from .options import Options, parse
from .report import Report
from .timing import median_step_times
from .training import History, Training, accuracy

COMPARED_STEPS = 40


def run(options: Options, console: Console) -> Report:
    """Do what ``options`` ask for; the checkpoint goes to the output folder."""
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    train, test = data.load()
    steps = options.epochs * data.batches_per_epoch(train)
    batches = data.batches(train, options.epochs, torch.Generator().manual_seed(options.seed))
    history = History()
    path = options.out / "checkpoint.pt"
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))

        def advance(loss: float) -> None:
            progress.update(task, advance=1, loss=loss)

        first = Training(steps)
        first.run(islice(batches, steps // 2), history, advance, Stepper(first, options.mode))
        checkpoint.save(first, path)
        second, resumption = checkpoint.resume(path, steps)
        second.run(batches, history, advance, Stepper(second, options.mode))
    some = list(islice(data.batches(train, options.epochs + 2, torch.Generator().manual_seed(0)), COMPARED_STEPS))
    return Report(
        seed=options.seed,
        epochs=options.epochs,
        mode=options.mode,
        test_accuracy=accuracy(second.model, test),
        minimum_accuracy=options.minimum_accuracy,
        compilations=(co.compile_report(first.optimizer), co.compile_report(second.optimizer)),
        resumption=resumption,
        modes=tuple(compare(some, options.compare)) if options.compare else (),
        step_seconds=median_step_times(second.model, data.Images(*(t[: data.BATCH_SIZE] for t in train))),
        seconds=time.perf_counter() - started,
        history=history,
    )


def main() -> int:
    """The exit status: 1 if the model did not become good enough."""
    options = parse(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    report = run(options, console)
    report.write_json(options.out / "report.json")
    report.write_picture(options.out / "training.png")
    console.print(report.table())
    console.print(f"report.json, training.png and checkpoint.pt are in {options.out.resolve()}")
    if report.test_accuracy < options.minimum_accuracy:
        shortfall = f"test accuracy {report.test_accuracy:.2f} % is below the minimum of {options.minimum_accuracy:g} %"
        print(f"tools/run: {shortfall}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
