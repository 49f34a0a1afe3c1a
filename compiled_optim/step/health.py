"""Which parameters do not train as they should: seen in a few elements of each, in every step, without a wait.

A step copies up to 128 elements from the middle of each parameter before and after its update. What it finds goes into a
table on the device, which holds the last 64 steps. Only a report reads it, and looks at whole tensors then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_optim.memory.layout import as_real, flat, is_dense, plain_copy
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.storage import PARTS

ELEMENTS, STEPS = 128, 64
_LEAST = 16  # steps that say how large a parameter's updates usually are, and elements: those of few often pass through 0
_DEVIATIONS, _FACTOR = 8.0, 4.0  # how far from the usual an update is unusual: in deviations of its logarithm, and times
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Finding:
    """What is wrong with a parameter.

    Attributes:
        kind: one of these. ``"no gradient"``: it never had one, and is not frozen. ``"zero gradient"``: its gradients were
            only zeros. ``"not moved"``: none of its bits has changed since it is watched. ``"too small"``: more than half of
            its elements with gradients stayed, since their updates are below half a unit in the last place.
            ``"zero moments"``: averages are at 0, or were after a load, though it has taken steps. ``"unusual"``: the ratio
            of update and weight left the range that it had, though ``lr`` does not say so; of 16 elements or more.
        name: of the parameter.
        message: a sentence with numbers.
    """

    kind: str
    name: str
    message: str

    def __str__(self) -> str:
        return f"'{self.name}': {self.message}"


@dataclass(frozen=True)
class HealthReport:
    """The result of an optimizer's ``health``.

    Attributes:
        optimizer: the class name.
        watched: whether steps were watched. Without that, only ``"no gradient"`` and ``"zero moments"`` are found.
        checked: the names of the parameters.
        findings: what is wrong, in the order of the parameters.
    """

    optimizer: str
    watched: bool
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        wrong = {finding.name for finding in self.findings}
        how = "" if self.watched else "; call watch_health() to watch further steps"
        head = f"{self.optimizer}: {len(wrong)} of {len(self.checked)} parameters may not train{how}"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


class Watch:
    """A few elements of each parameter of ``plans``, and what the last steps did to them. ``before`` was there before."""

    def __init__(self, plans: Sequence[Plan], before: Watch | None = None) -> None:
        devices = dict.fromkeys(plan.device for plan in plans if not plan.is_meta)
        self._here = [_OnDevice([p for p in plans if p.device == device and not p.is_meta], device) for device in devices]
        known = {} if before is None else {key: here for here in before._here for key in here.rows}
        for here in self._here:
            for key in here.rows.keys() & known.keys():
                here.take_over(key, known[key])

    def see_gradients(self, plan: Plan, grads: Sequence[Tensor | None]) -> None:
        """Look at the gradients that the next step takes, one for each member of ``plan``."""
        for here in self._here:
            if plan in here.plans:
                here.see_gradients(plan, grads)

    def begin(self) -> None:
        """Look at the parameters, before a step updates them."""
        for here in self._here:
            torch._foreach_copy_(here.before_rows, here.samples)

    def end(self, clipping: Clipping) -> None:
        """Note what the step did. Nothing waits for the device."""
        for here in self._here:
            here.note(None if clipping.idle else clipping.outcome(here.device)[1])

    def note_load(self) -> None:
        """Note which averages are at 0 now, after a load."""
        for here in self._here:
            here.zero_after_load = {m.owner: names for m, plan in here.members if (names := zero_moments(m, plan))}

    def findings(self, least: int) -> Iterator[Finding]:
        """What is wrong in at least that many steps, besides what state alone tells. Waits for the device."""
        for here in self._here:
            yield from here.findings(least)


class _OnDevice:
    """What a :class:`Watch` keeps on one device.

    ``history`` has the shape (steps, quantities, parameters); the quantities of a step are the norms of the sampled update
    and weight, the largest sampled gradient (NaN for none), how many elements stayed though they had one, and how many had;
    and ``lr``, 1 where a rule has none or another device has it.
    """

    def __init__(self, plans: Sequence[Plan], device: torch.device) -> None:
        self.plans, self.device = plans, device
        self.members = [(member, plan) for plan in plans for member in plan.members]
        self.rows = {id(member.owner): row for row, (member, _) in enumerate(self.members)}
        self.samples = [_sample(_weight(member).detach()) for member, _ in self.members]
        count = len(self.members)
        dtype = torch.float64 if any(sample.dtype == torch.float64 for sample in self.samples) else torch.float32
        self._before, self._after, self._grads = torch.zeros(3, count, ELEMENTS, dtype=dtype, device=device).unbind()
        sizes = [sample.numel() for sample in self.samples]
        self.before_rows, self._after_rows, self._grad_rows = (
            [row[:size] for row, size in zip(block, sizes, strict=True)]
            for block in (self._before, self._after, self._grads)
        )
        self.history = torch.full((STEPS, 6, count), math.nan, dtype=dtype, device=device)
        groups = {member.group: member.groups[member.group] for member, _ in self.members}
        self._rated = [g for g in groups.values() if "lr" in g and g.read_only("lr")[0].device == device]
        places = {id(group): place for place, group in enumerate(self._rated)}
        found = [places.get(id(groups[member.group]), len(places)) for member, _ in self.members]
        places_of = torch.tensor(found, dtype=torch.int64, device="cpu")
        self._rate_of = (places_of.pin_memory() if device.type == "cuda" else places_of).to(device, non_blocking=True)
        self._one = torch.ones(1, dtype=dtype, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_sums = [_bit_sum(member) for member, _ in self.members]
        self.zero_after_load: dict[Tensor, list[str]] = {}
        self._absent = torch.full((1,), math.nan, device=device)

    def take_over(self, key: int, other: _OnDevice) -> None:
        row, there = self.rows[key], other.rows[key]
        self.history[:, :, row] = other.history[:, :, there].to(self.history.device)
        self.place.copy_(other.place)
        self.first_sums[row] = other.first_sums[there].to(self.device)
        owner = self.members[row][0].owner
        if owner in other.zero_after_load:
            self.zero_after_load[owner] = other.zero_after_load[owner]

    def see_gradients(self, plan: Plan, grads: Sequence[Tensor | None]) -> None:
        targets, sources = [], []
        for member, grad in zip(plan.members, grads, strict=True):
            row = self._grad_rows[self.rows[id(member.owner)]]
            is_there = grad is not None and not grad.is_sparse and row.numel() > 0
            targets.append(row if is_there else row[:1])
            if not is_there or grad is None:
                sources.append(self._absent[: row.numel()])
            elif grad.is_contiguous() == (weight := _weight(member)).is_contiguous():
                sources.append(_sample(grad))
            else:  # in another order of memory
                sources.append(_sample(grad.new_empty_strided(weight.shape, weight.stride()).copy_(grad)))
        torch._foreach_copy_(targets, sources)

    def note(self, skips: Tensor | None) -> None:
        """Note a step, which a number other than 0 in ``skips`` left out."""
        torch._foreach_copy_(self._after_rows, self.samples)
        update, sizes = self._after - self._before, self._grads.abs()
        has_gradient, largest = sizes > 0, sizes.amax(1)
        if skips is not None:
            largest = torch.where(skips == 0, largest, math.nan)
        norms = [torch.linalg.vector_norm(values, dim=1) for values in (update, self._before)]
        counts = [marks.sum(1, dtype=update.dtype) for marks in (has_gradient & (update == 0), has_gradient)]
        numbers = [group.read_only("lr")[0].detach() for group in self._rated]
        rates = torch.cat([torch.stack(numbers).to(update.dtype), self._one]) if numbers else self._one
        rates = rates.index_select(0, self._rate_of)
        self.history.index_copy_(0, self.place, torch.stack([*norms, largest, *counts, rates])[None])
        self.place.add_(1).remainder_(STEPS)

    def findings(self, least: int) -> Iterator[Finding]:
        history = self.history.roll(-int(self.place.item()), 0).double().cpu()
        updates, weights, largest, stayed, present, rates = history[~history[:, 0].isnan().all(1)].unbind(1)
        for row, (member, plan) in enumerate(self.members):
            if not member.param.numel():
                continue
            had = ~largest[:, row].isnan()
            moves = had & (rates[:, row] != 0)
            if moves.any():  # else lr is 0 by choice, not at the beginning or end of a schedule
                had = moves
            zeros = int((largest[:, row][had] == 0).flip(0).long().cumprod(0).sum())
            if zeros >= least and _is_zero(member):
                yield Finding("zero gradient", member.name, f"its last {zeros} gradients were only zeros")
            enough = STEPS if _mode(plan) == "stochastic" else least  # by chance, few small steps may move nothing
            if had.sum() >= enough and torch.equal(_bit_sum(member), self.first_sums[row]):
                yield Finding("not moved", member.name, f"no bit of it moved in the last {len(updates)} steps or before")
            elif _rounds(member, plan) and moves.sum() >= least:
                share = float(stayed[moves, row].sum() / present[moves, row].sum())  # NaN without elements
                if share > 0.5:
                    said = f"{share:.0%} of its elements with gradients stayed: updates are below half a unit of the weight"
                    yield Finding("too small", member.name, f"{said} in {str(member.param.dtype).removeprefix('torch.')}")
            if member.owner in self.zero_after_load:
                names = " and ".join(self.zero_after_load[member.owner])
                yield Finding("zero moments", member.name, f"the last load left {names} at 0, though it has taken steps")
            ratios = (updates[:, row] / weights[:, row]).log()
            if self.samples[row].numel() >= _LEAST and (unusual := _unusual(ratios, rates[:, row].log())):
                yield Finding("unusual", member.name, unusual)


def report(optimizer: str, plans: Sequence[Plan], watch: Watch | None, least: int, steps: int) -> HealthReport:
    """What is wrong in the members of ``plans``, and was in ``least`` steps of those that ``watch`` saw.

    The optimizer has taken ``steps`` steps in this process. The state may know of more.
    """
    found = [] if watch is None else list(watch.findings(least))
    known = {(finding.kind, finding.name) for finding in found}
    # Entries one by one: Plan.scalars may move them, and kernels and graphs would go on to write where they were.
    counts = [torch.stack([member.entries["step"] for member in plan.members]).tolist() for plan in plans]
    is_old = max([steps, *(max(each) for each in counts)]) >= least
    for plan, each in zip(plans, counts, strict=True):
        for member, count in zip(plan.members, each, strict=True):
            if not count and is_old and member.owner.requires_grad:
                found.append(Finding("no gradient", member.name, "it never had a gradient"))
            elif ("zero moments", member.name) not in known and (names := zero_moments(member, plan)):
                said = f"{' and '.join(names)} are at 0, though it has taken {count:.0f} steps"
                found.append(Finding("zero moments", member.name, said))
    names = [member.name for plan in plans for member in plan.members]
    places = {name: place for place, name in enumerate(names)}
    found.sort(key=lambda finding: places[finding.name])
    return HealthReport(optimizer, watch is not None, tuple(names), tuple(found))


def _unusual(logs: Tensor, rates: Tensor) -> str:
    """What is unusual about the last of some logarithms of ratios of update and weight; empty if nothing is.

    ``rates`` are the logarithms of ``lr``, with which schedules let the ratios grow and fall.
    """
    is_finite = logs.isfinite() & rates.isfinite()
    logs, rates = logs[is_finite], rates[is_finite]
    if len(logs) <= _LEAST:
        return ""
    usual, last = logs[:-1] - rates[:-1] + rates[-1], logs[-1]
    middle = usual.median()
    width = float((usual - middle).abs().median()) * 1.4826  # a normal deviation
    if float((last - middle).abs()) <= max(_DEVIATIONS * width, math.log(_FACTOR)):
        return ""
    return f"its last update was {last.exp():.2g} of the weight, where with this lr {middle.exp():.2g} was usual before"


def zero_moments(member: Member, plan: Plan) -> list[str]:
    """The averages of a parameter that are at 0 though it has taken steps. Waits for the device."""
    if not member.entries["step"].item():
        return []
    averages = [b.name for b in plan.rule.buffers if b.init == 0 and not b.is_copy]
    starting = [name for name in averages if name in plan.buffers and name not in PARTS]
    held = [name for name in starting if member.entries[name].numel() and not member.entries[name].count_nonzero()]
    return [] if held and _is_zero(member) else held


def _weight(member: Member) -> Tensor:
    """What holds all bits of a parameter in one tensor, if something does."""
    return member.entries.get("master_param", member.param)


def _mode(plan: Plan) -> str | None:
    """How the parameters of ``plan`` are stored. In modes of further bits and of random rounding, small updates add up."""
    mode: str | None = (plan.statics.get("weights") or [None])[0]
    return mode


def _rounds(member: Member, plan: Plan) -> bool:
    """Whether rounding may lose small updates, and :meth:`Watch.end` sees all: after it, some get back what has gaps."""
    return _mode(plan) in (None, "master") and member.param.is_floating_point() and is_dense(member.param)


def _is_zero(member: Member) -> bool:
    """Whether a parameter has a dense gradient of zeros now."""
    grad = member.owner.grad
    return grad is not None and not grad.is_sparse and not bool(grad.count_nonzero())


def _sample(tensor: Tensor) -> Tensor:
    """A view of up to :data:`ELEMENTS` numbers from the middle of ``tensor``; equal elements for equal strides."""
    real = as_real(tensor)
    if real.is_contiguous():
        count = real.numel()
        start = max(0, count // 2 - ELEMENTS // 2)
        return real.as_strided((min(count - start, ELEMENTS),), (1,), real.storage_offset() + start)
    while real.dim() > 1:
        real = real.select(0, real.shape[0] // 2)
    return real[:ELEMENTS]


def _bit_sum(member: Member) -> Tensor:
    """Sums of the bits of a parameter and of what holds further bits, as integers: of every eighth element each.

    One sum would stay where two elements move by the same distance in opposite directions, as biases of two classes do.
    """
    tensors = [member.param, *(member.entries[name] for name in PARTS if name in member.entries)]
    dense = [flat(t if is_dense(t) else plain_copy(t.detach())) for t in tensors if t.numel()]
    bits = [t.view(_INTEGERS[t.element_size()]) for t in dense]
    sums = [t[start::8].sum(dtype=torch.int64) for t in bits for start in range(8)]
    return torch.stack(sums) if sums else torch.zeros(1, dtype=torch.int64)
