"""Decay of any reference apart from its gradient, and from its learning rate, as optimi's documentation has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

IN_GRADIENT = "ASGD Adadelta Adagrad Adam Adamax NAdam RAdam RMSprop SGD"
"""The optimizers whose torch.optim adds decay to the gradient."""


def decoupled(make: Callable[..., torch.optim.Optimizer], name: str) -> Callable[..., torch.optim.Optimizer]:
    """What makes references that ``make`` makes, called ``name``, with ``decouple_wd``, ``decouple_lr`` and ``max_lr``.

    Those that add decay to the gradient decay outside of the plain step, which gets no decay; others by another number.
    """

    def made(
        params: Any, *, max_lr: float | None = None, decouple_lr: bool = False, **arguments: Any
    ) -> torch.optim.Optimizer:
        outside = name in IN_GRADIENT.split()
        decouple_wd = arguments.pop("decouple_wd", None) if outside else False
        optimizer = make(params, **arguments)
        for group in optimizer.param_groups:
            group.setdefault("max_lr", group["lr"] if max_lr is None else max_lr)
            group.setdefault("decouple_lr", decouple_lr)
            group.setdefault("decouple_wd", decouple_wd)
        plain = optimizer.step

        @torch.no_grad()
        def step() -> None:
            asked = [group["weight_decay"] for group in optimizer.param_groups]
            for group, weight_decay in zip(optimizer.param_groups, asked, strict=True):
                lr, max_lr = float(group["lr"]), float(group["max_lr"])
                if group["decouple_lr"]:
                    weight_decay = weight_decay / max_lr if max_lr else 0.0
                group["weight_decay"] = weight_decay
                if outside and (group["decouple_lr"] if group["decouple_wd"] is None else group["decouple_wd"]):
                    group["weight_decay"] = 0.0
                    for param in (p for p in group["params"] if p.grad is not None):
                        param.mul_(1 - lr * weight_decay)
            plain()
            for group, weight_decay in zip(optimizer.param_groups, asked, strict=True):
                group["weight_decay"] = weight_decay

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    return made
