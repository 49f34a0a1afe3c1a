"""The generated parts of all READMEs.

The optimizers come from the classes, measurements from ``perf/results``, the example from its file, and the floor plan from
the package's docstring. ``python tools/readme.py`` rewrites them; a test fails while they are stale.
"""

from __future__ import annotations

import csv
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import compiled_optim as co
from compiled_optim.rule.fields import Buffer, Fact, Hyper, Static

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("optimizers", "interop", "checkpoint", "lowering", "capture", "rule", "cli")
"""The folders with guides, in the order in which users need them."""
INSIDE = ("", "groups", "plan", "step", "memory", "reports", "simulated")
"""The folders whose pages are for those who change the package, "" for the package itself."""
READMES = [
    ROOT / folder / "README.md"
    for folder in ("", *(f"compiled_optim/{f}" for f in (*FLOORS, *INSIDE)), "perf", "tests", "tools", "tools/recipes")
]
RECIPES = sorted((ROOT / "tools" / "recipes").glob("*.py"))
PRINTED = re.compile(r"^# Prints, in (?P<seconds>\d+) s:\n(?P<lines>(?:# .*\n)+)\Z", re.MULTILINE)
"""The end of a recipe: its output."""

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

_OURS, _INDUCTOR, _CAPTURED = "compiled_optim", "compiled_optim[inductor]", "compiled_optim[captured]"
_FUSED, _FOREACH = "torch fused", "torch foreach"
_SHARE = "share of torch's step on float32"

Row = dict[str, str]


def _measured(table: str, **chosen: str) -> list[Row]:
    """Return the rows of ``perf/results/<table>.csv`` that have the chosen entries."""
    with (ROOT / "perf" / "results" / f"{table}.csv").open() as file:
        return [row for row in csv.DictReader(file) if all(row[name] == value for name, value in chosen.items())]


def _conditions(row: Row) -> str:
    threads = f"{row['threads']} thread{'s' * (row['threads'] != '1')}"
    return f"{row['device']}, {threads}, torch {row['torch']}, revision {row['commit']}"


def _is_gpu(row: Row) -> bool:
    return row["device"].startswith("NVIDIA")


def _time(row: Row) -> str:
    """Return the median, or the range if no median was recorded."""
    if not row["p50"]:
        return f"{row['p20']} to {row['p80']}"
    return f"{float(row['p50']):.3g}" if float(row["p50"]) < 1000 else f"{float(row['p50']):.0f}"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first ``left`` columns are words and the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _paragraphs(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(p.split()), 125, break_long_words=False) for p in paragraphs)


def optimizers_table() -> str:
    """Build a Markdown row per exported optimizer: its summary, the fields that it declares, and its state."""
    classes = [c for name in sorted(co.__all__) if is_optimizer(c := getattr(co, name))]
    rows = ["| optimizer | fields and defaults | state per parameter |", "|---|---|---|"]
    for cls in classes:
        summary = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        choices = [s for s in cls._declaration.statics if s.init]
        declared = [f for f in (*cls._declaration.hypers, *choices) if f.name in cls._declared]
        fields = ", ".join(f"`{_argument(f)}`" for f in declared)
        buffers = ", ".join(f"`{b.name}`{condition(cls, b)}" for b in cls._declaration.buffers if b.name in cls._declared)
        scalars = ", ".join(f"`{s.name}`" for s in cls._declaration.scalars)
        state = ", ".join(filter(None, [buffers, scalars])) if hasattr(cls, "_rule") else "one for all parameters together"
        rows.append(f"| `{cls.__name__}`: {summary.partition(': ')[2] or summary} | {fields} | {state} |")
    return "\n".join(rows)


def condition(cls: type[co.CompiledOptimizer], field: Buffer) -> str:
    """Return the condition under which a buffer exists: a shape of the parameter, or an argument."""
    if field.when is None:
        return ""
    assert isinstance(field.when, str), "an optimizer says by name when its state exists"
    return f" (of a {field.when})" if isinstance(cls._all_fields[field.when], Fact) else f" (with `{field.when}`)"


def _argument(field: Hyper | Static) -> str:
    return field.name if field.default is inspect.Parameter.empty else f"{field.name}={field.default}"


def is_optimizer(value: object) -> bool:
    """Return whether ``value`` is an optimizer's class, and not the base of all."""
    return isinstance(value, type) and issubclass(value, co.CompiledOptimizer) and value is not co.CompiledOptimizer


Times = dict[str, Row]  # by competitor


def _steps() -> list[dict[tuple[str, str], Times]]:
    """List step times with fresh gradients by optimizer and workload, of each device with AdamW, in the order of dates.

    They are of one run: of those at the last revision, the one with the most competitors.
    """
    devices: dict[tuple[str, str], dict[tuple[str, str], dict[str, Times]]] = {}
    for row in _measured("step", metric="step, fresh gradients"):
        device = row["device"].partition(", ")[0], row["threads"]  # older rows lack its vector instructions
        runs = devices.setdefault(device, {}).setdefault((row["optimizer"], row["workload"]), {})
        runs.setdefault(row["date"], {})[row["competitor"]] = row
    by_device = [
        {key: _fullest(runs) for key, runs in quantities.items()}
        for quantities in devices.values()
        if ("adamw", "small-148") in quantities
    ]
    return sorted(by_device, key=lambda times: times["adamw", "small-148"][_OURS]["date"])


def _fullest(runs: dict[str, Times]) -> Times:
    """Return the run with the most competitors at the last revision that was measured beside torch. Keys are dates."""
    last_first = [times for _, times in sorted(runs.items(), reverse=True)]
    beside = [times for times in last_first if any(name.startswith("torch") for name in times)] or last_first
    return max((times for times in beside if times[_OURS]["commit"] == beside[0][_OURS]["commit"]), key=len)


def _against(ours: Row, theirs: Row, mark: str = "") -> list[str]:
    times = [f"{float(row['p50']):.3g} ms" for row in (ours, theirs)]
    return [*(f"{text}{mark}" for text in times), f"{float(ours['p50']) / float(theirs['p50']):.2f}{mark}"]


_WORKLOADS = {
    "gpt2-124m": "GPT-2's 148 tensors, 124 million elements",
    "small-1000": "1000 tensors, 4096 elements each",
    "small-148": "148 tensors, 4096 elements each",
    "tiny-10": "10 tensors, 16 elements each",
}


_STORED = {_FUSED, *(f"{_OURS}[{mode}]" for mode in ("float32", "split8, int8", "kahan, bfloat16", "stochastic, bfloat16"))}


def summary() -> str:
    """Compare AdamW's steps in time and memory, on a GPU and on a CPU, with the conditions."""
    kinds = {_is_gpu(times["adamw", "small-148"][_OURS]): times for times in _steps()}  # the last device of each kind
    cpu, gpu = kinds[False], kinds[True]
    by_hand = {r["competitor"]: r for r in _measured("by_hand", benchmark="step", workload="tiny-10")}
    rows = []
    for name, words in _WORKLOADS.items():
        here, there = cpu["adamw", name], gpu.get(("adamw", name), by_hand)
        mark = "*" if there is by_hand else ""
        rows.append([words, *_against(there[_OURS], there[_FUSED], mark), *_against(here[_OURS], here[_FUSED])])
    steps = _grid(["AdamW, tensors", f"{_OURS}, GPU", _FUSED, "ratio", f"{_OURS}, CPU", _FUSED, "ratio"], rows)
    measured = [r for r in _measured("low_memory", workload="gpt2-124m") if not r["commit"].endswith("-dirty")]
    devices = {r["device"]: r for r in measured}
    memory = {r["competitor"]: float(r["p50"]) for r in measured if r["metric"] == "memory"}
    shares = {(r["competitor"], r["device"]): f"{float(r['p50']):.2f}" for r in measured if r["metric"] == _SHARE}
    stored = [
        [
            name.replace("[", ", ").rstrip("]"),
            *(f"{memory[name]:.2f}", f"{memory[name] / memory[_FUSED]:.2f}", *(shares[name, device] for device in devices)),
        ]
        for name in memory
        if name in _STORED
    ]
    head = ["AdamW, GPT-2's tensors", "bytes per parameter, with its gradient", "of torch fused"]
    where = [_conditions(times["adamw", "gpt2-124m"][_OURS]) for times in (gpu, cpu)]
    revisions = ", ".join(row["commit"] for row in devices.values())
    text = f"""
        Medians; each step gets its gradients in new tensors. Times in the second table are relative to {_FUSED} in float32,
        at revisions {revisions}. If memory alone limited steps, they would be as the bytes are. GPU: {where[0]}. CPU:
        {where[1]}. *Measured by hand, on the same GPU at revision {by_hand[_OURS]["commit"]}. [perf](perf/README.md) has the
        rest.
    """
    return "\n\n".join([steps, _grid([*head, *(f"time, {device}" for device in devices)], stored), _paragraphs(text)])


def speed_table() -> str:
    """List median step times with fresh gradients: AdamW's by device and workload, others' where they were timed last."""
    steps, others, conditions = [], {}, []
    for times in _steps():
        ratios = {}
        for (optimizer, workload), entrants in sorted(times.items()):
            theirs = {name: row for name, row in entrants.items() if name.split()[0] == "torch"}
            device = entrants[_OURS]["device"]
            if workload == "small-10" and any("compiled" in name for name in theirs):
                ratios[optimizer] = _against(entrants[_OURS], min(theirs.values(), key=lambda row: float(row["p50"])))[-1]
            elif optimizer == "adamw":
                steps.append([workload, device, *_against(entrants[_OURS], theirs[_FUSED])])
            elif theirs and workload != "30-million":
                name = min(theirs, key=lambda name: float(theirs[name]["p50"]))
                figures = _against(entrants[_OURS], theirs[name])
                key = optimizer, workload, _is_gpu(entrants[_OURS])
                others[key] = [optimizer, workload, device, *figures, name.removeprefix("torch ")]
        rows = sorted((row for entrants in times.values() for row in entrants.values()), key=lambda row: row["date"])
        revisions = " and ".join(dict.fromkeys(row["commit"] for row in rows))
        conditions.append(_conditions({**rows[-1], "commit": revisions}))
        if ratios:
            order = sorted((ratio, name) for name, ratio in ratios.items())
            conditions[-1] += ", where on ten tensors of 4096 elements, compiled steps included, ratios are "
            conditions[-1] += " to ".join(f"{ratio} ({name})" for ratio, name in (order[0], order[-1]))
    adamw = _grid(["AdamW step", "on", _OURS, _FUSED, "ratio"], steps, 2)
    head = ["step", "workload", "on", _OURS, "the fastest of torch.optim", "ratio", "which one"]
    where = _paragraphs(f"{'; '.join(conditions)}; medians from `perf/results/step.csv`.")
    return "\n\n".join([adamw, _grid(head, list(others.values()), 3), where])


def gpu() -> str:
    """List other measurements on a GPU: bandwidth, other packages, the host's time, first steps."""
    speeds = [r for r in _measured("bandwidth", unit="GB/s") if _is_gpu(r)]
    moved = {tuple(r["metric"].split(", ")): f"{float(r['p50']):.0f}" for r in speeds}
    kinds, dtypes = ("step", "clipped step", "copy"), ("float32", "bfloat16")
    bandwidth = _grid(
        ["GB/s, half a billion elements", *kinds], [[dtype, *(moved[kind, dtype] for kind in kinds)] for dtype in dtypes]
    )
    first = {(r["workload"], r["metric"]): float(r["p50"]) for r in _measured("first_step") if _is_gpu(r)}
    fresh, warm = (max(t for (_, metric), t in first.items() if metric == f"both, {c} cache") for c in ("fresh", "warm"))
    steps = _measured("by_hand", metric="step, with the wait for the device")
    begin = f"""
        Construction and first step take at most {fresh:.1f} s with an empty cache, and {warm:.1f} s with a filled one
        (`first_step.csv`, `bandwidth.csv`; {_conditions(speeds[-1])}). A step takes the host so long, until the call returns
        (`host.csv`, the same revision), and at an earlier one the device so long, until it is done (`by_hand.csv`, revision
        {steps[0]["commit"]}):
    """
    tables = [_by_competitor("us on the host", _measured("host")), _by_competitor("ms per step", steps)]
    return "\n\n".join([bandwidth, _paragraphs(begin), *tables])


def _by_competitor(title: str, rows: Sequence[Row]) -> str:
    """Return a Markdown table with a row per workload and a column per competitor."""
    competitors = list(dict.fromkeys(r["competitor"] for r in rows))
    times = {(r["optimizer"], r["workload"], r["competitor"]): _time(r) for r in rows}
    workloads = dict.fromkeys((r["optimizer"], r["workload"]) for r in rows)
    return _grid(
        [title, *competitors],
        [[f"{o}, {w}", *(times.get((o, w, competitor), "") for competitor in competitors)] for o, w in workloads],
    )


def loops() -> str:
    """List times of training steps on a GPU, by the way to run them."""
    rows = _measured("by_hand", benchmark="training_step")
    models = list(dict.fromkeys(r["workload"] for r in rows))
    times = {(r["competitor"], r["workload"]): _time(r) for r in rows}
    ways = dict.fromkeys(r["competitor"] for r in rows)
    head = ["ms per training step, AdamW", *models]
    table = _grid(head, [[way, *(times.get((way, model), "") for model in models)] for way in ways])
    return f"{table}\n\n{_conditions(rows[0])};\nfrom `perf/results/by_hand.csv`."


def compiled() -> str:
    """List times of steps on a GPU that a user compiles, in ms."""
    rows = [r for r in _measured("compiled_step", unit="ms") if _is_gpu(r)]
    kinds = list(dict.fromkeys((r["workload"], r["metric"].removeprefix("step, ")) for r in rows))
    at = {(r["workload"], r["metric"].removeprefix("step, "), r["competitor"]): _time(r) for r in rows}
    head = ["AdamW, ms per step", "mode", "`multi_tensor`", "`inductor`", "torch.optim, foreach"]
    table = _grid(head, [[w, m, *(at[w, m, name] for name in (_OURS, _INDUCTOR, _FOREACH))] for w, m in kinds], 2)
    return f"{table}\n\n{_conditions(rows[0])};\nmedians from `perf/results/compiled_step.csv`."


def schedulers() -> str:
    """Describe the times of steps of torch's schedulers."""
    said = []
    for on_gpu in (False, True):
        rows = [r for r in _measured("schedulers", workload="24 groups") if _is_gpu(r) == on_gpu]
        last = {(r["competitor"], r["metric"]): r for r in rows if r["date"] == rows[-1]["date"]}
        ours = {metric: float(r["p50"]) for (name, metric), r in last.items() if name == _OURS}
        ratios = {metric: float(r["ratio"]) for (name, metric), r in last.items() if name == _FUSED}
        special, ratio = ours.pop("OneCycleLR"), ratios.pop("OneCycleLR")
        said.append(f"""
            {min(ours.values()):.0f} to {max(ours.values()):.0f} us, {min(ratios.values()):.1f} to {max(ratios.values()):.1f}
            times as long as with torch.optim, and OneCycleLR {special:.0f} us, {ratio:.1f} times ({_conditions(rows[-1])})
        """)
    return _paragraphs(f"""
        With 24 groups, a scheduler's step takes the host {said[0].strip()}. With parameters on a GPU it takes
        {said[1].strip()}; `perf/results/schedulers.csv`.
    """)


def hybrid() -> str:
    """Describe the losses of MuonAdamW and AdamW on a small language model."""
    rows = _measured("hybrid")
    by_metric = {(r["competitor"], r["metric"]): r for r in rows}
    ends, rates = (
        {n: by_metric[n, metric]["p50"] for n in ("MuonAdamW", "AdamW")} for metric in ("final loss", "learning rate")
    )
    said = " and ".join(f"{name} {float(loss):.3f} (lr {float(rates[name]):.3g})" for name, loss in ends.items())
    count = by_metric["AdamW", "final loss"]["n"]
    return _paragraphs(f"""
        On a small language model, {rows[0]["workload"]}, the median loss at the end is {said}, in nats. Each has its best of
        five learning rates; {count} other seeds. Nothing follows for other models ([picture](results/hybrid.png);
        {_conditions(rows[-1])}; `perf/results/hybrid.csv`).
    """)


def convergence() -> str:
    """Describe how far the final loss in low precision is above float32's."""
    rows = _measured("convergence", metric="above float32, at most (95 %)")
    worst: dict[str, float] = {}
    for row in rows:
        worst[row["workload"]] = max(worst.get(row["workload"], 0.0), float(row["p50"]))
    said = " and ".join(f"{bound:.4f} on {task}" for task, bound in worst.items())
    return _paragraphs(f"""
        The final loss in low precision exceeds float32's by at most {said} (nats; one-sided, 95 %, {rows[0]["n"]} seeds;
        {_conditions(rows[-1])}; `perf/results/convergence.csv`).
    """)


def tested() -> str:
    """Describe the results of the tests that need a GPU."""
    runs: dict[str, dict[str, Row]] = {}
    for row in _measured("by_hand", benchmark="gpu tests"):
        runs.setdefault(row["commit"], {})[row["metric"]] = row
    *_, (_, whole), (later, part) = runs.items()
    most, muon = _measured("by_hand", metric="difference after 5 steps, at most")
    return _paragraphs(f"""
        On a GPU ({_conditions(whole["passed"])}) {whole["passed"]["p50"]} tests passed. {whole["failed"]["p50"]} failed by a
        mistake of their own, and {whole["skipped for want of a second GPU"]["p50"]} need two GPUs. At revision {later},
        {part["passed"]["p50"]} tests of captures, matrices and watched steps passed again, and the two that had failed. No
        later revision has run on a GPU. After 5 steps (revision {most["commit"]}), parameters of
        {most["workload"].removesuffix(" but Muon")} differed by at most {most["p50"]} from torch.optim's, and with Muon by
        {muon["p50"]}.
    """)


def versions() -> str:
    """Describe the last results of the tests that run with every version of torch."""
    last = {row["torch"].partition("+")[0]: row for row in _measured("versions")}
    rows = sorted(last.items(), key=lambda item: [*map(int, item[0].split("."))])
    *others, newest = (f"{torch} (Python {row['python']}, triton {row['triton']})" for torch, row in rows)
    several = " and ".join(filter(None, (", ".join(others), newest)))
    passed = sorted({int(row["passed"]) for row in last.values()})
    counts = " to ".join(map(str, dict.fromkeys((passed[0], passed[-1]))))
    failed = " and ".join(f"{row['failed']} failed with {torch}" for torch, row in rows if row["failed"] != "0")
    revisions = " and ".join(dict.fromkeys(row["commit"] for _, row in rows))
    return _paragraphs(f"""
        A few of the tests that depend on torch ran with {several}. With each {counts} passed, and
        {failed or "none failed"} (revision {revisions}; `perf/results/versions.csv`).
    """)


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


def _lowered() -> list[Row]:
    """Return the rows of one group in float32 on sm_90, without options."""
    return _measured("lowering", dtype="float32", options="", arch="sm_90", groups="1")


def _latest() -> dict[tuple[str, str, int], Row]:
    """Return AdamW's last rows by lowering, shapes and number of tensors."""
    return {(r["lowering"], r["shapes"], int(r["tensors"])): r for r in _lowered() if r["optimizer"] == "adamw"}


def lowering_table() -> str:
    """List the parts of a step on a GPU: a row per way to run AdamW and number of tensors, then other optimizers."""
    table, latest = _lowered(), _latest()
    others = {(row["optimizer"], row["tensors"]): row for row in table if row["lowering"] == "auto"}
    headings = ["AdamW on sm_90", "tensors", "launches", "operators", "bytes/parameter", "registers", "compiling"]
    headings += ["CUDA graphs", "hold", "copied"]
    rows = []
    for (shapes, tensors), name in _SHAPES.items():
        for form, title in _FORMS.items():
            if (row := latest.get((form, shapes, tensors))) is not None:
                figures = [row["launches"], row["operators"], f"{float(row['bytes_per_param']):.2f}"]
                figures += [row["registers"].split(".")[0], f"{float(row['seconds']):.2g} s"]
                rows.append([title, name, *figures, row["partitions"], row["cuda_graph"], row["copied"]])
    kinds = [[name, tensors, row["launches"], row["operators"]] for (name, tensors), row in others.items()]
    last = table[-1]
    compiling = "Compiling: processor time of the first step, without a GPU"
    source = f"{compiling}; torch {last['torch']}, triton {last['triton']}; from `perf/results/lowering.csv`."
    counts = _grid(["optimizer, equal shapes", "tensors", "Triton launches", "torch operators"], kinds)
    return "\n\n".join([_grid(headings, rows, 2), counts, source])


def choice() -> str:
    """Advise which lowering to choose, with its costs for GPT-2's tensors, and in a training step on a CPU."""
    latest = _latest()
    launches = {form: latest[form, "gpt2", 148]["launches"] for form in _FORMS}
    seconds = {form: f"{float(latest[form, 'gpt2', 148]['seconds']):.2g} s" for form in _FORMS}
    last = {r["competitor"]: r for r in _measured("training_step", metric="training step, default")}
    step = {name: f"{_time(row)} ms" for name, row in last.items()}
    return _paragraphs(f"""
        Leave it at `"auto"`. A step of AdamW with `"multi_tensor"` has {launches["multi_tensor"]} launches for GPT-2's 148
        tensors on a GPU. It compiles in {seconds["multi_tensor"]}, and changes of groups or numbers compile nothing. In a
        function that you compile, the step is one operator, whose Python runs at every call, except in a CUDA graph.

        Take `"inductor"` to have the step inlined into your compiled function. The compiler can then fuse its operations
        with others, and no Python runs. The step then has {launches["inlined"]} launches, and compiles in
        {seconds["inlined"]} ({seconds["torch"]} for torch.optim's AdamW). The function is traced again when groups, state or
        the set of gradients change, but not when numbers do. Take `"eager"` for derivatives through a step, or to debug one.

        On a CPU a compiled training step of the demo's model takes {step[_OURS]} with the operator, {step[_INDUCTOR]} with
        the step inlined, and {step[_FOREACH]} with torch.optim ({_conditions(last[_OURS])}; medians from
        `perf/results/training_step.csv`).
    """)


def example_rule() -> str:
    """Return the file of an optimizer, the shortest."""
    return f"```python\n{inspect.getsource(inspect.getmodule(co.Lion)).strip()}\n```"  # type: ignore[arg-type]


_EXTRAS = {"sklearn": "demo", "unit_scaling": "mup", "lightning": "trainers", "peft": "trainers", "transformers": "trainers"}


def needed_extra(recipe: Path) -> str:
    """Return the extras that a recipe needs, separated by commas as for pip; ``""`` if it needs none."""
    imported = re.findall(r"^(?:import|from) (\w+)", recipe.read_text(), re.MULTILINE)
    return ",".join(sorted({_EXTRAS[name] for name in imported if name in _EXTRAS}))


def recipes() -> str:
    """Return a Markdown row per recipe, from its file: its summary, its extra, and its time."""
    rows = []
    for path in RECIPES:
        text = path.read_text()
        summary = text.partition("\n")[0].removeprefix('"""').replace("``", "`")
        seconds, extra = PRINTED.search(text), needed_extra(path)
        rows.append([f"[{path.stem}]({path.name})", summary, extra and f"`{extra}`", seconds["seconds"] if seconds else ""])
    return _grid(["recipe", "shows", "extra", "seconds"], rows, 3)


def floor_plan() -> str:
    """Return the folders and modules of the package, the top floor first, as its docstring lists them."""
    _, _, plan = (co.__doc__ or "").partition(":\n\n")
    return f"```\n{textwrap.dedent(plan).strip()}\n```"


_PARTS = {
    "summary": summary,
    "optimizers": optimizers_table,
    "speed": speed_table,
    "gpu": gpu,
    "loops": loops,
    "compiled": compiled,
    "schedulers": schedulers,
    "convergence": convergence,
    "hybrid": hybrid,
    "tested": tested,
    "versions": versions,
    "choice": choice,
    "lowering": lowering_table,
    "rule": example_rule,
    "recipes": recipes,
    "floors": floor_plan,
}


def generated(text: str) -> str:
    """Return ``text`` with its generated parts brought up to date."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_PARTS[match[2]]()}\n{match[3]}", text)


if __name__ == "__main__":
    for readme in READMES:
        readme.write_text(generated(readme.read_text()))
