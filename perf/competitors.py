"""Named ways to make an optimizer: this package's lowerings and torch.optim's implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import compiled_optim

OURS = "compiled_optim"
FUSED = "torch fused"
COMPILED = "torch.compile"

_OURS: dict[str, dict[str, Any]] = {OURS: {}, f"{OURS}[inductor]": {"lowering": "inductor"}}
_TORCH: dict[str, dict[str, Any]] = {
    FUSED: {"fused": True},
    "torch foreach": {"foreach": True},
    "torch foreach capturable": {"foreach": True, "capturable": True},
    "torch for-loop": {"foreach": False},
    "torch": {},
}

HYPERPARAMETERS: dict[str, dict[str, Any]] = {"sgd": {"lr": 1e-3, "momentum": 0.9}}
"""Given to both sides, where the defaults would benchmark an optimizer that nobody uses."""


@dataclass(frozen=True)
class Competitor:
    """A named way to make an optimizer for some parameters, which have a ``dtype``."""

    name: str
    make: Callable[[Sequence[Tensor]], Optimizer]
    dtype: torch.dtype = torch.float32


def exported() -> dict[str, type[compiled_optim.CompiledOptimizer]]:
    """The package's optimizers by lower-case name."""
    public = [getattr(compiled_optim, name) for name in compiled_optim.__all__]
    classes = [c for c in public if isinstance(c, type) and issubclass(c, compiled_optim.CompiledOptimizer)]
    return {c.__name__.lower(): c for c in classes if c is not compiled_optim.CompiledOptimizer}


def optimizers() -> dict[str, tuple[type[Optimizer], type[Optimizer] | None]]:
    """By lower-case name: each optimizer of this package, and torch.optim's where it has it.

    Those left out, of sparse gradients and of closures, step from something else than a dense gradient per parameter.
    """
    return {
        name: (ours, getattr(torch.optim, ours.__name__, None))
        for name, ours in exported().items()
        if hasattr(ours, "_rule") and ours._gradients == "dense"
    }


def arguments(optimizer: type[Optimizer]) -> dict[str, Any]:
    """The hyperparameters that an optimizer, ours or torch.optim's of that name, is given."""
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty]
    return {**dict.fromkeys(required, 1e-3), **HYPERPARAMETERS.get(optimizer.__name__.lower(), {})}


def competitor(optimizer: str, name: str) -> Competitor:
    """The competitor ``name`` for ``optimizer``; whether it works on a device is another question.

    Raises:
        ValueError: it is torch.optim's, and torch.optim has no such optimizer.
    """
    ours, theirs = optimizers()[optimizer]
    hyperparameters = arguments(ours)
    if name in _OURS:
        return Competitor(name, lambda params: ours(params, **hyperparameters, **_OURS[name]))
    if theirs is None:
        raise ValueError(f"torch.optim has no {ours.__name__}")
    if name == COMPILED:
        return Competitor(name, lambda params: _with_compiled_step(theirs(params, **hyperparameters)))
    return Competitor(name, lambda params: theirs(params, **hyperparameters, **_TORCH[name]))


def working(optimizer: str, device: torch.device, names: Sequence[str] = ()) -> list[Competitor]:
    """The competitors, or those of ``names``, that can take a step on ``device``; this package's default is the first.

    Raises:
        ValueError: one of ``names`` is unknown or does not work.
    """
    theirs = optimizers()[optimizer][1]
    known = {name: competitor(optimizer, name) for name in (*_OURS, *(_TORCH if theirs else ()))}
    if not names and theirs and "foreach" in inspect.signature(theirs).parameters:
        del known["torch"]  # is one of the others
    if unknown := set(names) - set(known):
        raise ValueError(f"unknown competitors {sorted(unknown)}; there are {list(known)}")
    wanted = {OURS, *(names or known)}
    able = [c for name, c in known.items() if name in wanted and (name in _OURS or _works(c, device))]
    if unable := set(names) - {c.name for c in able}:
        raise ValueError(f"{sorted(unable)} cannot run {optimizer} on {device}")
    return able


def all_names() -> Iterator[str]:
    """The names of all competitors of the step benchmark."""
    yield from (*_OURS, *_TORCH)


def _works(candidate: Competitor, device: torch.device) -> bool:
    """Whether ``candidate`` exists on ``device``, found by trying: torch has no public list of what supports what."""
    param = torch.zeros(2, 2, device=device, requires_grad=True)
    param.grad = torch.zeros_like(param)
    try:
        candidate.make([param]).step()
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _with_compiled_step(optimizer: Optimizer) -> Optimizer:
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment, method-assign]
    return optimizer
