"""Tests and measurements for a GPU, in calls that end within ten minutes each; ``perf/gpu --help`` lists them.

``perf/gpu first`` has the most important parts, for a GPU that is available for minutes. ``tests`` writes pytest's report.
The others append to the tables of measurements. The outcome of each part is saved in ``outcomes.csv`` as soon as it ends. A
part that fails, or is out of time, does not keep the next one from running, and its measurements so far are in the tables.
Each call writes all output to a log, and ends with a table of all promises and whether its measurements keep them.

They run in the environment of the Python that starts them, which needs torch, triton, numpy, pandas and pytest; with
pytest-xdist the tests run on several processes, with pytest-timeout one that hangs ends after two minutes. Other packages
are measured if they are installed, or in ``out/wheels``, to which ``perf/gpu wheels`` downloads them.

``--rehearse`` runs the same commands with tiny tensors and a few tests, on the CPU if the machine has no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

from perf import wheels
from perf.budget import GRACE, INTERRUPTED, LEFT, ROOT, Outcome, Part, run

LIMIT = 590.0
"""Seconds that a call may take."""

_TORCHS = "'torch fused' 'torch foreach' compiled_optim[inductor]"
_PRODUCTS = "'compiled_optim[torch products]'"
_FORMS = f"{_PRODUCTS} compiled_optim[split] compiled_optim[captured] 'compiled_optim[split8, int8]'"
_PEERS = """'optimi foreach' 'optimi triton' heavyball flashoptim 'flashoptim float32 state' bitsandbytes
    'bitsandbytes 8-bit' 'heavyball compile_step' 'torch fused compiled' 'torch foreach capturable compiled' torchao
    'torchao 8-bit' 'torchao bfloat16, stochastic'"""
"""Those that compile long are last: after one of them, another begins only if it could take as long."""

FIRST = {
    "checks --only fixed": 60.0,
    "checks --only unfixed": 50.0,
    "checks --only others": 50.0,
    "loops --model small": 90.0,
    "checks --only sanitized": 110.0,
    "tests": 140.0,
    "loops --model gpt2 --rounds 11": 90.0,
}
"""The parts of ``first`` with their seconds, the most important first. ``tests`` are those of :data:`NEW`."""

SHOWING = ("checks --only unfixed", "checks --only others")
"""Parts that demonstrate a fault: they fail, or end with an illegal access, where it exists."""

TIMINGS = {
    f"step --workload gpt2-124m --rounds 51 --competitors {_TORCHS} compiled_optim[watched]": 70.0,
    "bandwidth --dtype float32 bfloat16": 55.0,
    "host": 50.0,
    "kernels": 30.0,
    "low-memory --rounds 51": 50.0,
    f"step --workload small-148 small-1000 --rounds 51 --competitors {_TORCHS}": 60.0,
    f"step --optimizer muon --workload gpt2-matrices --rounds 31 --competitors {_PRODUCTS} torch": 50.0,
    f"kernels --optimizer muon --workload gpt2-matrices --competitors {_PRODUCTS}": 25.0,
    f"step --optimizer adafactor --workload gpt-matrices --rounds 31 --competitors {_TORCHS}": 35.0,
    f"step --optimizer sgd --workload gpt2-124m --rounds 51 --competitors {_TORCHS}": 35.0,
    "gates --only step bandwidth schedulers": 60.0,
    "gates --only first-step --tries 1": 70.0,
}
"""Commands of ``python -m perf`` with their seconds, the most important first."""

OTHERS = {
    f"step --optimizer muon --workload gpt2-matrices --rounds 31 --competitors {_FORMS}": 80.0,
    "step --optimizer muonadamw --workload gpt2-124m --rounds 31 --competitors compiled_optim[captured] "
    "'compiled_optim[split8, int8]' 'torch Muon and fused AdamW'": 75.0,
    f"step --optimizer normuon --workload gpt2-matrices --rounds 31 --competitors {_FORMS}": 80.0,
    "step --optimizer lamb --workload gpt2-124m --rounds 51 --competitors compiled_optim[captured] pytorch_optimizer": 50.0,
    "step --workload small-148 --rounds 51 --competitors compiled_optim[DTensor] 'torch fused' 'torch fused[DTensor]'": 45.0,
    "step --optimizer muon --workload experts --rounds 11 --competitors 'compiled_optim[split8, int8]'": 50.0,
    "step --optimizer adamwschedulefree --workload gpt2-124m --rounds 31 --competitors schedulefree heavyball": 50.0,
    f"step --workload gpt2-124m --rounds 21 --competitors {_PEERS}": 150.0,
}
"""Other optimizers and forms. The other packages are last, since some compile long."""

COMPILED = {
    "loops --model small": 100.0,
    "loops --model gpt2": 110.0,
    "checks": 90.0,
    "compiled-step --workload small-10 --rounds 101": 60.0,
    "training-step --rounds 101 --competitors compiled_optim[inductor] 'torch fused' 'torch fused compiled'": 110.0,
    "compiled-step --workload gpt2-124m --rounds 51 --modes default": 120.0,
}
"""Training loops, checks, and functions that the user compiles. Most of the time is compiling."""

TRAIN = {"train": LIMIT}
"""GPT-2 from random weights in every way to take a step."""

DISTRIBUTED = {"distributed": LIMIT}
"""Training on two GPUs and on four, compared with one."""

FILES = ["tests/capture/test_cuda.py", "tests/capture/test_capture_surroundings.py"]
"""All files with tests marked ``cuda``."""

REHEARSED = " or ".join(
    [
        "(unchanged or clip_norm or group_added) and AdamW",
        "by_hand or loss_that_is_kept",
        *("first_step_in", "two_streams", "waits", "graphed_callables", "scaler_inside", "capture_does", "allocate"),
        *("sparse_gradients", "leaves_nothing", "alignment", "draws"),
    ]
)
"""The tests of a rehearsal, an argument of ``-k``."""

NEW = [
    *("large_matrices", "after_the_capture", "graph_of_others", "few_bytes", "symmetric", "stacked", "reduce_overhead"),
    *("low_precision", "by_hand", "two_rules", "gradient_release", "sparse"),
]
"""Words in the names of tests that have not passed on a GPU since their subject changed."""

TAIL = 60
"""The number of lines of a command's output that are printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the calls. Return 1 if a part failed or was out of time, 2 without a GPU, 130 after an interrupt."""
    started, begun = time.monotonic(), _now()
    args = _parser().parse_args(arguments)
    if args.call == WHEELS:
        return wheels.download()
    import torch  # its seconds count

    from perf.results import device_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.rehearse:
        print("perf/gpu needs a CUDA device; this machine has none. With --rehearse it needs none", file=sys.stderr)
        return 2
    directory = (args.directory or ROOT / ("out/rehearsal" if args.rehearse else "perf/results")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    name = device_name(device)
    log = directory / f"gpu-{args.call}.log"
    log.write_text(f"{name}, torch {torch.__version__}, Python {platform.python_version()}\n")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="perf-gpu-") as site:
        path = wheels.install(Path(site))
        parts = [
            replace(part, seconds=args.limits * part.seconds, environment={**path, **part.environment})
            for part in PLANS[args.call](directory, device.type, name, args.rehearse)
        ]
        for outcome in run(parts, log, started, GRACE * min(1.0, args.limits)):
            outcomes.append(outcome)
            print("\n".join(outcome.printed.splitlines()[-TAIL:]), flush=True)
            _save_outcome(outcome, args.call, directory / "outcomes.csv", name)
    table = verdicts(directory, device.type, name, begun)
    lines = [f"{name}: {outcome}: {said(outcome)}" for outcome in outcomes]
    summary = "\n".join([*lines, "", table.to_string(index=False)])
    print(summary)
    with log.open("a") as file:
        print(summary, file=file)
    if any(outcome.failure == INTERRUPTED for outcome in outcomes):
        return 130
    return 1 if any(outcome.failure and not outcome.part.shows_fault for outcome in outcomes) else 0


def said(outcome: Outcome) -> str:
    """Return the most important line of a part's output: its error, or else the last one."""
    lines = [line.strip() for line in outcome.printed.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("appended to ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)] if outcome.failure else []
    return next(iter([*errors[-1:], *lines[-1:]]), "")[:200]


def _save_outcome(outcome: Outcome, call: str, path: Path, device: str) -> None:
    """Append the outcome of a part to a table."""
    import pandas as pd

    from perf.results import append_table, stamp

    line = {
        "call": call,
        "part": str(outcome.part),
        "outcome": outcome.failure or "succeeded",
        "seconds": round(outcome.seconds),
        "limit": round(outcome.part.seconds),
        "said": said(outcome),
        "device": device,
    }
    append_table(stamp(pd.DataFrame([line])), path)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def verdicts(directory: Path, device: str, name: str, begun: str) -> pd.DataFrame:
    """Return every promise with the measurement on the device of that name since ``begun``."""
    import pandas as pd

    from perf.gates import stored_checks
    from perf.results import COLUMNS, read

    lines = []
    for benchmark, check in stored_checks(device):
        path = directory / f"{benchmark}.csv"
        table = read(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
        for promise, value in check.look_up(table[(table["device"] == name) & (table["date"] >= begun)]):
            verdict = "not measured" if value is None else "kept" if promise.kept_by(value) else "MISSED"
            measured = "" if value is None else f"{value:.3g}"
            lines.append({"promise": promise.name, "limit": str(promise), "measured": measured, "verdict": verdict})
    return pd.DataFrame(lines)


def first(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """Return the parts of ``perf/gpu first``."""
    words = REHEARSED if rehearsal else " or ".join(NEW)
    parts = []
    for command, seconds in FIRST.items():
        if command == "tests":
            parts.append(replace(_pytest("first", directory, device, name, words), seconds=_seconds(seconds, rehearsal)))
        else:
            (part,) = _measurements({command: seconds}, directory, device, rehearsal)
            parts.append(replace(part, shows_fault=command in SHOWING))
    return parts


def timings(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """Return the measurements of ``perf/gpu timings``."""
    return _measurements(TIMINGS, directory, device, rehearsal)


def others(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """Return the measurements of ``perf/gpu others``."""
    return _measurements(OTHERS, directory, device, rehearsal)


def compiled(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """Return the measurements of ``perf/gpu compiled``."""
    return _measurements(COMPILED, directory, device, rehearsal)


def train(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """Return the trainings of ``perf/gpu train``."""
    return _measurements(TRAIN, directory, device, rehearsal)


def distributed(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """Return the trainings of ``perf/gpu distributed``."""
    return _measurements(DISTRIBUTED, directory, device, rehearsal)


def _measurements(commands: Mapping[str, float], directory: Path, device: str, rehearsal: bool) -> list[Part]:
    options = ["--device", device, "--results", str(directory), "--seconds", LEFT, *(["--rehearse"] if rehearsal else [])]
    return [
        Part(_seconds(seconds, rehearsal), ["-m", "perf", *shlex.split(command), *options], name=" ".join(command.split()))
        for command, seconds in commands.items()
    ]


def _seconds(seconds: float, rehearsal: bool) -> float:
    return (3 if rehearsal else 1) * seconds  # a CPU needs longer to compile and run


def tests(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """Return the run of pytest of ``perf/gpu tests``."""
    return [_pytest("cuda", directory, device, name, REHEARSED if rehearsal else "")]


def _pytest(report: str, directory: Path, device: str, name: str, words: str) -> Part:
    """Return the run of the tests that need a GPU, those with ``words``. Their ``report`` has the ``name``."""
    pytest = [
        *("-m", "pytest", *FILES, "--tb=short", "-p", "no:cacheprovider", "-o", f"junit_suite_name={name}"),
        # Warnings of torch and Triton only on a GPU. This package's are RuntimeWarnings, and errors.
        *(word for kind in ("User", "Future", "Deprecation") for word in ("-W", f"default::{kind}Warning")),
        *(["-p", "pytest_timeout", "--timeout", "120"] if _is_installed("pytest_timeout") else []),
        *(["-k", words] if words else []),
        *(["--cuda-on-cpu"] if device == "cpu" else []),
    ]
    workers = str(min(12, max(1, (os.cpu_count() or 1) * 3 // 4)))
    several = ["-p", "xdist.plugin", "-n", workers, "--dist", "worksteal"] if _is_installed("xdist") else []
    # No other plugins, since they may warn, and no processes for compiling beside those of the tests.
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2"}
    command = [*pytest, *several, "-m", "cuda", f"--junitxml={directory}/{report}-tests.xml"]
    return Part(480 + GRACE, command, environment, "tests")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


PLANS: dict[str, Callable[[Path, str, str, bool], list[Part]]] = {
    "first": first,
    "tests": tests,
    "timings": timings,
    "compiled": compiled,
    "others": others,
    "train": train,
    "distributed": distributed,
}
WHEELS = "wheels"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perf/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=[*PLANS, WHEELS])
    parser.add_argument("directory", nargs="?", type=Path, help="the folder of the files (default: perf/results)")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU if there is no GPU (default: out/rehearsal)")
    parser.add_argument("--limits", type=float, default=1.0, metavar="FACTOR", help="multiplies the seconds of each part")
    return parser
