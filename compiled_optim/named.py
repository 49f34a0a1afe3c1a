"""The state of an optimizer keyed by parameter name instead of by integer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from compiled_optim.checkpoint.forms import group_names, named, read
from compiled_optim.checkpoint.state_dict import LoadReport
from compiled_optim.optimizer import CompiledOptimizer


def named_state_dict(optimizer: CompiledOptimizer) -> dict[str, Any]:
    """The state dict with parameter names for keys.

    ``{"state": {"fc.bias": {...}}, "param_groups": [{"params": ["fc.bias"], "lr": ...}]}``. Prefixes that module wrappers
    insert are removed. Values are those of :meth:`CompiledOptimizer.state_dict`, so ``torch.distributed.checkpoint`` can
    save it, and load into it, as it is.

    Raises:
        ValueError: the optimizer's parameters have no names, or two of them the same.
    """
    return named(optimizer.state_dict())


def load_named_state_dict(
    optimizer: CompiledOptimizer,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    hyperparameters: Literal["checkpoint", "keep"] = "checkpoint",
) -> LoadReport:
    """Copy a state dict keyed by parameter name into the live tensors; see :meth:`CompiledOptimizer.load_state_dict`.

    Raises:
        ValueError, TypeError: a parameter on either side has no name, or as :meth:`CompiledOptimizer.load_state_dict`.
    """
    state_dict = read(state_dict)
    if not all("param_names" in group for group in optimizer.param_groups):
        raise ValueError("the optimizer's parameters have no names: make it from named_parameters() or a dict")
    unnamed = next((i for i, group in enumerate(state_dict["param_groups"]) if group_names(group) is None), None)
    if unnamed is not None:
        raise ValueError(f"the state dict has no names for the parameters of param_groups[{unnamed}]")
    return optimizer.load_state_dict(state_dict, strict=strict, hyperparameters=hyperparameters)
