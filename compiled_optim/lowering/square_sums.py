"""The sum of the squares of all gradients, over every plan, device and process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_optim.hyperparameters import scalar_dtype
from compiled_optim.lowering.interface import Lowering
from compiled_optim.lowering.layout import as_real, compute_dtype
from compiled_optim.sharding import sum_over_shards


class SquareSums:
    """Partial sums in a fixed order, so that the norm of equal gradients is equal bit for bit.

    Each device has one float64 vector: the partial sums of its plans, and one number for every other device.
    """

    def __init__(self, units: Sequence[Lowering]) -> None:
        self._units = list(units)
        devices = list(dict.fromkeys(unit.plan.device for unit in units))
        counts = {d: [u.square_sum_count for u in units if u.plan.device == d] for d in devices}
        self._whole = {d: torch.zeros(sum(counts[d]) + len(devices) - 1, dtype=scalar_dtype(d), device=d) for d in devices}
        self._own: list[Tensor] = []
        pieces = {d: iter(torch.split(self._whole[d][: sum(counts[d])], counts[d])) for d in devices}
        for unit in units:
            own = next(pieces[unit.plan.device])
            unit.connect(own, self._whole[unit.plan.device])
            self._own.append(own)
        self._local = {d: self._whole[d][: sum(counts[d])] for d in devices}
        self._foreign = {d: self._whole[d][sum(counts[d]) :] for d in devices}

    def measure(self) -> None:
        """Measure the prepared gradients of all units."""
        for unit, own in zip(self._units, self._own, strict=True):
            unit.measure()
            if unit.plan.sharded:
                sum_over_shards(own, unit.plan.params[0])
        if len(self._whole) > 1:
            sums = {device: local.sum() for device, local in self._local.items()}
            for device, foreign in self._foreign.items():
                others = (s for d, s in sums.items() if d != device)
                for entry, other in zip(foreign.unbind(), others, strict=True):
                    entry.copy_(other, non_blocking=True)


def square_sum(grads: Sequence[Tensor | None]) -> Tensor | float:
    """The sum of the squares of ``grads`` in torch operations; 0 if there are none."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            alike.setdefault(compute_dtype(grad.dtype), []).append(as_real(grad))
    norms = [torch.stack(torch._foreach_norm(reals, 2, dtype=dtype)) for dtype, reals in alike.items()]
    return sum((n.to(scalar_dtype(n.device)).square().sum() for n in norms), 0.0)
