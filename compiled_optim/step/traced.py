"""The step in the graph of a function that the user compiles: as operations of the graph, or as an operator.

An operator's schema declares what a graph can see of a step: the parameters change, the gradients are read. State and
hyperparameters belong to the optimizer, which the operator finds by its number, and so do compilers that look at operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from compiled_optim.memory.sharding import local, traced_part
from compiled_optim.rule.rule import Gradients
from compiled_optim.step.inlined import InlinedStep
from compiled_optim.torch_internals import called_while_tracing, let_compilers_trace, mend_tracing


class Steppable(Protocol):
    """What the operator needs of what runs an optimizer's steps."""

    @property
    def params(self) -> list[Tensor]:
        """The parameters, in the order the operator's positions refer to."""

    @property
    def number(self) -> int:
        """What :func:`register` returned."""

    @property
    def step(self) -> object:
        """What runs steps now; another object when groups, state or clipping changed."""

    @property
    def is_outdated(self) -> bool:
        """Whether :attr:`step` is about to be another object."""

    @property
    def inlined(self) -> InlinedStep | None:
        """The step as a function of tensors, if compiled code holds that."""

    def current(self) -> object:
        """:attr:`step`, made anew if groups or state changed."""

    def settle_inlined(self, present: Sequence[int]) -> bool:
        """Make :attr:`step` current, and :attr:`inlined` of it where compiled code can hold that. Whether it can.

        ``present`` are the positions of the parameters that have a gradient.
        """

    def settle_for_graphs(self) -> bool:
        """Make :attr:`step` current, and all that it needs where a compiler's CUDA graph can hold it. Whether one can."""

    def run(self, grads: list[Tensor | None] | None = None) -> None:
        """Update the parameters from ``grads``, one entry for each, or from their own."""

    def run_in_graph(self, grads: list[Tensor | None]) -> None:
        """Do so where a compiler may be recording a CUDA graph, or be about to."""


_optimizers: WeakValueDictionary[int, Steppable] = WeakValueDictionary()
_numbers = itertools.count()


def register(optimizer: Steppable) -> int:
    """The number under which the operator finds ``optimizer``, for as long as it lives."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


@called_while_tracing
def settle(key: str) -> bool:
    """:meth:`Steppable.settle_for_graphs`."""
    return _optimizers[int(key)].settle_for_graphs()


@called_while_tracing
def settle_groups(key: str) -> None:
    """:meth:`Steppable.current`."""
    _optimizers[int(key)].current()


@called_while_tracing
def settle_inlined(key: str, present: Sequence[int]) -> bool:
    """:meth:`Steppable.settle_inlined`."""
    let_compilers_trace(run_inlined)
    return _optimizers[int(key)].settle_inlined(present)


@called_while_tracing
def number_of(key: str) -> int:
    """:attr:`Steppable.number`, as a constant: Dynamo takes an attribute that was another number before for a variable."""
    return int(key)


@called_while_tracing
def depend_on(identity: str) -> None:
    """Let what is traced be valid for as long as ``step`` is the same object."""


def record_step(engine: Any, gradients: Gradients, scaler: tuple[Tensor | None, Tensor | None]) -> None:
    """Record a step in the graph that is being traced.

    It reads nothing that Dynamo treats specially. ``engine`` is a :class:`Steppable`. ``scaler`` has ``grad_scale`` and
    ``found_inf`` of a gradient scaler that calls the step, with tensors that are other ones each time.
    """
    mend_tracing()
    settle_groups(engine.key)
    # Dynamo refuses to read sparse gradients; no step with such is inlined.
    positions = [] if gradients == "sparse" else [i for i, p in enumerate(engine.params) if p.grad is not None]
    is_scaled = scaler[0] is not None or scaler[1] is not None
    if settle_inlined(engine.key, positions):
        _record_operations(engine, positions, scaler, is_scaled=is_scaled)
    else:
        _record_operator(engine, gradients, positions, is_scaled=is_scaled)


def _record_operations(
    engine: Any, positions: list[int], scaler: tuple[Tensor | None, Tensor | None], *, is_scaled: bool
) -> None:
    _guard(engine)
    inlined, owned = engine.inlined, engine.params
    grads = [traced_part(owned[i].grad, owned[i]) for i in positions]
    params = [traced_part(p, p) for p in owned]
    hypers = [engine.step.vectors[group][name] for group, name in inlined.hypers]
    clipping = []
    if inlined.clips or is_scaled:
        given = (None, *scaler, None)
        clipping = [own if new is None else new for own, new in zip(inlined.clipping, given, strict=True)]
    run_inlined(params, grads, positions, inlined.tensors, hypers, clipping, number_of(engine.key))


def run_inlined(
    params: list[Tensor],
    grads: list[Tensor],
    positions: list[int],
    tensors: list[Tensor],
    hypers: list[Sequence[Tensor]],
    clipping: list[Tensor],
    optimizer: int,
) -> None:
    """Update ``params`` by :meth:`InlinedStep.run` of an optimizer; ``grads`` are of those at ``positions``.

    Compilers call it on stand-ins of the tensors.
    """
    given = dict(zip(positions, grads, strict=True))
    numbers = [[vector.view(()) for vector in vectors] for vectors in hypers]
    inlined = _optimizers[optimizer].inlined
    assert inlined is not None
    single = [vector.view(()) for vector in clipping]
    inlined.run(params, [given.get(i) for i in range(len(params))], tensors, numbers, single)


def _guard(engine: Any) -> None:
    """Let what is traced be valid for as long as the step is; nothing of the host's runs when compiled code does."""
    depend_on(engine.step.identity)
    if engine.is_outdated or engine.launcher is not None:
        raise RuntimeError("the step changed while it was traced")


def _record_operator(engine: Any, gradients: Gradients, positions: list[int], *, is_scaled: bool) -> None:
    stays = settle(engine.key)
    owned, number = engine.params, number_of(engine.key)
    if gradients == "sparse":
        torch.ops.compiled_optim.step_own_gradients(owned, number)
        return
    params = [owned[i] for i in positions]
    grads = [traced_part(p.grad, p) for p in params]
    updated = [traced_part(p, p) for p in params]
    if stays and not is_scaled:
        _guard(engine)
        torch.ops.compiled_optim.step_in_graph(updated, grads, positions, number)
    else:
        torch.ops.compiled_optim.step(updated, grads, positions, number)


# ``custom_op`` would wrap this in Python once more per dispatch key and count the versions of parameters one by one:
# three times the cost for a thousand tensors.
_library = torch.library.Library("compiled_optim", "FRAGMENT")  # type: ignore[no-untyped-call]


def _step(params: list[Tensor], grads: list[Tensor], positions: list[int], optimizer: int) -> None:
    _run_with(_optimizers[optimizer].run, params, grads, positions, optimizer)


def _step_in_graph(params: list[Tensor], grads: list[Tensor], positions: list[int], optimizer: int) -> None:
    _run_with(_optimizers[optimizer].run_in_graph, params, grads, positions, optimizer)


def _run_with(
    run: Callable[[list[Tensor | None]], None],
    params: list[Tensor],
    grads: list[Tensor],
    positions: list[int],
    optimizer: int,
) -> None:
    """Update ``params``, which are those at ``positions``, ascending, of the optimizer's parameters, from ``grads``.

    A compiler may hand over copies of the parameters and copy them back later; they then get the new values too.
    """
    owned = _optimizers[optimizer].params
    given: list[Tensor | None] = [*grads]
    if len(positions) < len(owned):
        given = [None] * len(owned)
        for position, grad in zip(positions, grads, strict=True):
            given[position] = grad
        owned = [owned[position] for position in positions]
    run(given)
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


_HOSTED = (torch.Tag.cudagraph_unsafe,)
"""Of an operator whose host's half must run every time, so that no compiler may put it into a CUDA graph."""

for _schema, _run, _tags in (
    ("step(Tensor(a!)[] params, Tensor[] grads, int[] positions, int optimizer) -> ()", _step, _HOSTED),
    ("step_in_graph(Tensor(a!)[] params, Tensor[] grads, int[] positions, int optimizer) -> ()", _step_in_graph, ()),
    ("step_own_gradients(Tensor(a!)[] params, int optimizer) -> ()", _step_own_gradients, _HOSTED),
):
    _library.define(_schema, tags=_tags)  # type: ignore[no-untyped-call]
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"compiled_optim::{_name}", lambda *args: None, lib=_library)
