"""The next step of a few parameters, taken on copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.lowering.select import Totals, lower
from compiled_optim.memory.layout import scalar_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.output_memory import NO_OUTPUTS
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.storage import HALVES, INT8, code_name, scale_name
from compiled_optim.state import ParamState, decoded, weight


class StepInputs(NamedTuple):
    """The numbers from which a step on copies begins."""

    member: Member  # whose hyperparameters, step count and scalars the step takes
    values: Mapping[str, Tensor]  # "param" and the rule's buffers, as of :func:`exact`
    grad: Tensor


def exact(plan: Plan, member: Member) -> dict[str, Tensor]:
    """Return ``"param"``, a parameter with all its bits, and the buffers of its rule, decoded, by name."""
    weights, codes = plan.statics.get("weights"), {n for n, d in plan.statics.get("state_dtype", ()) if d == INT8}
    values = {"param": member.param if weights is None else weight(member.param, member.entries, *weights)}
    for name in plan.rule.present_buffers(_plain(plan.statics)):
        entry = member.entries[code_name(name) if name in codes else name]
        values[name] = decoded(entry, member.entries[scale_name(name)]) if name in codes else entry
    return {name: value.detach() for name, value in values.items()}


def taken(plan: Plan, start: StepInputs, steps: int = 1) -> tuple[Tensor, Tensor]:
    """Return the parameter of ``start``, and what a step, neither clipped nor rounded, adds to it.

    The step is taken in float64 where the device has it. Of several ``steps`` from the same gradient, each element has its
    largest addition.

    Raises:
        GradientLayoutError, ValueError: a step cannot take a gradient.
    """
    member, values, grad = start
    before, *buffers = map(wide, values.values())
    entries = {name: entry.clone() for name, entry in member.entries.items() if name not in plan.buffers}
    entries |= zip([*values][1:], buffers, strict=True)
    of_group = member.groups, member.group, member.index
    shadow = Member(before.clone(), *of_group, ParamState(entries), tuple(entries), member.numbers)
    copies = Plan(plan.rule, _plain(plan.statics), [shadow], lambda _: grad)
    copies.read([grad], state=False, keep_alive=True)  # an error where a step would raise one
    clipping = Clipping(plan.device)
    lowering = lower(copies, "eager", clipping, CompilationLog(), NO_OUTPUTS, False)
    lowering.compile()
    copies.reread([grad])
    lowering.prepare([grad])
    launched = Totals([lowering], clipping) if plan.rule.has_totals(plan.statics) else lowering
    largest = torch.zeros_like(before)
    for _ in range(steps):
        last = shadow.param.clone()
        launched.launch()
        update = shadow.param - last
        largest = torch.where(update.abs() > largest.abs(), update, largest)
    lowering.finish()
    return before, largest


def _plain(statics: Mapping[str, Any]) -> dict[str, Any]:  # of numbers that are stored as they are
    return {name: choice for name, choice in statics.items() if name not in ("weights", "state_dtype")}


def wide(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` in the widest dtype of its device."""
    dtype = scalar_dtype(tensor.device)
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype, copy=True)


def remedy(plan: Plan, member: Member, modes: str) -> str:
    """Return, in words, what lets steps move a parameter for which they are too small; ``modes`` of ``weights`` may."""
    if member.param.dtype not in HALVES or "weights" in plan.statics:
        return "use a larger lr: the weights already have all bits of float32"
    has_modes = any(option.name == "weights" for option in plan.rule.options)
    is_recorded = member.groups[member.group].get("differentiable")
    return f"use weights={modes}" if has_modes and not is_recorded else "keep it in float32"
