"""The sum of the squares of all gradients, over every plan, device and process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.lowering.interface import Lowering
from compiled_optim.memory.layout import scalar_dtype
from compiled_optim.memory.sharding import add_over_shards


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
