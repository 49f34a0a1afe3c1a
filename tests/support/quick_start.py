"""A process that constructs optimizers and steps: what makes the first step slow, counted."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import compiled_optim as co
from compiled_optim.memory import cache

OPTIMIZERS: dict[str, tuple[type[co.CompiledOptimizer], dict[str, Any], list[tuple[int, ...]]]] = {
    "Adafactor": (co.Adafactor, {"lr": 0.3, "weight_decay": 0.2}, [(5, 3), (4, 2, 3), (7,)]),
    "Muon": (co.Muon, {"lr": 0.3}, [(5, 3), (3, 5)]),
    "AdamW": (co.AdamW, {}, [(5, 3), (7,)]),
    "SparseAdam": (co.SparseAdam, {"lr": 0.3}, [(5, 3)]),
}


def _gradient(param: Tensor, kind: type[co.CompiledOptimizer]) -> Tensor:
    grad = torch.linspace(-1, 2, param.numel()).view_as(param)
    return grad.to_sparse(1) if kind is co.SparseAdam else grad


@contextlib.contextmanager
def _counting() -> Iterator[dict[str, Any]]:
    """The commands that run meanwhile, the libraries that are made, and the calls of Python's functions."""
    found: dict[str, Any] = {"started": [], "made": -cache.uses["made"], "calls": 0}
    begin = subprocess.Popen.__init__

    def started(process: Any, command: Any, *args: Any, **kwargs: Any) -> None:
        found["started"].append(command)
        begin(process, command, *args, **kwargs)

    def count(frame: Any, event: str, argument: Any) -> None:
        found["calls"] += event == "call"

    with mock.patch.object(subprocess.Popen, "__init__", started):
        sys.setprofile(count)
        try:
            yield found
        finally:
            sys.setprofile(None)
    found["made"] += cache.uses["made"]


def main() -> None:
    """Print what was found, by optimizer, as JSON."""
    found = {}
    for name, (kind, options, shapes) in OPTIMIZERS.items():
        params = [torch.nn.Parameter(torch.linspace(-3, 3, torch.Size(shape).numel()).view(shape)) for shape in shapes]
        for param in params:
            param.grad = _gradient(param, kind)
        with _counting() as counted:
            optimizer = kind(params, **options)
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        report = co.compile_report(optimizer)
        found[name] = {
            **counted,
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
