"""A process that trains with compiled optimizers, called and in compiled steps: the results, and the uses of caches."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import compiled_optim as co
from compiled_optim.rule import Number, buffer, hyper

FACTOR = float(os.environ.get("FACTOR", "1"))
"""A number in the rule of a user, which another version of their program changes."""


class OfUser(co.CompiledOptimizer):
    """A rule whose numbers and operations read a constant of its module (none)."""

    lr: Number = hyper(ge=0)
    average = buffer()

    @staticmethod
    def coefficients(lr: Any) -> dict[str, Any]:
        return {"lr": lr * FACTOR}

    @staticmethod
    def update(param: Any, grad: Any, c: Any, average: Any) -> dict[str, Any]:
        return {"step": c.lr * (average + grad) * FACTOR, "average": average / 2 + grad}


WAYS: dict[str, tuple[type[co.CompiledOptimizer], dict[str, Any]]] = {
    "operator": (co.AdamW, {"lr": 0.3}),
    "inlined": (co.AdamW, {"lr": 0.3, "lowering": "inductor"}),
    "inlined, of a user": (OfUser, {"lr": 0.1, "lowering": "inductor"}),
    "inlined, scheduled": (co.AdamW, {"lr": 0.3, "lowering": "inductor"}),
    "called": (co.AdamW, {"lr": 0.3, "lowering": "inductor"}),
    "called, of a user": (OfUser, {"lr": 0.1, "lowering": "inductor"}),
    "called, on matrices": (co.Muon, {"lr": 0.1, "lowering": "inductor"}),
}


def _trained(way: str, *, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    kind, options = WAYS[way]
    model, x = nn.Linear(5, 2, bias="matrices" not in way), torch.randn(3, 5)
    optimizer = kind(model.named_parameters(), **options if compiled else {**options, "lowering": "eager"})
    if "scheduled" in way:
        optimizer.schedule(lr=lambda step: 0.3 * FACTOR / step)

    def train() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = torch.compile(train, fullgraph=True) if compiled and "called" not in way else train
    for _ in range(3):
        step()
    return [number for param in model.parameters() for number in param.detach().flatten().tolist()]


def main(ways: list[str]) -> None:
    """Print what was found as JSON, by way. ``--save FILE`` and ``--load FILE`` exchange torch's cache artifacts."""
    torch._dynamo.config.trace_autograd_ops = True
    if ways[0] == "--load":
        torch.compiler.load_cache_artifacts(Path(ways[1]).read_bytes())
    found = {}
    for way in WAYS if ways[0].startswith("--") else ways:
        torch._dynamo.reset()
        counters.clear()
        result = _trained(way, compiled=True)
        uses = {**counters["aot_autograd"], **counters["inductor"]}
        found[way] = {
            "result": result,
            "uncompiled": _trained(way, compiled=False),
            **{name: uses.get(name, 0) for name in ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")},
            **{name: uses.get(name, 0) for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")},
        }
    if ways[0] == "--save":
        artifacts = torch.compiler.save_cache_artifacts()
        assert artifacts is not None
        Path(ways[1]).write_bytes(artifacts[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
