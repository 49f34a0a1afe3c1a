"""How the files here were made: ``python tests/data/make.py`` while their format_version was the current one.

A file stays as it is for ever; a new format_version gets a new one.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

import compiled_optim as co
from compiled_optim.checkpoint.read import FORMAT_VERSION

SHAPES = {"embed.weight": (5, 2), "fc.weight": (2, 3), "fc.bias": (3,), "scale": ()}
CASES = {
    "AdamW": (co.AdamW, {"betas": (0.8, 0.95), "eps": 1e-3, "amsgrad": True}),
    "SGD": (co.SGD, {"momentum": 0.8, "dampening": 0.1}),
}


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Gradients that need no random numbers; ``scale`` has none at step 1."""
    made = {
        name: torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).sin().add(step).reshape(shape)
        for name, shape in SHAPES.items()
    }
    return {name: grad for name, grad in made.items() if (name, step) != ("scale", 1)}


def optimizer(case: str, params: dict[str, nn.Parameter]) -> co.CompiledOptimizer:
    """The optimizer of ``case`` with two groups."""
    cls, options = CASES[case]
    first, second = list(params.items())[:2], list(params.items())[2:]
    return cls([{"params": first, "lr": 0.05}, {"params": second, "weight_decay": 0.25}], lr=0.1, **options)


def train(made: co.CompiledOptimizer, params: dict[str, nn.Parameter], first: int, last: int) -> None:
    """The steps from ``first`` to ``last``."""
    for step in range(first, last):
        given = gradients(step)
        for name, param in params.items():
            param.grad = given.get(name)
        made.step()


if __name__ == "__main__":
    content = {}
    for case in CASES:
        params = {name: nn.Parameter(torch.ones(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
        made = optimizer(case, params)
        train(made, params, 0, 3)
        before = {name: param.detach().clone() for name, param in params.items()}
        saved = copy.deepcopy(made.state_dict())
        train(made, params, 3, 6)
        content[case] = {"params": before, "state_dict": saved, "after": {n: p.detach() for n, p in params.items()}}
    torch.save(content, Path(__file__).parent / f"format_version_{FORMAT_VERSION}.pt")
