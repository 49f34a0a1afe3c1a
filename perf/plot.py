"""Charts from the tables of measurements."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pandas as pd

from perf.competitors import OURS
from perf.results import RESULTS


def latest(table: pd.DataFrame) -> pd.DataFrame:
    """The last row of every quantity on every device, in the order of the file."""
    return table.drop_duplicates(["workload", "optimizer", "competitor", "metric", "device", "threads"], keep="last")


def plot_ratios(directory: Path = RESULTS) -> list[Path]:
    """Draw the ratios of the step benchmark, one picture per optimizer and device, and return the files written."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = latest(pd.read_csv(directory / "step.csv"))
    steps = steps[(steps["metric"] == "step, fresh gradients") & ~steps["competitor"].str.startswith(OURS)]
    written = []
    for (optimizer, device, threads), part in steps.groupby(["optimizer", "device", "threads"], sort=False):
        ratios = part.pivot(index="workload", columns="competitor", values="ratio")
        axes = ratios.plot.bar(figsize=(9, 4.5), rot=0)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xlabel("")
        axes.set_ylabel(f"{OURS} / competitor, median step times")
        axes.set_title(f"{optimizer}, {device}, {threads} threads: below 1 is faster than the competitor", fontsize=10)
        slug = "".join(c if c.isalnum() else "-" for c in f"{optimizer} {device} {threads}".lower())
        path = directory / f"step-{slug}.png"
        axes.figure.savefig(path, dpi=150, bbox_inches="tight")
        plt.close(axes.figure)
        written.append(path)
    return written
