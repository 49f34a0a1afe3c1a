"""What was measured is saved, whatever comes then: an interrupt, an error, the end of the process or of the time."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import compiled_optim as co
from perf import (
    __main__,
    budget,
    checks,
    compiled_steps,
    convergence,
    first_step,
    host_time,
    hybrid,
    loops,
    low_memory,
    schedulers,
    turns,
)
from perf.__main__ import main
from perf.budget import Deadline
from perf.competitors import FUSED, OURS
from perf.loops import Way
from perf.turns import Call, Table, measured

CPU = torch.device("cpu")
PERF = str(Path(turns.__file__).parent)
Taken = tuple[bool, dict[str, list[float]]]
"""Whether ways were timed alone, and their samples."""

COMMANDS = {
    "step": ["step", "--rehearse"],
    "low-memory": ["low-memory", "--rehearse"],
    "changed": ["changed", "--rehearse"],
    "loops": ["loops", "--rehearse"],
    "compiled-step": ["compiled-step", "--rehearse"],
    "training-step": ["training-step", "--rehearse", "--competitors", FUSED],
}
"""All that time several ways."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* applies to no parameter:UserWarning", "ignore:.*uncaptured:RuntimeWarning"
)


def _make(name: str, params: list[torch.Tensor], device: torch.device) -> torch.optim.Optimizer:
    """What steps uncompiled in the place of each."""
    return co.AdamW(params)


@pytest.fixture
def quick_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing, and take few ways."""
    few = functools.partial(loops.measure_loops, ways=[Way(OURS, "model", runner=True), Way(FUSED), Way(OURS)])
    monkeypatch.setattr(__main__.loops, "measure_loops", few)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(compiled_steps, "_make", _make)
    monkeypatch.setattr(low_memory, "WAYS", {name: low_memory.WAYS[name] for name in ("float32", "bfloat16")})


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """What is timed, as it is when somebody looks."""
    ledger: list[Taken] = []
    take = turns._take

    def noting(samples: dict[str, list[float]], calls: Any, device: torch.device, rounds: int, *args: Any) -> None:
        ledger.append((rounds == 1, samples))  # a rehearsal has two rounds in turn
        take(samples, calls, device, rounds, *args)

    monkeypatch.setattr(turns, "_take", noting)
    return ledger


def _table(directory: Path) -> pd.DataFrame:
    tables = [pd.read_csv(path) for path in directory.glob("*.csv")]
    return pd.concat(tables) if tables else pd.DataFrame(columns=["competitor", "metric", "n", "p50", "unit"])


def _assert_kept(directory: Path, ledger: list[Taken]) -> None:
    """Every sample is in the table: those alone, and those in turn of whole rounds."""
    table = _table(directory)
    times = table[(table["unit"] == "ms") & (table["n"] > 0)]
    wanted = []
    for alone, samples in ledger:
        count = min(map(len, samples.values()), default=0)
        wanted += [(name, alone, count, 1e3 * pd.Series(s[:count]).median()) for name, s in samples.items() if count]
    rows = times[["competitor", "metric", "n", "p50"]].itertuples(index=False)
    found = [(name, metric.endswith(", alone"), n, p50) for name, metric, n, p50 in rows]
    assert [row[:3] for row in found] == [row[:3] for row in wanted]
    assert [row[3] for row in found] == pytest.approx([row[3] for row in wanted], rel=1e-5)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fail() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


class _Counted:
    """A timer whose seconds are their number; the ``last`` one ends by ``end``."""

    def __init__(self, last: int, end: Callable[[], None]) -> None:
        self.last, self.end, self.count = last, end, 0

    def __call__(self, call: Callable[[], object], device: torch.device, clock: Any = None) -> float:
        self.count += 1
        if self.count == self.last:
            self.end()
        call()
        return float(self.count)


@pytest.mark.parametrize("last", [1, 4, 7, 12, 17, 23, 26])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("quick_ways")
def test_an_interrupt_at_any_timing_keeps_all_that_was_timed(
    command: str, last: int, taken: list[Taken], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = _Counted(last, _interrupt)
    monkeypatch.setattr(turns, "timed", timer)
    code = main([*COMMANDS[command], "--results", str(tmp_path)])
    assert code == (130 if timer.count >= last else 0)
    _assert_kept(tmp_path, taken)
    table = _table(tmp_path)
    said = {name for name, metric in zip(table["competitor"], table["metric"], strict=True) if "interrupted" in metric}
    alone = {name for is_alone, samples in taken if is_alone for name in samples}
    finished = {*table.loc[table["n"] > 0, "competitor"]}
    assert (said | finished) >= alone  # each has a row, with a number or with the reason
    assert last != 1 or said


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("quick_ways")
def test_a_way_that_dies_does_not_keep_others_from_being_timed(
    command: str, taken: list[Taken], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one; where it is this package's, not torch's, the command fails."""
    monkeypatch.setattr(turns, "timed", _Counted(1, _fail))
    assert main([*COMMANDS[command], "--results", str(tmp_path)]) == (command != "low-memory")
    _assert_kept(tmp_path, taken)
    table = _table(tmp_path)
    assert table["metric"].str.contains("did not run: RuntimeError: CUDA error: an illegal").sum() == 1
    assert (table["metric"].str.endswith(", alone") & (table["n"] > 0)).sum() >= 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("quick_ways")
def test_before_a_way_begins_those_before_it_are_in_the_file(
    command: str, taken: list[Taken], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may end in it, and then nothing is saved any more."""
    looks = 0
    take = turns._take

    def looking(*args: Any) -> None:
        nonlocal looks
        looks += 1
        _assert_kept(tmp_path, taken)
        take(*args)

    monkeypatch.setattr(turns, "_take", looking)
    assert main([*COMMANDS[command], "--results", str(tmp_path)]) == 0
    assert looks > 2


SEEDS = [pytest.param(seed, marks=[] if seed < 3 else pytest.mark.full) for seed in range(20)]


@pytest.mark.quick
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("quick_ways")
def test_a_rehearsal_interrupted_at_a_random_moment_keeps_all_that_was_timed(
    seed: int, taken: list[Taken], tmp_path: Path
) -> None:
    """By a signal before some line of these programs: also where rows are made, shown and saved."""
    command = [*COMMANDS["loops"], "--results"]
    main([*command, str(tmp_path / "first")])  # what a process does once takes lines, too
    taken.clear()
    with _signal_before(-1) as lines:
        assert main([*command, str(tmp_path / "whole")]) == 0
    _assert_kept(tmp_path / "whole", taken)
    taken.clear()
    moment = random.Random(seed).randrange(lines.count)
    try:
        with _signal_before(moment) as lines:
            main([*command, str(tmp_path / "interrupted")])
    except KeyboardInterrupt:  # before the command began
        assert not taken
    assert lines.count >= moment
    _assert_kept(tmp_path / "interrupted", taken)


class _signal_before:
    """Interrupts this process before the line of that number; ``count`` is how many there were."""

    def __init__(self, moment: int) -> None:
        self.moment, self.count = moment, 0

    def __enter__(self) -> _signal_before:
        self._handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGINT, self._handler)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PERF) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count - 1 == self.moment:
                signal.raise_signal(signal.SIGINT)
        return self._line


PIECES: list[tuple[list[str], Any, str, int, dict[str, int]]] = [
    (["schedulers", "--rounds", "2"], schedulers.time, "process_time", 6, {OURS: 1, FUSED: 1}),
    (["host", "--rehearse"], checks, "synchronize", 8 + 8, {OURS: 2, "compiled_optim[captured]": 1}),
    (["kernels", "--rehearse"], checks, "enter", 2, {OURS: 1}),
    (["checks", "--rehearse", "--only", "huge"], checks, "_difference", 2, {OURS: 1}),
    (["convergence", "--rehearse", "--task", "digits"], convergence, "final_loss", 4, {"float32": 2, "split8, int8": 1}),
    (["hybrid", "--rehearse"], hybrid, "trained", 2, {"AdamW": 1}),
    (["hybrid", "--rehearse"], hybrid, "trained", 4, {"AdamW": 1, "MuonAdamW": 1}),
    (["bandwidth", "--rehearse"], turns, "timed", 11, {OURS: 2, "copy": 2}),
    (["overhead", "--rehearse"], turns, "timed", 5, {OURS: 2}),
]
"""Other commands, what is interrupted in them, at which call, and the samples of a row of each that were taken by then."""


@pytest.mark.parametrize("end", [_interrupt, _fail])
@pytest.mark.parametrize(
    ("command", "where", "name", "last", "kept"), PIECES, ids=[f"{piece[0][0]}-{piece[3]}" for piece in PIECES]
)
def test_other_commands_keep_what_they_measured(
    command: list[str],
    where: ModuleType,
    name: str,
    last: int,
    kept: dict[str, int],
    end: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count(1)
    real = getattr(where, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == last:
            end()
        return real(*args, **kwargs)

    if where is schedulers.time:  # which others look at too
        monkeypatch.setattr(schedulers, "time", SimpleNamespace(process_time=counted))
    else:
        monkeypatch.setattr(where, name, counted)
    goes_on = end is _fail and command[0] == "kernels"  # with the next competitor, and says that one failed
    with pytest.raises(RuntimeError) if end is _fail and not goes_on else contextlib.nullcontext():
        assert main([*command, "--results", str(tmp_path)]) == (1 if goes_on else 130)
    table = _table(tmp_path)
    measured = table.groupby("competitor")["n"].max()
    assert measured[kept.keys()].to_dict() == kept
    assert (measured.drop(kept.keys()) > 0).any() if goes_on else measured.keys().tolist() == sorted(kept)
    assert table["metric"].str.startswith("did not run: ").any() == goes_on


@pytest.mark.parametrize(("module", "command"), [(first_step, "first-step"), (host_time, "overhead")])
def test_processes_that_were_timed_are_kept(
    module: ModuleType, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)

    def measured(*args: Any) -> dict[str, Any]:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return {"step": [1.0, 2.0]} if module is host_time else {"both": 1.0}

    monkeypatch.setattr(module, "_in_process", measured)
    monkeypatch.setattr(__main__, "measure_overhead", lambda *args, **options: iter([]))
    monkeypatch.setattr(__main__.importlib.util, "find_spec", lambda name: object())
    options = [
        "--workload",
        "tiny-10",
        "--rounds",
        "2",
        *(["--competitors", OURS, FUSED] if command == "first-step" else []),
    ]
    assert main([command, *options, "--results", str(tmp_path)]) == 130
    rows = {"both, fresh cache": 1, "both, warm cache": 1} if module is first_step else {"step, driver that does nothing": 4}
    assert dict(zip(*(_table(tmp_path)[c] for c in ("metric", "n")), strict=True)) == rows


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock, at the entry."""
    clock = [0.0]
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_way_begins_only_if_one_as_long_as_the_longest_fits(now: list[float]) -> None:
    def making(seconds: float) -> Callable[[], Call]:
        def make() -> Call:
            now[0] += seconds
            return Call(lambda: None)

        return make

    ways = {"own": making(10), "long": making(40), "fits": making(1), "does not": making(1), "nor this": making(1)}
    table = Table("loops", "tiny", "step", reference="own")
    deadline = Deadline(90.0, started=0.0)
    rows = [row for rows in measured(table, ways, CPU, rounds=4, warmup=0, deadline=deadline) for row in rows]
    assert now == [51.0]
    reasons = {row.competitor: row.metric for row in rows if row.n == 0}
    assert reasons == dict.fromkeys(("does not", "nor this"), "did not run: out of time")
    assert {row.competitor for row in rows if row.metric == "step, alone"} == {"own", "long", "fits"}
    assert {row.competitor for row in rows if row.metric == "step"} == {"own", "long", "fits"}  # that there was time for


def test_rounds_in_turn_end_with_the_time(now: list[float]) -> None:
    def step() -> None:
        now[0] += 10.0

    ways = {name: lambda: Call(step) for name in ("own", "other")}
    table = Table("loops", "tiny", "step", reference="own")
    options = {"rounds": 8, "warmup": 0, "deadline": Deadline(75.0, started=0.0)}  # 2 rounds alone each take 40
    rows = [row for rows in measured(table, ways, CPU, **options) for row in rows]
    assert [(row.metric, row.n) for row in rows] == [
        *[("step, alone", 2)] * 2,
        *[("step", 2)] * 2,
        ("paired ratio, step", 2),
    ]


def test_without_time_for_rounds_in_turn_there_are_those_alone(now: list[float]) -> None:
    def step() -> None:
        now[0] += 10.0

    table = Table("loops", "tiny", "step", reference="own")
    options = {"rounds": 4, "warmup": 0, "deadline": Deadline(9.0, started=0.0)}
    rows = [row for rows in measured(table, {"own": lambda: Call(step)}, CPU, **options) for row in rows]
    assert [(row.metric, row.n) for row in rows] == [("step, alone", 1)]


def test_ratios_are_left_out_where_there_is_nothing_of_this_package() -> None:
    def fail() -> Call:
        raise LookupError("no such thing")

    table = Table("loops", "tiny", "step", reference="own")
    found = measured(table, {"own": fail, "other": lambda: Call(lambda: None)}, CPU, rounds=2, warmup=0)
    rows = [row for batch in found for row in batch]
    assert [(row.competitor, row.metric, row.ratio) for row in rows] == [
        ("own", "did not run: no such thing", None),
        ("other", "step, alone", None),
        ("other", "step", None),
    ]


def test_where_every_way_fails_the_rows_say_so() -> None:
    ways = {name: lambda: Call(_fail) for name in ("own", "other")}
    table = Table("loops", "tiny", "step", reference="own")
    rows = [row for rows in measured(table, ways, CPU, rounds=2, warmup=0) for row in rows]
    assert [row.competitor for row in rows if "illegal" in row.metric] == ["own", "other"]
    assert len(rows) == 2


def test_compiled_steps_of_both_modes_share_the_time(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "_modes", lambda device: ("default", "reduce-overhead"))

    def compiling(function: Any, mode: str, *, fullgraph: bool) -> Any:
        now[0] += 30.0
        return function

    monkeypatch.setattr(compiled_steps, "_compiled", compiling)
    monkeypatch.setattr(compiled_steps, "_make", _make)
    deadline = Deadline(130.0, started=0.0)
    found = compiled_steps.measure_compiled_step("tiny-matrices", CPU, rounds=2, deadline=deadline)
    rows = [row for batch in found for row in batch]
    times = [(row.competitor, row.metric) for row in rows if row.metric.endswith("alone")]
    assert times == [
        *((name, "step, default, alone") for name in compiled_steps.NAMES),
        (OURS, "step, reduce-overhead, alone"),
    ]
    assert [row.competitor for row in rows if row.n == 0] == [*compiled_steps.NAMES[1:]]
