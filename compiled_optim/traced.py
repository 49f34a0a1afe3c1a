"""The step as one operator, for training steps that the user compiles whole.

The operator's schema declares what a graph can see of a step: the parameters change, the gradients are read. State and
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


# The host's half of a step must run every time, so no compiler may put the operator into a CUDA graph.
@torch.library.custom_op("compiled_optim::step", mutates_args=("params",), tags=(torch.Tag.cudagraph_unsafe,))
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
    for position, given in zip(positions, params, strict=True):
        if given.data_ptr() != owned[position].data_ptr():
            given.copy_(owned[position])
