"""The step in the graph of a function that the user compiles: as operations of the graph, or as an operator.

An operator's schema declares what a graph can see of a step: the parameters change, the gradients are read. State and
hyperparameters belong to the optimizer, which the operator finds by a name, and so do compilers that look at operations.
The name says what the optimizer is, since compiled code can be kept and run by another process.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.lowering.torch_ops.inductor import InlinedStep
from compiled_optim.memory.sharding import local, traced_part
from compiled_optim.memory.torch_internals import called_while_tracing, let_compilers_trace, mend_tracing
from compiled_optim.rule.rule import Gradients


class Steppable(Protocol):
    """What the operator needs of what runs an optimizer's steps."""

    @property
    def params(self) -> list[Tensor]:
        """The parameters, in the order the operator's positions refer to."""

    @property
    def name(self) -> str:
        """What :func:`named` returned last; empty before."""

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

    def hand_out(self, name: str, group: int) -> None:
        """Note that somebody gets the live tensors of a hyperparameter."""

    def run(self, grads: list[Tensor | None] | None = None) -> None:
        """Update the parameters from ``grads``, one entry for each, or from their own."""

    def run_in_graph(self, grads: list[Tensor | None]) -> None:
        """Do so where a compiler may be recording a CUDA graph, or be about to."""


_optimizers: WeakValueDictionary[str, Steppable] = WeakValueDictionary()
_numbers = itertools.count()


def register(optimizer: Steppable) -> str:
    """The number, as a text, under which this process finds ``optimizer`` for as long as it lives."""
    key = str(next(_numbers))
    _optimizers[key] = optimizer
    return key


_named: WeakValueDictionary[str, Steppable] = WeakValueDictionary()


def named(optimizer: Steppable, kind: str, params: Iterable[tuple[str, Tensor]]) -> str:
    """The name by which operators find ``optimizer``, for as long as it lives and has ``params``.

    It is made of what every process knows that makes this optimizer, so that caches of compiled code serve all of them. The
    last part counts those that are alive and equal in all else.
    """
    facts = [(name, None if is_lazy(param) else tuple(param.shape), str(param.dtype)) for name, param in params]
    first = f"{facts[0][0]} {facts[0][1]}" if facts else "nothing"
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    description = f"{kind} of {first}, {len(facts)} in all, {digest}"
    if _described(optimizer.name) == description:
        return optimizer.name
    _named.pop(optimizer.name, None)
    names = (f"{description} #{place}" for place in itertools.count())
    return next(name for name in names if _named.setdefault(name, optimizer) is optimizer)


def _described(name: str) -> str:
    return name.rpartition(" #")[0]


def _found(name: str, params: Sequence[Tensor], positions: Sequence[int]) -> Steppable:
    """The optimizer of this name, and of ``params``, which are those at ``positions`` of its parameters.

    Of several that differ in the last part of their names alone it is the one whose parameters these are. The last part
    counts where they are nobody's, but a compiler's copies.

    Raises:
        RuntimeError: there is no such optimizer, or the parameters are another one's.
    """
    found = _named.get(name)
    if found is not None and all(map(is_, _at(found, positions), params)):
        return found
    live = [optimizer for ref in _named.valuerefs() if (optimizer := ref()) is not None]
    owned = {_place(param) for optimizer in live for param in optimizer.params}
    known = [(i, place) for i, place in zip(positions, map(_place, params), strict=True) if place in owned]
    alike = [optimizer for optimizer in live if _described(optimizer.name) == _described(name)]
    fitting = [each for each in alike if all(_place(each.params[i]) == place for i, place in known)]
    if found in fitting:
        return found
    if known and len(fitting) == 1:
        return fitting[0]
    there = "; ".join(sorted(optimizer.name for optimizer in live)) or "none"
    reason = "the parameters are another optimizer's" if alike and known else "it is not in this process"
    raise RuntimeError(f"this code was compiled for the optimizer [{name}], but {reason}; there are: {there}")


def _at(optimizer: Steppable, positions: Sequence[int]) -> list[Tensor]:
    owned = optimizer.params
    return owned if len(positions) == len(owned) else [owned[position] for position in positions]


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where ``tensor`` lies, whether it has memory or not."""
    part = local(tensor)
    return part.untyped_storage()._cdata, part.storage_offset()  # type: ignore[return-value]


@called_while_tracing
def settle(key: str) -> bool:
    """:meth:`Steppable.settle_for_graphs`."""
    return _optimizers[key].settle_for_graphs()


@called_while_tracing
def settle_groups(key: str) -> None:
    """:meth:`Steppable.current`."""
    _optimizers[key].current()


@called_while_tracing
def hand_out(key: str, name: str, group: int) -> None:
    """:meth:`Steppable.hand_out`."""
    _optimizers[key].hand_out(name, group)


@called_while_tracing
def settle_inlined(key: str, present: Sequence[int]) -> bool:
    """:meth:`Steppable.settle_inlined`."""
    let_compilers_trace(run_inlined)
    return _optimizers[key].settle_inlined(present)


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
    run_inlined(params, grads, positions, inlined.tensors, hypers, clipping, engine.name)


def run_inlined(
    params: list[Tensor],
    grads: list[Tensor],
    positions: list[int],
    tensors: list[Tensor],
    hypers: list[Sequence[Tensor]],
    clipping: list[Tensor],
    optimizer: str,
) -> None:
    """Update ``params`` by :meth:`InlinedStep.run` of an optimizer; ``grads`` are of those at ``positions``.

    Compilers call it on stand-ins of the tensors.
    """
    given = dict(zip(positions, grads, strict=True))
    numbers = [[vector.view(()) for vector in vectors] for vectors in hypers]
    inlined = _found(optimizer, [], []).inlined  # all that belongs to the one or the other is handed in
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
    owned, name = engine.params, engine.name
    if gradients == "sparse":
        torch.ops.compiled_optim.step_own_gradients(owned, name)
        return
    params = [owned[i] for i in positions]
    grads = [traced_part(p.grad, p) for p in params]
    updated = [traced_part(p, p) for p in params]
    if stays and not is_scaled:
        _guard(engine)
        torch.ops.compiled_optim.step_in_graph(updated, grads, positions, name)
    else:
        torch.ops.compiled_optim.step(updated, grads, positions, name)


# ``custom_op`` would wrap this in Python once more per dispatch key and count the versions of parameters one by one:
# three times the cost for a thousand tensors.
_library = torch.library.Library("compiled_optim", "FRAGMENT")  # type: ignore[no-untyped-call]


def _step(params: list[Tensor], grads: list[Tensor], positions: list[int], optimizer: str) -> None:
    found = _found(optimizer, params, positions)
    _run_with(found.run, found, params, grads, positions)


def _step_in_graph(params: list[Tensor], grads: list[Tensor], positions: list[int], optimizer: str) -> None:
    found = _found(optimizer, params, positions)
    _run_with(found.run_in_graph, found, params, grads, positions)


def _run_with(
    run: Callable[[list[Tensor | None]], None],
    optimizer: Steppable,
    params: list[Tensor],
    grads: list[Tensor],
    positions: list[int],
) -> None:
    """Update ``params``, which are those at ``positions``, ascending, of the optimizer's parameters, from ``grads``.

    A compiler may hand over copies of the parameters and copy them back later; they then get the new values too.
    """
    owned = _at(optimizer, positions)
    given: list[Tensor | None] = [*grads]
    if len(positions) < len(optimizer.params):
        given = [None] * len(optimizer.params)
        for position, grad in zip(positions, grads, strict=True):
            given[position] = grad
    run(given)
    _hand_over(owned, params)


def _step_own_gradients(params: list[Tensor], optimizer: str) -> None:
    """Update ``params``, all of the optimizer's parameters, from the gradients that they have when the graph runs.

    For gradients that a graph cannot hold: Dynamo refuses to read sparse ones.
    """
    owner = _found(optimizer, params, range(len(params)))
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
    ("step(Tensor(a!)[] params, Tensor[] grads, int[] positions, str optimizer) -> ()", _step, _HOSTED),
    ("step_in_graph(Tensor(a!)[] params, Tensor[] grads, int[] positions, str optimizer) -> ()", _step_in_graph, ()),
    ("step_own_gradients(Tensor(a!)[] params, str optimizer) -> ()", _step_own_gradients, _HOSTED),
):
    _library.define(_schema, tags=_tags)  # type: ignore[no-untyped-call]
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"compiled_optim::{_name}", lambda *args: None, lib=_library)
