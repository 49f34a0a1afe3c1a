"""Cautious steps of any reference (arXiv:2411.16085, as the authors' C-AdamW): a plain step is taken back in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cautious(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """What makes the cautious form of the references that ``make`` makes; it takes ``cautious=True`` too."""

    def made(params: Any, *, cautious: bool = True, **arguments: Any) -> torch.optim.Optimizer:
        optimizer = make(params, **arguments)
        plain = optimizer.step

        @torch.no_grad()
        def step() -> None:
            moved = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            before = [(p.clone(), {k: _copy(v) for k, v in optimizer.state[p].items()}) for _, p in moved]
            plain()
            for (group, param), (old, state) in zip(moved, before, strict=True):
                _take_back(type(optimizer).__name__, group, param, optimizer.state[param], old, state)

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    return made


def _take_back(name: str, group: dict[str, Any], param: Tensor, state: Any, old: Tensor, old_state: dict[str, Any]) -> None:
    """Take back what a plain step of one tensor did to elements that went up their gradient; the others move the more."""
    decayed = old * _decay(name, group, old_state)
    step, grad = _real(decayed - param), _real(param.grad)
    goes_down = step * (-grad if group["maximize"] else grad) > 0
    share = goes_down.sum().item() / max(goes_down.numel(), 1)
    _real(param).copy_(_real(decayed) - goes_down * step / max(share, 1e-3))
    if name == "ASGD":  # the average is that of the parameter as it is
        mu = float(old_state.get("mu", 1.0))
        state["ax"].copy_((1 - mu) * old_state.get("ax", 0) + mu * param)


def _decay(name: str, group: dict[str, Any], old_state: dict[str, Any]) -> float:
    """What the plain step multiplies the parameter with, apart from its step; naive references decay so, if they do."""
    if name == "ASGD":
        return 1 - group["lambd"] * float(old_state.get("eta", group["lr"]))
    decoupled = group.get("decoupled_weight_decay", name == "Naive")
    return 1 - group["lr"] * group.get("weight_decay", 0.0) if decoupled else 1.0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
