"""The step in the graph of a function that the user compiles: as operations of the graph, or as an operator.

An operator's schema declares what a graph can see of a step: the parameters change, the gradients are read. State and
hyperparameters belong to the optimizer, whose engine the operator finds by a name, and so do compilers that look at
operations. The name says what the optimizer is, since compiled code can be kept and run by another process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.layout import local, traced_part
from compiled_optim.memory.torch_internals import (
    called_while_tracing,
    guard_by,
    guard_items,
    let_compilers_trace,
    mend_tracing,
)
from compiled_optim.step.engine import ENGINES, NAMED, Engine, without_number
from compiled_optim.step.step import Gradients, Step


@called_while_tracing
def ask(key: str, method: str, *args: Any) -> bool | str | None:
    """What this method of an engine returns, if a trace can hold it."""
    answer = getattr(ENGINES[key], method)(*args)
    return answer if isinstance(answer, (bool, str)) else None


@called_while_tracing
def let_trace() -> None:
    """Let compilers call :func:`run_inlined`."""
    let_compilers_trace(run_inlined)


@called_while_tracing
def _guard_params(key: str, _: str) -> None:
    """Let what is traced be valid for as long as its parameters are an engine's, and a text is what it is now."""
    guard_items(ENGINES[key], "step.params")


def guard_params(engine: Engine) -> None:
    """Let what is traced, and has read all parameters, be valid for as long as they are those of ``engine``."""
    _guard_params(engine.key, engine.changes.lists)


@called_while_tracing
def _guard_state(key: str) -> None:
    """Let what is traced be valid for as long as scalars of state are where the step has them, in one tensor."""
    guard_by(ENGINES[key], lambda engine: not engine.step.has_moved_scalars())


@called_while_tracing
def _depend_on(identity: str) -> None:
    """Let what is traced be valid for as long as a step has this ``identity``."""


def record_step(engine: Engine, scaler: tuple[Tensor | None, Tensor | None]) -> None:
    """Record a step in the graph that is being traced.

    It reads nothing that Dynamo treats specially. ``scaler`` has ``grad_scale`` and ``found_inf`` of a gradient scaler that
    calls the step, with tensors that are other ones each time.
    """
    mend_tracing()
    let_trace()
    ask(engine.key, "current")
    # Dynamo refuses to read sparse gradients; no step with such is inlined.
    is_sparse = engine.takes_sparse  # read of groups, this would depend on their entries
    positions = [] if is_sparse else [i for i, p in enumerate(engine.params) if p.grad is not None]
    guard_params(engine)
    is_scaled = scaler[0] is not None or scaler[1] is not None
    if not ask(engine.key, "inline", positions):
        step, inlined, owned = _guard(engine), engine.inlined, engine.params
        assert inlined is not None
        _guard_state(engine.key)
        grads = [traced_part(owned[i].grad, owned[i]) for i in positions]
        params = [traced_part(p, p) for p in owned]
        hypers = [step.vectors[group][name] for group, name in inlined.hypers]
        clipping = []
        if inlined.clips or is_scaled:
            given = (None, *scaler, None)
            clipping = [old if new is None else new for old, new in zip(inlined.clipping, given, strict=True)]
        run_inlined(params, grads, positions, inlined.tensors, hypers, clipping, engine.name)
        return
    is_in_graph = ask(engine.key, "preallocate_for_graphs") and not is_scaled
    owned, name = engine.params, engine.name
    if is_sparse:
        torch.ops.compiled_optim.step(owned, [], [*range(len(owned))], name)
        return
    params = [owned[i] for i in positions]
    grads = [traced_part(p.grad, p) for p in params]
    updated = [traced_part(p, p) for p in params]
    if is_in_graph:
        _guard(engine)
        torch.ops.compiled_optim.step_in_graph(updated, grads, positions, name)
    else:
        torch.ops.compiled_optim.step(updated, grads, positions, name)


def run_inlined(
    params: list[Tensor],
    grads: list[Tensor],
    positions: list[int],
    tensors: list[Tensor],
    hypers: Sequence[Sequence[Tensor]],
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


def _guard(engine: Engine) -> Step:
    """The step for which the trace is valid. Compiled code runs no Python of this package."""
    step = engine.step
    assert step is not None
    _depend_on(step.identity)
    if engine.changes.pending or engine.launcher is not None:
        raise RuntimeError("the step changed while it was traced")
    return step


def _found(name: str, params: Sequence[Tensor], positions: Sequence[int]) -> Engine:
    """The engine of this name, and of ``params``, which are those at ``positions`` of its parameters.

    Of several that differ in the last part of their names alone it is the one whose parameters these are. The last part
    counts where they are nobody's, but a compiler's copies.

    Raises:
        RuntimeError: there is no such engine, or the parameters are another one's.
    """
    found = NAMED.get(name)
    if found is not None and all(map(is_, _at(found.params, positions), params)):
        return found
    live = list(NAMED.values())
    owned = {_place(param) for engine in live for param in engine.params}
    known = [(i, place) for i, place in zip(positions, map(_place, params), strict=True) if place in owned]
    alike = [engine for engine in live if without_number(engine.name) == without_number(name)]
    fitting = [engine for engine in alike if all(_place(engine.params[i]) == place for i, place in known)]
    if found in fitting:
        return found
    if known and len(fitting) == 1:
        return fitting[0]
    there = "; ".join(sorted(engine.name for engine in live)) or "none"
    reason = "the parameters are another optimizer's" if alike and known else "it is not in this process"
    raise RuntimeError(f"this code was compiled for the optimizer [{name}], but {reason}; there are: {there}")


def _at(params: list[Tensor], positions: Sequence[int]) -> list[Tensor]:
    return params if len(positions) == len(params) else [params[position] for position in positions]


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where ``tensor`` lies, whether it has memory or not."""
    part = local(tensor)
    return part.untyped_storage()._cdata, part.storage_offset()  # type: ignore[return-value]


# ``custom_op`` would wrap this in Python once more per dispatch key and count the versions of parameters one by one:
# three times the cost for a thousand tensors.
_library = torch.library.Library("compiled_optim", "FRAGMENT")  # type: ignore[no-untyped-call]


def _step(
    run: Callable[[Engine, Gradients], None],
    params: list[Tensor],
    grads: list[Tensor],
    positions: Sequence[int],
    optimizer: str,
) -> None:
    """Let an engine ``run`` with ``grads`` of ``params``, which are those at ``positions``, ascending, of its parameters.

    Without any, it runs with the gradients that they have then: Dynamo refuses to read sparse ones.
    A compiler may hand over copies of the parameters and copy them back later; they then get the new values too.
    """
    engine = _found(optimizer, params, positions)
    every = engine.params
    owned = _at(every, positions)
    given: Gradients = [*grads]
    if params and not grads:
        given = None
    elif len(positions) < len(every):
        by_position = dict(zip(positions, grads, strict=True))
        given = [by_position.get(i) for i in range(len(every))]
    run(engine, given)
    if not all(map(is_, owned, params)):
        for param, copy in zip(map(local, owned), params, strict=True):
            if copy.data_ptr() != param.data_ptr():
                copy.copy_(param)
            elif copy is not param:
                torch.autograd.graph.increment_version(copy)


OPERATORS: dict[str, Callable[..., None]] = {
    "step": functools.partial(_step, Engine.run),
    "step_in_graph": functools.partial(_step, Engine.run_in_graph),
}
"""By name, what each operator does. The host's half of the first must run every time: no CUDA graph may hold it."""

for _name, _run in OPERATORS.items():
    _tags = () if _name == "step_in_graph" else (torch.Tag.cudagraph_unsafe,)
    _form = "(Tensor(a!)[] params, Tensor[] grads, int[] positions, str optimizer) -> ()"
    _library.define(_name + _form, tags=_tags)  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"compiled_optim::{_name}", lambda *args: None, lib=_library)
