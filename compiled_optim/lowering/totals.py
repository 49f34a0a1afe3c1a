"""What is summed over everything: every plan, device and process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.interface import Lowering
from compiled_optim.memory.layout import add_over_shards, scalar_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.rule.symbols import PLAIN
from compiled_optim.state import scalar_names


class SquareSums:
    """Partial sums in a fixed order, so that the norm of equal gradients is equal bit for bit.

    Each device has one float64 vector: the partial sums of its plans, and one number for every other device.
    """

    def __init__(self, lowerings: Sequence[Lowering]) -> None:
        self._lowerings = list(lowerings)
        devices = list(dict.fromkeys(lowering.plan.device for lowering in lowerings))
        counts = {d: [x.square_sum_count for x in lowerings if x.plan.device == d] for d in devices}
        self._sums = {d: torch.zeros(sum(counts[d]) + len(devices) - 1, dtype=scalar_dtype(d), device=d) for d in devices}
        self._parts: list[Tensor] = []
        pieces = {d: iter(torch.split(self._sums[d][: sum(counts[d])], counts[d])) for d in devices}
        for lowering in lowerings:
            part = next(pieces[lowering.plan.device])
            lowering.connect(part, self._sums[lowering.plan.device])
            self._parts.append(part)
        self._local = {d: self._sums[d][: sum(counts[d])] for d in devices}
        self._foreign = {d: self._sums[d][sum(counts[d]) :] for d in devices}

    def measure(self) -> None:
        """Measure the prepared gradients of all plans."""
        for lowering, part in zip(self._lowerings, self._parts, strict=True):
            if lowering.plan.is_meta:  # what has no numbers adds none
                continue
            lowering.measure()
            if lowering.plan.sharded:
                total = part.sum()
                add_over_shards(total, lowering.plan.params[0])
                part.zero_()
                part[0] = total  # of all processes, in one number
        if len(self._sums) > 1:
            sums = {device: local.sum() for device, local in self._local.items()}
            for device, foreign in self._foreign.items():
                others = (s for d, s in sums.items() if d != device)
                for entry, other in zip(foreign.unbind(), others, strict=True):
                    entry.copy_(other, non_blocking=True)


class Totals:
    """Launches lowerings of one rule stage by stage: what each sums over its plan is added up for all of them.

    The state of each parameter has the scalars that are shared, so that they are saved, loaded and moved like others. A
    parameter that joins takes over those of the parameter that took the most steps.

    Raises:
        ValueError: choices that decide which totals there are differ between groups.
    """

    def __init__(self, lowerings: Sequence[Lowering], clipping: Clipping) -> None:
        self._lowerings = list(lowerings)
        self._clipping = clipping
        self._plans = [lowering.plan for lowering in lowerings]
        self._first = self._plans[0]
        self._rule = self._first.rule
        names = [[w.totals for w in self._rule.written(plan.statics, PLAIN) if w.totals] for plan in self._plans]
        if any(other != names[0] for other in names):
            choices = ", ".join(s.name for s in self._rule.statics)
            raise ValueError(f"{self._rule.name} sums over all parameters, so its groups must agree in {choices}")
        self._names = names[0]
        self._adapts = self._rule.adapt is not None
        if self._rule.shared_scalars:
            self._share()

    def launch(self) -> None:
        """Update every parameter that has a prepared gradient."""
        with torch.no_grad():
            launches = [lowering.launch_in_stages() for lowering in self._lowerings]
            sums = [next(launch) for launch in launches]
            for stage, names in enumerate(self._names):
                total = torch.stack([s.to(self._first.device, non_blocking=True) for s in sums]).sum(0)
                given = self._adapted(names, total) if stage == 0 and self._adapts else total
                own = [given.to(plan.device, non_blocking=True) for plan in self._plans]
                further = [_sent(launch, numbers) for launch, numbers in zip(launches, own, strict=True)]
                sums = [s for s in further if s is not None]

    def _adapted(self, names: Sequence[str], total: Tensor) -> Tensor:
        """``total``, and behind it what ``adapt`` makes of it for ``update``; the shared scalars take their new values."""
        plan, scalars = self._first, self._first.scalar_blocks[0][:, 0].unbind()
        shared = {n: s for n, s in zip(scalar_names(self._rule), scalars, strict=True) if n in self._rule.shared_scalars}
        values: dict[str, Any] = {**plan.statics, **shared, **dict(zip(names, total.unbind(), strict=True))}
        for h in plan.hypers:
            elements = tuple(t.to(plan.device, total.dtype) for t in plan.groups[0].read_only(h.name))
            values[h.name] = elements if h.is_tuple else elements[0]
        assert self._rule.adapt is not None
        adapted = self._rule.adapt(values).items()
        found = {name: torch.as_tensor(value, dtype=total.dtype, device=plan.device) for name, value in adapted}
        further = [value for name, value in found.items() if name not in shared]
        goes_on = None if self._clipping.idle else self._clipping.outcome(plan.device)[1] == 0
        for name, old in shared.items():
            if name in found:
                self._write(name, found[name] if goes_on is None else torch.where(goes_on, found[name], old))
        return torch.cat([total, torch.stack(further)]) if further else total

    def _share(self) -> None:
        """Let all parameters have the scalars of the one that took the most steps."""
        counts = [block[0].max() for plan in self._plans for block in plan.scalar_blocks]
        blocks = [block for plan in self._plans for block in plan.scalar_blocks]
        device = self._first.device
        leading = torch.stack([count.to(device) for count in counts]).argmax()
        for row, name in enumerate(scalar_names(self._rule)):
            if name in self._rule.shared_scalars:
                last = [block[row].index_select(0, block[0].argmax().view(1))[0] for block in blocks]
                values = torch.stack([value.to(device) for value in last])
                self._write(name, values.index_select(0, leading.view(1))[0])

    def _write(self, name: str, value: Tensor) -> None:
        row = scalar_names(self._rule).index(name)
        for plan in self._plans:
            for block in plan.scalar_blocks:
                block[row].copy_(value, non_blocking=True)


def _sent(launch: Generator[Tensor, Tensor, None], numbers: Tensor) -> Tensor | None:
    """The sums of the next stage of ``launch``; None where it has ended."""
    try:
        return launch.send(numbers)
    except StopIteration:
        return None
