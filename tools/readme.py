"""The generated parts of README.md.

The optimizers come from the classes, step times and lowerings from ``perf/results``, the example from its file, and the
floor plan from the package's docstring. ``python tools/readme.py`` rewrites them; a test fails while they are stale.
"""

from __future__ import annotations

import csv
import inspect
import re
import textwrap
from pathlib import Path

import compiled_optim as co
from compiled_optim.rule.fields import Buffer, Fact, Hyper, Static

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = README.parent / "perf" / "results" / "step.csv"
LOWERED = README.parent / "perf" / "results" / "lowering.csv"
MEMORY = README.parent / "perf" / "results" / "low_memory.csv"
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def optimizers_table() -> str:
    """One Markdown row per exported optimizer: what it is, the fields that it declares, and its state."""
    classes = [c for name in sorted(co.__all__) if _is_optimizer(c := getattr(co, name))]
    rows = ["| optimizer | fields and defaults | state per parameter |", "|---|---|---|"]
    for cls in classes:
        summary = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        choices = [s for s in cls.fields_of(Static) if s.init]
        own = [f for f in (*cls.fields_of(Hyper), *choices) if f.name in cls.declared]
        fields = ", ".join(f"`{_argument(f)}`" for f in own)
        buffers = ", ".join(f"`{b.name}`{_condition(cls, b)}" for b in cls.declaration.buffers if b.name in cls.declared)
        scalars = ", ".join(f"`{s.name}`" for s in cls.declaration.scalars)
        state = ", ".join(filter(None, [buffers, scalars])) if hasattr(cls, "rule") else "one for all parameters together"
        rows.append(f"| `{cls.__name__}`: {summary.partition(': ')[2] or summary} | {fields} | {state} |")
    return "\n".join(rows)


def _condition(cls: type[co.CompiledOptimizer], field: Buffer) -> str:
    """In which case a buffer exists: of a parameter of some shape, or with an argument."""
    if field.when is None:
        return ""
    assert isinstance(field.when, str), "an optimizer says by name when its state exists"
    return f" (of a {field.when})" if isinstance(cls.fields[field.when], Fact) else f" (with `{field.when}`)"


def _argument(field: Hyper | Static) -> str:
    return field.name if field.default is inspect.Parameter.empty else f"{field.name}={field.default}"


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, co.CompiledOptimizer) and value is not co.CompiledOptimizer


def speed_table() -> str:
    """Median step times with fresh gradients, device by device: a row per workload of AdamW, and per other optimizer.

    A row compares times of one run: of those with the most competitors, the last.
    """
    with RESULTS.open() as file:
        measured = [row for row in csv.DictReader(file) if row["metric"] == "step, fresh gradients"]
    devices: dict[tuple[str, str], dict[tuple[str, str], dict[str, dict[str, float]]]] = {}
    for row in measured:
        runs = devices.setdefault((row["device"], row["threads"]), {}).setdefault((row["optimizer"], row["workload"]), {})
        runs.setdefault(row["date"], {})[row["competitor"]] = float(row["p50"])
    parts = []
    for (device, threads), quantities in devices.items():
        last = {key: max(runs.items(), key=lambda run: (len(run[1]), run[0]))[1] for key, runs in quantities.items()}
        version = next(row["torch"] for row in reversed(measured) if (row["device"], row["threads"]) == (device, threads))
        source = f"{device}, {threads} threads, torch {version}; medians from `perf/results/step.csv`."
        parts += [*_speed_rows(last), "", source, ""]
    return "\n".join(parts[:-1])


def _speed_rows(times: dict[tuple[str, str], dict[str, float]]) -> list[str]:
    """Two Markdown tables of the milliseconds by optimizer and workload, and by competitor."""
    rows = ["| AdamW step | compiled_optim | torch fused | ratio |", "|---|---|---|---|"]
    others = ["| step | workload | compiled_optim | the fastest of torch.optim | | ratio |", "|---|---|---|---|---|---|"]
    for (optimizer, workload), entrants in sorted(times.items()):
        ours = entrants["compiled_optim"]
        theirs = {name: time for name, time in entrants.items() if name.startswith("torch")}
        if optimizer == "adamw":
            fused = theirs["torch fused"]
            rows.append(f"| {workload} | {ours:.3g} ms | {fused:.3g} ms | {ours / fused:.2f} |")
        else:
            name = min(theirs, key=theirs.__getitem__)
            best = theirs[name]
            kind = name.removeprefix("torch ")
            others.append(f"| {optimizer} | {workload} | {ours:.3g} ms | {best:.3g} ms | {kind} | {ours / best:.2f} |")
    return [*rows, "", *others]


_WAYS = {"multi_tensor": "multi_tensor", "inductor": "inductor", "torch": "torch.optim, foreach, compiled"}
_SHOWN = [("multi_tensor", n) for n in (10, 148, 1000, 20000)] + [(w, n) for w in ("inductor", "torch") for n in (10, 148)]


def lowering_table() -> str:
    """What a step on a GPU consists of: a Markdown row per way to run AdamW and number of tensors, then the other kinds."""
    with LOWERED.open() as file:
        table = [
            row
            for row in csv.DictReader(file)
            if (row["dtype"], row["options"], row["arch"], row["groups"]) == ("float32", "", "sm_90", "1")
        ]
    found = [row for row in table if row["optimizer"] == "adamw"]
    others = {(row["optimizer"], int(row["tensors"])): row for row in table if row["lowering"] == "auto"}
    latest = {(row["lowering"], int(row["tensors"])): row for row in found}
    rows = [
        "| AdamW on sm_90 | tensors | Triton launches | torch operators | bytes/parameter | registers | compiling |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, tensors in _SHOWN:
        row = latest[way, tensors]
        numbers = [row["launches"], row["operators"], f"{float(row['bytes_per_param']):.2f}", row["registers"].split(".")[0]]
        rows.append(f"| {_WAYS[way]} | {tensors} | {' | '.join(numbers)} | {float(row['seconds']):.2g} s |")
    rows += ["", "| optimizer, equal shapes | tensors | Triton launches | torch operators |", "|---|---|---|---|"]
    rows += [f"| {name} | {tensors} | {row['launches']} | {row['operators']} |" for (name, tensors), row in others.items()]
    last = table[-1]
    compiling = "Compiling: CPU time of the first step, without a GPU"
    source = f"{compiling}; torch {last['torch']}, triton {last['triton']}; from `perf/results/lowering.csv`."
    return "\n".join([*rows, "", source])


def memory_table() -> str:
    """Of each precision the bytes for each parameter, and the step as a share of torch's fused AdamW on float32."""
    with MEMORY.open() as file:
        rows = list(csv.DictReader(file))
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["competitor"], {})[row["metric"]] = row
    table = ["| AdamW | bytes per parameter, with its gradient | step |", "|---|--:|--:|"]
    for name, by_metric in found.items():
        share = next(row for metric, row in by_metric.items() if metric.startswith("share"))
        table.append(f"| {name} | {float(by_metric['memory']['p50']):.2f} | {float(share['p50']):.2f} |")
    last = rows[-1]
    where = f"{last['workload']}; {last['device']}, {last['threads']} threads, torch {last['torch']}"
    return "\n".join([*table, "", f"The step's time as a share of torch's, {where}; from `perf/results/low_memory.csv`."])


def example_rule() -> str:
    """A whole file of an optimizer, the shortest."""
    return f"```python\n{inspect.getsource(inspect.getmodule(co.Lion)).strip()}\n```"  # type: ignore[arg-type]


def floor_plan() -> str:
    """The folders and modules of the package, the top floor first, as its docstring lists them."""
    _, _, plan = (co.__doc__ or "").partition(":\n\n")
    return f"```\n{textwrap.dedent(plan).strip()}\n```"


_PARTS = {
    "optimizers": optimizers_table,
    "speed": speed_table,
    "lowering": lowering_table,
    "memory": memory_table,
    "rule": example_rule,
    "floors": floor_plan,
}


def generated(text: str) -> str:
    """``text`` with its generated parts brought up to date."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_PARTS[match[2]]()}\n{match[3]}", text)


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
