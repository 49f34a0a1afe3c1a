"""Print, as JSON, the first element of each gradient after steps whose traced backward is followed by a graph break.

A list for each lowering, of a list for each of three steps.
"""

from __future__ import annotations

import json
import warnings

import torch
from torch import nn

import compiled_optim as co

warnings.simplefilter("ignore")
torch._dynamo.config.trace_autograd_ops = True


@torch.compile(backend="eager")
def train() -> torch.Tensor:
    """Train what the loop below made."""
    optimizer.zero_grad()
    loss = sum((p * 10.0**i).sum() for i, p in enumerate(params))
    loss.backward()
    print(end="")
    optimizer.step()
    return loss.detach()


found = []
for lowering in ("multi_tensor", "inductor", "eager"):
    torch._dynamo.reset()
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = co.SGD(params, lr=0.001, lowering=lowering)
    seen = []
    for _ in range(3):
        train()
        seen.append([p.grad[0].item() for p in params])
    found.append(seen)
print(json.dumps(found))
