"""The optimizer's state: what each parameter owns, how it starts, and which dtype it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_optim.fields import Rule
from compiled_optim.hyperparameters import scalar_dtype
from compiled_optim.watched import WatchedDict


class ParamState(WatchedDict[str, Any]):
    """The state of one parameter: ``step``, the rule's scalars and its buffers, by name."""


class OptimizerState(WatchedDict[Tensor, ParamState]):
    """``optimizer.state``: parameter -> :class:`ParamState`. A missing entry reads as an empty one, as in torch."""

    def __missing__(self, param: Tensor) -> ParamState:
        state = ParamState(self._changed)
        self.set_quietly(param, state)
        return state

    def __setitem__(self, param: Tensor, values: Any) -> None:
        super().__setitem__(param, ParamState(self._changed, values))


def scalar_inits(rule: Rule) -> dict[str, float]:
    """The per-tensor scalars of ``rule`` with their initial values; ``step`` comes first."""
    return {"step": 0.0, **{s.name: s.init for s in rule.scalars}}


def new_buffer(param: Tensor) -> Tensor:
    """A zero state buffer for ``param``: its shape, dtype, device, memory format and, for a DTensor, placements."""
    return torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False)


def complete(
    rule: Rule, buffers: tuple[str, ...], param: Tensor, state: ParamState, make: Callable[[Tensor], Tensor]
) -> bool:
    """Give ``state`` every entry that ``rule`` needs and move entries that are on another device than ``param``.

    Existing values stay. Numbers and tensors of any dtype are accepted for the scalars, which become float64 tensors.
    Returns whether anything was made or moved.
    """
    device = param.device
    before = {name: id(value) for name, value in state.items()}
    for name, init in scalar_inits(rule).items():
        value = state.get(name, init)
        if isinstance(value, Tensor) and value.is_meta:
            value = init
        if not isinstance(value, Tensor) or value.device != device or value.dtype != scalar_dtype(device):
            fresh = torch.empty((), dtype=scalar_dtype(device), device=device)
            state.set_quietly(name, fresh.fill_(value) if not isinstance(value, Tensor) else fresh.copy_(value.reshape(())))
    for name in buffers:
        value = state.get(name)
        if value is None or value.is_meta:
            state.set_quietly(name, make(param))
        elif value.device != device:
            state.set_quietly(name, value.to(device))
    return before != {name: id(value) for name, value in state.items()}
