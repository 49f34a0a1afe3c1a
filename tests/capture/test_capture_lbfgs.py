"""The CUDA-graph runner and L-BFGS of fixed iterations, on simulated graphs: closure and iterations in one graph."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from capture_scenarios import (
    RECAPTURES,
    Scenario,
    Side,
    assert_equal,
    checkpoint_loaded,
    every_hyperparameter,
    lr_assigned,
    lr_saved_and_put_back,
    make,
    parameter_rebound,
    unchanged,
    written_in_some_way,
)
from capture_scenarios import train_by_closure as train
from simulated_graph import install
from torch import Tensor

import compiled_optim as co
from compiled_optim.optimizer import engine_of

STEPS = 20


def lr_scheduled(side: Side, i: int) -> None:
    if i == 0:
        side.kept["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.8)
    else:
        side.kept["scheduler"].step()


def fewer_iterations(side: Side, i: int) -> None:
    if i == 9:
        side.optimizer.param_groups[0]["max_iter"] = 2


def made(**kwargs: object) -> Side:
    return make(co.LBFGS, groups=1, **{"lr": 0.1, "max_iter": 3, "history_size": 4, "fixed_iterations": True, **kwargs})


def batch(i: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 + i))


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize(
    "scenario",
    [
        unchanged,
        lr_assigned,
        lr_saved_and_put_back,
        lr_scheduled,
        every_hyperparameter,
        checkpoint_loaded,
        parameter_rebound,
        fewer_iterations,
    ],
)
def test_equals_uncaptured(scenario: Scenario) -> None:
    ours, twin = made(), made()
    runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, modules=ours.model)
    for i in range(STEPS):
        for side in (ours, twin):
            scenario(side, i)
        assert torch.equal(runner(batch(i)), train(twin, batch(i)))
        assert_equal(ours, twin, i)
    report = co.compile_report(ours.optimizer)
    assert report.recaptures == {"fewer_iterations": 1, **RECAPTURES}.get(scenario.__name__, 0)
    assert report.replays >= STEPS - 3 - 2 * report.recaptures
    assert report.steps == engine_of(twin.optimizer).steps


def test_a_graph_by_hand_follows_every_write() -> None:
    ours, twin = made(), made()
    for side in (ours, twin):
        side.kept["adopted"] = torch.zeros(())
        train(side, batch(0))
    x = batch(0).clone()
    from simulated_graph import SimulatedGraph

    graph = SimulatedGraph(torch.device("cpu"))
    graph.capture(lambda: train(ours, x))
    for i in range(50):
        x.copy_(batch(i))
        for side in (ours, twin):
            written_in_some_way(side, random.Random(i))
        graph.replay()
        train(twin, batch(i))
        assert_equal(ours, twin, i)


def test_a_capture_that_would_make_state_is_refused() -> None:
    from simulated_graph import SimulatedGraph

    ours = made()
    train(ours, batch(0))
    ours.optimizer.param_groups[0]["max_iter"] = 2
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['max_iter'\] was written; take one step before"):
        SimulatedGraph(torch.device("cpu")).capture(lambda: train(ours, batch(0)))


def test_what_no_graph_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="a step of LBFGS calls its closure"):
        co.CUDAGraphRunner(made().optimizer)
    side = made(fixed_iterations=False)
    with pytest.raises(ValueError, match="decides on the host when to stop; a CUDA graph needs fixed_iterations=True"):
        co.CUDAGraphRunner(functools.partial(train, side), optimizers=side.optimizer)
