"""The kernel of symmetric products beside float64 ones, in units of bfloat16's rounding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_optim.lowering.kernels import symmetric, triton

TILING = symmetric.Tiling(rows=1, block=32, depth=16, stages=1, warps=1)
ROWS = [8, 16, 32, 40, 72]
COLUMNS = [8, 16, 24]
BATCHES = [(3,), (2, 3)]


def matrices(shape: tuple[int, ...], columns: int, *, transposed: bool) -> Tensor:
    """Random bfloat16 matrices, which may lie in memory as the transposed ones."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(
        (*shape[:-1], columns, shape[-1]) if transposed else (*shape, columns), generator=generator, device="cpu"
    ).bfloat16()
    return x.mT if transposed else x


def product(x: Tensor, numbers: tuple[Any, ...], tiling: symmetric.Tiling) -> Tensor:
    """What the kernel makes of a stack, whose tensors have ``numbers`` of their own where these are tensors."""
    transposed = not x.is_contiguous()
    lying, out = (x.mT if transposed else x), x.new_full((*x.shape[:-1], x.shape[-2]), torch.nan)
    each = isinstance(numbers[0], Tensor) if numbers else False
    given = [n if each else torch.tensor([n], dtype=torch.float64, device=x.device) for n in numbers or [0.0] * 3]
    index = torch.arange(len(x), device=x.device)
    if each:  # tensors have columns in a table
        given, index = [n.double().flip(0).contiguous() for n in given], index.flip(0).contiguous()
    kind = ("each" if each else "same") if numbers else ""
    module = triton.load(triton.WORDS + symmetric.TEXT)
    symmetric.multiplier(module, tiling, lying.shape, x.device, transposed=transposed, numbers=kind)(
        lying, out, given, index
    )
    return out


def wrong(x: Tensor, numbers: tuple[Any, ...], tiling: symmetric.Tiling = TILING) -> list[str]:
    """What is wrong with the product of ``x`` by itself, or the polynomial of ``x``."""
    found = product(x, numbers, tiling)
    wide, exact = x.double(), x.double() @ x.double().mT
    scale = wide.abs() @ wide.abs().mT
    if numbers:
        a, b, c = (n.double().view(-1, *[1] * (x.dim() - 1)) if isinstance(n, Tensor) else n for n in numbers)
        exact = a * torch.eye(x.shape[-1], device=x.device) + b * wide + c * exact
        scale = abs(a) * torch.eye(x.shape[-1], device=x.device) + abs(b) * wide.abs() + abs(c) * scale
    rounding = exact.abs() / 256 + scale * 2.0**-22 * (1 + x.shape[-1]) + 1e-30
    error = ((found.double() - exact).abs() / rounding).max().item()
    said = [] if error <= 1 else [f"an error of {error} roundings"]
    if found.shape != exact.shape or found.dtype != torch.bfloat16 or not found.is_contiguous():
        said.append("another shape or dtype")
    return said if torch.equal(found, found.mT) else [*said, "it is not symmetric"]


def interpreted() -> dict[str, list[str]]:
    """Return what is wrong, by case."""
    np.matmul = None  # what it makes depends on the processor
    found = {}
    for rows, columns, batch, transposed in itertools.product(ROWS, COLUMNS, BATCHES, (False, True)):
        found[f"gram {rows} {columns} {batch} {transposed}"] = wrong(
            matrices((*batch, rows), columns, transposed=transposed), ()
        )
    for rows, batch in itertools.product(ROWS, BATCHES):
        factor = matrices((*batch, rows), 8, transposed=False)
        x = factor @ factor.mT / 8
        each = torch.linspace(0.5, 2.0, 3 * batch[0]).view(3, batch[0]).unbind()
        for name, numbers in {"same": (3.4445, -4.775, 2.0315), "each": each}.items():
            found[f"quadratic {name} {rows} {batch}"] = wrong(x, numbers)
    return found
