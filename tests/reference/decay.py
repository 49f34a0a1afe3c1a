"""Decay of any reference apart from its gradient, and from its learning rate, as optimi's documentation has it.

Decay by the square of the rate is as in AdamC (arXiv:2506.02285), and decay of some elements as in arXiv:2510.12402.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference.cautious import _decay

IN_GRADIENT = "ASGD Adadelta Adagrad Adam Adamax NAdam RAdam RMSprop SGD"
"""The optimizers whose torch.optim adds decay to the gradient."""
_MASKS = "LAMB Ranger"
"""The optimizers whose naive references themselves decay only some elements."""


def decoupled(make: Callable[..., torch.optim.Optimizer], name: str) -> Callable[..., torch.optim.Optimizer]:
    """What makes references that ``make`` makes, called ``name``, with all choices of decay and ``max_lr``.

    Those that add decay to the gradient decay outside of the plain step, which gets no decay; others by another number.
    """

    def made(
        params: Any,
        *,
        max_lr: float | None = None,
        decouple_lr: bool = False,
        corrected_weight_decay: bool = False,
        cautious_weight_decay: bool = False,
        **arguments: Any,
    ) -> torch.optim.Optimizer:
        outside = name in IN_GRADIENT.split()
        decouple_wd = arguments.pop("decouple_wd", None) if outside else False
        optimizer = make(params, **arguments)
        for group in optimizer.param_groups:
            group.setdefault("max_lr", group["lr"] if max_lr is None else max_lr)
            group.setdefault("decouple_lr", decouple_lr)
            group.setdefault("decouple_wd", decouple_wd)
            group.setdefault("corrected_weight_decay", corrected_weight_decay)
            group.setdefault("cautious_weight_decay", cautious_weight_decay)
        plain = optimizer.step

        def decay() -> None:
            asked = [group["weight_decay"] for group in optimizer.param_groups]
            for group, weight_decay in zip(optimizer.param_groups, asked, strict=True):
                lr, max_lr = float(group["lr"]), float(group["max_lr"])
                if group.get("decouple_lr"):
                    weight_decay = weight_decay / max_lr if max_lr else 0.0
                if group.get("corrected_weight_decay"):
                    weight_decay = weight_decay * lr / max_lr if max_lr else 0.0
                group["weight_decay"] = weight_decay
                if outside and (group.get("decouple_lr") if group.get("decouple_wd") is None else group.get("decouple_wd")):
                    group["weight_decay"] = 0.0
                    for param in (p for p in group["params"] if p.grad is not None):
                        param.mul_(1 - lr * weight_decay)
            plain()
            for group, weight_decay in zip(optimizer.param_groups, asked, strict=True):
                group["weight_decay"] = weight_decay

        @torch.no_grad()
        def step() -> None:
            """Where the step without decay and the parameter have opposite signs, take the results without decay."""
            groups = [g for g in optimizer.param_groups if g.get("cautious_weight_decay") and name not in _MASKS.split()]
            params = [(g, p) for g in groups for p in g["params"]]  # also those without a gradient share numbers
            if not params:
                return decay()
            before = [_snapshot(optimizer, p) for _, p in params]
            asked = [group["weight_decay"] for group in groups]
            for group in groups:
                group["weight_decay"] = 0.0
            plain()
            kept = [_snapshot(optimizer, p) for _, p in params]
            # What a plain step of ASGD multiplies with, by a number of its own, is no part of the step.
            shares = [_decay(name, g, s) if name == "ASGD" else 1.0 for (g, _), (_, s) in zip(params, before, strict=True)]
            for group, weight_decay in zip(groups, asked, strict=True):
                group["weight_decay"] = weight_decay
            for (_, param), (value, state) in zip(params, before, strict=True):
                param.copy_(value)
                optimizer.state.pop(param, None)
                optimizer.state.update({param: state} if state else {})
            vars(optimizer).get("shared", {}).clear()  # a naive reference reads it from the state
            decay()
            for (_, param), (old, _), (new, state), share in zip(params, before, kept, shares, strict=True):
                falls = _real(old * share - new) * _real(old) >= 0
                for target, without in ((param, new), *((v, state[k]) for k, v in optimizer.state.get(param, {}).items())):
                    if isinstance(target, Tensor) and (target.shape, target.dtype) == (param.shape, param.dtype):
                        _real(target).copy_(torch.where(falls, _real(target), _real(without)))

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    return made


def _snapshot(optimizer: torch.optim.Optimizer, param: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A copy of a parameter and of its state."""
    state = optimizer.state.get(param, {}).items()
    return param.detach().clone(), {k: v.clone() if isinstance(v, Tensor) else v for k, v in state}


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
