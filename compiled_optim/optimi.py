"""State for the optimizers of optimi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.optimi import has_counterpart, to_optimi
from compiled_optim.groups.parameters import parameters_of
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.rule import Declaration
from compiled_optim.state import converted, part_of, structure

_COUNTERPARTS = ("SGD", "Adam", "AdamW", "RAdam", "Lion", "Adan", "StableAdamW", "Ranger")


def optimi_state_dict(optimizer: CompiledOptimizer) -> dict[str, Any]:
    """A state dict that optimi's optimizer of the same name loads, with which it goes on as ``optimizer`` does.

    For SGD, Adam, AdamW, RAdam, Lion, Adan, StableAdamW and Ranger of optimi 0.3. Its tensors are copies, which optimi can
    write into. optimi's plain loops then run, with the choices that are saved here and not those of its constructor. Loading
    goes the other way without a call: :meth:`CompiledOptimizer.load_state_dict` takes what optimi saves.

    Codes of 8 bits become numbers, and what a weight's own dtype cannot hold becomes ``kahan_comp``, in that dtype. What is
    not part of a group, such as ``max_grad_norm``, does not go along. RAdam's ``eps`` means something else in optimi
    for as long as its second bias correction is not 1: there it is added to the corrected root.

    Raises:
        ValueError: optimi has no such optimizer or option, or it cannot count as here: the parameters of a group took
            different numbers of steps where it counts them; or ``weights`` are rounded at random.
    """
    kind = type(optimizer)
    update = getattr(kind, "update", kind)
    is_theirs = update.__module__.startswith("compiled_optim.") and update.__qualname__.partition(".")[0] in _COUNTERPARTS
    if not is_theirs or not has_counterpart(optimizer._declaration):
        raise ValueError(f"optimi has no {kind.__name__}")
    for index, group in enumerate(optimizer.param_groups):
        if isinstance(scale := group.get("lr_scale"), Mapping) or callable(scale):  # of which a state dict has nothing
            raise ValueError(f"param_groups[{index}] has 'lr_scale', which has no counterpart in optimi")
    saved = optimizer.state_dict()
    declaration, groups = optimizer._declaration, engine_of(optimizer).distinct_groups
    for index, group in enumerate(groups):
        if group.get("weights") == "stochastic":
            raise ValueError(f"param_groups[{index}] has weights='stochastic', which has no counterpart in optimi")
        numbers = saved["param_groups"][index]["params"]
        for param, place in parameters_of(group).items():
            if entries := saved["state"].get(numbers[place]):
                choices = structure(declaration, groups, index, place)
                saved["state"][numbers[place]] = _in_optimis_form(declaration, param, entries, choices)
    return to_optimi(saved)


@torch.no_grad()
def _in_optimis_form(
    declaration: Declaration, param: Tensor, entries: Mapping[str, Any], choices: Mapping[str, Any]
) -> dict[str, Any]:
    """``entries``, a parameter's state, with ``kahan_comp`` in place of another part of the weight, and without codes."""
    weights = None if part_of(choices) is None else ("kahan", choices["weights"][1])
    stored = {b.name: entries[b.name] for b in declaration.buffers if entries.get(b.name) is not None}
    changes = converted(declaration, param, stored, {**choices, "weights": weights, "state_dtype": ()})
    return {name: value for name, value in {**entries, **changes}.items() if value is not None or name not in changes}
