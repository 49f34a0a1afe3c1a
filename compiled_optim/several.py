"""Several optimizers of one model, such as Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from compiled_optim.checkpoint.saved_values import described
from compiled_optim.optimizer import CompiledOptimizer, engine_of

Optimizers: TypeAlias = CompiledOptimizer | Sequence[CompiledOptimizer]


def listed(optimizers: Any) -> list[CompiledOptimizer]:
    """``optimizers`` as a list; an error if they are no several optimizers of this package."""
    result = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if foreign := [each for each in result if not isinstance(each, CompiledOptimizer)]:
        raise TypeError(f"an optimizer of this package, or a list of some, is needed, got {described(foreign[0])}")
    if not result:
        raise ValueError("the list of optimizers is empty")
    return result


def check_disjoint(optimizers: Sequence[CompiledOptimizer]) -> None:
    """Raise ``ValueError`` where a parameter is in two of ``optimizers``."""
    owners: dict[int, str] = {}
    for index, optimizer in enumerate(optimizers):
        label = label_of(index, optimizer)
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                if (other := owners.setdefault(id(param), label)) != label:
                    name = (group.get("param_names") or {place: place})[place]
                    raise ValueError(f"{other} and {label} both have the parameter '{name}'")


@contextlib.contextmanager
def locked(optimizers: Sequence[CompiledOptimizer]) -> Iterator[None]:
    """Let steps, saves and loads of other threads wait during a ``with`` block."""
    with contextlib.ExitStack() as locks:
        for engine in sorted(map(engine_of, optimizers), key=lambda engine: int(engine.key)):
            locks.enter_context(engine.lock)
        yield


def label_of(index: int, optimizer: CompiledOptimizer) -> str:
    """What messages call the optimizer at this place in a list."""
    return f"optimizers[{index}] ({type(optimizer).__name__})"


@contextlib.contextmanager
def naming(label: str) -> Iterator[None]:
    """Let an error say of which optimizer it is."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if len(error.args) == 1:
            error.args = (f"{label}: {error}",)
        raise
