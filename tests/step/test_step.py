"""The step as an object: what another one takes over, and what an optimizer without one answers."""

from __future__ import annotations

import copy
import cProfile
import os
import pstats
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interruptions import Interruption
from round_trips import copied
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer, engine_of


def _give(optimizer: CompiledOptimizer) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 0.5)


@pytest.fixture
def stepped() -> CompiledOptimizer:
    optimizer = co.AdamW([nn.Parameter(torch.ones(3)) for _ in range(2)], max_grad_norm=1.0)
    _give(optimizer)
    optimizer.step()
    return optimizer


def test_another_one_counts_on_and_keeps_what_a_captured_graph_writes(stepped: CompiledOptimizer) -> None:
    before, outcome = engine_of(stepped).step, stepped.skipped_steps.data_ptr()
    stepped.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    stepped.step()
    after = engine_of(stepped).step
    assert after is not before
    assert after.stale() == ""
    assert stepped.skipped_steps.data_ptr() == outcome
    assert engine_of(stepped).steps == co.compile_report(stepped).steps == 2


def test_one_that_is_made_and_interrupted_is_made_again(stepped: CompiledOptimizer) -> None:
    engine, point = engine_of(stepped), 0
    while True:
        stepped.state.clear()
        before = engine.step
        if not Interruption(point).run(engine.current):
            break
        if not engine.step.stale():  # the interrupt came behind the last line that makes it
            assert engine.step is not before
            assert stepped.state.keys() == {*engine.params}
        point += 97
    assert point > 97 * 3
    assert engine.step.stale() == ""


@pytest.mark.parametrize(
    ("kind", "kwargs", "reason"),
    [
        (co.AdamW, {}, None),
        (co.AdamW, {"lowering": "eager"}, r"AdamW updates 'w' in another way \(eager\)"),
        (co.LBFGS, {"fixed_iterations": True}, None),
        (co.LBFGS, {}, "LBFGS decides on the host when to stop"),
    ],
)
def test_what_a_graph_can_hold(kind: type[CompiledOptimizer], kwargs: dict[str, Any], reason: str | None) -> None:
    step = engine_of(kind([("w", nn.Parameter(torch.ones(3)))], **kwargs)).current()
    if reason is None:
        assert not step.refusal
        assert step.key() == step.key()
        assert bool(step.only_whole) == (kind is co.LBFGS)
    else:
        assert re.search(reason, step.refusal)


def test_steps_are_counted_whoever_runs_them(stepped: CompiledOptimizer) -> None:
    def closure() -> Tensor:
        return torch.ones(())

    stepped.step(closure)
    engine_of(stepped).run()
    assert engine_of(stepped).steps == engine_of(stepped).runs == 3


@copied
def test_one_without_a_step_can_be_asked_for_anything(stepped: CompiledOptimizer, copied: Callable[[Any], Any]) -> None:
    assert engine_of(copied(stepped)).step is None
    assert float(copied(stepped).hyperparameter("lr")) == 1e-3
    assert copied(stepped).hyperparameters() == stepped.hyperparameters()
    assert float(copied(stepped).skipped_steps) == 0
    assert copied(stepped).grad_norm is None
    assert co.compile_report(copied(stepped)).steps == 0
    assert len(copied(stepped).state_dict()["state"]) == 2
    copied(stepped).zero_grad()
    copied(stepped).schedule(lr=lambda step: 0.1 / step)
    with pytest.warns(RuntimeWarning, match="uncaptured"):
        co.CUDAGraphRunner(copied(stepped)).step()


def _three() -> co.AdamW:
    return co.AdamW([(name, torch.nn.Parameter(torch.ones(3))) for name in "abc"], lr=0.1)


def _calls_of(function: Callable[[], object]) -> int:
    """How many functions of the package it calls, once it was called before."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and f"{os.sep}compiled_optim{os.sep}" in frame.f_code.co_filename

    function()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_making_an_optimizer_takes_few_calls() -> None:
    """What a class knows is computed once, with the first optimizer of the class."""
    assert _calls_of(_three) <= 960


def test_loading_takes_few_calls() -> None:
    optimizer, other = _three(), _three()
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    other.step()
    saved = copy.deepcopy(other.state_dict())
    assert _calls_of(lambda: optimizer.load_state_dict(saved)) <= 410
    profile = cProfile.Profile()
    profile.runcall(optimizer.load_state_dict, saved)
    assert pstats.Stats(profile).total_calls <= 1000  # type: ignore[attr-defined]  # those of torch and Python, too
