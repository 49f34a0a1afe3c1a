"""Report the parameters that a step is too small to move, in the dtype in which they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_optim.groups.numbers import send
from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.layout import MemoryOrder, as_real, flat
from compiled_optim.memory.torch_internals import outside_dynamo, outside_inference_mode
from compiled_optim.optimizer import CompiledOptimizer, checked_engine
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.reports.finding import Finding
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.storage import ROUNDED
from compiled_optim.step.next_step import StepInputs, exact, remedy, taken
from compiled_optim.step.rule_step import step_with_rule

_MODES = "'split8', 'kahan' or 'stochastic'"  # of weights=
_STAYS = (
    "at lr {lr:.3g}, {share:.0%} of it does not move: a weight of {weight:.2g} needs a step of {needed:.2g}, and gets "
    "{available:.2g}"
)
_UNEVEN = (
    f"in {{share:.0%}} of the groups of {GROUP}, half of the gradients and moments are less than a tenth of the largest, "
    "and slowed by 8 bits"
)


@dataclass(frozen=True)
class NumericsReport:
    """The result of :func:`check_numerics`.

    Attributes:
        optimizer: the class name.
        checked: the names of the parameters that a step would move.
        findings: each about one parameter. ``"too small"``, the worst first: a step moves less than half of the elements
            that the rule would move. ``figures`` has ``share``, the share that stays of these elements, from 0.5 to 1;
            ``lr``, the learning rate of the group; ``weight``, the median magnitude of those that stay; and two more
            medians: ``needed``, the smallest step that moves them, half the distance to the next number that can be
            stored, and ``available``, the step that the optimizer takes. ``"uneven"``: in ``share`` of the groups of 64
            elements, half of the gradients and moments are below a tenth of the largest, and slowed by 8 bits.
    """

    optimizer: str
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        count = sum(finding.name == "too small" for finding in self.findings)
        head = f"{self.optimizer}: the next step is too small for {count} of {len(self.checked)} parameters"
        return "\n".join([head, *(f"  '{finding.params[0]}': {finding.said}" for finding in self.findings)])


@outside_dynamo
@outside_inference_mode()
@torch.no_grad()
def check_numerics(optimizer: CompiledOptimizer) -> NumericsReport:
    """Report which parameters the next step is too small to move. It changes nothing, and waits for the device.

    The next step is computed from the present gradients, which must be unscaled, on copies in float64, one parameter at a
    time. A rule's sums over all parameters are then sums over one parameter. A parameter without a gradient moves by its
    momentum. Print the report for advice.

    Raises:
        NotImplementedError: steps need a closure.
        TypeError: ``optimizer`` is not one of this package, or a step cannot take a gradient.
        RuntimeError, ValueError: a step would be refused, as :meth:`CompiledOptimizer.step` says.
    """
    engine = checked_engine(optimizer, "check_numerics")
    with engine.lock:
        step = step_with_rule(engine, "check its numerics")
        engine.groups.check_numbers()
        send(engine.changes)
        return _report(engine.kind.__name__, [lowering.plan for lowering in step.lowerings])


def _report(optimizer: str, plans: Sequence[Plan]) -> NumericsReport:
    checked, too_small, uneven = [], [], []
    for plan in plans:
        grads = plan.gradients(list(map(gradient, plan.params)))
        for member, grad in zip(plan.members, grads, strict=True):
            if plan.is_meta or (grad is None and plan.rule.gradients == "sparse"):
                continue
            grad = torch.zeros_like(member.param) if grad is None else grad  # momentum alone moves the parameter
            start = StepInputs(member, exact(plan, member), grad)
            if share := _uneven(plan, start):
                evidence, advice = _UNEVEN.format(share=share), "choose state_dtype=torch.bfloat16, or name it in exclude="
                uneven.append(Finding("uneven", (member.name,), evidence, advice, {"share": share}))
            before, step = map(as_real, taken(plan, start))
            step = step.abs()
            moved = (step > 0) & step.isfinite()
            if not moved.any():
                continue
            checked.append(member.name)
            half_unit = _half_unit(before, plan, member)
            stuck = moved & (step < half_unit)
            share = (stuck.sum() / moved.sum()).item()
            if share > 0.5:
                sizes = {"weight": before.abs(), "needed": half_unit, "available": step}
                figures = {"share": share, "lr": float(member.groups[member.group]["lr"])}
                figures |= {name: size[stuck].median().item() for name, size in sizes.items()}
                evidence = _STAYS.format(**figures)
                too_small.append(Finding("too small", (member.name,), evidence, remedy(plan, member, _MODES), figures))
    too_small.sort(key=lambda each: -each.figures["needed"] / each.figures["available"])
    return NumericsReport(optimizer, tuple(checked), (*too_small, *uneven))


def _uneven(plan: Plan, start: StepInputs) -> float:
    """Return the share of groups whose elements differ too much for 8 bits; 0 without state in 8 bits."""
    if not plan.rule.grouped_buffers(plan.statics):
        return 0.0
    sizes = start.grad.detach().abs().float()
    for name, moment in start.values.items():
        if any(b.name == name and b.int8 == "signed" for b in plan.rule.buffers):
            sizes = sizes.maximum(moment.abs())
    vector = flat(MemoryOrder(start.member.param).arranged(sizes))
    groups = torch.nn.functional.pad(vector, (0, -len(vector) % GROUP)).view(-1, GROUP)  # zeros, which do not count
    half = torch.where(groups > 0, groups, torch.nan).nanmedian(1).values  # of nonzero elements
    return (half * 10 < groups.amax(1)).double().mean().item()


def _half_unit(value: Tensor, plan: Plan, member: Member) -> Tensor:
    """Return half of the distance from each number to the next that can be stored; 0 if steps of any size add up."""
    mode, _ = plan.statics.get("weights") or (None, None)
    if mode in ROUNDED:
        return torch.zeros_like(value)
    stored = torch.finfo(torch.float32 if mode else member.param.dtype)
    power = torch.frexp(value.abs().clamp(min=torch.finfo(member.param.dtype).smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(value, stored.eps / 2), power)
