"""A training step in the file ``argv[1]``, which another process made, beside a checkpoint: go on with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co

X = torch.linspace(-1, 1, 24).view(6, 4)


class Model(nn.Module):
    def __init__(self, width: int = 8, seed: int = 5) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 512).bfloat16()
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.norm(self.first(x)) * self.frozen).bfloat16()).float().mean(1, keepdim=True)


def optimizer_of(model: nn.Module, kind: Any = co.AdamW, **options: Any) -> Any:
    """In two groups, of which the second stores the bits that 16-bit weights lack."""
    first = [(name, p) for name, p in model.named_parameters() if p.dtype == torch.float32]
    rest = {"params": [(name, p) for name, p in model.named_parameters() if p.dtype != torch.float32], "lr": 0.02}
    if kind is co.AdamW:
        rest["weights"] = "split8"
    options = {"lr": 0.05, "max_grad_norm": 0.5, "skip_nonfinite": True, "lowering": "inductor"} | options
    return kind([{"params": first}, rest], **options)


def scheduler_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch / 20))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch_of(step: int) -> dict[str, Tensor]:
    """One of them has no finite loss."""
    return {"x": X * (1 + step % 5), "y": X.sum(1, keepdim=True) * (float("inf") if step == 30 else 1)}


def go_on(train: Callable[..., Tensor], optimizer: Any, scheduler: Any, steps: range) -> None:
    """Train on one thread: with more, products of matrices may be rounded otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for i in steps:
            train(batch_of(i))
            scheduler.step()
            optimizer.param_groups[0]["weight_decay"] = 0.01 * (i % 3)
            optimizer.max_grad_norm = 0.5 + 0.1 * (i % 2)
    finally:
        torch.set_num_threads(threads)


def saved(model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    parts = model.state_dict(), co.named_state_dict(optimizer), scheduler.state_dict(), torch.get_rng_state()
    return dict(zip(("model", "optimizer", "scheduler", "random"), parts, strict=True))


def main(file: str) -> None:
    checkpoint = torch.load(f"{file}.checkpoint")
    model = Model()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    model.load_state_dict(checkpoint["model"])
    co.load_named_state_dict(optimizer, checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    torch.set_rng_state(checkpoint["random"])
    optimizer.max_grad_norm = 0.5
    started: list[Any] = []
    begin = subprocess.Popen.__init__
    subprocess.Popen.__init__ = lambda self, *args, **kwargs: (started.append(args), begin(self, *args, **kwargs))[1]  # type: ignore
    train = co.load_step(file, model, optimizer)
    go_on(train, optimizer, scheduler, range(25, 50))
    compilers = [name for name in ("torch._dynamo", "torch._inductor.codecache") if name in sys.modules]
    torch.save({**saved(model, optimizer, scheduler), "compilers": compilers, "started": len(started)}, f"{file}.end")


if __name__ == "__main__":
    main(sys.argv[1])
