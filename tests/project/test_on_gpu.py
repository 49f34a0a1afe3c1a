"""What is run on a GPU: it fits into its time, and runs without one as a rehearsal."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
import simulated_graph
import torch

from perf import budget, checks, competitors, measure, on_gpu, wheels, workspaces
from perf.__main__ import _parser, main
from perf.budget import GRACE, LEFT, ROOT, Deadline, Outcome, Part, run
from perf.competitors import FUSED, OURS, PEERS
from perf.loops import WAYS, Way, measure_loops
from perf.measure import step_table
from perf.results import append, device_name
from perf.workloads import shapes

TESTS = Path(__file__).resolve().parents[1]
NAME = device_name(torch.device("cpu"))

INTERRUPTED = """
import signal
def test_one(): pass
def test_two():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell lets what it runs in the background ignore
    signal.raise_signal(signal.SIGINT)  # to this thread: as the process's, another one could take it, later
def test_three(): pass
"""

LATE = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.default_int_handler)
try:
    pathlib.Path(sys.argv[1] + "~").write_text(str(child.pid))
    os.rename(sys.argv[1] + "~", sys.argv[1])  # from here on it may be interrupted
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture
def rehearsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no GPU, and for every command twenty times its seconds: this machine may be doing much else."""
    installed = on_gpu._is_installed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(on_gpu, "_is_installed", lambda module: module != "pytest_timeout" and installed(module))

    def patiently(parts: Sequence[Part], *args: Any) -> Iterator[Outcome]:
        return run([dataclasses.replace(part, seconds=20 * part.seconds) for part in parts], *args)

    monkeypatch.setattr(on_gpu, "run", patiently)


@pytest.mark.parametrize("call", on_gpu.PLANS)
def test_the_parts_of_a_call_fit_into_ten_minutes(call: str, tmp_path: Path) -> None:
    parts = on_gpu.PLANS[call](tmp_path, "cuda", "a GPU", False)
    assert sum(part.seconds for part in parts) <= on_gpu.LIMIT <= 590
    assert all(part.seconds > GRACE for part in parts)


def test_the_tests_have_eight_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(on_gpu, "_is_installed", lambda module: True)
    (together,) = on_gpu.tests(tmp_path, "cuda", "a GPU", False)
    assert together.seconds - GRACE == 480
    assert together.command[together.command.index("-n") + 1] == "12"


@pytest.mark.parametrize("rehearsal", [False, True])
def test_every_measurement_is_a_command(rehearsal: bool, tmp_path: Path) -> None:
    plans = [plan(tmp_path, "cuda", "a GPU", rehearsal) for plan in on_gpu.PLANS.values()]
    parts = [part for part in itertools.chain(*plans) if part.command[:2] == ["-m", "perf"]]
    assert len(parts) > 30
    for part in parts:
        args = _parser().parse_args(["12" if word == LEFT else word for word in part.command[2:]])
        assert (args.device.type, args.results, args.rehearse, args.seconds) == ("cuda", tmp_path, rehearsal, 12)


def test_what_is_first_tells_most_first(tmp_path: Path) -> None:
    names = [str(part) for part in on_gpu.first(tmp_path, "cuda", "a GPU", False)]
    assert names[:4] == [*(f"checks --only {mode}" for mode in workspaces.MODES), "loops --model small"]
    assert {"checks --only sanitized", "tests", "loops --model gpt2 --rounds 11"} == {*names[4:]}


def test_what_shows_a_fault_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsing: None) -> None:
    shows = {str(part): part.shows_fault for part in on_gpu.first(tmp_path, "cuda", "a GPU", False)}
    assert [name for name, is_shown in shows.items() if is_shown] == ["checks --only unfixed", "checks --only others"]
    for is_shown in (True, False):
        part = Part(60.0, ["-c", "raise SystemExit(3)"], name="it", shows_fault=is_shown)
        monkeypatch.setitem(on_gpu.PLANS, "first", lambda *args, part=part: [part])
        assert on_gpu.main(["first", str(tmp_path), "--rehearse"]) == (0 if is_shown else 1)


def test_every_word_of_new_tests_is_in_a_name() -> None:
    names = " ".join(re.findall(r"(?:def test_|class Test|id=)\S+", "".join((ROOT / f).read_text() for f in on_gpu.FILES)))
    assert [word for word in on_gpu.NEW if word not in names.lower()] == []


def _of_others() -> Iterator[tuple[str, str, str]]:
    """Optimizer, workload and competitor of each step of this package's that ``perf/gpu others`` times."""
    for command in on_gpu.OTHERS:
        args = _parser().parse_args([*shlex.split(command), "--device", "cpu"])
        for workload, name in itertools.product(args.workload, dict.fromkeys([OURS, *args.competitors])):
            if PEERS[name].module in (OURS, "perf.pairs"):
                yield args.optimizer, workload, name


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*uncaptured.*")  # a CPU has no graphs
@pytest.mark.parametrize(("optimizer", "workload", "name"), [*_of_others()])
def test_what_others_times_takes_steps_of_such_shapes(
    optimizer: str, workload: str, name: str, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(competitors.end_mesh)
    device = torch.device("cpu")
    small = [tuple(size // 12 if size > 64 else size for size in shape) for shape in dict.fromkeys(shapes(workload))]
    made = competitors.competitor(optimizer, name)
    grads = measure.make_gradients(small, device, 1, made.dtype)
    measure.enter(made, measure.make_params(small, device, made.dtype), grads)


CRASHES = {
    "no part": "raise SystemExit(3)",
    "illegal": "print('torch.AcceleratorError: CUDA error: an illegal access\\nCompile with'); raise SystemExit(1)",
    "killed": "import os; print('so far', flush=True); os.abort()",
    "fine": "print('all is well')",
}


@pytest.mark.usefixtures("rehearsing")
def test_a_part_that_dies_does_not_keep_the_next_from_running_and_each_outcome_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "outcomes.csv"
    counts: list[int] = []

    def parts(*args: Any) -> list[Part]:
        return [Part(60.0, ["-c", code], name=name) for name, code in CRASHES.items()]

    def looking(*args: Any) -> Iterator[Outcome]:
        for outcome in run(*args):
            counts.append(len(pd.read_csv(table)) if table.exists() else 0)
            yield outcome

    monkeypatch.setattr(on_gpu, "run", looking)
    monkeypatch.setitem(on_gpu.PLANS, "first", parts)
    assert on_gpu.main(["first", str(tmp_path), "--rehearse"]) == 1
    assert counts == [0, 1, 2, 3]
    found = pd.read_csv(table).fillna("")
    assert list(found["part"]) == [*CRASHES]
    assert list(found["outcome"]) == ["exit status 3", "exit status 1", f"exit status {-signal.SIGABRT}", "succeeded"]
    said = ["", "torch.AcceleratorError: CUDA error: an illegal access", "so far", "all is well"]
    assert list(found["said"]) == said
    log = (tmp_path / "gpu-first.log").read_text()
    for name, line in zip(CRASHES, said, strict=True):
        assert re.search(rf"{re.escape(name)}: {re.escape(line)}$", log, re.MULTILINE)


def test_an_interrupt_is_handed_on_and_ends_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process(subprocess.Popen[bytes]):
        """A process whose caller is interrupted while he waits."""

        waits = 0

        def wait(self, timeout: float | None = None) -> int:
            Process.waits += 1
            if Process.waits == 1:
                _wait_for((tmp_path / "begun").exists)
                raise KeyboardInterrupt
            return super().wait(600)

    monkeypatch.setattr(subprocess, "Popen", Process)
    log = tmp_path / "log"
    log.touch()
    parts = [Part(30.0, ["-c", LATE, str(tmp_path / "begun"), "polite"]), Part(30.0, ["-c", "print('not begun')"])]
    (outcome,) = run(parts, log, time.monotonic())
    assert (outcome.failure, outcome.printed) == (budget.INTERRUPTED, "interrupted\n")
    assert "not begun" not in log.read_text()


def test_a_part_is_told_how_many_seconds_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: 100.0))
    log = tmp_path / "log"
    log.touch()
    (outcome,) = run([Part(50.0, ["-c", "import sys; print(sys.argv[1])", LEFT])], log, 90.0, grace=5.0)
    assert outcome.printed == "35\n"
    assert str(outcome.part) in log.read_text().replace("35", LEFT)


def _wheel(folder: Path, name: str) -> None:
    """A package of one module."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "number = 7",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_wheels_that_came_along_are_found_by_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, site, log = tmp_path / "wheels", tmp_path / "site", tmp_path / "log"
    folder.mkdir()
    log.touch()
    monkeypatch.setattr(wheels, "FOLDER", folder)
    assert wheels.install(site) == {}
    _wheel(folder, "came_along")
    environment = wheels.install(site)
    command = ["-c", "import came_along, perf; print(came_along.number, perf.__path__[0])"]
    (outcome,) = run([Part(60.0, command, environment)], log, time.monotonic())
    assert outcome.printed == f"7 {ROOT / 'perf'}\n"
    (folder / "broken-1.0-py3-none-any.whl").write_text("no archive")
    assert wheels.install(tmp_path / "other") == {}


def test_wheels_are_those_that_the_tests_have() -> None:
    pinned = wheels._pinned()
    assert len(pinned) == len(wheels.PACKAGES)
    assert [p for p in pinned if "==" not in p] == ["opt-einsum"]
    modules = {"torch-optimi": "optimi", "opt-einsum": ""}
    others = {peer.module.partition(".")[0] for peer in PEERS.values()}
    assert {modules.get(name, name) for name in wheels.PACKAGES} - {""} <= others


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", workspaces.MODES)
def test_a_runners_graph_is_compared_with_a_twin(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With simulated graphs; the second time the twin's losses differ from some step on."""
    simulated_graph.install(monkeypatch)
    command = ["checks", "--only", mode, "--rehearse", "--results", str(tmp_path)]
    assert main(command) == 0
    assert f"{mode}: 0 steps that differ, 0 " in capsys.readouterr().out
    steps, step = itertools.count(1), workspaces._step

    def drifting(*args: Any) -> torch.Tensor:
        return step(*args) + (next(steps) > 8)

    monkeypatch.setattr(workspaces, "_step", drifting)
    assert main(command) == (mode == "fixed")
    table = pd.read_csv(tmp_path / "workspaces.csv")
    differing = table.loc[table["metric"] == "steps that differ", "p50"].to_list()
    assert differing[0] == 0 < differing[1]


def test_every_file_with_such_tests_is_run() -> None:
    marked = {path for path in TESTS.rglob("test_*.py") if re.search(r"needs_cuda\(\)|mark\.cuda\b", path.read_text())}
    assert marked - {Path(__file__)} == {TESTS.parent / file for file in on_gpu.FILES}


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    command = [sys.executable, "perf/gpu", "timings", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--rehearse" in done.stderr
    assert not list(tmp_path.iterdir())


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _has_ended(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().split()[2] in "ZX"
    except OSError:
        return True


def test_a_late_command_is_interrupted_then_ended_and_those_behind_it_have_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [tmp_path / "one", tmp_path / "two"]
    parts = [
        Part(30.0, ["-c", LATE, str(children[0]), "polite"]),
        Part(20.0, ["-c", LATE, str(children[1]), "stubborn"]),
        Part(100.0, ["-c", "print('done'); raise SystemExit(3)"]),
        Part(5.0, ["-c", "pass"]),
    ]
    now = 0.0
    limits, interrupted = [], []

    class Process(subprocess.Popen[bytes]):
        """A process whose seconds are counted: 4 if it ends by itself, otherwise all that are waited for it."""

        def send_signal(self, sig: int) -> None:
            assert sig == signal.SIGINT
            interrupted.append(self.args[-1])
            super().send_signal(sig)

        def wait(self, timeout: float | None = None) -> int:
            nonlocal now
            if timeout is None:
                return super().wait()
            limits.append(timeout)
            if self.args[-1] == "stubborn" or (self.args[-1] == "polite" and not interrupted):
                _wait_for(Path(self.args[-2]).exists)
                now += timeout
                raise subprocess.TimeoutExpired(self.args, timeout)
            now += 4.0
            return super().wait(600)

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now))
    log = tmp_path / "log"
    log.write_text("before\n")
    outcomes = list(run(parts, log, now, grace=10.0))
    assert [outcome.failure for outcome in outcomes] == ["out of time", "out of time", "exit status 3", ""]
    assert [outcome.seconds for outcome in outcomes] == [24.0, 26.0, 4.0, 4.0]
    assert limits == [20.0, 10.0, 16.0, 10.0, 90.0, 91.0]
    assert interrupted == ["polite", "stubborn"]
    assert [outcome.printed for outcome in outcomes] == ["interrupted\n", "", "done\n", ""]
    assert log.read_text().startswith("before\n$ python -c")
    for child in children:
        _wait_for(functools.partial(_has_ended, child.read_text()))


def test_an_interrupted_run_of_tests_writes_its_report_and_names_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(INTERRUPTED)
    report = tmp_path / "report.xml"
    options = [
        "-c",
        "/dev/null",
        f"--rootdir={tmp_path}",
        "-p",
        "left_out",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    command = [sys.executable, "-m", "pytest", str(tmp_path), *options]
    environment = os.environ | {"PYTHONPATH": str(TESTS / "support")}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    assert "2 tests left out" in printed
    assert all(f"\ntest_slow.py::test_{name}\n" in printed for name in ("two", "three"))
    assert [name for case in ElementTree.parse(report).iter("testcase") if (name := case.get("name"))] == ["test_one"]


REHEARSALS = {
    "timings": {"bandwidth.csv", "host.csv", "kernels.csv", "low_memory.csv", "schedulers.csv", "step.csv"},
    "compiled": {"checks.csv", "loops.csv"},
}
"""Which tables the rehearsals below write."""


@pytest.mark.full
@pytest.mark.parametrize("call", REHEARSALS)
@pytest.mark.usefixtures("rehearsing")
def test_a_rehearsal_writes_its_tables(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that does not compile for minutes; ``perf/gpu --rehearse`` tries everything."""
    commands = getattr(on_gpu, call.upper())
    slow = ("first-step", "torchao", "compiled-step", "training-step", "loops --model gpt2", "inductor", "muon")
    chosen = {command: seconds for command, seconds in commands.items() if not any(word in command for word in slow)}
    assert len(chosen) == (5 if call == "timings" else 2)
    monkeypatch.setattr(on_gpu, call.upper(), chosen)
    assert on_gpu.main([call, str(tmp_path), "--rehearse"]) == 0
    tables = {path.name: pd.read_csv(path) for path in tmp_path.glob("*.csv")}
    assert all(set(table["device"]) == {NAME} for table in tables.values())
    assert len(tables.pop("outcomes.csv")) == len(chosen)
    assert tables.keys() == REHEARSALS[call]
    log = (tmp_path / f"gpu-{call}.log").read_text()
    assert log.startswith(f"{NAME}, torch {torch.__version__}")
    assert log.count("succeeded") == len(chosen)
    assert re.search(r"^ *promise +limit +measured +verdict$", log, re.MULTILINE)
    if call == "timings":
        kinds = itertools.product(("float32", "bfloat16"), ("step", "clipped step", "copy", "clipping"))
        assert list(tables["bandwidth.csv"]["metric"])[:8] == [f"{metric}, {dtype}" for dtype, metric in kinds]
        said = r"step of StepLR, 24 groups.* at most 4.25 ratio of medians +[\d.]+ +(kept|MISSED)$"
        assert re.search(said, log, re.MULTILINE)
    else:
        loops, found = tables["loops.csv"], tables["checks.csv"]
        ways = [*map(str, WAYS)]
        assert list(loops.loc[loops["metric"] == "training step", "competitor"]) == ways
        losses = loops.loc[loops["unit"] == "nats", "p50"]
        assert (losses - losses.iloc[0]).abs().max() < 0.05
        assert "20 steps" in {*found["workload"]}
        assert "compute-sanitizer" in {*found["competitor"]}


def test_verdicts_are_of_this_call(tmp_path: Path) -> None:
    rows = step_table("small-148", "adamw", "fresh").together({OURS: [2.0], FUSED: [1.0]})
    append(rows, torch.device("cpu"), tmp_path)
    for begun, measured, verdict in (("2020", "2", "MISSED"), ("2999", "", "not measured")):
        table = on_gpu.verdicts(tmp_path, "cpu", NAME, begun).set_index("promise")
        found = table.loc["AdamW step, small-148, fresh gradients: time / torch fused"]
        assert list(found) == ["at most 1.1 ratio of medians", measured, verdict]


@pytest.mark.filterwarnings("ignore:.*runs AdamW uncaptured:RuntimeWarning")  # of a CPU
def test_a_check_that_finds_a_difference_fails() -> None:
    (rows,) = checks.long_run(torch.device("cpu"), 3)
    assert [row.p50 for row in rows] == [0.0]
    assert not any(map(checks.failed, rows))
    assert checks.failed(dataclasses.replace(rows[0], p50=1e-9))
    ((ran,),) = checks.sanitized(torch.device("cpu"), "false")
    assert checks.failed(ran)


@pytest.mark.full
def test_without_the_tool_the_steps_that_it_would_watch_are_taken() -> None:
    (absent,), (ran,) = checks.sanitized(torch.device("cpu"), "no-such-tool")
    assert absent.metric == "did not run: no-such-tool is not installed"
    assert not checks.failed(absent)
    assert (ran.metric, ran.p50, checks.failed(ran)) == ("exit status", 0, False)


def test_loops_out_of_time_are_named() -> None:
    torch._dynamo.reset()
    ways = [Way(OURS), Way(FUSED)]
    found = measure_loops("tiny", torch.device("cpu"), rounds=2, deadline=Deadline(0.0), ways=ways)
    rows = [row for batch in found for row in batch]
    assert [(row.competitor, row.metric) for row in rows] == [(str(way), "did not run: out of time") for way in ways]


@pytest.mark.full
@pytest.mark.usefixtures("rehearsing")
def test_a_rehearsal_of_the_tests_passes_and_writes_its_report(tmp_path: Path) -> None:
    assert on_gpu.main(["tests", str(tmp_path), "--rehearse"]) == 0
    (suite,) = ElementTree.parse(tmp_path / "cuda-tests.xml").iter("testsuite")
    assert suite.get("name") == NAME
    assert int(suite.get("tests", 0)) > 10
    assert "succeeded" in (tmp_path / "gpu-tests.log").read_text()
