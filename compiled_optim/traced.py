"""The step as an operator, for training steps that the user compiles whole.

An operator's schema declares what a graph can see of a step: the parameters change, the gradients are read. State and
hyperparameters belong to the optimizer, which the operator finds by its number.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Steppable(Protocol):
    """What the operator needs of an optimizer."""

    def traceable_params(self) -> list[Tensor]:
        """The parameters, in the order the operator's positions refer to."""

    def step_now(self) -> None:
        """Update the parameters from their ``grad``."""


_optimizers: WeakValueDictionary[int, Steppable] = WeakValueDictionary()
_numbers = itertools.count()


def register(optimizer: Steppable) -> int:
    """The number under which the operator finds ``optimizer``, for as long as it lives."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


@torch.library.custom_op("compiled_optim::step", mutates_args=("params",))
def traced_step(params: list[Tensor], grads: list[Tensor], positions: list[int], optimizer: int) -> None:
    """Update ``params``, which are those at ``positions`` of the optimizer's parameters, from ``grads``.

    A compiler may hand over copies of the parameters and copy them back later; they then get the new values too.
    """
    owner = _optimizers[optimizer]
    owned = owner.traceable_params()
    before = [p.grad for p in owned]
    for param in owned:
        param.grad = None
    for position, grad in zip(positions, grads, strict=True):
        owned[position].grad = grad
    try:
        owner.step_now()
    finally:
        for param, kept in zip(owned, before, strict=True):
            param.grad = kept
    _hand_over([owned[position] for position in positions], params)


@torch.library.custom_op("compiled_optim::step_own_gradients", mutates_args=("params",))
def traced_step_own_gradients(params: list[Tensor], optimizer: int) -> None:
    """Update ``params``, all of the optimizer's parameters, from the gradients that they have when the graph runs.

    For gradients that a graph cannot hold: Dynamo refuses to read sparse ones.
    """
    owner = _optimizers[optimizer]
    owner.step_now()
    _hand_over(owner.traceable_params(), params)


def _hand_over(owned: list[Tensor], given: list[Tensor]) -> None:
    for own, stand_in in zip(owned, given, strict=True):
        if stand_in.data_ptr() != own.data_ptr():
            stand_in.copy_(own)
