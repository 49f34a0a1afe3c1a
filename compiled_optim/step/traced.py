"""The step as an operator, for training steps that the user compiles whole.

An operator's schema declares what a graph can see of a step: the parameters change, the gradients are read. State and
hyperparameters belong to the optimizer, which the operator finds by its number.
"""

from __future__ import annotations

import itertools
from operator import is_
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from compiled_optim.memory.sharding import local, traced_part
from compiled_optim.rule.rule import Gradients
from compiled_optim.torch_internals import mend_tracing


class Steppable(Protocol):
    """What the operator needs of what runs an optimizer's steps."""

    @property
    def params(self) -> list[Tensor]:
        """The parameters, in the order the operator's positions refer to."""

    def run(self, grads: list[Tensor | None] | None = None) -> None:
        """Update the parameters from ``grads``, one entry for each, or from their own."""


_optimizers: WeakValueDictionary[int, Steppable] = WeakValueDictionary()
_numbers = itertools.count()


def register(optimizer: Steppable) -> int:
    """The number under which the operator finds ``optimizer``, for as long as it lives."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


def record_step(owned: list[Tensor], number: int, gradients: Gradients) -> None:
    """Record the step of the optimizer of this number in the graph that is being traced.

    It reads nothing that Dynamo treats specially. ``owned`` are the optimizer's parameters.
    """
    mend_tracing()
    if gradients == "sparse":
        torch.ops.compiled_optim.step_own_gradients(owned, number)
        return
    positions = [i for i, p in enumerate(owned) if p.grad is not None]
    params = [owned[i] for i in positions]
    grads = [traced_part(p.grad, p) for p in params]
    torch.ops.compiled_optim.step([traced_part(p, p) for p in params], grads, positions, number)


# ``custom_op`` would wrap this in Python once more per dispatch key and count the versions of parameters one by one:
# three times the cost for a thousand tensors.
_library = torch.library.Library("compiled_optim", "FRAGMENT")  # type: ignore[no-untyped-call]


def _step(params: list[Tensor], grads: list[Tensor], positions: list[int], optimizer: int) -> None:
    """Update ``params``, which are those at ``positions``, ascending, of the optimizer's parameters, from ``grads``.

    A compiler may hand over copies of the parameters and copy them back later; they then get the new values too.
    """
    owner = _optimizers[optimizer]
    owned = owner.params
    given: list[Tensor | None] = [*grads]
    if len(positions) < len(owned):
        given = [None] * len(owned)
        for position, grad in zip(positions, grads, strict=True):
            given[position] = grad
        owned = [owned[position] for position in positions]
    owner.run(given)
    _hand_over(owned, params)


def _step_own_gradients(params: list[Tensor], optimizer: int) -> None:
    """Update ``params``, all of the optimizer's parameters, from the gradients that they have when the graph runs.

    For gradients that a graph cannot hold: Dynamo refuses to read sparse ones.
    """
    owner = _optimizers[optimizer]
    owner.run()
    _hand_over(owner.params, params)


def _hand_over(owned: list[Tensor], given: list[Tensor]) -> None:
    """Write new values into copies that a compiler made."""
    if not all(map(is_, owned, given)):
        for own, stand_in in zip(map(local, owned), given, strict=True):
            if stand_in.data_ptr() != own.data_ptr():
                stand_in.copy_(own)
            elif stand_in is not own:
                torch.autograd.graph.increment_version(stand_in)


for _schema, _run in (
    ("step(Tensor(a!)[] params, Tensor[] grads, int[] positions, int optimizer) -> ()", _step),
    ("step_own_gradients(Tensor(a!)[] params, int optimizer) -> ()", _step_own_gradients),
):
    # The host's half of a step must run every time, so no compiler may put the operator into a CUDA graph.
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[no-untyped-call]
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"compiled_optim::{_name}", lambda *args: None, lib=_library)
