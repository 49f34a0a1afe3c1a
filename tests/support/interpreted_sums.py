"""Sums of Triton's kernels: how far they are from float64 sums of the same float32 numbers.

In units of the last place of the float32 result; infinity where only one of both is finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.lowering.stacks import StackLowering
from compiled_optim.optimizer import engine_of

ELEMENTS = 5000  # of two blocks of sums, the last one of which is not full


def data(kind: str, dtype: torch.dtype) -> Tensor:
    """Badly scaled numbers."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ELEMENTS, generator=generator, dtype=torch.float64)
    if kind == "wide":
        x *= 10 ** (torch.rand(ELEMENTS, generator=generator, dtype=torch.float64) * 24 - 16)
    if kind == "huge":  # squares close to the largest float32, of which no two can be added
        x = x.sign() * (1.5e19 + 3e18 * torch.rand(ELEMENTS, generator=generator, dtype=torch.float64))
    if kind == "tiny":
        x *= 1e-18
    return x.to(dtype)


def ulps(found: Tensor, exact: Tensor) -> float:
    """The largest distance, in units of the last place of ``exact`` as a float32 number or what it is."""
    a, b = found.double().numpy(), exact.double().numpy()
    unit = np.spacing(np.abs(exact.float().numpy() if found.dtype != torch.float64 else b)).astype(np.float64)
    differs = np.where(a == b, 0.0, np.abs(a - b) / unit)
    return float(np.nan_to_num(differs, nan=np.inf).max())


def sum_of_squares(x: Tensor, dims: Any) -> Tensor:
    """Of float32 squares, or of float64 ones, in float64."""
    return (x * x).double().sum(dims)


def of_elements(x: Tensor, *, moved: bool) -> float:
    """The mean of squares that LAMB takes of weights."""
    memory = torch.empty(ELEMENTS + 1, dtype=x.dtype)
    param = nn.Parameter((memory[1:] if moved else memory[:-1]).copy_(x))
    param.grad = torch.ones_like(param)
    optimizer = co.LAMB([param], lr=0.0)
    optimizer.step()
    (lowering,) = engine_of(optimizer).step.lowerings
    row = 1 + len(lowering.plan.rule.coefficient_names(lowering.plan.statics))
    found = lowering.coefficients.table.coefficients[row]
    exact = sum_of_squares(x, 0)[None] / ELEMENTS
    return ulps(found if x.dtype == torch.float64 else found.float(), exact if x.dtype == torch.float64 else exact.float())


def of_matrix(x: Tensor, *, moved: bool) -> float:
    """The means of squares that Adafactor keeps of rows and columns; in its first step, these are its state."""
    grad = x[: 64 * 64].view(64, 64)  # so that a mean is a sum but for a power of 2
    memory = torch.empty(grad.numel() + 1, dtype=x.dtype)
    param = nn.Parameter(torch.ones(64, 64, dtype=x.dtype))
    param.grad = (memory[1:] if moved else memory[:-1]).copy_(grad.flatten()).view(64, 64)
    optimizer = co.Adafactor([param])
    optimizer.step()
    (lowering,) = engine_of(optimizer).step.lowerings
    assert isinstance(lowering, StackLowering)
    errors = []
    for name, dim in (("row_var", -1), ("col_var", -2)):
        found, exact = optimizer.state[param][name].flatten(), sum_of_squares(grad, dim).to(x.dtype)
        errors.append(ulps(found * grad.shape[dim], exact))
    return max(errors)


def interpreted() -> dict[str, dict[str, float]]:
    """Return the distances of the sums over elements and of those of a matrix, by case."""
    found = {}
    for kind in ("plain", "wide", "huge", "tiny"):
        for dtype in (torch.float32, torch.float64):
            for moved in (False, True):
                name = f"{kind} {str(dtype).removeprefix('torch.')}{' moved' * moved}"
                x = data(kind, dtype)
                found[name] = {"elements": of_elements(x, moved=moved), "matrix": of_matrix(x, moved=moved)}
    return found
