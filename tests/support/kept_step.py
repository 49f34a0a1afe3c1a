"""A compiled training step in the file ``KEPT_STEP``: one process keeps it, another goes on with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co

X = torch.linspace(-1, 1, 24).view(6, 4)


def model_of(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def optimizer_of(model: nn.Module, kind: Any = co.AdamW) -> Any:
    return kind(model.named_parameters(), lr=0.05)


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def keep(path: Path) -> None:
    model = model_of(8, 3)
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    with torch._dynamo.config.patch(trace_autograd_ops=True, enable_aot_compile=True):
        compiled = torch.compile(train_step, fullgraph=True, options=options)
        compiled.aot_compile(((model, optimizer_of(model), X), {})).save_compiled_function(str(path))


def go_on(path: Path) -> dict[str, Any]:
    """What becomes of a model, and of others with optimizers; and what is said where one of these is handed to the step."""
    others = [model_of(8, 5), model_of(9, 5), model_of(8, 5)]
    before = [[param.detach().clone() for param in other.parameters()] for other in others]
    optimizers = [optimizer_of(*each) for each in zip(others, (co.SGD, co.AdamW, co.AdamW), strict=True)]
    model, twin = model_of(8, 3), model_of(8, 3)
    optimizer, expected = optimizer_of(model), optimizer_of(twin, torch.optim.AdamW)
    with path.open("rb") as file:
        run = torch.compiler.load_compiled_function(file)
    for i in range(3):
        run(model, optimizer, X * (1 + i))
        train_step(twin, expected, X * (1 + i))
    trained = all(map(torch.allclose, model.parameters(), twin.parameters()))
    try:
        run(others[0], optimizers[0], X)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    stay = [all(map(torch.equal, other.parameters(), values)) for other, values in zip(others, before, strict=True)]
    return {"trained": trained, "stay": stay, "error": error}


if __name__ == "__main__":
    place = Path(os.environ["KEPT_STEP"])
    if place.exists():
        print(json.dumps(go_on(place)))
    else:
        keep(place)
