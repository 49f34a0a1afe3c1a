"""Steps with gradients from the smallest numbers to the largest ones: norms, decisions and steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

import compiled_optim as co

SIZES = {
    torch.float32: [1.4e-45, 1e-41, 1e-38, 1e-30, 1e-22, 1.0, 1e12, 3e17, 1e18, 1e20, 1e25, 3e38],
    torch.bfloat16: [3e-38, 1e-30, 1.0, 1e12, 1e18, 1e20, 3e38],  # Triton's interpreter takes its denormal numbers for 0
    torch.float16: [6e-8, 1e-3, 6e4],
    torch.float64: [1e-100, 1e25, 1e100, math.inf, math.nan],
}
NUMELS = (5000, 5003, 3)  # several at a time, one by one, and fewer than that
SCALES = (1.0, 2.0**16)


def gradients(dtype: torch.dtype, size: float) -> Iterator[list[torch.Tensor]]:
    """Many numbers of a size, and a single one among ones."""
    torch.manual_seed(0)
    yield [(size * (0.5 + torch.rand(n, dtype=torch.float64) / 2)).to(dtype) for n in NUMELS]
    single = [torch.ones(n, dtype=dtype) for n in NUMELS]
    single[1][4999] = -size
    yield single


def exact_norm(grads: list[torch.Tensor], scale: float) -> float:
    """Of gradients that are divided by ``scale``."""
    return math.sqrt(math.fsum((x / scale) ** 2 for grad in grads for x in grad.tolist()))


def outcomes(dtype: torch.dtype, lowering: str, *, compiled: bool = False) -> list[tuple[float, bool, list[float]]]:
    """Of each case with and without clipping to 1: the norm, whether the step was skipped, and where SGD went from 0."""
    params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in NUMELS]
    found = []
    for clip in (1.0, None):
        optimizer = co.SGD(params, lr=1.0, max_grad_norm=clip, skip_nonfinite=True, lowering=lowering)
        optimizer.grad_scale = torch.ones((), dtype=torch.float64)
        step = torch.compile(optimizer.step, fullgraph=True) if compiled else optimizer.step
        for size in SIZES[dtype]:
            for grads in gradients(dtype, size):
                for scale in SCALES:
                    optimizer.grad_scale.fill_(scale)
                    skipped = optimizer.skipped_steps.clone()
                    for param, grad in zip(params, grads, strict=True):
                        param.data.zero_()
                        param.grad = grad
                    step()
                    ends = [params[0][0].item(), params[1][4999].item(), params[2][2].item()]
                    found.append((optimizer.grad_norm.item(), bool(optimizer.skipped_steps > skipped), ends))
    return found


def interpreted() -> dict[str, Any]:
    """Return the outcomes of Triton's kernels, by dtype."""
    return {str(dtype): outcomes(dtype, "multi_tensor") for dtype in SIZES}
