"""Schedules inside the step: functions of the step count on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from catalog import give_gradients, parameters

import compiled_optim as co


def _warmup_cosine(step: torch.Tensor) -> torch.Tensor:
    return 0.3 * torch.where(step < 3, step / 3, 0.5 * (1 + torch.cos(math.pi * (step - 3) / 10)))


def _run(optimizer: co.CompiledOptimizer, params: list[torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients(params, params, step, absent=3)
        params[0].grad = torch.full_like(params[0], 0.1 * step)  # always there, so that it counts every step
        optimizer.step()


def _equal(a: list[torch.nn.Parameter], b: list[torch.nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


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
