from __future__ import annotations

import functools
import itertools
import re
import sys
from collections import Counter

import pandas as pd
import pytest
import torch
from torch.distributed.tensor import DTensor

pytest.importorskip("matplotlib")

from perf import (
    changed,
    competitors,
    convergence,
    gates,
    host_time,
    low_memory,
    measure,
    movement,
    report,
    results,
    schedulers,
    turns,
)
from perf.__main__ import main
from perf.competitors import FUSED, OURS, PEERS, SPLIT, TORCH_PRODUCTS, Competitor, competitor, entered, optimizers
from perf.compiled_steps import INLINED, NAMES
from perf.measure import measure_bandwidth, step_table
from perf.results import NOT_RUN
from perf.workloads import TINY, WORKLOADS, elements, shapes

TRACED = [INLINED, "torch foreach capturable compiled"]
CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Let each call that is timed take a second more than the one before it."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr(turns, "timed", lambda call, device, clock=None: [call(), next(seconds)][1])


@pytest.mark.parametrize(
    ("name", "tensors", "count"),
    [
        ("gpt2-124m", 148, 124_439_808),
        ("vit-tiny", 152, 5_717_416),
        ("gpt-matrices", 48, 12 * (3 + 1 + 4 + 4) * 256**2),
        ("gpt2-matrices", 48, 12 * (3 + 1 + 4 + 4) * 768**2),
        ("small-10", 10, 40_960),
        ("small-148", 148, 606_208),
        ("small-1000", 1000, 4_096_000),
        ("tiny-10", 10, 160),
        ("matrices-148", 148, 37_888),
        ("tiny-matrices", 10, 160),
        ("30-million", 30, 30_000_000),
        ("half-billion", 500, 500_000_000),
        ("experts", 8, 4 * 2 * 8 * 3072 * 768),
        ("scalars-20000", 20_000, 20_000),
    ],
)
def test_workloads_have_the_known_sizes(name, tensors, count):
    assert len(shapes(name)) == tensors
    assert elements(name) == count


def test_every_workload_has_a_known_size():
    sizes = next(m for m in test_workloads_have_the_known_sizes.pytestmark if m.name == "parametrize").args[1]
    assert sorted(name for name, *_ in sizes) == sorted(WORKLOADS)


def test_optimizers_come_in_pairs_of_one_name():
    assert {"adamw", "sgd"} <= set(optimizers())
    for name, (ours, theirs) in optimizers().items():
        assert ours.__name__.lower() == name
        if theirs is None:
            assert not hasattr(torch.optim, ours.__name__)
        else:
            assert ours.__name__ == theirs.__name__
            assert theirs.__module__.startswith("torch.optim")


PAIR = "torch Muon and fused AdamW"
# On a CPU. Those without AdamW are entered for no step of it.
WITHOUT_ADAMW = {TORCH_PRODUCTS, SPLIT, PAIR, "pytorch_optimizer", "pytorch_optimizer compiled", "schedulefree"}
NEED_A_GPU = {"torch foreach capturable", "optimi triton", "flashoptim", "flashoptim float32 state"}
OTHERS = {
    "pytorch_optimizer": "lion",
    "pytorch_optimizer compiled": "lion",
    "schedulefree": "adamwschedulefree",
    "heavyball": "adamwschedulefree",
    "torch": "muon",
    TORCH_PRODUCTS: "normuon",
    SPLIT: "muon",
    PAIR: "muonadamw",
    "optimi": "lion",
    "bitsandbytes": "lamb",
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # whatever other packages say
@pytest.mark.parametrize(
    ("name", "optimizer"), [*((name, "adamw") for name in PEERS if name not in WITHOUT_ADAMW), *OTHERS.items()]
)
def test_every_peer_takes_finite_steps_or_says_why_not(name: str, optimizer: str, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(competitors.end_mesh)
    (ours, *made), reasons = entered(optimizer, [name])
    assert (ours.name, [c.name for c in made], reasons) == (OURS, [name] if name != OURS else [], {})
    sizes = [(64, 64), (4, 4)]
    made = competitor(optimizer, name)
    grads = measure.make_gradients(sizes, CPU, 1, made.dtype)
    before = [grad.clone() for grad in grads]
    params = measure.make_params(sizes, CPU, made.dtype)
    if name in NEED_A_GPU:
        with pytest.raises(Exception, match=r"CUDA|cuda|drivers"):
            measure.enter(made, params, grads)
    else:
        entrant = measure.enter(made, params, grads)
        assert all(bool(param.isfinite().all()) for param in params)
        assert all(a.equal(b) for a, b in zip(grads, before, strict=True))
        entrant.take(grads, "same")
        taken = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in entrant.params]
        shared = {grad.data_ptr() for grad in taken} & {g.data_ptr() for g in grads}
        assert bool(shared) != PEERS[name].spoils_gradients


def test_a_package_that_is_not_installed_has_a_row_that_says_so(clock, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optimi", None)
    names = ["optimi", "torch foreach capturable", FUSED]
    assert main(["step", "--rehearse", "--competitors", *names, "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "step.csv").set_index("competitor")
    assert table.loc["optimi", "metric"] == "did not run: optimi is not installed"
    assert "AssertionError: If capturable=True" in table.loc["torch foreach capturable", "metric"]
    assert table.loc[["optimi", "torch foreach capturable"], "n"].tolist() == [0, 0]
    assert (table.loc[[OURS, FUSED], "p50"] > 0).all()
    assert "did not run: optimi is not installed" in capsys.readouterr().out


def test_what_is_entered():
    found, reasons = entered("adamw", [], 1000)
    names = {c.name for c in found}
    assert {name for name, peer in PEERS.items() if peer.compiled} - names == {"torch compiled", *reasons}
    assert all("ask with --competitors" in why for why in reasons.values())
    assert WITHOUT_ADAMW.isdisjoint({*names, *reasons})
    assert "torch" not in names
    assert {"torch", "torch compiled"} <= {c.name for c in entered("muon")[0]}
    asked, reasons = entered("adamw", ["torch fused compiled", "schedulefree"], 1000)
    assert [c.name for c in asked] == [OURS, "torch fused compiled"]
    assert reasons == {"schedulefree": "schedulefree has no adamw"}


@pytest.mark.parametrize(
    ("update", "why"),
    [(lambda p: None, "changed nothing"), (lambda p: p.data.fill_(float("nan")), "not finite"), (1, "TypeError")],
    ids=["nothing", "nan", "raises"],
)
def test_a_step_that_does_no_work_is_not_timed(update, why):
    class Bad(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self):
            for param in self.param_groups[0]["params"]:
                update(param)

    ways = measure.step_ways([(4,)], [competitor("adamw", OURS), Competitor("bad", Bad)], CPU, "fresh")
    reasons = {}
    found = turns.measured(turns.Table("step", TINY, "step"), ways, CPU, rounds=2, warmup=0, reasons=reasons)
    rows = [row for batch in found for row in batch]
    assert why in reasons["bad"]
    assert {row.competitor for row in rows if row.n} == {OURS}


@pytest.mark.parametrize(("name", "why", "code"), [(OURS, "no", 1), (OURS, results.OUT_OF_TIME, 0), (FUSED, "no", 0)])
def test_a_command_fails_if_something_of_this_package_did(name, why, code, tmp_path, monkeypatch):
    rows = results.left_out("step", TINY, "adamw", {name: why})
    monkeypatch.setattr("perf.__main__.measure_step", lambda *args, **options: iter([rows]))
    assert main(["step", "--rehearse", "--results", str(tmp_path)]) == code


def test_copies_of_functions_have_their_own_code():
    step = torch.optim.AdamW.step
    copied = competitors.with_own_code(step)
    assert copied.__code__ == step.__code__
    assert copied.__code__ is not step.__code__
    inner, theirs = copied.__closure__[0].cell_contents, step.__closure__[0].cell_contents
    assert inner.__code__ is not theirs.__code__


@pytest.mark.parametrize(
    ("ratio", "unit", "words"),
    [
        (0.0265, "us", "0.026, ours is 37.7x faster"),
        (1.5, "ms", "1.500, ours is 1.5x slower"),
        (1.0, "s", "1.000 "),
        (1.5, "GB/s", "1.500 "),
    ],
)
def test_a_ratio_of_times_is_told_in_words(ratio: float, unit: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    results.show([results.Row("step", TINY, "adamw", "torch fused", "step", unit, 1.0, 1.0, 1.0, ratio, 3)], "")
    assert f" {words}" in capsys.readouterr().out


def test_step_appends_well_formed_rows(clock, tmp_path, capsys):
    command = ["step", "--workload", "tiny-10", "--rounds", "4", "--competitors", FUSED, "--results", str(tmp_path)]
    assert main(command) == 0
    assert main(command) == 0
    assert FUSED in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "step.csv")
    assert list(table.columns) == results.COLUMNS
    assert len(table) == 2 * 10  # for fresh and same gradients: two steps alone, two in turn, and a paired ratio
    alone = table["metric"].str.endswith(", alone")
    assert (table.loc[alone, "n"] == 1).all()
    assert alone.sum() == 2 * 4
    table = table[~alone]
    assert set(table["competitor"]) == {OURS, FUSED}
    assert (table["n"] == 4).all()
    assert (table["p20"] <= table["p50"]).all()
    assert (table["p50"] <= table["p80"]).all()
    assert (table["p20"] > 0).all()
    assert (table["torch"] == torch.__version__).all()


def test_schedulers_are_timed_beside_torchs(tmp_path, monkeypatch):
    looks = itertools.count()
    monkeypatch.setattr(schedulers.time, "process_time", lambda: next(looks) ** 2)
    assert main(["schedulers", "--rounds", "2", "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "schedulers.csv")
    assert list(table["competitor"]) == [OURS, FUSED] * 8  # schedulers, over few groups and many
    assert {"LambdaLR", "OneCycleLR"} <= set(table["metric"])
    assert (table["p50"] > 0).all()
    ours, theirs = (table.loc[table["competitor"] == name, "p50"].to_numpy() for name in (OURS, FUSED))
    assert table.loc[table["competitor"] == FUSED, "ratio"].to_numpy() == pytest.approx(ours / theirs, rel=1e-3)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, behind a graph break
@pytest.mark.parametrize(
    ("command", "file", "names"),
    [
        (["training-step", "--competitors", *TRACED, FUSED, "schedulefree"], "training_step", [OURS, *TRACED]),
        (["compiled-step", "--workload", TINY], "compiled_step", NAMES),
    ],
)
def test_steps_that_users_compile_are_timed_beside_torchs(command, file, names, clock, tmp_path, monkeypatch):
    compiled, compile_function = [], torch.compile

    def trace(function, *, fullgraph, mode):
        compiled.append((function, fullgraph))
        return compile_function(function, fullgraph=fullgraph, backend="eager")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", trace)
    assert main([*command, "--rounds", "2", "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / f"{file}.csv")
    reasons = table[table["n"] == 0]
    assert list(reasons["metric"]) == ["did not run: schedulefree has no adamw"] * (file == "training_step")
    table = table[table["n"] > 0]
    entered = [*names, FUSED] if file == "training_step" else names
    alone = table["metric"].str.endswith(", alone")
    assert sorted(table.loc[alone, "competitor"]) == sorted(entered)
    table = table[~alone]
    assert sorted(table["competitor"]) == sorted([*entered, *entered[1:]])
    assert list(table["unit"]) == ["ms"] * len(entered) + ["ratio"] * len(entered[1:])
    assert (table["p50"] > 0).all()
    assert len({id(function.__code__) for function, _ in compiled}) == len(entered)  # none checks another's guards
    is_one_graph = {True: 3 if file == "training_step" else 2, False: 1}  # of torch fused, all but the step
    assert Counter(fullgraph for _, fullgraph in compiled) == is_one_graph


def test_calls_in_turn_are_timed_together():
    called = []
    calls = {name: functools.partial(called.append, name) for name in "abc"}
    samples = turns.in_turn(calls, CPU, rounds=4, warmup=1)
    assert {name: len(seconds) for name, seconds in samples.items()} == dict.fromkeys("abc", 4)
    rounds = ["".join(called[i : i + 3]) for i in range(0, len(called), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len({*rounds}) > 2


def test_a_recorded_inlined_step_is_as_promised():
    """AdamW in a function that the user compiles, over GPT-2's tensors, as ``tools/lowering`` wrote it down last."""
    table = results.read(results.RESULTS / "lowering.csv")
    chosen = (table["optimizer"] == "adamw") & (table["shapes"] == "gpt2") & (table["arch"] == "sm_90")
    inlined, stock = (table[chosen & (table["lowering"] == name)].iloc[-1] for name in ("inlined", "torch"))
    assert inlined["tensors"] == 148
    assert inlined["launches"] <= 11
    assert inlined["bytes_per_param"] == 28.0
    assert inlined["graphs"] == inlined["partitions"] == 1
    assert inlined["cuda_graph"] == "all"
    assert inlined[["operators", "cpp", "waits", "uploads", "spills"]].tolist() == [0] * 5
    assert inlined["repeats"] >= 2
    assert (inlined["commit"], inlined["repeats"]) == (stock["commit"], stock["repeats"])


@pytest.mark.full
def test_no_save_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(host_time, "REPEATS", 1)
    assert main(["overhead", "--workload", "tiny-10", "--rounds", "2", "--no-save", "--results", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []


def test_every_measurement_names_its_hardware_and_revision():
    for path in results.RESULTS.glob("*.csv"):
        table = results.read(path)
        if path.name not in ("lowering.csv", "versions.csv"):  # which are counted, not measured
            assert list(table.columns) == results.COLUMNS, path
            assert table["device"].notna().all(), path
        assert table["commit"].str.fullmatch(r"[0-9a-f]{7,}(-dirty)?").all(), path


def test_append_refuses_a_table_with_other_columns(tmp_path):
    (tmp_path / "step.csv").write_text("benchmark,seconds\n")
    rows = step_table("tiny-10", "adamw", "fresh").together({OURS: [1.0], FUSED: [2.0]})
    with pytest.raises(ValueError, match="columns"):
        results.append(rows, CPU, tmp_path)


def test_ratios_are_ours_over_theirs():
    rows = step_table("tiny-10", "adamw", "fresh").together({OURS: [1.0, 1.0, 4.0], FUSED: [2.0, 2.0, 2.0]})
    by_name = {(r.competitor, r.metric.split(",")[0]): r for r in rows}
    assert by_name[FUSED, "step"].ratio == 0.5
    assert by_name[OURS, "step"].p50 == 1000
    assert by_name[FUSED, "paired ratio"].p50 == 0.5


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
def test_bandwidth_counts_each_number_once_and_clipped_gradients_twice(monkeypatch, dtype, size):
    """With a clock in which all that is timed takes a second."""
    monkeypatch.setattr(turns, "timed", lambda call, device: [call(), 1.0][1])
    (rows,) = measure_bandwidth("small-10", "adamw", CPU, dtype=dtype, rounds=3)
    numbers = elements("small-10")
    name = str(dtype).removeprefix("torch.")
    assert {(r.metric, r.unit, r.n): r.p50 for r in rows} == pytest.approx(
        {
            (f"step, {name}", "GB/s", 3): 7 * numbers * size / 1e9,
            (f"clipped step, {name}", "GB/s", 3): 8 * numbers * size / 1e9,
            (f"copy, {name}", "GB/s", 6): 2 * 4 * (7 * numbers * size // 8) / 1e9,
            (f"clipping, {name}", "ms", 3): 0.0,
        }
    )
    assert [r.competitor for r in rows] == [OURS, OURS, "copy", OURS]


def test_bandwidth_appends_rows_for_every_dtype(clock, tmp_path):
    dtypes = ["--dtype", "float32", "bfloat16"]
    assert main(["bandwidth", "--workload", "small-10", "--rounds", "3", *dtypes, "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "bandwidth.csv")
    assert list(table["metric"]) == [
        f"{metric}, {dtype}" for dtype in dtypes[1:] for metric in ("step", "clipped step", "copy", "clipping")
    ]
    assert (table.loc[table["unit"] == "GB/s", "p50"] > 0).all()


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The report of the recorded tables."""
    monkeypatch.setattr(report, "check", lambda names: None)
    path = tmp_path / "report.html"
    assert main(["report", "--optimizer", "adamw", "muon", "--steps", "3", "--output", str(path)]) == 0
    return path.read_text()


@pytest.mark.full
def test_the_report_is_one_page_that_names_hardware_and_revisions(page):
    pictures = page.count("<svg")
    assert pictures >= 10
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert len(captions) == pictures
    assert all(re.search(r", \d+ threads, torch [\d.+a-z, ]+, revision [0-9a-f]{7}", caption) for caption in captions)
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert len(titles) == 6
    assert {"A training loop", "What did not hold"} <= {*titles}
    assert "muon, 3 steps" in page
    assert f">{FUSED}</text>" in page


@pytest.mark.parametrize("revision", ["abc1234", "1234567", "2e01545"])
def test_the_report_says_what_did_not_hold_and_what_did_not_run(revision, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "check", lambda names: None)
    monkeypatch.setattr(results, "_commit", lambda: revision)
    rows = step_table("gpt2-124m", "adamw", "fresh").together({OURS: [3.0], FUSED: [2.0], "torchao": [4.0]})
    rows += results.left_out("step", "gpt2-124m", "adamw", {"optimi": "optimi is not <installed>"})
    results.append(rows, CPU, tmp_path)
    path = tmp_path / "report.html"
    assert main(["report", "--rehearse", "--results", str(tmp_path), "--output", str(path)]) == 0
    page = path.read_text()
    assert page.count("adamw step, gpt2-124m: time / torch fused") == 1
    assert "time / torchao" not in page
    assert "AdamW step, gpt2-124m, fresh gradients: time / torch fused" in page
    assert "at most 1.05 ratio of medians" in page
    assert "did not run: optimi is not &lt;installed&gt;" in page
    assert f"revision {revision}" in page


@pytest.mark.full
def test_there_is_no_report_on_an_optimizer_whose_tests_fail(tmp_path, monkeypatch, capsys):
    red = tmp_path / "test_red.py"
    red.write_text("import pytest\n@pytest.mark.parametrize('n', ['AdamW', 'Lion'])\ndef test_it(n): assert n == 'Lion'\n")
    monkeypatch.setattr(report, "TESTS", str(red))
    path = tmp_path / "report.html"
    command = ["report", "--rehearse", "--results", str(tmp_path), "--output", str(path)]
    assert main([*command, "--optimizer", "lion", "adamw"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("no report: the tests of adamw in ")
    assert said.count("\n") == 1
    assert not path.exists()
    assert main([*command, "--optimizer", "lion"]) == 0
    assert path.exists()


def test_stored_rows_are_judged_as_measured_ones():
    found, names = {}, set()
    for name, check in gates.stored_checks("cuda"):
        if name != "schedulers":  # whose rows were measured by another command
            table = results.read(results.RESULTS / f"{name}.csv")
            table = report.latest(table[table["device"].str.startswith("NVIDIA")])
            rows = [results.Row(**row) for row in table[list(results.Row.__annotations__)].to_dict("records")]
            found |= check.values(rows)
            names |= {promise.name for promise in check.promises}
    assert found.keys() == names
    assert 0.9 < found["AdamW step, half-billion: bandwidth / a copy's"] < 1.05


def check_of(*tries, benchmark="step"):
    left = iter(tries)
    return gates.Check(benchmark, (gates.Promise("speed", 1.1, "ratio"),), lambda: {"speed": next(left)})


def test_gates_stop_at_the_first_kept_try():
    (verdict,) = gates.judge([check_of(1.0)])
    assert verdict.kept
    assert verdict.tries == [1.0]


def test_gates_retry_twice_and_report_every_try():
    (verdict,) = gates.judge([check_of(1.3, 1.2, 1.1)])
    assert verdict.kept
    assert verdict.tries == [1.3, 1.2, 1.1]


def test_gates_miss_after_three_tries(monkeypatch, capsys):
    monkeypatch.setattr(gates, "checks", lambda device, record: [check_of(1.0), check_of(1.3, 1.2, 1.11)])
    assert main(["gates", "--no-save"]) == 1
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "1.300, 1.200, 1.110" in printed
    monkeypatch.setattr(gates, "checks", lambda device, record: [check_of(1.0)])
    assert main(["gates", "--no-save"]) == 0


def test_gates_of_one_benchmark_with_one_try(monkeypatch, capsys):
    both = [check_of(1.0), check_of(1.3, 1.0, benchmark="bandwidth")]
    monkeypatch.setattr(gates, "checks", lambda device, record: both)
    assert main(["gates", "--no-save", "--only", "step"]) == 0
    assert main(["gates", "--no-save", "--only", "bandwidth", "--tries", "1"]) == 1
    assert "1.300 " in capsys.readouterr().out


def test_a_rehearsal_of_the_gates_measures_and_promises_nothing(tmp_path):
    command = ["gates", "--only", "step", "bandwidth", "--rehearse", "--results", str(tmp_path)]
    assert main(command) == 0
    for name in ("step", "bandwidth"):
        assert set(pd.read_csv(tmp_path / f"{name}.csv")["workload"]) == {TINY}


def test_a_promise_may_be_a_least_number():
    promise = gates.Promise("bandwidth", 0.88, "ratio", at_least=True)
    assert [promise.kept_by(value) for value in (0.87, 0.88, 0.9, float("nan"))] == [False, True, True, False]


def test_a_promise_that_is_not_a_number_is_missed():
    (verdict,) = gates.judge([check_of(*[float("nan")] * 3)])
    assert not verdict.kept


@pytest.mark.filterwarnings("ignore:.* applies to no parameter:UserWarning")  # of a rehearsal, whose tensors are small
def test_low_memory_appends_times_and_bytes(tmp_path) -> None:
    assert main(["low-memory", "--rehearse", "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "low_memory.csv")
    assert set(table["metric"]) == {"step", "share of torch's step on float32", "memory", "step, alone"}
    assert set(table["competitor"]) == {FUSED, *(f"{OURS}[{name}]" for name in low_memory.WAYS)}
    torchs = table[table["competitor"] == FUSED].set_index("metric")["p50"]
    assert (torchs["share of torch's step on float32"], torchs["memory"]) == (1, 16.25)  # 0.25 of it for step counts


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* applies to no parameter:UserWarning")  # as above
def test_changed_appends_times_and_bytes(tmp_path) -> None:
    assert main(["changed", "--rehearse", "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "changed.csv")
    shares = table[table["metric"] == "share of bytes handed over"]["p50"].tolist()
    assert shares == sorted(shares)  # more at larger learning rates
    assert 0 < shares[0] < shares[-1] <= 1
    timed = table[table["metric"] == "step"]["competitor"]
    ways = ("plain", "tracked", "plain again")
    assert set(timed) == {f"{OURS}[{kind}, {way}]" for kind in changed.KINDS for way in ways}


@pytest.mark.full
def test_a_first_step_that_another_package_lacks_is_a_row_that_says_why(tmp_path) -> None:
    command = ["first-step", "--optimizer", "muon", "--workload", "tiny-matrices", "--rounds", "1"]
    assert main([*command, "--competitors", OURS, "torch fused", "--results", str(tmp_path)]) == 0
    metrics = pd.read_csv(tmp_path / "first_step.csv").groupby("competitor")["metric"].agg(list)
    assert len(metrics[OURS]) == 8
    assert metrics["torch fused"] == [f"{NOT_RUN}TypeError: Muon.__init__() got an unexpected keyword argument 'fused'"]


@pytest.mark.full
def test_convergence_appends_losses_and_bounds(tmp_path) -> None:
    assert main(["convergence", "--task", "digits", "--rehearse", "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "convergence.csv")
    assert len(table) == len(convergence.PRECISIONS) * 3 - 2
    assert (table["p20"] <= table["p80"]).all()


def test_hybrid_tunes_both_sides_and_draws(tmp_path) -> None:
    assert main(["hybrid", "--rehearse", "--results", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "hybrid.csv")
    assert set(table["competitor"]) == {"AdamW", "MuonAdamW"}
    assert set(table["metric"]) == {"tuning, lr 0.008", "final loss", "learning rate"}
    assert (tmp_path / "hybrid.png").read_bytes().startswith(b"\x89PNG")


def test_movement_counts_what_each_package_moves(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["movement", "--steps", "3", "--rates", "1e-6", "1e-3", "--results", str(tmp_path)])
    movement.main()
    table = results.read(tmp_path / "movement.csv").set_index(["competitor", "workload", "metric"])["p50"]
    assert {name for name, *_ in table.index} == {*movement.WAYS}
    assert max(table[:, "matrix, 3 steps", "share moved, lr 1e-06"]) < 0.05
    assert min(table[:, "matrix, 3 steps", "share moved, lr 1e-03"]) > 0.9
    norms = {name: table[name, "norm, 3 steps", "share moved, lr 1e-03"] for name in movement.WAYS}
    assert norms["torch"] == norms[OURS] == 0 < norms[f"{OURS}[auto]"]


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("task", convergence.TASKS)
def test_low_precision_trains_as_well(task: str) -> None:
    """Two seeds and few steps, of which at most 0.0018 nats were observed; perf/results/convergence.csv has whole runs."""
    losses = {
        name: [convergence.final_loss(task, name, seed, 22) for seed in convergence.SEEDS[:2]]
        for name in convergence.PRECISIONS
    }
    full = losses.pop(convergence.FLOAT32)
    for name, values in losses.items():
        assert max(low - exact for low, exact in zip(values, full, strict=True)) < 0.006, name


def test_a_bound_is_above_the_mean() -> None:
    assert convergence.bound([1.0] * 8) == 1.0
    assert convergence.bound([0.0, 2.0] * 4) == pytest.approx(1 + 1.895 * (8 / 7) ** 0.5 / 8**0.5)
