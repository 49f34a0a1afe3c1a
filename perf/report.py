"""One HTML page from the tables of measurements, and from a training loop that it runs: ``python -m perf report``."""

from __future__ import annotations

import html
import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.nn import functional

from perf import gates, results
from perf.competitors import FUSED, OURS, PEERS, competitor, exported
from perf.convergence import TASKS
from perf.results import NOT_RUN, Row
from perf.turns import in_turn
from perf.workloads import WORKLOADS, shapes

ROOT = Path(__file__).parents[1]
TESTS = "tests/optimizers/test_reference.py"
CONDITIONS = ["device", "threads", "torch", "commit"]
BARS = 24
"""The most bars in a picture: those of the shortest times."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>compiled_optim: measurements</title>
<style>
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 2px 10px; border-bottom: 1px solid #ddd; }
svg { max-width: 100%; height: auto; } figcaption { color: #555; margin-bottom: 2em; } figure { margin: 0; }
</style></head><body><h1>compiled_optim: measurements</h1>
{% for section in sections %}<h2>{{ section.title }}</h2><p>{{ section.text }}</p>
{% for picture, caption in section.pictures %}<figure>{{ picture | safe }}<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}{{ section.table | safe }}
{% endfor %}</body></html>
"""


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    text: str
    pictures: Sequence[tuple[str, str]] = ()  # SVG, and its caption with the conditions of the measurement
    table: str = ""  # HTML


class RedTestsError(Exception):
    """An optimizer's tests fail, so its speed is not reported."""


def write(directory: Path, optimizers: Sequence[str], device: torch.device, steps: int, path: Path) -> None:
    """Write the page about some optimizers, whose tests are run first.

    Raises:
        RedTestsError: the tests of one fail, or it has none.
    """
    check(optimizers)
    tables = {file.stem: results.read(file) for file in sorted(directory.glob("*.csv"))}
    page = jinja2.Environment(autoescape=True).from_string(PAGE)
    path.write_text(page.render(sections=list(sections(tables, optimizers, device, steps))))


def check(optimizers: Sequence[str]) -> None:
    """Run the tests that compare each optimizer with its reference.

    Raises:
        RedTestsError: the tests of one fail, or it has none.
    """
    for name in optimizers:
        command = [
            sys.executable,
            "-m",
            "pytest",
            TESTS,
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            exported()[name].__name__,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
            raise RedTestsError(f"no report: the tests of {name} in {TESTS} do not pass: {last}")


def sections(
    tables: dict[str, pd.DataFrame], optimizers: Sequence[str], device: torch.device, steps: int
) -> Iterator[Section]:
    """Yield the parts of the page. If a table is missing, its part has no picture."""
    none = pd.DataFrame(columns=results.COLUMNS)
    of = {
        name: latest(table[table["optimizer"].isin(optimizers)])
        for name, table in tables.items()
        if name not in ("lowering", "versions")
    }
    bandwidth, step, first, memory = (of.get(n, none) for n in ("bandwidth", "step", "first_step", "low_memory"))
    speeds = bandwidth[bandwidth["unit"] == "GB/s"]
    text = "Bytes that a step must move, by the time it takes; a copy counts what it reads and what it writes."
    yield Section("Bytes per second, against a copy", text, pictures(speeds, ["workload", "optimizer"], "metric", "GB/s"))
    times = step[step["metric"] == "step, fresh gradients"]
    text = "Medians of steps in turn, from the call until the device is done; each step gets its gradients in new tensors."
    yield Section(
        "Time of a step, by peer", text, pictures(times, ["workload", "optimizer"], "competitor", "ms"), remarks(step)
    )
    compiling = first[first["metric"] == "both, fresh cache"]
    yield Section(
        "Compiling: first steps by the number of tensors",
        "Seconds for construction and first step in a new process with an empty cache.",
        list(_lines(compiling)),
    )
    yield Section(
        "Bytes per parameter",
        "Of parameters, gradients, state and tables.",
        pictures(memory[memory["metric"] == "memory"], ["workload", "optimizer"], "competitor", "bytes/parameter"),
    )
    yield Section(
        "A training loop",
        "Run for this page: a small transformer on text, equal batches and first weights, steps in turn.",
        [loop for name in optimizers for loop in training_loops(name, device, steps)],
    )
    missed = pd.DataFrame(failures(tables, times), columns=["what", "limit", "measured", *CONDITIONS])
    yield Section(
        "What did not hold",
        "Promises that the latest measurements miss or that were not measured there, and steps slower than those of a peer.",
        table=missed.to_html(index=False, border=0) if len(missed) else "Everything held.",
    )


def latest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of every quantity on every device, in the order of the file."""
    return table.drop_duplicates(["workload", "optimizer", "competitor", "metric", "device", "threads"], keep="last")


def pictures(rows: pd.DataFrame, separate: list[str], label: str, unit: str) -> list[tuple[str, str]]:
    """Draw bars of medians: a picture for each device and each value of the columns ``separate``."""
    drawn = []
    for key, part in rows.groupby(["device", "threads", *separate], sort=False):
        part = part.dropna(subset="p50").sort_values("p50").head(BARS)
        if part.empty:
            continue
        figure = Figure(figsize=(9, 0.9 + 0.3 * len(part)))
        axes = figure.subplots()
        colors = ["tab:orange" if name.startswith(OURS) else "tab:blue" for name in part["competitor"]]
        axes.barh(part[label].tolist(), part["p50"], color=colors)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        drawn.append((_svg(figure), f"{', '.join(map(str, key[2:]))}. {conditions(part)}"))
    return drawn


def _lines(rows: pd.DataFrame) -> Iterator[tuple[str, str]]:
    for (_, _, optimizer), part in rows.groupby(["device", "threads", "optimizer"], sort=False):
        counted = part.assign(tensors=[len(shapes(w)) if w in WORKLOADS else None for w in part["workload"]])
        figure = Figure(figsize=(9, 3.5))
        axes = figure.subplots()
        for name, line in counted.dropna(subset="tensors").sort_values("tensors").groupby("competitor", sort=False):
            axes.plot(line["tensors"], line["p50"], marker="o", label=name)
        axes.set(xscale="log", xlabel="tensors", ylabel="s", ylim=(0, None))
        axes.legend()
        yield _svg(figure), f"{optimizer}. {conditions(part)}"


def training_loops(optimizer: str, device: torch.device, steps: int) -> Iterator[tuple[str, str]]:
    """Draw losses and times of a loop with this package's optimizer, and with torch's, fused if possible."""
    calls, losses = {}, {}
    for name in (OURS, FUSED if _is_in_torch(optimizer, FUSED, device) else "torch"):
        if name != OURS and not _is_in_torch(optimizer, name, device):
            continue
        torch.manual_seed(0)
        model, batches, _ = TASKS["text"](steps, 0)
        params = list(model.to(device).parameters())
        if exported()[optimizer]._granularity == "matrix":
            params = [param for param in params if param.dim() == 2]  # the others stay as they are
        instance = competitor(optimizer, name).make(params)
        losses[name] = []
        calls[name] = _step(model, instance, [(x.to(device), y.to(device)) for x, y in batches], losses[name])
    seconds = in_turn(calls, device, rounds=steps, warmup=0)
    figure = Figure(figsize=(9, 3.5))
    left, right = figure.subplots(1, 2)
    for name in calls:
        left.plot([float(loss) for loss in losses[name]], label=name)
        right.plot([1e3 * s for s in seconds[name]], label=name)
    left.set(xlabel="step", ylabel="loss, nats")
    right.set(xlabel="step", ylabel="ms" if device.type != "cpu" else "ms of processors", yscale="log")
    left.legend()
    rows = results.frame([Row("loop", "text", optimizer, OURS, "", "ms", 0, 0, 0, None, steps)], device)
    yield _svg(figure), f"{optimizer}, {steps} steps. {conditions(rows)}"


def _is_in_torch(optimizer: str, name: str, device: torch.device) -> bool:
    """Return whether torch.optim has the optimizer in this way."""
    try:
        param = torch.zeros(2, 2, device=device, requires_grad=True)
        param.grad = torch.zeros_like(param)
        competitor(optimizer, name).make([param]).step()
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _step(model: Any, optimizer: Any, batches: Sequence[Any], losses: list[torch.Tensor]) -> Any:
    remaining = iter(batches)

    def step() -> None:
        inputs, targets = next(remaining)
        loss = functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    return step


def failures(tables: dict[str, pd.DataFrame], times: pd.DataFrame) -> Iterator[list[Any]]:
    """Yield promises that the latest rows miss, and ratios of steps above 1."""
    for kind in ("cpu", "cuda"):
        for benchmark, promised in gates.stored_checks(kind):
            table = tables.get(benchmark, pd.DataFrame(columns=results.COLUMNS))
            is_gpu = table["device"].str.startswith("NVIDIA")
            for _, part in latest(table[is_gpu == (kind == "cuda")]).groupby(["device", "threads"], sort=False):
                for promise, value in promised.look_up(part):
                    if value is None or not promise.kept_by(value):
                        measured = "not measured" if value is None else f"{value:.3g}"
                        yield [promise.name, str(promise), measured, *part.iloc[-1][CONDITIONS]]
    for _, row in times[(times["ratio"] > 1) & ~times["competitor"].str.startswith(OURS)].iterrows():
        what = f"{row['optimizer']} step, {row['workload']}: time / {row['competitor']}"
        yield [what, "at most 1", f"{row['ratio']:.3g}", *row[CONDITIONS]]


def remarks(step: pd.DataFrame) -> str:
    """List the reasons why peers did not run, and why the times of others are hard to compare."""
    last = step.drop_duplicates(["workload", "optimizer", "competitor", "device", "threads"], keep="last")
    absent = last[last["metric"].str.startswith(NOT_RUN)]
    lines = [f"{r.competitor} ({r.optimizer}, {r.workload}, {r.device}) {r.metric}" for r in absent.itertuples()]
    lines += [f"{name}: {PEERS[name].note}" for name in last["competitor"].unique() if name in PEERS and PEERS[name].note]
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in dict.fromkeys(lines)) + "</ul>"


def conditions(rows: pd.DataFrame) -> str:
    """Describe the device and the revisions of rows."""
    first = rows.iloc[0]
    threads, versions = f"{first['threads']} threads", ", ".join(dict.fromkeys(rows["torch"]))
    return f"{first['device']}, {threads}, torch {versions}, revision {', '.join(dict.fromkeys(rows['commit']))}"


def _svg(figure: Figure) -> str:
    figure.tight_layout()
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
