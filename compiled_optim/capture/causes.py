"""What a captured graph depends on without reading it again, and what of it changed since: in words, with names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from compiled_optim.groups.names import parameter_name
from compiled_optim.memory.sharding import local
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.declared import added_choices


def described(optimizer: CompiledOptimizer) -> dict[str, str]:
    """Everything about ``optimizer`` whose change makes a graph of its step stale, by name."""
    bound = optimizer.max_grad_norm
    facts = {
        "max_grad_norm": "off" if bound is None else place(bound) if _is_copied(bound, optimizer) else "on",
        "skip_nonfinite": str(optimizer.skip_nonfinite),
    }
    holdings = engine_of(optimizer).holdings
    for (i, name), (_, function) in holdings.schedules.functions.items():
        facts[f"schedule of param_groups[{i}][{name!r}]"] = f"{getattr(function, '__name__', 'object')} at {id(function):#x}"
    declared, added = optimizer._declaration, added_choices(type(optimizer))
    for i, group in enumerate(optimizer.param_groups):
        label = f"param_groups[{i}]"
        facts[label] = f"{len(group['params'])} parameters"
        for name in ("maximize", "differentiable", *(s.name for s in declared.statics)):
            facts[f"{label}[{name!r}]"] = str(group.get(name, added.get(name)))
        for name in declared.structural_hypers:
            zero = hasattr(group, "nonzero") and not group.nonzero(name)
            facts[f"{label}[{name!r}]"] = "0" if zero else "another number than 0"
        for j, param in enumerate(group["params"]):
            name = parameter_name(group, i, j)
            facts[f"parameter '{name}'"] = place(param)
            state: Mapping[str, Any] = holdings.state.get(param) or {}
            for entry in (b.name for b in declared.buffers if b.name in state):
                facts[f"state {entry!r} of '{name}'"] = place(state[entry])
            if param.grad is not None:
                facts[f"gradient dtype of '{name}'"] = str(param.grad.dtype)
                if param.grad.is_sparse:
                    facts[f"gradient of '{name}'"] = words(param.grad)
    return facts


def _is_copied(bound: float | Tensor, optimizer: CompiledOptimizer) -> TypeGuard[Tensor]:
    step = engine_of(optimizer).step
    devices = () if step is None else step.devices
    return isinstance(bound, Tensor) and (bound.dtype != torch.float64 or bound.device not in devices)


def place(tensor: Tensor) -> str:
    """What a tensor is, and where."""
    kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    return f"{kind} at {local(tensor).data_ptr():#x}"


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What changed from ``old`` to ``new``: the first three things, with old and new value; empty if nothing did.

    State that moved is named only where nothing else changed, since it may have moved because of the other change. A
    gradient that came or went is no difference, since a table follows it.
    """
    quiet = ("gradient", "state")
    changes = [f"{label} {old[label]} -> {value}" for label, value in new.items() if label in old and old[label] != value]
    changes += [f"{label} is new" for label in new if label not in old and not label.startswith(quiet)]
    changes += [f"{label} is gone" for label in old if label not in new and not label.startswith(quiet)]
    changes = [change for change in changes if not change.startswith("state")] or changes
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more


def words(grad: Tensor | None) -> str:
    """Where a gradient is."""
    if grad is None:
        return "None"
    if grad.is_sparse:
        return f"with {grad._nnz()} {'' if grad.is_coalesced() else 'un'}coalesced entries"
    return f"at {local(grad).data_ptr():#x}"
