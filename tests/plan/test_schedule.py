"""Schedules inside the step: functions of the step count on the device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, give_gradients, parameters

import compiled_optim as co


def _warmup_cosine(step: torch.Tensor) -> torch.Tensor:
    return 0.3 * torch.where(step < 3, step / 3, 0.5 * (1 + torch.cos(math.pi * (step - 3) / 10)))


def _as_number(step: int) -> float:
    return 0.3 * (step / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 10)))


def _run(optimizer: co.CompiledOptimizer, params: list[torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients(params, params, step, absent=3)
        params[0].grad = torch.full_like(params[0], 0.1 * step)  # always there, so that it counts every step
        optimizer.step()


def _equal(a: list[torch.nn.Parameter], b: list[torch.nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_schedule_equals_assigning_its_values(lowering: str) -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = (co.AdamW(ps, lr=torch.tensor(1.0), lowering=lowering) for ps in (params, twins))
    optimizer.schedule(lr=_warmup_cosine, betas=lambda step: (1 - 1 / (step + 1), 0.9))
    _run(optimizer, params, 0, 1)
    with co.no_recompiles():
        for step in range(8):
            twin.param_groups[0]["lr"] = _as_number(step + 1)
            twin.param_groups[0]["betas"] = (1 - 1 / (step + 2), 0.9)
            _run(twin, twins, step, step + 1)
            if step:
                _run(optimizer, params, step, step + 1)
            assert optimizer.hyperparameters()[0]["lr"] == pytest.approx(_as_number(step + 1), rel=1e-12)
            assert all(torch.allclose(p, t, rtol=1e-6, atol=1e-7) for p, t in zip(params, twins, strict=True))


def test_groups_have_their_own_schedules() -> None:
    params = parameters(torch.float32)
    optimizer = co.SGD([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}], lr=0.1)
    optimizer.schedule(group=0, lr=lambda step: 0.1 / step)
    optimizer.schedule(weight_decay=lambda step: 0.01 * step)
    _run(optimizer, params, 0, 4)
    numbers = optimizer.hyperparameters()
    assert [n["lr"] for n in numbers] == [0.1 / 4, 0.5]
    assert [n["weight_decay"] for n in numbers] == [0.04, 0.04]
    optimizer.schedule(lr=None)
    _run(optimizer, params, 4, 6)
    assert [n["lr"] for n in optimizer.hyperparameters()] == [0.1 / 4, 0.5]
    optimizer.param_groups[0]["lr"] = 0.7
    assert optimizer.hyperparameters()[0]["lr"] == 0.7


def test_an_assignment_does_not_end_a_schedule() -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = (co.AdamW(ps, lr=1.0) for ps in (params, twins))
    for o in (optimizer, twin):
        o.schedule(lr=_warmup_cosine)
    for step in range(3):
        _run(twin, twins, step, step + 1)
        with pytest.warns(UserWarning, match=r"opt\.schedule\(lr=None\) ends that schedule"):
            optimizer.param_groups[0]["lr"] = 100.0
        _run(optimizer, params, step, step + 1)
    assert _equal(params, twins)


def test_a_skipped_step_does_not_advance_the_schedule() -> None:
    params = parameters(torch.float32)
    optimizer = co.SGD(params, lr=1.0, skip_nonfinite=True)
    optimizer.schedule(lr=lambda step: 0.1 * step)
    for step, bad in enumerate((False, True, True, False)):
        give_gradients(params, params, step)
        if bad:
            params[0].grad[0, 0] = math.nan
        optimizer.step()
    assert optimizer.hyperparameters()[0]["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_momentum_that_was_zero_is_scheduled_from_the_first_step(lowering: str) -> None:
    """It asks for a buffer, which a step without momentum has not."""
    param, twin = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer, reference = co.SGD([param], lr=0.3, lowering=lowering), torch.optim.SGD([twin], lr=0.3, momentum=0.0)
    for step in range(1, 6):
        if step == 3:
            optimizer.schedule(momentum=lambda step: 0.9 / step)
        reference.param_groups[0]["momentum"] = 0.9 / step if step >= 3 else 0.0
        param.grad, twin.grad = (torch.full_like(param, step) for _ in range(2))
        optimizer.step()
        reference.step()
        torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-12, atol=0)


def test_schedules_go_on_after_loading_and_in_copies() -> None:
    params, twins, others = (parameters(torch.float32) for _ in range(3))
    optimizer, twin = (co.AdamW(ps, lr=1.0) for ps in (params, twins))
    for o in (optimizer, twin):
        o.schedule(lr=_warmup_cosine)
    _run(optimizer, params, 0, 6)
    _run(twin, twins, 0, 3)
    clone = copy.deepcopy(twin)
    own = [p for g in clone.param_groups for p in g["params"]]
    _run(clone, own, 3, 6)
    assert _equal(params, own)
    resumed = co.AdamW(others, lr=1.0)
    resumed.schedule(lr=_warmup_cosine)
    resumed.load_state_dict(twin.state_dict())
    with torch.no_grad():
        for other, t in zip(others, twins, strict=True):
            other.copy_(t)
    _run(resumed, others, 3, 6)
    assert _equal(params, others)


def test_inside_a_compiled_step() -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = (co.AdamW(ps, lr=1.0) for ps in (params, twins))
    for o in (optimizer, twin):
        o.schedule(lr=_warmup_cosine)
    step_now = torch.compile(optimizer.step, fullgraph=True)
    for step in range(4):
        give_gradients(params, twins, step)
        step_now()
        twin.step()
    assert _equal(params, twins)


@pytest.mark.parametrize(
    ("functions", "error", "message"),
    [
        ({"lr": 0.1}, TypeError, r"the schedule of lr in param_groups\[0\] must be a function"),
        ({"learning_rate": lambda step: step}, ValueError, "AdamW has no hyperparameter 'learning_rate'; it has lr, betas"),
        ({"lr": lambda step: 0.1 if step < 3 else 0.2}, ValueError, "torch.where instead of if"),
        ({"lr": lambda step: math.cos(step)}, ValueError, "torch.cos instead of math.cos"),
        ({"lr": lambda step: -step}, ValueError, "Invalid learning rate: -1.0"),
        ({"betas": lambda step: step / 2}, TypeError, "betas of the schedule of betas .* must be a tuple of 2 numbers"),
    ],
)
def test_bad_schedules(functions: dict[str, Any], error: type[Exception], message: str) -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = co.AdamW(params), co.AdamW(twins)
    with pytest.raises(error, match=message):
        optimizer.schedule(**{"eps": lambda step: 1.0 * step, **functions})
    _run(optimizer, params, 0, 2)
    _run(twin, twins, 0, 2)
    assert _equal(params, twins)
    with pytest.raises(IndexError):
        optimizer.schedule(group=1, lr=_warmup_cosine)
