"""Detection of parameters that a step is too small to move, in the dtype in which they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_optim.groups.live import Live
from compiled_optim.lowering.choice import Totals, lower
from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.layout import MemoryOrder, as_real, flat
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.storage import HALVES, INT8, ROUNDED, code_name, scale_name
from compiled_optim.state import ParamState, decoded, weight
from compiled_optim.step.engine import Engine
from compiled_optim.step.rule_step import RuleStep

_CHOICES = ("weights", "state_dtype")  # of the storage of weights and state


@dataclass(frozen=True)
class StuckParameter:
    """A parameter in which a step moves less than half of the elements that the rule would move.

    Attributes:
        name: the parameter's name.
        share: the share that stays of the elements that the rule would move, from 0.5 to 1.
        lr: the learning rate of its group.
        weight: the median magnitude of those that stay; the next two are medians too.
        needed: the smallest step that moves them, half the distance to the next number that can be stored.
        available: the step that the optimizer takes.
        remedy: an option that would move them.
    """

    name: str
    share: float
    lr: float
    weight: float
    needed: float
    available: float
    remedy: str

    def __str__(self) -> str:
        return (
            f"'{self.name}': at lr {self.lr:.3g}, {self.share:.0%} of it does not move: a weight of {self.weight:.2g} needs "
            f"a step of {self.needed:.2g}, and gets {self.available:.2g}; {self.remedy}"
        )


@dataclass(frozen=True)
class NumericsReport:
    """The result of an optimizer's ``check_numerics``.

    Attributes:
        optimizer: the class name.
        checked: the names of the parameters that a step would move.
        stuck: those that it moves too little, the worst first.
        uneven: for parameters with 8-bit state, by name, the share of the groups of 64 elements that are uneven: half
            of the elements have gradients and moments below a tenth of the group's largest. 8 bits slow these elements.
    """

    optimizer: str
    checked: tuple[str, ...]
    stuck: tuple[StuckParameter, ...]
    uneven: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{self.optimizer}: the next step is too small for {len(self.stuck)} of {len(self.checked)} parameters"
        lines = [head, *(f"  {stuck}" for stuck in self.stuck)]
        for name, share in self.uneven.items():
            lines.append(
                f"  '{name}': in {share:.0%} of the groups of {GROUP}, half of the gradients and moments are less than a "
                "tenth of the largest, and slowed by 8 bits; choose state_dtype=torch.bfloat16, or name it in exclude="
            )
        return "\n".join(lines)


@torch.no_grad()
def check_numerics(engine: Engine) -> NumericsReport:
    """Take the engine's next step on copies in float64, one parameter at a time, and compare it with what is stored.

    A rule's sums over all parameters are then sums over one parameter.

    Raises:
        NotImplementedError: the step needs a closure.
        TypeError, ValueError: a step cannot take a gradient, as :meth:`Plan.read` says.
    """
    current, name = engine.current(), engine.kind.__name__
    engine.check_numbers()
    if not isinstance(current, RuleStep):
        raise NotImplementedError(f"{name} cannot check its numerics: its steps need a closure")
    Live.send(engine.changes)
    checked, stuck, uneven = [], [], {}
    for plan in [lowering.plan for lowering in current.lowerings]:
        grads = plan.gradients(list(map(gradient, plan.params)))
        for member, grad in zip(plan.members, grads, strict=True):
            if plan.is_meta or (grad is None and plan.rule.gradients == "sparse"):
                continue
            grad = torch.zeros_like(member.param) if grad is None else grad  # momentum alone moves the parameter
            if share := _uneven(plan, member, grad):
                uneven[member.name] = share
            before, after = (as_real(t) for t in _next(plan, member, grad))
            step = (after - before).abs()
            moved = (step > 0) & step.isfinite()
            if not moved.any():
                continue
            checked.append(member.name)
            half_unit = _half_unit(before, plan, member)
            stuck_elements = moved & (step < half_unit)
            share = (stuck_elements.sum() / moved.sum()).item()
            if share > 0.5:
                lr = float(member.groups[member.group]["lr"])
                weight, needed, available = (t[stuck_elements].median().item() for t in (before.abs(), half_unit, step))
                stuck.append(StuckParameter(member.name, share, lr, weight, needed, available, _remedy(plan, member)))
    stuck.sort(key=lambda each: -each.needed / each.available)
    return NumericsReport(name, tuple(checked), tuple(stuck), uneven)


def _uneven(plan: Plan, member: Member, grad: Tensor) -> float:
    """Return the share of groups whose elements differ too much for 8 bits; 0 without state in 8 bits."""
    if not plan.rule.grouped_buffers(plan.statics):
        return 0.0
    sizes = grad.detach().abs().float()
    for name, moment in _buffers(plan, member, plan.statics):
        if any(b.name == name and b.int8 == "signed" for b in plan.rule.buffers):
            sizes = sizes.maximum(moment.abs())
    vector = flat(MemoryOrder(member.param).arranged(sizes))
    groups = torch.nn.functional.pad(vector, (0, -len(vector) % GROUP)).view(-1, GROUP)  # zeros, which do not count
    half = torch.where(groups > 0, groups, torch.nan).nanmedian(1).values  # of nonzero elements
    return (half * 10 < groups.amax(1)).double().mean().item()


def _next(plan: Plan, member: Member, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parameter with all its bits before and after its next step, which is neither clipped nor rounded."""
    param, weights = member.param.detach(), plan.statics.get("weights")
    before = _wide(param if weights is None else weight(param, member.entries, *weights))
    copy = before.clone()
    statics = {name: choice for name, choice in plan.statics.items() if name not in _CHOICES}
    entries = {name: entry.clone() for name, entry in member.entries.items() if name not in plan.buffers}
    entries |= dict(_buffers(plan, member, statics))
    shadow = Member(copy, member.groups, member.group, member.index, ParamState(entries), tuple(entries), member.numbers)
    shadows = Plan(plan.rule, statics, [shadow], lambda _: grad)
    shadows.read([grad], state=False, keep_alive=True)  # an error where a step would raise one
    clipping = Clipping(plan.device)
    lowering = lower(shadows, "eager", clipping, CompilationLog(), False)
    lowering.compile()
    shadows.reread([grad])
    lowering.prepare([grad])
    Totals([lowering], clipping).launch() if plan.rule.has_totals(plan.statics) else lowering.launch()
    lowering.finish()
    return before, copy


def _buffers(plan: Plan, member: Member, statics: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of the rule's own buffers, and the buffers, decoded."""
    codes = {name for name, dtype in plan.statics.get("state_dtype", ()) if dtype == INT8}
    for name in plan.rule.present_buffers(statics):
        entry = member.entries[code_name(name) if name in codes else name]
        yield name, _wide(decoded(entry, member.entries[scale_name(name)]) if name in codes else entry)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def _half_unit(value: Tensor, plan: Plan, member: Member) -> Tensor:
    """Return half of the distance from each number to the next that can be stored; 0 if steps of any size add up."""
    mode, _ = plan.statics.get("weights") or (None, None)
    if mode in ROUNDED:
        return torch.zeros_like(value)
    stored = torch.finfo(torch.float32 if mode else member.param.dtype)
    power = torch.frexp(value.abs().clamp(min=torch.finfo(member.param.dtype).smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(value, stored.eps / 2), power)


def _remedy(plan: Plan, member: Member) -> str:
    if member.param.dtype not in HALVES or "weights" in plan.statics:
        return "use a larger lr: the weights already have all bits of float32"
    is_elementwise = plan.rule.granularity == "element" and plan.rule.gradients == "dense"
    return "use weights='split8', 'kahan' or 'stochastic'" if is_elementwise else "keep it in float32"
