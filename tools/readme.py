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
TRAINING = README.parent / "perf" / "results" / "training_step.csv"
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


_FORMS = {
    "multi_tensor": "`multi_tensor`, called",
    "operator": "`multi_tensor`, in a compiled function",
    "inlined": "`inductor`, in a compiled function",
    "inductor": "`inductor`, called",
    "torch": "torch.optim, foreach, compiled",
}
_SHAPES = {
    ("gpt2", 148): "GPT-2's 148",
    **{("mixed", count): f"{count}, four shapes" for count in (10, 148, 1000)},
    ("equal", 20000): "20000, one shape",
}


def _lowered() -> list[dict[str, str]]:
    """Rows of one group in float32 on sm_90, without options."""
    with LOWERED.open() as file:
        rows = list(csv.DictReader(file))
    return [r for r in rows if (r["dtype"], r["options"], r["arch"], r["groups"]) == ("float32", "", "sm_90", "1")]


def _latest() -> dict[tuple[str, str, int], dict[str, str]]:
    """AdamW's last rows by lowering, shapes and number of tensors."""
    return {(r["lowering"], r["shapes"], int(r["tensors"])): r for r in _lowered() if r["optimizer"] == "adamw"}


def lowering_table() -> str:
    """What a step on a GPU consists of: a Markdown row per way to run AdamW and number of tensors, then the other kinds."""
    table, latest = _lowered(), _latest()
    others = {(row["optimizer"], int(row["tensors"])): row for row in table if row["lowering"] == "auto"}
    headings = ["AdamW on sm_90", "tensors", "launches", "operators", "bytes/parameter", "registers", "compiling"]
    headings += ["CUDA graphs", "hold", "copied"]
    rows = [f"| {' | '.join(headings)} |", "|---|---" + "|--:" * 5 + "|--:|---|--:|"]
    for (shapes, tensors), name in _SHAPES.items():
        for form, title in _FORMS.items():
            if (row := latest.get((form, shapes, tensors))) is not None:
                figures = [row["launches"], row["operators"], f"{float(row['bytes_per_param']):.2f}"]
                figures += [row["registers"].split(".")[0], f"{float(row['seconds']):.2g} s"]
                figures += [row["partitions"], row["cuda_graph"], row["copied"]]
                rows.append(f"| {title} | {name} | {' | '.join(figures)} |")
    rows += ["", "| optimizer, equal shapes | tensors | Triton launches | torch operators |", "|---|---|---|---|"]
    rows += [f"| {name} | {tensors} | {row['launches']} | {row['operators']} |" for (name, tensors), row in others.items()]
    last = table[-1]
    compiling = "Compiling: processor time of the first step, without a GPU"
    source = f"{compiling}; torch {last['torch']}, triton {last['triton']}; from `perf/results/lowering.csv`."
    return "\n".join([*rows, "", source])


def choice() -> str:
    """Which lowering to choose, with what each costs for GPT-2's tensors, and in a training step on a CPU."""
    latest = _latest()
    launches = {form: latest[form, "gpt2", 148]["launches"] for form in _FORMS}
    seconds = {form: f"{float(latest[form, 'gpt2', 148]['seconds']):.2g} s" for form in _FORMS}
    with TRAINING.open() as file:
        last = {r["competitor"]: r for r in csv.DictReader(file) if r["metric"] == "training step, default"}
    step = {name: f"{float(r['p50']):.3g} ms" for name, r in last.items()}
    machine = last["compiled_optim"]
    text = f"""
        Leave it at `"auto"`: `"multi_tensor"` is {launches["multi_tensor"]} launches for GPT-2's 148 tensors on a GPU, is
        compiled in {seconds["multi_tensor"]}, and follows every change; in a function that you compile it is one operator,
        whose host's half runs each time outside of CUDA graphs. Take `"inductor"` if the step shall be operations of your
        compiled function, which the compiler fuses with others and of which nothing is left to the host: then it is
        {launches["inlined"]} launches and compiled in {seconds["inlined"]} ({seconds["torch"]} for torch.optim's AdamW), and
        the function is traced again when groups, state or the set of gradients change, but not when numbers do. Take
        `"eager"` for derivatives through a step, or to look into one.

        On a CPU a compiled training step of the demo's model takes {step["compiled_optim"]} with the operator,
        {step["compiled_optim[inductor]"]} with the step's operations inlined, and {step["torch foreach"]} with torch.optim's
        ({machine["device"]}, {machine["threads"]} thread; medians from `perf/results/training_step.csv`).
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(p.split()), 125, break_long_words=False) for p in paragraphs)


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
    "choice": choice,
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
