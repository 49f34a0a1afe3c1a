"""AdamW and SGD beside torch's own, and what the tests of their groups do with both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catalog import LOWERINGS, relative_error
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import compiled_optim as co

HYPERS = {
    co.AdamW: {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2},
    co.SGD: {"lr": 0.03, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2},
}
STOCK = {co.AdamW: torch.optim.AdamW, co.SGD: torch.optim.SGD}

lowerings = pytest.mark.parametrize("lowering", LOWERINGS)
classes = pytest.mark.parametrize("cls", list(HYPERS), ids=lambda c: c.__name__)


def as_float(value: Any) -> Any:
    """What torch.optim is given: plain numbers."""
    if isinstance(value, (tuple, list)):
        return tuple(map(as_float, value))
    return float(value)


def name_of(value: Any) -> str | None:
    return value.__name__ if callable(value) else None


def pairs(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def numbers(group: dict[str, Any], cls: type[Optimizer]) -> dict[str, Any]:
    """A group's hyperparameters as Python floats."""
    return {
        key: tuple(map(float, group[key])) if isinstance(group[key], (tuple, list)) else float(group[key])
        for key in HYPERS[cls]
    }


def tensors(optimizer: co.CompiledOptimizer) -> list[Tensor]:
    """The live tensors of all hyperparameters."""
    keys, groups = HYPERS[type(optimizer)], range(len(optimizer.param_groups))
    return [t for group in groups for key in keys for t in pairs(optimizer.hyperparameter(key, group))]


def twins(cls: type[Optimizer], groups: int = 1, **kwargs: Any) -> tuple[Optimizer, Optimizer]:
    """One of ours and torch's own over equal float64 parameters, one or two groups."""
    both = []
    options = {**HYPERS[cls], **{k: v for k, v in kwargs.items() if k != "lowering"}}
    for made in (cls, STOCK[cls]):
        params = [Parameter(torch.linspace(-1, 1, n, dtype=torch.float64)) for n in (6, 3, 4, 5)]
        listed = [{"params": params}] if groups == 1 else [{"params": params[:2]}, {"params": params[2:], "lr": 0.007}]
        own = {"lowering": kwargs["lowering"]} if made is cls and "lowering" in kwargs else {}
        both.append(made(listed, **options, **own))
    return both[0], both[1]


def params_of(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: Optimizer, t: int) -> None:
    for i, param in enumerate(params_of(optimizer)):
        param.grad = torch.cos(torch.arange(param.numel(), dtype=param.dtype) + t + i).view_as(param)
    optimizer.step()


def step_both(ours: Optimizer, theirs: Optimizer, *steps: int) -> None:
    for t in steps:
        step(ours, t)
        step(theirs, t)


def assert_equal_params(ours: Optimizer, theirs: Optimizer) -> None:
    mine, others = params_of(ours), params_of(theirs)
    assert len(mine) == len(others)
    assert relative_error(mine, others) < 1e-14


def assign(group: dict[str, Any], key: str, value: Any) -> None:
    group[key] = value


def update_with_keywords(group: dict[str, Any], key: str, value: Any) -> None:
    group.update(**{key: value})


def update_with_a_dict(group: dict[str, Any], key: str, value: Any) -> None:
    group.update({key: value})


def update_with_pairs(group: dict[str, Any], key: str, value: Any) -> None:
    group.update([(key, value)])


def or_in_place(group: dict[str, Any], key: str, value: Any) -> None:
    group |= {key: value}
