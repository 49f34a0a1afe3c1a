"""torch's schedulers, what they are made for, and how their optimizers are stepped and looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

import compiled_optim as co

STEPS = 30


def each(optimizer: Optimizer, value: float) -> list[float]:
    """One value per group, no two alike."""
    return [value * 0.7**i for i in range(len(optimizer.param_groups))]


def sequential(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=1e-4),
        lr_scheduler.ExponentialLR(optimizer, 0.93),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5, 14])


def chained(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, factor=0.3, total_iters=7),
        lr_scheduler.ExponentialLR(optimizer, 0.97),
        lr_scheduler.MultiplicativeLR(optimizer, lambda t: 1 - 0.1 / (t + 1)),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t, k=k: 1 / (1 + k * t) for k in each(o, 0.3)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9 + 0.003 * t),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=4, gamma=0.7),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 7, 7, 21], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.3, total_iters=9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, end_factor=0.9, total_iters=17),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.93),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=11, eta_min=3e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2, eta_min=3e-4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=23, power=1.7),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, each(o, 1e-3), each(o, 0.07), step_size_up=4, step_size_down=7, mode="exp_range", gamma=0.98, cycle_momentum=False
    ),
    "CyclicLR-momentum": lambda o: lr_scheduler.CyclicLR(
        o, each(o, 1e-3), each(o, 0.07), step_size_up=5, mode="triangular2", base_momentum=0.63, max_momentum=0.91
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, each(o, 0.07), total_steps=STEPS + 2, base_momentum=0.63, max_momentum=0.91
    ),
    "OneCycleLR-linear": lambda o: lr_scheduler.OneCycleLR(
        o, each(o, 0.07), total_steps=STEPS + 2, anneal_strategy="linear", three_phase=True, cycle_momentum=False
    ),
    "OneCycleLR-linear-momentum": lambda o: lr_scheduler.OneCycleLR(
        o, each(o, 0.07), total_steps=STEPS + 2, anneal_strategy="linear", base_momentum=0.63, max_momentum=0.91
    ),
    "OneCycleLR-three-phases": lambda o: lr_scheduler.OneCycleLR(
        o, each(o, 0.07), total_steps=STEPS + 2, three_phase=True, base_momentum=0.63, max_momentum=0.91
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=2, cooldown=1, min_lr=1e-5),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}

GROUPS: dict[str, list[dict[str, Any]]] = {
    "one-group": [{}],
    "shared-lr": [{}, {"weight_decay": 0.05}],
    "own-lr": [{"lr": 0.02}, {"lr": 0.003}],
    "24-groups": [{"lr": 0.02 * 0.9**i, "weight_decay": 0.05 * (i % 2)} for i in range(24)],
}

OPTIMIZERS: dict[str, tuple[type[Optimizer], type[Optimizer], dict[str, Any]]] = {
    "AdamW": (co.AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.87, 0.95)}),
    "SGD": (co.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.87}),
}


def make(cls: type[Optimizer], groups: str, kwargs: dict[str, Any]) -> Optimizer:
    """An optimizer over new parameters, two to a group."""
    generator = torch.Generator().manual_seed(3)
    own = [
        {"params": [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (5, 2)], **entries}
        for entries in GROUPS[groups]
    ]
    return cls(own, **kwargs)


def step(optimizer: Optimizer, t: int) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, math.sin(t + 1))
    optimizer.step()


def advance(scheduler: Any, t: int) -> None:
    """Step the scheduler; the loss it may want improves for 5 steps and stays for 6, in turn."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 / (1 + min(t % 11, 5) + 5 * (t // 11)))
    else:
        scheduler.step()


def typed(value: Any) -> Any:
    """A value and its type, also inside tuples and lists: a tensor that equals a float is not taken for one."""
    return (type(value), [typed(v) for v in value] if isinstance(value, (tuple, list)) else value)


def moved(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """What schedulers move, with its type: the learning rate and the momentum or betas of every group."""
    return [(typed(group["lr"]), typed(group.get("betas", group.get("momentum")))) for group in optimizer.param_groups]


def live(optimizer: Any) -> list[tuple[Any, ...]]:
    """As :func:`moved`, read from the tensors that steps read."""
    result = []
    for i, group in enumerate(optimizer.param_groups):
        rate, moments = (optimizer.hyperparameter(key, i) for key in ("lr", "betas" if "betas" in group else "momentum"))
        numbers = tuple(m.item() for m in moments) if isinstance(moments, tuple) else moments.item()
        result.append((typed(rate.item()), typed(numbers)))
    return result
