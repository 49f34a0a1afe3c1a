"""The optimizer's step next to torch.optim's, on the same model and the same gradients."""

from __future__ import annotations

import copy
import time
from statistics import median

from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import compiled_optim as co

from .data import Images
from .model import parameter_groups
from .training import WEIGHT_DECAY

OURS = "compiled_optim.AdamW"
WARM_UP_ROUNDS = 20


def median_step_times(model: nn.Module, batch: Images, rounds: int = 300) -> dict[str, float]:
    """Median seconds per step by optimizer; the optimizers take turns, so that a busy machine slows all alike."""
    functional.cross_entropy(model(batch.pixels), batch.digits).backward()
    gradients = [p.grad for p in model.parameters()]
    models = [copy.deepcopy(model) for _ in range(4)]
    groups = [parameter_groups(m, WEIGHT_DECAY) for m in models]
    optimizers: dict[str, Optimizer] = {
        OURS: co.AdamW(groups[0]),
        "torch.optim.AdamW(fused=True)": AdamW(groups[1], fused=True),
        "torch.optim.AdamW(foreach=True)": AdamW(groups[2], foreach=True),
        "torch.optim.AdamW()": AdamW(groups[3]),
    }
    contenders = list(zip(optimizers, optimizers.values(), models, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(WARM_UP_ROUNDS + rounds):
        first = turn % len(contenders)
        for name, optimizer, copied in contenders[first:] + contenders[:first]:
            for parameter, gradient in zip(copied.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()  # in new memory each time, as backward leaves it
            started = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - started)
    return {name: median(taken[WARM_UP_ROUNDS:]) for name, taken in seconds.items()}
