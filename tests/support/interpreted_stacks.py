"""What Inductor wrote for stacks of matrices on a GPU, beside the eager lowering: relative to what three steps change."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import interpreted_inlined
import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.lowering import stack_code
from compiled_optim.memory.torch_compiler import ListFunction

SHAPES = {
    "Muon": [(20, 40), (20, 40), (40, 33)],
    "NorMuon": [(33, 20)],
    "experts": [(3, 20, 24)] * 2,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "experts": {"stacks": ["*"], "lr": 0.05, "ns_coefficients": "polar_express"},
}


def made(name: str, lowering: str, device: str = "cpu") -> tuple[list[nn.Parameter], co.CompiledOptimizer]:
    """Parameters in two groups, and their optimizer."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES[name]]
    groups = [{"params": [(f"w{i}", p)], "lr": 0.02 * (1 + i)} for i, p in enumerate(params)]
    if name == "Muon":
        groups[1]["ns_coefficients"] = (3.0, -4.0, 1.8)  # a stack's tensors have numbers of their own
    optimizer = getattr(co, name, co.Muon)
    return params, optimizer(groups, lowering=lowering, **OPTIONS.get(name, {}))


def stepped(name: str, lowering: str) -> dict[str, Tensor]:
    """What three steps add to parameters, and state, in float64."""
    params, optimizer = made(name, lowering)
    start = [p.detach().double().clone() for p in params]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    state = {f"{i} {n}": v.double() for i, p in enumerate(params) for n, v in optimizer.state[p].items()}
    return state | {f"{i}": p.detach().double() - s for i, (p, s) in enumerate(zip(params, start, strict=True))}


def interpreted(file: str) -> dict[str, dict[str, float]]:
    """Return how far parameters and state are from those of eager steps, by case.

    Args:
        file: has, by the names of :data:`SHAPES`, the modules that Inductor wrote.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, modules in json.loads(Path(file).read_text()).items():
            given = iter(modules)

            def compiled(*_: Any, given: Any = given, **__: Any) -> ListFunction:
                return interpreted_inlined._loaded(next(given), Path(folder))

            with mock.patch.multiple(stack_code, compiled=compiled, _kernels={}):
                ours = stepped(name, "inductor")
            assert next(given, None) is None
            expected = stepped(name, "eager")
            found[name] = {n: ((ours[n] - e).norm() / e.norm()).item() for n, e in expected.items()}
    return found
