"""The next step of a few parameters, taken on copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_CHOICES = ("weights", "state_dtype")  # of the storage of weights and state


class StepInputs(NamedTuple):
    """The numbers from which a step on copies begins."""

    member: Member  # whose hyperparameters, step count and scalars the step takes
    values: Mapping[str, Tensor]  # "param" and the rule's buffers, as of :func:`exact`
    grad: Tensor


def exact(plan: Plan, member: Member) -> dict[str, Tensor]:
    """Return ``"param"``, a parameter with all its bits, and the buffers of its rule, decoded, by name."""
    weights, codes = plan.statics.get("weights"), {n for n, d in plan.statics.get("state_dtype", ()) if d == INT8}
    values = {"param": member.param if weights is None else weight(member.param, member.entries, *weights)}
    for name in plan.rule.present_buffers(_plain(plan)):
        entry = member.entries[code_name(name) if name in codes else name]
        values[name] = decoded(entry, member.entries[scale_name(name)]) if name in codes else entry
    return {name: value.detach() for name, value in values.items()}


def taken(plan: Plan, starts: Sequence[StepInputs], steps: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return, for each of ``starts``, its parameter, and what a step, neither clipped nor rounded, adds to it.

    The step is taken in float64 where the device has it. Of several ``steps`` from the same gradients, each element has its
    largest addition.

    Raises:
        GradientLayoutError, ValueError: a step cannot take a gradient.
    """
    befores, shadows = [], []
    for member, values, _ in starts:
        before, *buffers = map(wide, values.values())
        entries = {name: entry.clone() for name, entry in member.entries.items() if name not in plan.buffers}
        entries |= zip([*values][1:], buffers, strict=True)
        of_group = member.groups, member.group, member.index
        shadows.append(Member(before.clone(), *of_group, ParamState(entries), tuple(entries), member.numbers))
        befores.append(before)
    present: list[Tensor | None] = [start.grad for start in starts]
    by_id = dict(zip([id(shadow.owner) for shadow in shadows], present, strict=True))
    copies = Plan(plan.rule, _plain(plan), shadows, lambda param: by_id[id(param)])
    copies.read(present, state=False, keep_alive=True)  # an error where a step would raise one
    clipping = Clipping(plan.device)
    lowering = lower(copies, "eager", clipping, CompilationLog(), NO_OUTPUTS, False)
    lowering.compile()
    copies.reread(present)
    lowering.prepare(present)
    launched = Totals([lowering], clipping) if plan.rule.has_totals(plan.statics) else lowering
    updates = [torch.zeros_like(before) for before in befores]
    for _ in range(steps):
        lasts = [shadow.param.clone() for shadow in shadows]
        launched.launch()
        news = [shadow.param - last for shadow, last in zip(shadows, lasts, strict=True)]
        updates = [torch.where(new.abs() > old.abs(), new, old) for old, new in zip(updates, news, strict=True)]
    lowering.finish()
    return list(zip(befores, updates, strict=True))


def _plain(plan: Plan) -> dict[str, Any]:
    """Return the choices of ``plan`` for numbers that are stored as they are."""
    return {name: choice for name, choice in plan.statics.items() if name not in _CHOICES}


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
