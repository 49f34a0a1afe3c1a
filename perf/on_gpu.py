"""What to run on a GPU, in three calls that end within ten minutes each: ``perf/gpu tests``, ``timings`` and ``compiled``.

``perf/gpu tests [DIRECTORY]`` writes pytest's reports to DIRECTORY (default: perf/results). ``perf/gpu timings [DIRECTORY]``
and ``perf/gpu compiled [DIRECTORY]``, for training loops, checks that a GPU alone can make, and functions that torch.compile
compiles, append to the tables there. All write what is printed to a file of their own, say what was out of time, and end
with a table of all promises and whether this call's measurements keep them. They run in the environment of the Python that
starts them, which needs torch, triton, numpy, pandas and pytest; with pytest-xdist the tests run on several processes, with
pytest-timeout one that hangs ends after two minutes; of other packages those are measured that are installed.

``--rehearse`` runs the same commands with tiny tensors and a few tests, on the CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

from perf.budget import GRACE, LEFT, ROOT, Part, run

LIMIT = 590.0
"""Seconds that a call may take."""

_TORCHS = "compiled_optim[inductor] 'torch fused' 'torch foreach'"
_PRODUCTS = "'compiled_optim[torch products]'"
_PEERS = """'torch foreach capturable compiled' 'torch fused compiled' 'optimi foreach' 'optimi triton' heavyball
    'heavyball compile_step' bitsandbytes 'bitsandbytes 8-bit' flashoptim 'flashoptim float32 state' torchao 'torchao 8-bit'
    'torchao bfloat16, stochastic'"""

TIMINGS = {
    f"step --workload gpt2-124m --rounds 51 --competitors {_TORCHS} compiled_optim[watched]": 70.0,
    "bandwidth --dtype float32 bfloat16": 55.0,
    "host": 30.0,
    "kernels": 30.0,
    "low-memory --rounds 51": 40.0,
    f"step --workload small-148 small-1000 --rounds 51 --competitors {_TORCHS}": 60.0,
    f"step --optimizer muon --workload gpt2-matrices --rounds 31 --competitors {_PRODUCTS} torch": 40.0,
    f"kernels --optimizer muon --workload gpt2-matrices --competitors {_PRODUCTS}": 25.0,
    f"step --optimizer adafactor --workload gpt-matrices --rounds 31 --competitors {_TORCHS}": 30.0,
    f"step --optimizer sgd --workload gpt2-124m --rounds 51 --competitors {_TORCHS}": 25.0,
    "gates --only step bandwidth schedulers": 50.0,
    "gates --only first-step --tries 1": 70.0,
    f"step --workload gpt2-124m --rounds 21 --competitors {_PEERS}": 65.0,
}
"""Commands of ``python -m perf`` with their seconds, those worth most first; the peers last, since torchao compiles long."""

COMPILED = {
    "loops --model small --seconds 60": 100.0,
    "loops --model gpt2 --seconds 60": 100.0,
    "checks": 90.0,
    "compiled-step --workload small-10 --rounds 101": 60.0,
    "training-step --rounds 101 --competitors compiled_optim[inductor] 'torch fused' 'torch fused compiled'": 100.0,
    "compiled-step --workload gpt2-124m --rounds 51 --modes default": 140.0,
}
"""Training loops, what a GPU alone can show, and functions that the user compiles; most of the time goes into compiling."""

TRAIN = {f"train --seconds {LEFT}": LIMIT}
"""GPT-2 from random weights in every way to take a step."""

DISTRIBUTED = {f"distributed --seconds {LEFT}": LIMIT}
"""Training on two GPUs and on four, compared with one."""

FILES = ["tests/capture/test_cuda.py", "tests/capture/test_capture_surroundings.py"]
"""All that hold tests marked ``cuda``."""

REHEARSED = " or ".join(
    [
        "(unchanged or clip_norm or group_added) and AdamW",
        "by_hand or loss_that_is_kept",
        *("first_step_in", "two_streams", "waits", "graphed_callables", "scaler_inside", "capture_does", "allocate"),
        *("sparse_gradients", "leaves_nothing", "alignment", "draws"),
    ]
)
"""The tests of a rehearsal, as ``-k`` takes them."""

TAIL = 60
"""Lines that are printed of what a command printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the calls; 1 if a command of it failed or was out of time, 2 if there is no GPU."""
    started, begun = time.monotonic(), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    args = _parser().parse_args(arguments)
    import torch  # takes seconds, which count

    from perf.results import device_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.rehearse:
        print("perf/gpu needs a CUDA device; this machine has none. With --rehearse it needs none", file=sys.stderr)
        return 2
    directory = (args.directory or ROOT / ("out/rehearsal" if args.rehearse else "perf/results")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    name = device_name(device)
    parts = PLANS[args.call](directory, device.type, name, args.rehearse)
    log = directory / f"gpu-{args.call}.log"
    log.write_text(f"{name}, torch {torch.__version__}, Python {platform.python_version()}\n")
    outcomes = []
    for outcome in run(parts, log, started):
        outcomes.append(outcome)
        print("\n".join(outcome.printed.splitlines()[-TAIL:]), flush=True)
    table = verdicts(directory, device.type, name, begun)
    summary = "\n".join([*(f"{name}: {outcome}" for outcome in outcomes), "", table.to_string(index=False)])
    print(summary)
    with log.open("a") as file:
        print(summary, file=file)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def verdicts(directory: Path, device: str, name: str, begun: str) -> pd.DataFrame:
    """Every promise, against what was measured on the device of that name since ``begun``."""
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


def timings(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """The measurements of ``perf/gpu timings``."""
    return _measurements(TIMINGS, directory, device, rehearsal)


def compiled(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """The measurements of ``perf/gpu compiled``."""
    return _measurements(COMPILED, directory, device, rehearsal)


def train(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """The trainings of ``perf/gpu train``."""
    return _measurements(TRAIN, directory, device, rehearsal)


def distributed(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """The trainings of ``perf/gpu distributed``; those of a rehearsal need no GPU."""
    return _measurements(DISTRIBUTED, directory, "cpu" if rehearsal else device, rehearsal)


def _measurements(commands: Mapping[str, float], directory: Path, device: str, rehearsal: bool) -> list[Part]:
    options = ["--device", device, "--results", str(directory), *(["--rehearse"] if rehearsal else [])]
    times = 3 if rehearsal else 1  # a CPU compiles and runs what it must
    return [Part(times * seconds, ["-m", "perf", *shlex.split(command), *options]) for command, seconds in commands.items()]


def tests(directory: Path, device: str, name: str, rehearsal: bool) -> list[Part]:
    """The runs of pytest of ``perf/gpu tests``; ``name`` is in their reports."""
    pytest = [
        *("-m", "pytest", *FILES, "--tb=short", "-p", "no:cacheprovider", "-o", f"junit_suite_name={name}"),
        # What torch and Triton may say on a GPU and nowhere else. This package's own are RuntimeWarnings, and errors.
        *(word for kind in ("User", "Future", "Deprecation") for word in ("-W", f"default::{kind}Warning")),
        *(["-p", "pytest_timeout", "--timeout", "120"] if _is_installed("pytest_timeout") else []),
        *(["-k", REHEARSED] if rehearsal else []),
        *(["--cuda-on-cpu"] if device == "cpu" else []),
    ]
    workers = str(min(12, max(1, (os.cpu_count() or 1) * 3 // 4)))
    several = ["-p", "xdist.plugin", "-n", workers, "--dist", "worksteal"] if _is_installed("xdist") else []
    # No other plugin, since it may warn; and no processes for compiling beside those of the tests.
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2"}
    command = [*pytest, *several, "-m", "cuda", f"--junitxml={directory}/cuda-tests.xml"]
    return [Part(480 + GRACE, command, environment)]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


PLANS: dict[str, Callable[[Path, str, str, bool], list[Part]]] = {
    "timings": timings,
    "compiled": compiled,
    "tests": tests,
    "train": train,
    "distributed": distributed,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perf/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=list(PLANS))
    parser.add_argument("directory", nargs="?", type=Path, help="where the files go (default: perf/results)")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU if there is no GPU (default: out/rehearsal)")
    return parser
