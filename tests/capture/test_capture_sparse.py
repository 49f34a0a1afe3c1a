"""The CUDA-graph runner and sparse gradients, on simulated graphs: one graph for fixed numbers of entries."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from capture_scenarios import Side, assert_equal, make_tables, written_in_some_way
from simulated_graph import SimulatedGraph, install
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.lowering.rows import RowBatch

STEPS = 20
CONTROLS: list[dict[str, Any]] = [{}, {"max_grad_norm": 0.5}, {"skip_nonfinite": True}, {"maximize": True}]


def batch(i: int, size: int = 6) -> Tensor:
    """Indices, some of them twice."""
    return torch.randint(0, 1000, (size,), generator=torch.Generator().manual_seed(i))


def train(side: Side, index: Tensor) -> Tensor:
    side.optimizer.zero_grad()
    loss = side.model(index)
    loss.backward()
    side.optimizer.step()
    return loss


def move(side: Side, i: int) -> None:
    """Hyperparameters and the clipping bound, by assignment and in place; a non-finite gradient is left to the caller."""
    group = side.optimizer.param_groups[0]
    group["lr"] = 0.1 / (i + 1)
    side.optimizer.hyperparameter("betas")[1].fill_(0.9 + 0.001 * i)
    if side.optimizer.max_grad_norm is not None:
        side.optimizer.max_grad_norm = 0.5 / (i + 1)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("controls", CONTROLS, ids=str)
def test_a_step_equals_an_uncaptured_one(controls: dict[str, Any], coalesced: bool) -> None:
    ours, twin = make_tables(**controls), make_tables(**controls)
    runner = co.CUDAGraphRunner(ours.optimizer)
    index = torch.arange(5)
    for i in range(STEPS):
        for side in (ours, twin):
            move(side, i)
            side.optimizer.zero_grad()
            side.model(index if coalesced else batch(i)).backward()
            if i == 8 and "skip_nonfinite" in controls:
                side.model.kinds.weight.grad._values()[0, 0] = torch.inf
            if coalesced:
                for p in side.params:
                    p.grad = p.grad.coalesce()
        runner.step()
        twin.optimizer.step()
        assert_equal(ours, twin, i)
    report = co.compile_report(ours.optimizer)
    assert report.replays == STEPS - 3
    assert report.recaptures == 0


@pytest.mark.parametrize("controls", CONTROLS, ids=str)
def test_a_training_step_equals_an_uncaptured_one(controls: dict[str, Any]) -> None:
    ours, twin = make_tables(**controls), make_tables(**controls)
    runner = co.CUDAGraphRunner(lambda index: train(ours, index), optimizers=ours.optimizer)
    for i in range(STEPS):
        move(ours, i)
        move(twin, i)
        assert torch.equal(runner(batch(i)), train(twin, batch(i)))
        assert_equal(ours, twin, i)
        if i % 6 == 5:  # a step outside of the graph, with other entries
            for side in (ours, twin):
                train(side, batch(i, size=4))
    report = co.compile_report(ours.optimizer)
    assert report.recaptures == 0
    assert report.replays == STEPS - 3


def _delayed(side: Side, index: Tensor) -> Tensor:
    """Steps with the gradients that the call before left."""
    side.optimizer.step()
    side.optimizer.zero_grad()
    loss = side.model(index)
    loss.backward()
    return loss


def test_gradients_of_the_call_before() -> None:
    ours, twin = make_tables(), make_tables()
    for side in (ours, twin):
        side.model(batch(99)).backward()
    runner = co.CUDAGraphRunner(lambda index: _delayed(ours, index), optimizers=ours.optimizer)
    for i in range(STEPS):
        assert torch.equal(runner(batch(i)), _delayed(twin, batch(i)))
        assert_equal(ours, twin, i)


def test_a_graph_holds_dense_and_sparse_steps() -> None:
    sides = []
    for _ in range(2):
        side = make_tables(max_grad_norm=1.0)
        side.kept["dense"] = head = nn.Linear(4, 1)
        with torch.no_grad():
            for p in head.parameters():
                p.fill_(0.3)
        side.kept["adamw"] = co.AdamW(head.named_parameters(), lr=0.01)
        sides.append(side)

    def step(side: Side, index: Tensor) -> Tensor:
        optimizers = side.optimizer, side.kept["adamw"]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = side.kept["dense"](side.model.words(index % 11)).square().mean() + side.model(index)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    ours, twin = sides
    runner = co.CUDAGraphRunner(lambda index: step(ours, index), optimizers=[ours.optimizer, ours.kept["adamw"]])
    for i in range(STEPS):
        for side in sides:
            side.kept["adamw"].param_groups[0]["lr"] = 0.01 / (i + 1)
        assert torch.equal(runner(batch(i)), step(twin, batch(i)))
        assert_equal(ours, twin, i)
        for p, q in zip(ours.kept["dense"].parameters(), twin.kept["dense"].parameters(), strict=True):
            assert torch.equal(p, q)


def test_another_number_of_entries_is_captured_again_within_the_budget() -> None:
    ours, twin = make_tables(), make_tables()
    runner = co.CUDAGraphRunner(ours.optimizer, warmup=1, recaptures=2)

    def take(i: int, size: int) -> None:
        for side, step in ((ours, runner.step), (twin, twin.optimizer.step)):
            side.optimizer.zero_grad()
            side.model(batch(i, size)).backward()
            step()
        assert_equal(ours, twin, i)

    for i in range(9):
        take(i, 6 if i < 4 else 9)
    (cause,) = co.compile_report(ours.optimizer).captures[1:]
    assert "gradient of 'words.weight' with 6 entries in repeated rows -> with 9 entries in repeated rows" in cause
    with co.no_recompiles(), pytest.raises(co.RecompileError, match="with 9 entries in repeated rows -> with 5"):
        take(9, 5)
    twin.optimizer.load_state_dict(ours.optimizer.state_dict())  # the refused step was not taken
    for p, q in zip(ours.params, twin.params, strict=True):
        assert torch.equal(p, q)


def test_a_missing_gradient_is_captured_again() -> None:
    ours, twin = make_tables(), make_tables()
    runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
    for i in range(10):
        for side, step in ((ours, runner.step), (twin, twin.optimizer.step)):
            side.optimizer.zero_grad()
            side.model(batch(i)).backward()
            if i >= 5:
                side.model.places.weight.grad = None
            step()
        assert_equal(ours, twin, i)
    assert co.compile_report(ours.optimizer).recaptures == 1


def test_entries_that_were_coalesced_and_are_not() -> None:
    """As many of them as before, of which some now name the same row."""
    ours, twin = make_tables(), make_tables()
    runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
    for i in range(8):
        for side, step in ((ours, runner.step), (twin, twin.optimizer.step)):
            side.optimizer.zero_grad()
            side.model(torch.tensor([0, 1, 2, 3]) if i < 4 else torch.tensor([i, i, 1, i])).backward()
            if i < 4:
                for p in side.params:
                    p.grad = p.grad.coalesce()
            step()
        assert_equal(ours, twin, i)
    (cause,) = co.compile_report(ours.optimizer).captures[1:]
    assert "with 4 entries in distinct rows -> with 4 entries in repeated rows" in cause


def test_memory_that_a_graph_reads_outlives_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps outside of the graph with more numbers of entries than are kept."""
    used = []
    gather = RowBatch.gather

    def spy(table: RowBatch, *entries: Any) -> None:
        if SimulatedGraph.recording is not None:
            used.append(weakref.ref(table))
        gather(table, *entries)

    monkeypatch.setattr(RowBatch, "gather", spy)
    ours, twin = make_tables(), make_tables()
    runner = co.CUDAGraphRunner(lambda index: train(ours, index), optimizers=ours.optimizer, warmup=1)
    for i in range(6):
        if i > 2:
            for size in range(1, 20):
                for side in (ours, twin):
                    train(side, batch(size, size))
        runner(batch(i))
        train(twin, batch(i))
        assert_equal(ours, twin, i)
    assert co.compile_report(ours.optimizer).replays == 5
    gc.collect()
    assert len(used) == 2
    assert all(table() is not None for table in used)


def test_numbers_of_entries_that_were_not_met_cannot_be_captured() -> None:
    ours, twin = make_tables(), make_tables()
    runner = co.CUDAGraphRunner(lambda index: train(ours, index), optimizers=ours.optimizer, warmup=1)
    runner(batch(0))
    for size in range(1, 20):  # so many that those of the warm-up are forgotten
        train(ours, batch(size, size))
    twin.model.load_state_dict(ours.model.state_dict())
    twin.optimizer.load_state_dict(ours.optimizer.state_dict())
    with pytest.raises(RuntimeError, match="no step was taken before with gradients of so many entries"):
        runner(batch(1))
    for i in range(5):
        runner(batch(i))
        train(twin, batch(i))
        assert_equal(ours, twin, i)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_graph_by_hand_follows_every_write(dtype: torch.dtype) -> None:
    rates = [torch.tensor(0.05, dtype=dtype) for _ in range(2)]
    sides = ours, twin = [make_tables(lr=rate) for rate in rates]
    for side, rate in zip(sides, rates, strict=True):
        side.kept["adopted"] = rate
        train(side, batch(0))
    graph = SimulatedGraph(torch.device("cpu"))
    graph.capture(ours.optimizer.step)
    for i in range(50):
        for side in sides:
            written_in_some_way(side, random.Random(i))
        graph.replay()
        twin.optimizer.step()
        assert_equal(ours, twin, i)
