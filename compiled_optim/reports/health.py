"""Report the parameters that do not train as they should, from the records of watched steps and from state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_optim.memory.layout import is_dense
from compiled_optim.optimizer import CompiledOptimizer, checked_engine
from compiled_optim.reports.finding import Finding
from compiled_optim.step.engine import Engine
from compiled_optim.step.rule_step import RuleStep, step_with_rule
from compiled_optim.step.watch import STEPS, Watch, has_zero_gradient, zero_moments

_LEAST = 16  # steps that say how large a parameter's updates usually are, and elements: those of few often pass through 0
_DEVIATIONS, _FACTOR = 8.0, 4.0  # how far from the usual an update is unusual: in deviations of its logarithm, and times


@dataclass(frozen=True)
class HealthReport:
    """The result of :func:`health`.

    Attributes:
        optimizer: the class name.
        watched: True if steps were watched. Without that, only ``"no gradient"`` and ``"zero moments"`` are found.
        checked: the names of the parameters.
        findings: the problems, each of one parameter, in the order of the parameters. Their ``name`` is one of these. ``"no
            gradient"``: it never had one, and is not frozen. ``"zero gradient"``: its gradients were only zeros. ``"not
            moved"``: none of its bits has changed since it is watched. ``"too small"``: more than half of its elements with
            gradients stayed, since their updates are below half a unit of the last digit. ``"zero moments"``: averages are
            at 0, or were after a load, though it has taken steps. ``"unusual"``: the ratio of update and weight left the
            range that it had, though ``lr`` does not say so; of 16 elements or more.
    """

    optimizer: str
    watched: bool
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        wrong = {finding.params for finding in self.findings}
        how = "" if self.watched else "; call watch_health() to watch further steps"
        head = f"{self.optimizer}: {len(wrong)} of {len(self.checked)} parameters may not train{how}"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


def health(optimizer: CompiledOptimizer, least_steps: int = 2) -> HealthReport:
    """Report, by name, which parameters do not train as they should. It changes nothing, and waits for the device.

    Call ``optimizer.watch_health()`` first, and a few steps later this: before gradients are dropped, since zeros are
    reported of parameters whose present gradient is 0 too.

    Args:
        optimizer: an optimizer of this package.
        least_steps: a problem is reported once it lasted so many steps.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
        NotImplementedError: steps need a closure.
    """
    engine = checked_engine(optimizer, "health")
    with engine.lock:
        return _report(engine, step_with_rule(engine, "be watched"), least_steps)


def _report(engine: Engine, step: RuleStep, least: int) -> HealthReport:
    problems: dict[Tensor, dict[str, str]] = {}
    for watch in step.watches.values():
        taken = watch.taken()
        problems |= {owner: dict(_wrong(watch, i, taken[:, :, i], least)) for owner, i in watch.columns.items()}
    plans = [lowering.plan for lowering in step.lowerings]
    # Entries one by one: Plan.scalars may move them, while kernels and graphs write to the old addresses.
    counts = [count for plan in plans for count in torch.stack([m.entries["step"] for m in plan.members]).tolist()]
    is_old, findings, names = max([engine.steps, *counts]) >= least, [], []
    members = [(member, plan) for plan in plans for member in plan.members]
    for (member, plan), count in zip(members, counts, strict=True):
        wrong = problems.get(member.owner, {})
        if not count and is_old and member.owner.requires_grad:
            wrong["no gradient"] = "it never had a gradient"
        elif "zero moments" not in wrong and (averages := zero_moments(member, plan)):
            wrong["zero moments"] = f"{averages} are at 0, though it has taken {count:.0f} steps"
        names.append(member.name)
        findings += [Finding(name, (member.name,), evidence) for name, evidence in wrong.items()]
    return HealthReport(engine.kind.__name__, engine.is_watching, tuple(names), tuple(findings))


def _wrong(watch: Watch, column: int, steps: Tensor, least: int) -> Iterator[tuple[str, str]]:
    """Yield name and evidence of problems of one parameter that lasted ``least`` of ``steps``, rows of its quantities."""
    member, (weights, updates, grads, moved, present, rates, skipped) = watch.plan.members[column], steps.unbind(1)
    param, (mode, *_) = member.param, watch.plan.statics.get("weights") or (None,)
    if not param.numel():
        return
    had = ~grads.isnan() & (skipped == 0)
    moves = had & (rates != 0)
    if moves.any():  # else lr is 0 by choice, not only at the beginning or end of a schedule
        had = moves
    zeros = int((present[had] == 0).flip(0).long().cumprod(0).sum())
    if zeros >= least and has_zero_gradient(member):
        yield "zero gradient", f"its last {zeros} gradients were only zeros"
    # With stochastic rounding, few small steps may move nothing. With further bits, small updates add up. Parameters
    # with gaps in memory are updated in copies, which are written back after the step: the samples miss that.
    if had.sum() >= (STEPS if mode == "stochastic" else least) and not watch.has_moved(column):
        yield "not moved", f"no bit of it moved in the last {len(steps)} steps or before"
    elif mode in (None, "master") and param.is_floating_point() and is_dense(param) and moves.sum() >= least:
        share = float(1 - moved[moves].square().sum() / present[moves].square().sum())  # NaN without elements
        if share > 0.5:
            stayed = f"{share:.0%} of its elements with gradients stayed: updates are below half a unit of the weight"
            yield "too small", f"{stayed} in {str(param.dtype).removeprefix('torch.')}"
    if member.owner in watch.lost:
        yield "zero moments", f"the last load left {watch.lost[member.owner]} at 0, though it has taken steps"
    ratios = updates / weights / rates  # schedules of ``lr`` let updates grow and fall
    is_usable = ratios.log().isfinite()
    if watch.elements(column) < _LEAST or is_usable.sum() <= _LEAST:
        return
    *_, rate = rates[is_usable]
    *_, last = logs = ratios[is_usable].log()
    middle = logs[:-1].median()
    width = (logs[:-1] - middle).abs().median() * 1.4826  # a normal deviation
    if (last - middle).abs() > max(_DEVIATIONS * width, math.log(_FACTOR)):
        sizes = [f"{float(log.exp() * rate):.2g}" for log in (last, middle)]
        yield "unusual", f"its last update was {sizes[0]} of the weight, where with this lr {sizes[1]} was usual before"
