"""Training on two and four processes by ``python -m perf distributed``: as on one, and nothing hangs."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_train import command

from perf import distributed
from perf.competitors import OURS
from perf.layouts import EXPERTS, LAYOUTS, SIZES
from perf.results import NOT_RUN, says_failure

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
CPU = torch.device("cpu")


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_training_is_that_of_one_process(processes: int, tmp_path: Path) -> None:
    status, table = command(tmp_path, "distributed", "--rehearse", "--processes", str(processes), limit=1500)
    assert status == 0, table.to_string()
    pairs = [(name, way) for name in LAYOUTS for way in distributed.WAYS if LAYOUTS[name].clips or not way.bound]
    index = ["workload", "optimizer", "competitor"]
    found = table.pivot(index=index, columns="metric", values="p50")
    assert set(found.index) == {(f"{name}, {processes} processes", way.optimizer, str(way)) for name, way in pairs}
    assert (found[distributed.DIFFERENCE] < distributed.TOLERANCES[distributed.DIFFERENCE]).all()
    assert (found["host time of a step"] > 0).all()
    sent = found["bytes that a process hands to them"]

    def of(layout: str, optimizer: str, way: str) -> float:
        return float(sent[f"{layout}, {processes} processes", optimizer, way])

    for layout in LAYOUTS:
        assert of(layout, "adamw", OURS) == of(layout, "adamw", "torch foreach") == 0
    # The sum of squares of each kind of parameter, as one number.
    assert of("FSDP2", "adamw", f"{OURS}, clipped") == 8
    assert of("FSDP2", "muonadamw", OURS) > 0
    assert of("experts", "muonadamw", OURS) == 0


@pytest.mark.full
def test_a_process_that_hangs_ends_at_its_limit(capfd: pytest.CaptureFixture[str]) -> None:
    layouts = ["TP", "experts"]
    options = {"size": "small", "processes": [2], "layouts": layouts}
    rows = [*distributed.measure_distributed(CPU, **options, limit=1e-3)]
    assert [row.workload for (row,) in rows] == [f"{layout}, 2 processes" for layout in layouts]
    assert all(row.metric.startswith(f"{NOT_RUN}ProcessExitedException") and says_failure(row) for (row,) in rows)
    assert "Timeout" in capfd.readouterr().err


@pytest.mark.usefixtures("one_process")
def test_trainings_that_differ_are_told_apart() -> None:
    layout, size = LAYOUTS["FSDP2"], SIZES["small"]
    mesh = layout.mesh(CPU)
    ours = [way for way in distributed.WAYS if (way.competitor, way.optimizer) == (OURS, "adamw")]
    assert [way.bound for way in ours] == [None, 0.5]
    spread = [distributed.train(layout, way, size, CPU, mesh).model for way in ours]
    whole = [distributed.train(layout, way, size, CPU).model for way in ours]
    far = [[distributed.compare(s, w) for w in whole] for s in spread]
    assert max(far[0][0], far[1][1]) < distributed.TOLERANCES[distributed.DIFFERENCE]
    assert min(far[0][1], far[1][0]) > 1000 * distributed.TOLERANCES[distributed.DIFFERENCE]


def test_some_experts_of_each_step_have_no_gradient() -> None:
    """So that there are processes on which other gradients are absent than on others."""
    used = []

    class Noted(torch.optim.Optimizer):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.parameters(), {})
            self.named = dict(model.named_parameters())

        def step(self) -> None:
            used.append({int(n.split(".")[3]) for n, p in self.named.items() if ".local." in n and p.grad is not None})

    way = distributed.Way("no package", "none", Noted)
    distributed.train(LAYOUTS["experts"], way, SIZES["small"], CPU)
    assert all(len(experts) == EXPERTS // 2 for experts in used)
    assert set().union(*used) == {*range(EXPERTS)}


def test_gpus_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (row,) = next(distributed.measure_distributed(torch.device("cuda"), size="small", layouts=["FSDP2"]))
    assert row.metric == f"{NOT_RUN}needs 2 GPUs, and there are 1; with --device cpu it needs none"
    assert not says_failure(row)


def test_what_was_trained_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    row = distributed.Row("distributed", "TP, 2 processes", "adamw", OURS, "some", "abs", 1.0, 1.0, 1.0, None, 1)

    def interrupted(count: int, name: str, size: object, kind: str, folder: str, limit: float) -> None:
        Path(folder, "rows").write_text(json.dumps(dataclasses.asdict(row)) + "\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(distributed, "_run", interrupted)
    rows: list[distributed.Row] = []
    with pytest.raises(KeyboardInterrupt):
        collections.deque(map(rows.extend, distributed.measure_distributed(CPU, size="small", layouts=["TP"])))
    assert rows[0] == row
    assert [absent.metric for absent in rows[1:]] == [f"{NOT_RUN}interrupted"]


def test_no_layout_begins_that_would_not_fit() -> None:
    rows = [*distributed.measure_distributed(CPU, size="small", deadline=distributed.Deadline(0.0))]
    assert [row.metric for (row,) in rows] == [f"{NOT_RUN}out of time"] * 2 * len(LAYOUTS)
    assert not any(says_failure(row) for (row,) in rows)


def test_a_difference_is_a_failure() -> None:
    row = distributed.Row(
        "distributed", "TP, 2 processes", "adamw", OURS, distributed.DIFFERENCE, "abs", *(1e-6,) * 3, None, 1
    )
    assert distributed.failed(row)
    assert not distributed.failed(dataclasses.replace(row, p50=1e-12))
