"""A process that constructs optimizers and steps: how long that takes, and whether it imports a compiler."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

import compiled_optim as co

OPTIMIZERS: dict[str, tuple[type[co.CompiledOptimizer], dict[str, Any], list[tuple[int, ...]]]] = {
    "Adafactor": (co.Adafactor, {"lr": 0.3, "weight_decay": 0.2}, [(5, 3), (4, 2, 3), (7,)]),
    "Muon": (co.Muon, {"lr": 0.3}, [(5, 3), (3, 5)]),
    "AdamW": (co.AdamW, {}, [(5, 3), (7,)]),
    "SparseAdam": (co.SparseAdam, {"lr": 0.3}, [(5, 3)]),
}


def _gradient(param: Tensor, kind: type[co.CompiledOptimizer]) -> Tensor:
    grad = torch.linspace(-1, 2, param.numel()).view_as(param)
    return grad.to_sparse(1) if kind is co.SparseAdam else grad


def main() -> None:
    """Print what was found, by optimizer, as JSON."""
    found = {}
    for name, (kind, options, shapes) in OPTIMIZERS.items():
        params = [torch.nn.Parameter(torch.linspace(-3, 3, torch.Size(shape).numel()).view(shape)) for shape in shapes]
        for param in params:
            param.grad = _gradient(param, kind)
        started = time.perf_counter()
        optimizer = kind(params, **options)
        optimizer.step()
        seconds = time.perf_counter() - started
        optimizer.step()
        optimizer.zero_grad()
        report = co.compile_report(optimizer)
        found[name] = {
            "seconds": seconds,
            "compiler": sorted({"torch._dynamo", "torch._inductor"} & sys.modules.keys()),
            "result": [param.tolist() for param in params],
            "compiles": report.compiles,
            "loaded": report.loaded,
            "reported": report.seconds,
            "report": str(report),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
