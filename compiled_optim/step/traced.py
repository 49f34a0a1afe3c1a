"""The step in the graph of a function that the user compiles: as operations of the graph, or as an operator.

An operator's schema declares that the parameters change and the gradients are read. State and hyperparameters belong to the
optimizer, whose engine the operator finds by a name, as do compilers that look at operations. The name describes the
optimizer, since compiled code can be stored and run by another process.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import Path

import torch
from torch import Tensor

from compiled_optim.memory.layout import local, traced_part
from compiled_optim.memory.torch_internals import (
    called_while_tracing,
    guard_by,
    guard_items,
    let_caches_keep,
    let_compilers_trace,
    mend_tracing,
)
from compiled_optim.step.engine import ENGINES, NAMED, Engine, without_number
from compiled_optim.step.step import Gradients, Step


@called_while_tracing
def _build(key: str) -> None:
    """Let an engine build its step if it is stale."""
    ENGINES[key].current()


@called_while_tracing
def _inline(key: str, present: list[int]) -> str:
    return ENGINES[key].inline(present)


@called_while_tracing
def preallocate(key: str) -> bool:
    """Do :meth:`Engine.preallocate_for_graphs`."""
    return ENGINES[key].preallocate_for_graphs()


@called_while_tracing
def hand_out(key: str, name: str, group: int) -> None:
    """Do :meth:`Engine.hand_out`."""
    ENGINES[key].hand_out(name, group)


@called_while_tracing
def let_trace() -> None:
    """Let compilers call :func:`run_inlined`, and keep code that has its operations for other processes."""
    let_compilers_trace(run_inlined)
    let_caches_keep(run_inlined, _digest_of_package())


@functools.cache
def _digest_of_package() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    if not files:  # an installation without source
        return secrets.token_hex()
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@called_while_tracing
def _guard_params(key: str, _: str) -> None:
    """Let the trace be valid as long as its parameters are the engine's, and the second argument does not change."""
    guard_items(ENGINES[key], "step.params")


def guard_params(engine: Engine) -> None:
    """Let the trace, which has read all parameters, be valid as long as they are those of ``engine``."""
    _guard_params(engine.key, engine.changes.lists)


@called_while_tracing
def _guard_state(key: str) -> None:
    """Let the trace be valid as long as scalars of state are in the step's one tensor."""
    guard_by(ENGINES[key], lambda engine: not engine.step.has_moved_scalars())


@called_while_tracing
def _digest(key: str) -> str:
    """Return the digest of the inlined step. The trace does not depend on it."""
    inlined = ENGINES[key].inlined
    return inlined.digest() if inlined else ""


@called_while_tracing
def _counter_name(key: str, positions: list[int]) -> str:
    return ENGINES[key].outputs.counter(positions)


def _counter(engine: Engine, positions: list[int]) -> list[Tensor]:
    """Return the counter of a step of the parameters at ``positions`` in compiled code; empty if changes are not tracked."""
    if not engine.outputs.marks:
        return []
    return [getattr(engine.outputs.counters, _counter_name(engine.key, positions))]


@called_while_tracing
def _depend_on(identity: str) -> None:
    """Let the trace be valid as long as the step has this ``identity``."""


def record_step(engine: Engine, scaler: tuple[Tensor | None, Tensor | None]) -> None:
    """Record a step in the graph that is being traced.

    It reads nothing that Dynamo treats specially. ``scaler`` has ``grad_scale`` and ``found_inf`` of a gradient scaler that
    calls the step, which are new tensors in each call.
    """
    mend_tracing()
    let_trace()
    _build(engine.key)
    # Dynamo refuses to read sparse gradients; no step with sparse gradients is inlined.
    is_sparse = engine.takes_sparse  # read from groups, this would add guards on their entries
    positions = [] if is_sparse else [i for i, p in enumerate(engine.params) if p.grad is not None]
    guard_params(engine)
    is_scaled = scaler[0] is not None or scaler[1] is not None
    if not _inline(engine.key, positions):
        step, inlined, owned = _guard(engine), engine.inlined, engine.params
        assert inlined is not None
        _guard_state(engine.key)
        grads = [traced_part(owned[i].grad, owned[i]) for i in positions]
        params = [traced_part(p, p) for p in owned]
        numbers = [step.numbers[group] for group in inlined.groups]
        clipping = []
        if inlined.clips or is_scaled:
            scaler_args = (None, *scaler, None)
            clipping = [old if new is None else new for old, new in zip(inlined.clipping, scaler_args, strict=True)]
        run_inlined(params, grads, positions, inlined.tensors, numbers, clipping, engine.name, _digest(engine.key))
        return
    is_in_graph = preallocate(engine.key) and not is_scaled
    owned, name = engine.params, engine.name
    if is_sparse:
        torch.ops.compiled_optim.step([*owned, *_counter(engine, [*range(len(owned))])], [], [*range(len(owned))], name)
        return
    params = [owned[i] for i in positions]
    grads = [traced_part(p.grad, p) for p in params]
    updated = [*(traced_part(p, p) for p in params), *_counter(engine, positions)]
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
    numbers: Sequence[Sequence[Tensor]],
    clipping: list[Tensor],
    optimizer: str,
    digest: str,
) -> None:
    """Update ``params`` by :meth:`InlinedStep.run` of an optimizer; ``grads`` are of those at ``positions``.

    Compilers call it on fake tensors. Their caches tell code of one step from another's by the :meth:`InlinedStep.digest`.
    """
    by_position = dict(zip(positions, grads, strict=True))
    inlined = _find(optimizer, [], []).inlined  # any engine of this name: all tensors are arguments
    assert inlined is not None
    single = [vector.view(()) for vector in clipping]
    inlined.run(params, [by_position.get(i) for i in range(len(params))], tensors, numbers, single)


def _guard(engine: Engine) -> Step:
    """Return the step for which the trace is valid. Compiled code runs no Python of this package."""
    step = engine.step
    assert step is not None
    _depend_on(step.identity)
    if engine.changes.stale or engine.launcher is not None:
        raise RuntimeError("the step changed while it was traced")
    return step


def _find(name: str, params: Sequence[Tensor], positions: Sequence[int]) -> Engine:
    """Return the engine of this name that has ``params``, at ``positions`` of its parameters.

    Of several whose names differ only in the last part, it is the one that owns these parameters. The last part decides if
    no engine owns them, since they are a compiler's copies.

    Raises:
        RuntimeError: no engine has this name, or the parameters are another engine's.
    """
    named = NAMED.get(name)
    if named is not None and all(map(is_, _at(named.params, positions), params)):
        return named
    live = list(NAMED.values())
    owned = {_address(param) for engine in live for param in engine.params}
    known = [(i, address) for i, address in zip(positions, map(_address, params), strict=True) if address in owned]
    alike = [engine for engine in live if without_number(engine.name) == without_number(name)]
    fitting = [engine for engine in alike if all(_address(engine.params[i]) == address for i, address in known)]
    if named in fitting:
        return named
    if known and len(fitting) == 1:
        return fitting[0]
    names = "; ".join(sorted(engine.name for engine in live)) or "none"
    reason = "the parameters are another optimizer's" if alike and known else "it is not in this process"
    raise RuntimeError(f"this code was compiled for the optimizer [{name}], but {reason}; there are: {names}")


def _at(params: list[Tensor], positions: Sequence[int]) -> list[Tensor]:
    return params if len(positions) == len(params) else [params[position] for position in positions]


def _address(tensor: Tensor) -> tuple[int, int]:
    """Return the identity of the storage of ``tensor``, and its offset there; meta tensors have both, too."""
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

    One of its :attr:`OutputMemory.counters` may follow these.
    With empty ``grads``, it reads the ``grad`` of each: Dynamo refuses to read sparse ones.
    A compiler may pass copies of the parameters and copy them back later; they then get the new values too.
    """
    engine = _find(optimizer, params[: len(positions)], positions)
    every = engine.params
    written = [*_at(every, positions), *engine.outputs.counter_of(positions)]
    written = written[: len(params)]  # code whose guards are skipped may lack the counter
    passed: Gradients = [*grads]
    if params and not grads:
        passed = None
    elif len(positions) < len(every):
        by_position = dict(zip(positions, grads, strict=True))
        passed = [by_position.get(i) for i in range(len(every))]
    run(engine, passed)
    if not all(map(is_, written, params)):
        for param, copy in zip(map(local, written), params, strict=True):
            if copy.data_ptr() != param.data_ptr():
                copy.copy_(param)
            elif copy is not param:
                torch.autograd.graph.increment_version(copy)


OPERATORS: dict[str, Callable[..., None]] = {
    "step": functools.partial(_step, Engine.run),
    "step_in_graph": functools.partial(_step, Engine.run_in_graph),
}
"""The operators by name. The host's half of the first must run in every call: no CUDA graph may hold it."""

for _name, _run in OPERATORS.items():
    _tags = () if _name == "step_in_graph" else (torch.Tag.cudagraph_unsafe,)
    _form = "(Tensor(a!)[] params, Tensor[] grads, int[] positions, str optimizer) -> ()"
    _library.define(_name + _form, tags=_tags)  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"compiled_optim::{_name}", lambda *args: None, lib=_library)
