"""Time and memory of low precision, compared with torch's fused AdamW on float32: :func:`measure_low_memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import compiled_optim as co
from perf.budget import Deadline
from perf.competitors import FUSED, OURS, Competitor
from perf.convergence import FLOAT32, PRECISIONS
from perf.interrupts import let_in
from perf.measure import make_gradients, make_params, step_ways
from perf.results import Row
from perf.turns import Shares, measured
from perf.workloads import elements, shapes

WAYS: dict[str, dict[str, Any]] = {
    **PRECISIONS,
    "bfloat16": {"state_dtype": torch.bfloat16},
    "split8, bfloat16": {"weights": "split8", "state_dtype": torch.bfloat16},
    "split16, bfloat16": {"weights": "split16", "state_dtype": torch.bfloat16},
    "kahan, int8": {"weights": "kahan", "state_dtype": "int8"},
}
"""The options for bfloat16 parameters that are timed, by name, and those for float32."""


def _maker(options: dict[str, Any]) -> Callable[[Sequence[Tensor]], Optimizer]:
    return lambda params: co.AdamW(params, lr=1e-3, **options)


def competitors() -> list[Competitor]:
    """Return torch's fused AdamW, and this package's in each precision."""
    dtypes = {name: torch.float32 if name == FLOAT32 else torch.bfloat16 for name in WAYS}
    ours = [Competitor(f"{OURS}[{name}]", _maker(options), dtypes[name]) for name, options in WAYS.items()]
    return [Competitor(FUSED, lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)), *ours]


def measure_low_memory(
    workload: str, device: torch.device, *, rounds: int, deadline: Deadline | None = None
) -> Iterator[list[Row]]:
    """Measure bytes per parameter with gradient, and step times in turn, each also as a share of torch's in its round."""
    entered = competitors()
    for c in entered:
        with let_in():
            taken = _bytes(c, workload, device) / elements(workload)
        yield [Row("low_memory", workload, "adamw", c.name, "memory", "bytes/parameter", *(taken,) * 3, None, 1)]
    paired = "share of torch's step on float32"
    table = Shares("low_memory", workload, "step", reference=FUSED, paired=paired)
    ways = step_ways(shapes(workload), entered, device, "fresh")
    yield from measured(table, ways, device, rounds=rounds, warmup=3, deadline=deadline)


def _bytes(competitor: Competitor, workload: str, device: torch.device) -> int:
    """Return the bytes of parameters, gradients, state and tables after a step."""
    params = make_params(shapes(workload), device, competitor.dtype)
    for param, grad in zip(params, make_gradients(shapes(workload), device, 1, competitor.dtype), strict=True):
        param.grad = grad
    optimizer = competitor.make(params)
    optimizer.step()
    if isinstance(optimizer, co.CompiledOptimizer):
        return co.memory_report(optimizer).total
    tensors = [t for p in params for t in (p, p.grad, *optimizer.state[p].values()) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)
