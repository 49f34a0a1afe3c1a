"""The next step of a few parameters, taken on copies; and a warning where 16 bits are too few for the first one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import first_few
from compiled_optim.lowering.select import Totals, lower
from compiled_optim.memory.layout import part_placed_like, scalar, scalar_dtype
from compiled_optim.memory.torch_internals import is_capturing, is_fake, outside_inference_mode
from compiled_optim.plan.clipping import NAMES, Clipping, scaled
from compiled_optim.plan.compilations import CompilationLog, users_level
from compiled_optim.plan.output_memory import NO_OUTPUTS
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.plan.schedule import Schedules
from compiled_optim.rule.storage import HALVES, INT8, code_name, scale_name
from compiled_optim.state import ParamState, decoded, weight
from compiled_optim.step.watch import sample

_CHOICES = ("weights", "state_dtype")  # of the storage of weights and state
_ELEMENTS = 1024  # of each parameter, which are judged
_STEPS = 10  # by which the averages of most rules have grown to what they average
_WHOLE = 1 << 24  # elements of the largest parameter that is copied whole, where its step depends on all of them
_COUNTS = [1 << power for power in range(21)]  # the steps at which a schedule is asked for its rate
_MODES = "'auto', 'split8' or 'stochastic'"  # of weights=
_RATES = ("lr", "initial_lr", "max_lr")  # of a group; schedulers write the last two


def taken(
    plan: Plan, members: Sequence[Member], grads: Sequence[Tensor], elements: int | None = None, steps: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Return each of ``members`` with all its bits, and what its next step, neither clipped nor rounded, adds to it.

    The step is taken from ``grads`` on copies, in float64 where the device has it. Of several ``steps`` from these gradients
    the last one is returned. With ``elements``, for rules that work element by element, all is of a
    :func:`~compiled_optim.step.watch.sample` of so many, also ``grads``.

    Raises:
        GradientLayoutError, ValueError: a step cannot take a gradient.
    """
    statics = {name: choice for name, choice in plan.statics.items() if name not in _CHOICES}
    befores, shadows = [], []
    for member in members:
        param, weights = member.param.detach(), plan.statics.get("weights")
        values = {"param": param if weights is None else weight(param, member.entries, *weights)}
        values |= decoded_buffers(plan, member, statics)
        if elements is not None:
            values = {name: sample(value, param, elements, spread=True) for name, value in values.items()}
        before, *buffers = map(wide, values.values())
        entries = {name: entry.clone() for name, entry in member.entries.items() if name not in plan.buffers}
        entries |= zip([*values][1:], buffers, strict=True)
        of_group = member.groups, member.group, member.index
        shadows.append(Member(before.clone(), *of_group, ParamState(entries), tuple(entries), member.numbers))
        befores.append(before)
    present: list[Tensor | None] = [*grads]
    by_id = dict(zip([id(shadow.owner) for shadow in shadows], grads, strict=True))
    copies = Plan(plan.rule, statics, shadows, lambda param: by_id[id(param)])
    copies.read(present, state=False, keep_alive=True)  # an error where a step would raise one
    clipping = Clipping(plan.device)
    lowering = lower(copies, "eager", clipping, CompilationLog(), NO_OUTPUTS, False)
    lowering.compile()
    copies.reread(present)
    lowering.prepare(present)
    launched = Totals([lowering], clipping) if plan.rule.has_totals(plan.statics) else lowering
    for _ in range(steps):
        last = [shadow.param.clone() for shadow in shadows]
        launched.launch()
    lowering.finish()
    return [(before, shadow.param - old) for before, old, shadow in zip(befores, last, shadows, strict=True)]


def decoded_buffers(plan: Plan, member: Member, statics: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of the rule's own buffers, under the choices of ``statics``, and the buffers, decoded."""
    codes = {name for name, dtype in plan.statics.get("state_dtype", ()) if dtype == INT8}
    for name in plan.rule.present_buffers(statics):
        entry = member.entries[code_name(name) if name in codes else name]
        yield name, (decoded(entry, member.entries[scale_name(name)]) if name in codes else entry).detach()


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


_Judged: TypeAlias = tuple[Member, str, float, int, int]
"""A parameter with a remedy, the rate to which its update was scaled, the elements of its sample that move and that stay."""


class Trial:
    """Warns, once, of 16-bit parameters without ``weights`` that their steps are too small to move.

    It judges the first step that is taken with ``lr`` above 0, and waits for the device there. A sample of each parameter
    takes another step from the same gradient, and ten if that one is too small, since averages grow. The update is scaled
    to the largest of the group's ``lr``, ``initial_lr`` and ``max_lr``, or of a schedule in the step, so that a warm-up
    decides nothing. A parameter is reported if more than half of the elements that have a gradient and an update are
    rounded back. Rules that sum over all parameters are not judged, since such a sum sets their pace, nor are parameters of
    over 2**24 elements whose step depends on all elements.

    Attributes:
        is_open: whether no step was judged yet.
        warned: the names of the parameters that will not move, the evidence and the remedy; None if there are none.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.warned: tuple[tuple[str, ...], str, str] | None = None
        self._judged: list[_Judged] = []  # in this step
        self._has_gradients = False  # whether any parameter had one in this step
        self._is_postponed = False  # whether 16-bit ones that had one were not to move in this step

    @outside_inference_mode()
    @torch.no_grad()
    def look(
        self,
        plans: Sequence[Plan],
        grad_of: Callable[[Tensor], Tensor | None],
        clipping: Clipping,
        schedules: Schedules,
    ) -> None:
        """Judge the parameters of ``plans`` that have just taken a step, or a part of one, from what ``grad_of`` returns."""
        self.is_open = any(_is_rounded(plan, member) for plan in plans for member in plan.members)
        if not self.is_open or any(is_capturing(plan.device) for plan in plans):
            return
        for plan in plans:
            full = [(member, grad_of(member.owner)) for member in plan.members]
            self._has_gradients |= any(grad is not None for _, grad in full)
            parts = [(m, part_placed_like(g, m.owner)) for m, g in full]  # others would have to be sent between processes
            rounded = [(m, g) for m, g in parts if g is not None and m.param.numel() and _is_rounded(plan, m)]
            if rounded:
                judged = list(_judged(plan, rounded, clipping, schedules))
                self._judged += judged
                self._is_postponed |= not judged

    def end(self) -> None:
        """End the step, after the last :meth:`look` at its parts. Warn of what will not move."""
        judged, self._judged = self._judged, []
        self.is_open &= not judged and (self._is_postponed or not self._has_gradients)
        self._has_gradients, self._is_postponed = False, False
        if not (stuck := [each for each in judged if _is_stuck(*each[-2:])]):
            return
        members, remedies, rates, moving, staying = zip(*stuck, strict=True)
        lr = " to ".join(f"{rate:.3g}" for rate in dict.fromkeys((min(rates), max(rates))))
        evidence = f"at lr {lr}, {sum(staying) / sum(moving):.0%} of their elements are rounded back to what they were"
        names = tuple(member.name for member in members)
        self.warned = names, evidence, ", or ".join(dict.fromkeys(remedies))
        message = f"{len(stuck)} of {len(judged)} 16-bit parameters will not move ({first_few(names)}): {evidence}"
        warnings.warn(f"compiled_optim: {message}; {self.warned[2]}", UserWarning, stacklevel=users_level())


def _is_rounded(plan: Plan, member: Member) -> bool:
    """Return whether steps round a parameter to 16 bits, and its next step can be taken on a sample or a copy."""
    if member.param.dtype not in HALVES or plan.statics.get("weights") is not None:
        return False
    is_real = not (plan.is_meta or plan.wrapped or is_fake(member.param))
    is_small = member.param.numel() <= _WHOLE or _is_sampled(plan)
    return is_real and is_small and not plan.rule.has_totals(plan.statics)


def _is_sampled(plan: Plan) -> bool:
    return plan.rule.granularity == "element" and plan.rule.gradients == "dense"


def _judged(
    plan: Plan, pairs: Sequence[tuple[Member, Tensor]], clipping: Clipping, schedules: Schedules
) -> Iterator[_Judged]:
    """Yield the parameters whose ``lr`` is not 0, judged by their gradients, if the last step was not skipped."""
    factor: Tensor | float = 1.0
    if not clipping.idle:
        norm, skipped, _ = clipping.outcome(plan.device)
        clips = [number.to(norm) for number in clipping.tensors(plan.device)]
        factor, *_ = scaled((norm * clips[NAMES.index("grad_scale")]).square(), *clips)
        if skipped:
            return
    groups = plan.members[0].groups
    rates = {index: _rates(groups, index, schedules) for index in {member.group for member, _ in pairs}}
    pairs = [(member, grad.detach()) for member, grad in pairs if rates[member.group][0] > 0]
    is_sampled = _is_sampled(plan)
    if is_sampled:
        pairs = [(member, sample(grad, member.param, _ELEMENTS, spread=True)) for member, grad in pairs]
    parts = [pairs] if is_sampled else [[pair] for pair in pairs]  # whole copies one by one
    counted = [counts for part in parts for counts in _counted(plan, part, factor, rates, 1)]
    if again := [i for i, counts in enumerate(counted) if is_sampled and _is_stuck(*counts)]:
        later = dict(zip(again, _counted(plan, [pairs[i] for i in again], factor, rates, _STEPS), strict=True))
        counted = [later.get(i, counts) for i, counts in enumerate(counted)]
    for (member, _), (moving, staying) in zip(pairs, counted, strict=True):
        yield member, remedy(plan, member, _MODES), rates[member.group][1], moving, staying


def _is_stuck(moving: int, staying: int) -> bool:
    return staying * 2 > moving


def _counted(
    plan: Plan,
    pairs: Sequence[tuple[Member, Tensor]],
    factor: Tensor | float,
    rates: Mapping[int, tuple[float, float]],
    steps: int,
) -> list[tuple[int, int]]:
    """Return, for each parameter, how many elements have an update, and how many of those are rounded back."""
    members, grads = [member for member, _ in pairs], [wide(grad) * factor for _, grad in pairs]
    counts: list[Tensor] = []
    updates = taken(plan, members, grads, _ELEMENTS if _is_sampled(plan) else None, steps) if pairs else []
    for member, grad, (before, update) in zip(members, grads, updates, strict=True):
        lr, rate = rates[member.group]
        moves = (update != 0) & update.isfinite()
        moves &= True if grad.is_sparse else grad != 0  # else weight decay alone moves it, which few would miss
        stays = (before + update * (rate / lr)).to(member.param.dtype) == before
        counts += moves.sum(), (moves & stays).sum()
    return [(moving, staying) for moving, staying in torch.stack(counts).view(-1, 2).tolist()] if counts else []


def _rates(groups: Sequence[ParamGroup], index: int, schedules: Schedules) -> tuple[float, float]:
    """Return the ``lr`` of the last step of a group, and the largest that the training is known to have."""
    group = groups[index]
    entries = {**dict(dict.items(group)), **group.floats()}
    rates = [float(entries[name]) for name in _RATES if isinstance(entries.get(name), (int, float, Tensor))]
    if (index, "lr") in schedules.functions:
        hyper, function = schedules.functions[index, "lr"]
        device = group.read_only("lr")[0].device
        peaks = [float(value) for count in _COUNTS for value in hyper.elements(function(scalar(count, device)), "")]
        rates += filter(math.isfinite, peaks)
    return (rates[0], max(rates)) if "lr" in entries else (0.0, 0.0)
