"""Steps with a schedule that drops the gradients, in a process of their own; prints of each whether it used them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import compiled_optim as co

param = nn.Parameter(torch.zeros(2_000_000))
optimizer = co.SGD([param], lr=1.0)


def rate(step: Tensor) -> Tensor:
    optimizer.zero_grad()
    return torch.ones_like(step)


optimizer.schedule(lr=rate)
for i in range(3):
    param.grad = torch.full_like(param, 1.0 + i)
    before = param.detach().clone()
    optimizer.step()
    print(torch.equal(before - param, torch.full_like(param, 1.0 + i)), end=" ")
