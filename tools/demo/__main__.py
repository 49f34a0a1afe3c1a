"""Train in one mode after the other, each time resumed by name, and report."""

from __future__ import annotations

import copy
import logging
import sys
import time
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.optim import AdamW

import compiled_optim as co

from . import digits
from .options import MODES, parse
from .training import Training


def step_seconds(model: nn.Module, rounds: int = 100) -> dict[str, float]:
    """Return the median time of a step by optimizer. They take turns, so that a busy machine slows all of them."""
    makers = {"compiled_optim.AdamW": co.AdamW, "torch.optim.AdamW": AdamW}
    makers |= {f"torch.optim.AdamW({how}=True)": partial(AdamW, **{how: True}) for how in ("foreach", "fused")}
    optimizers = {name: make(digits.parameter_groups(copy.deepcopy(model))) for name, make in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else int
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.full_like(parameter, 1e-3)  # in new memory each time, as after backward
            wait()
            started = time.perf_counter()
            optimizer.step()
            wait()
            seconds[name].append(time.perf_counter() - started)
    return {name: median(taken[rounds // 10 :]) for name, taken in seconds.items()}


def main() -> None:
    """Print the report. Exit with 1 if the accuracy is below the minimum."""
    started = time.perf_counter()
    options, console = parse(sys.argv[1:]), Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    modes = options.modes or [mode for mode in MODES if device == "cuda" or mode != "captured"]
    if device == "cpu" and "captured" in modes:
        sys.exit("tools/run: captured needs a CUDA device, and there is none")
    torch._logging.set_logs(all=logging.ERROR)  # Dynamo warns that it leaves out the profiler's marks
    torch._dynamo.config.trace_autograd_ops = True  # without it Dynamo does not trace backward
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    images, (pixels, expected) = digits.load()
    steps = options.epochs * digits.batches_per_epoch(images)
    training, legs = Training(len(modes) * steps, device), []
    for mode in modes:
        batches = digits.batches(images, options.epochs, generator)
        said = mode if mode == "eager" else f"{mode} (the first step compiles)"
        shown = track(batches, said, steps, console=console, transient=True, disable=not console.is_terminal)
        legs.append(training.run(mode, shown))
        training = training.resumed()
    with torch.no_grad():
        guesses = training.model.eval()(pixels.to(device)).argmax(dim=1).cpu()
    accuracy = 100 * (guesses == expected).double().mean().item()

    times = step_seconds(training.model)
    title = f"compiled_optim on handwritten digits, {time.perf_counter() - started:.0f} s on {device}"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_row("test accuracy", f"{accuracy:.2f} % (minimum {options.min_accuracy:g} %)")
    table.add_row("loss of the first and the last batch", f"{legs[0].losses[0]:.3f} -> {legs[-1].losses[-1]:.3f}")
    table.add_row("resumed by name", f"after steps {', '.join(str(steps * (turn + 1)) for turn in range(len(modes)))}")
    table.add_section()
    table.add_row("training step", "median, first; no recompiles")
    for leg in legs:
        table.add_row(leg.mode, f"{1e3 * median(leg.seconds):.1f} ms, {leg.seconds[0]:.2g} s")
    table.add_section()
    table.add_row("optimizer step", "median")
    for name, taken in times.items():
        table.add_row(name, f"{1e6 * taken:.0f} µs, {taken / min(times.values()):.1f} times the least")
    console.print(table)
    if accuracy < options.min_accuracy:
        sys.exit(f"tools/run: the test accuracy of {accuracy:.2f} % is below the minimum of {options.min_accuracy:g} %")


if __name__ == "__main__":
    main()
