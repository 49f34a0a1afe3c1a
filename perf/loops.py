"""Training loops of GPTs, in every way to run one: :func:`measure_loops`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import compiled_optim as co
from perf.budget import Deadline
from perf.competitors import FUSED, OURS, competitor, with_own_code
from perf.compiled_steps import INLINED
from perf.convergence import Causal
from perf.measure import FIRST_STEPS
from perf.results import Row
from perf.turns import Call, Table, clock_of_processors, measured


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    width: int
    layers: int
    words: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}, {self.batch} x {self.length}, bfloat16 autocast"


SIZES = {
    "small": Size(256, 6, 8192, 8, 128),  # where the host limits
    "gpt2": Size(768, 12, 50257, 8, 1024),
    "tiny": Size(16, 1, 32, 2, 8),  # for rehearsals
}


@dataclass(frozen=True)
class Way:
    """A way to run a loop: the optimizer, and which part of the step is compiled, in which mode."""

    competitor: str
    compiled: str = ""  # ``model`` or ``step``, forward, backward and update together
    mode: str = "default"
    runner: bool = False

    def __str__(self) -> str:
        parts = [self.competitor, f"{self.compiled} compiled" if self.compiled else "eager"]
        parts += [self.mode] * (self.mode != "default") + ["in a runner"] * self.runner
        return ", ".join(parts)


WAYS = [
    Way(FUSED),
    Way(OURS),
    Way(OURS, "model", runner=True),
    Way(FUSED, "model"),
    Way(OURS, "model"),
    Way(FUSED, "model", "reduce-overhead"),
    Way(OURS, "model", "reduce-overhead"),
    Way(OURS, "step"),
    Way(OURS, "step", "reduce-overhead"),
    Way(INLINED, "step"),
]
"""Ways that compile nothing are first, since a way begins only if it could take as long as the longest; then by worth."""


class GPT(nn.Module):
    """A transformer over words, whose output embedding is its input's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(size.words, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Causal(size.width, max(4, size.width // 64)) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits ``(batch, length, words)`` of the next words."""
        return functional.linear(self.norm(self.blocks(self.words(text) + self.positions.weight)), self.words.weight)


def measure_loops(
    name: str,
    device: torch.device,
    *,
    rounds: int,
    deadline: Deadline | None = None,
    ways: Sequence[Way] = tuple(WAYS),
) -> Iterator[list[Row]]:
    """Measure milliseconds of a training step in each way, and the loss after some: see :func:`perf.turns.measured`."""
    size = SIZES[name]
    table = Table("loops", str(size), "training step", reference=str(Way(OURS, "model", runner=True)))

    def make(way: Way) -> Call:
        call = _loop(way, size, device)
        losses = [float(call()) for _ in range(2 * FIRST_STEPS)]
        loss = (str(way), f"loss of step {len(losses)}", "nats", *(losses[-1],) * 3, None, 1)
        return Call(call, rows=[Row("loops", str(size), "adamw", *loss)])

    makers = {str(way): functools.partial(make, way) for way in ways}
    clock = clock_of_processors(device)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield from measured(table, makers, device, rounds=rounds, warmup=3, deadline=deadline, clock=clock)


def _loop(way: Way, size: Size, device: torch.device) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    text = torch.randint(size.words, (size.batch, size.length + 1), device=device)
    model = GPT(size).to(device)
    step = training_step(way, model, competitor("adamw", way.competitor).make(list(model.parameters())))
    return lambda: step(text)


def training_step(way: Way, model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function from a text to its loss, which trains ``model`` in the ``way``."""
    run: Any = torch.compile(model, mode=way.mode) if way.compiled == "model" else model

    def step(text: Tensor) -> Tensor:
        with torch.autocast(text.device.type, torch.bfloat16):
            logits = run(text[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, -2), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if way.compiled == "step":
        return torch.compile(with_own_code(step), fullgraph=True, mode=way.mode)
    return co.CUDAGraphRunner(step, optimizers=optimizer) if way.runner else step
