"""A warning, after the first step, of 16-bit parameters that the step was too small to move."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import first_few
from compiled_optim.memory.layout import part_placed_like
from compiled_optim.memory.torch_internals import is_capturing, is_fake, outside_inference_mode
from compiled_optim.plan.clipping import NAMES, Clipping, scaled
from compiled_optim.plan.plan import Plan
from compiled_optim.plan.schedule import Schedules
from compiled_optim.rule.storage import HALVES
from compiled_optim.step.next_step import StepInputs, exact, remedy, taken, wide
from compiled_optim.step.watch import sample

_ELEMENTS, _TOTAL = 1024, 1 << 17  # that are judged, of each parameter and of all
_STEPS = 10  # by which the averages of most rules have grown to what they average


class _Judged(NamedTuple):
    name: str
    remedy: str
    lr: float  # to which the update was scaled
    moving: int  # elements of the sample with an update
    staying: int  # those of them that are rounded back


@dataclass
class Trial:
    """Judges whether the first step with ``lr`` above 0 rounds 16-bit parameters without ``weights`` back; it waits.

    A sample of each parameter takes ten more steps from the same gradient, since averages grow. Updates are scaled to the
    largest of the group's ``lr``, ``initial_lr`` and ``max_lr``, so that a warm-up decides nothing. Groups with a schedule
    of ``lr`` in the step need one of the last two. A parameter is reported if most elements with a gradient and an update
    are rounded back; later gradients may move them. Only elementwise rules without sums, on dense gradients, are judged.

    Attributes:
        is_open: whether no step was judged yet.
        findings: the arguments of a report's finding: ``"too small"``, or ``"not judged"`` after an error.
    """

    is_open: bool = True
    findings: tuple[tuple[str, tuple[str, ...], str, str], ...] = ()
    _seen: dict[Plan, dict[int, StepInputs]] | None = None  # samples, by parameter; None without a gradient

    @torch.no_grad()
    def see(self, plans: Sequence[Plan], grads: Mapping[int, Tensor | None]) -> None:
        """Take samples after a step, or a part of one, from ``grads``, by the identity of the parameter."""
        members = [(plan, member) for plan in plans if _is_judged(plan) for member in plan.members]
        rounded = [(plan, member) for plan, member in members if member.param.dtype in HALVES]
        if all(grad is None for grad in grads.values()) or any(is_capturing(plan.device) for plan in dict(rounded)):
            return
        self._seen = self._seen or defaultdict(dict)
        count = min(_ELEMENTS, _TOTAL // max(1, len(rounded)) + 1)
        for of, member in rounded:
            grad = part_placed_like(grads[id(member.owner)], member.owner)  # another would be sent between processes
            if grad is not None and grad.numel():
                cut = functools.partial(sample, weight=member.param, elements=count, spread=True)
                values = {name: cut(value) for name, value in exact(of, member).items()}
                self._seen[of][id(member.owner)] = StepInputs(member, values, wide(cut(grad.detach())))

    @outside_inference_mode()
    @torch.no_grad()
    def end(self, clipping: Clipping, schedules: Schedules) -> str:
        """Judge the step that was seen. Return a warning, or ""."""
        seen, self._seen = self._seen, None
        if seen is None:
            return ""
        results = [_judged(plan, [*starts.values()], clipping, schedules) for plan, starts in seen.items()]
        judged = [each for result in results for each in result or ()]
        self.is_open = not judged and None in results
        stuck = [each for each in judged if each.staying * 2 > each.moving]
        if not stuck:
            return ""
        names, remedies, rates, moving, staying = zip(*stuck, strict=True)
        lr = " to ".join(f"{rate:.3g}" for rate in dict.fromkeys((min(rates), max(rates))))
        share = f"{sum(staying) / sum(moving):.0%} of their elements"
        evidence = f"at lr {lr}, {share} are rounded back to what they were by this step"
        self.findings = (("too small", names, evidence, advice := ", or ".join(dict.fromkeys(remedies))),)
        whose = f"{len(stuck)} of {len(judged)} 16-bit parameters ({first_few(names)})"
        return f"compiled_optim: the step is too small for {whose}: {evidence}; {advice}"


def _is_judged(plan: Plan) -> bool:
    rule, has_numbers = plan.rule, not (plan.wrapped or is_fake(plan.members[0].param))
    return has_numbers and rule.is_elementwise and not rule.stages(plan.statics) and "weights" not in plan.statics


def _judged(plan: Plan, starts: list[StepInputs], clipping: Clipping, schedules: Schedules) -> list[_Judged] | None:
    """Judge parameters of a plan by their samples; None if the step was to move none of them."""
    factor: Tensor | float = 1.0
    if not clipping.idle:
        norm, skipped, _ = clipping.outcome(plan.device)
        clips = [number.to(norm) for number in clipping.tensors(plan.device)]
        factor, *_ = scaled((norm * clips[NAMES.index("grad_scale")]).square(), *clips)
        if skipped:
            return None
    used = {start.member.group: start.member.groups for start in starts}
    rates = {i: _rates(groups[i], (i, "lr") in schedules.functions) for i, groups in used.items()}
    known = [start for start in starts if rates[start.member.group]]
    if not (moved := [start for start in known if rates[start.member.group][0] > 0]):
        return None if known else []
    counts, whose = list[Tensor](), list[tuple[str, str, float]]()
    for run in _alike(plan, moved):
        values = {name: torch.cat([start.values[name] for start in run]) for name in run[0].values}
        grad, member = torch.cat([start.grad for start in run]) * factor, run[0].member
        before, update = taken(plan, StepInputs(member, values, grad), _STEPS)
        lr, largest = rates[member.group]
        moves = (update != 0) & update.isfinite() & (grad != 0)  # else weight decay alone moves it, which few would miss
        stays = moves & ((before + update * (largest / lr)).to(member.param.dtype) == before)
        counts += (part.sum(1) for part in torch.split(torch.stack([moves, stays]), [s.grad.numel() for s in run], 1))
        whose += ((m.name, remedy(plan, m, "'auto', 'split8' or 'stochastic'"), largest) for m, *_ in run)
    return [_Judged(*each, *elements) for each, elements in zip(whose, torch.stack(counts).tolist(), strict=True)]


def _rates(group: ParamGroup, is_scheduled: bool) -> tuple[float, ...]:
    """Return a group's ``lr`` and the largest one that is known; nothing where only a schedule in the step knows that."""
    entries = {**dict(dict.items(group)), **group.floats()}
    numbers = [e for e in map(entries.get, ("initial_lr", "max_lr")) if isinstance(e, (int, float, Tensor))]
    peaks = [float(n) for n in numbers if not isinstance(n, Tensor) or (n.numel() == 1 and not n.is_complex())]
    lr = entries.get("lr")
    return () if lr is None or (is_scheduled and not peaks) else (lr, max(lr, *filter(math.isfinite, peaks), 0.0))


def _alike(plan: Plan, starts: list[StepInputs]) -> list[list[StepInputs]]:
    """Return lists of parameters that take the same step, which can be joined to save launches."""
    alike = defaultdict[tuple[object, ...], list[StepInputs]](list)
    scalars = [start.member.entries[name].detach() for start in starts for name in plan.rule.scalar_names]
    for start, column in zip(starts, torch.stack(scalars).view(len(starts), -1).tolist(), strict=True):
        numbers = [pair for pair in start.member.numbers.items() if pair[0] != "seed"]  # which only rounding reads
        alike[(start.member.group, start.member.param.dtype, *numbers, *column)].append(start)
    return [*alike.values()]
