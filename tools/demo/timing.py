"""The optimizer's step next to torch.optim's, on the same model and the same gradients."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import compiled_optim as co

from .data import Images
from .model import parameter_groups
from .training import WEIGHT_DECAY

OURS = "compiled_optim.AdamW"
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    OURS: co.AdamW,
    "torch.optim.AdamW(fused=True)": partial(AdamW, fused=True),
    "torch.optim.AdamW(foreach=True)": partial(AdamW, foreach=True),
    "torch.optim.AdamW()": AdamW,
}
WARM_UP_ROUNDS = 20


def median_step_times(model: nn.Module, batch: Images, rounds: int = 300) -> dict[str, float]:
    """Median seconds per step by optimizer; the optimizers take turns, so that a busy machine slows all alike."""
    loss = functional.cross_entropy(model(batch.pixels), batch.digits)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    contenders: list[tuple[str, Optimizer, nn.Module]] = []
    for name, make in OPTIMIZERS.items():
        copied = copy.deepcopy(model)
        contenders.append((name, make(parameter_groups(copied, WEIGHT_DECAY)), copied))
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for turn in range(WARM_UP_ROUNDS + rounds):
        first = turn % len(contenders)
        for name, optimizer, copied in contenders[first:] + contenders[:first]:
            for parameter, gradient in zip(copied.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()  # in new memory each time, as backward leaves it
            started = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - started)
    return {name: median(taken[WARM_UP_ROUNDS:]) for name, taken in seconds.items()}
