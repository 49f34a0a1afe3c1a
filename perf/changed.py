"""Times of steps that track changed weights, and the bytes of changes: :func:`measure_changed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co
from perf.budget import Deadline
from perf.competitors import OURS, Competitor
from perf.interrupts import let_in
from perf.measure import make_gradients, make_params, step_ways
from perf.results import Row
from perf.turns import Shares, measured
from perf.workloads import shapes

KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "kahan": (torch.bfloat16, {"weights": "kahan"}),
}
"""The dtype of parameters and the options of AdamW, by name. All are served in bfloat16."""

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
STEPS = 20


def _competitor(kind: str, way: str, rate: float = 1e-3) -> Competitor:
    dtype, options = KINDS[kind]

    def make(params: Sequence[Tensor]) -> co.AdamW:
        optimizer = co.AdamW(params, lr=rate, **options)
        if way == "tracked":
            optimizer.track_changes(torch.bfloat16)
        return optimizer

    return Competitor(f"{OURS}[{kind}, {way}]", make, dtype)


def measure_changed(
    workload: str, device: torch.device, *, rounds: int, deadline: Deadline | None = None
) -> Iterator[list[Row]]:
    """Measure the share of bytes that change in a step, by learning rate, and steps with tracking beside those without.

    A second plain step is timed in turn with the first, so that its ratio shows the noise.
    """
    for rate in RATES:
        with let_in():
            share = _share(workload, rate, device)
        name = f"{OURS}[float32, lr {rate:g}]"
        yield [Row("changed", workload, "adamw", name, "share of bytes handed over", "ratio", *(share,) * 3, None, STEPS)]
    for kind in KINDS:
        entered = [_competitor(kind, way) for way in ("plain", "tracked", "plain again")]
        table = Shares("changed", workload, "step", reference=f"{OURS}[{kind}, plain]", paired="share of the plain step")
        ways = step_ways(shapes(workload), entered, device, "same")
        yield from measured(table, ways, device, rounds=rounds, warmup=3, deadline=deadline)


def _share(workload: str, rate: float, device: torch.device) -> float:
    """Return the bytes of changes of float32 weights, as a share of all weights in bfloat16, on average over steps."""
    params = make_params(shapes(workload), device)
    optimizer = _competitor("float32", "tracked", rate).make(params)
    sent = 0
    for step in range(STEPS):
        for param, grad in zip(params, make_gradients(shapes(workload), device, step), strict=True):
            param.grad = grad
        optimizer.step()
        sent += sum(t.nbytes for change in optimizer.changes() for t in (change.indices, change.values) if t is not None)
    return sent / (STEPS * 2 * sum(p.numel() for p in params))
