"""What a run leaves behind: a table for the terminal, a JSON file and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from compiled_optim import CompileReport

from .checkpoint import Resumption
from .modes import ModeResult
from .timing import OURS
from .training import History


@dataclass(frozen=True)
class Report:
    """The results of a run; accuracies are percentages.

    Attributes:
        mode: how the training steps were run.
        compilations: one report for each of the run's optimizers: before and after the resumption.
        modes: the ways to run a training step, compared.
        step_seconds: the median time of a step by optimizer.
        seconds: the time that all of it took, imports aside.
    """

    seed: int
    epochs: int
    mode: str
    test_accuracy: float
    minimum_accuracy: float
    compilations: tuple[CompileReport, ...]
    resumption: Resumption
    modes: tuple[ModeResult, ...]
    step_seconds: dict[str, float]
    seconds: float
    history: History

    @property
    def compiles(self) -> int:
        """How many kernels were compiled."""
        return sum(c.compiles for c in self.compilations)

    @property
    def recompiles(self) -> int:
        """How many of them after an optimizer's first step."""
        return sum(c.recompiles for c in self.compilations)

    @property
    def time_ratios(self) -> dict[str, float]:
        """How many times as long a step of each other optimizer takes."""
        return {name: taken / self.step_seconds[OURS] for name, taken in self.step_seconds.items() if name != OURS}

    def write_json(self, path: Path) -> None:
        """Write everything to ``path``."""
        derived = {"compiles": self.compiles, "recompiles": self.recompiles, "time_ratios": self.time_ratios}
        path.write_text(json.dumps({**asdict(self), **derived}, indent=2) + "\n")

    def table(self) -> Table:
        """The results for people."""
        last = self.compilations[-1]
        table = Table(title="compiled_optim on handwritten digits", show_header=False, title_justify="left")
        table.add_row("test accuracy", f"{self.test_accuracy:.2f} % (minimum {self.minimum_accuracy:g} %)")
        table.add_row("loss", f"{self.history.loss[0]:.3f} -> {self.history.loss[-1]:.3f}")
        table.add_row("steps", f"{len(self.history.loss)} in {self.epochs} epochs, {self.mode}, {last.lowering} lowering")
        seconds = sum(c.seconds for c in self.compilations)
        table.add_row("compiles", f"{self.compiles} ({seconds:.1f} s), {self.recompiles} recompiles")
        resumed = self.resumption
        table.add_row(
            "resumed by name",
            f"{len(resumed.names)} parameters after step {resumed.step}, {resumed.moved} of them at another position",
        )
        table.add_section()
        if self.modes:
            table.add_row("training step", "median")
        for m in self.modes:
            counts = f"{m.graphs} graphs, {m.kernels} kernels, {m.recompiles} recompiles, {m.captures} captures"
            table.add_row(m.mode, f"{1e3 * m.seconds:.1f} ms, first {m.first:.1f} s; {counts}")
        table.add_section()
        table.add_row("optimizer step", "median")
        for name, taken in self.step_seconds.items():
            ratio = f", {self.time_ratios[name]:.1f} times as long" if name in self.time_ratios else ""
            table.add_row(name, f"{1e6 * taken:.0f} µs{ratio}")
        table.add_section()
        table.add_row("run time", f"{self.seconds:.0f} s")
        return table

    def write_picture(self, path: Path) -> None:
        """Plot loss and learning rate over the steps to ``path``."""
        figure = Figure(figsize=(8, 6), layout="constrained")
        loss_axes, rate_axes = figure.subplots(2, sharex=True, height_ratios=[2, 1])
        figure.suptitle(f"Handwritten digits: {self.test_accuracy:.1f} % of the test images recognized")
        steps = np.arange(1, len(self.history.loss) + 1)
        epochs = steps.reshape(self.epochs, -1).mean(axis=1)
        losses = np.reshape(self.history.loss, (self.epochs, -1)).mean(axis=1)
        loss_axes.plot(steps, self.history.loss, color="C0", alpha=0.35, linewidth=0.8, label="each batch")
        loss_axes.plot(epochs, losses, color="C0", marker=".", label="mean of each epoch")
        loss_axes.set(ylabel="training loss", yscale="log")
        rate_axes.plot(steps, self.history.learning_rate, color="C1", label="learning rate")
        rate_axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None), xlim=(0, len(steps)))
        for axes in (loss_axes, rate_axes):
            axes.axvline(self.resumption.step, color="0.4", linestyle="--", linewidth=1, label="resumed by name")
            axes.grid(alpha=0.3)
            axes.legend(loc="upper right")
        figure.savefig(path, dpi=120)
