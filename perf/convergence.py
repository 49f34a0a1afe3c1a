"""Final losses of training with low precision and in float32: :func:`measure_convergence`.

Both sides have the same hyperparameters, batches and first weights. The claim is about the storage of weights and state, and
about final losses.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import compiled_optim as co
from perf.results import Row, percentiles
from perf.turns import kept
from tools.demo import digits

SEEDS = range(8)  # the first eight, not picked
FLOAT32 = "float32"
PRECISIONS: dict[str, dict[str, Any]] = {
    FLOAT32: {},
    "split8, int8": {"weights": "split8", "state_dtype": "int8"},
    "kahan, bfloat16": {"weights": "kahan", "state_dtype": torch.bfloat16},
    "stochastic, bfloat16": {"weights": "stochastic", "state_dtype": torch.bfloat16},
}
"""The options of an optimizer for bfloat16 parameters by name, and of one for float32."""

QUANTILE = 1.895  # of Student's t with 7 degrees of freedom: 95 %
CONTEXT, BATCH, WIDTH = 64, 16, 64

Batch = tuple[Tensor, Tensor]
Task = Callable[[int, int], tuple[nn.Module, Iterator[Batch], list[Batch]]]


class LanguageModel(nn.Module):
    """A transformer over the characters of ASCII that guesses the next one; two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.mixed = nn.Conv1d(WIDTH, WIDTH, 4)
        self.blocks = nn.ModuleList(Causal(WIDTH) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits ``(batch, characters, 128)`` of the next characters."""
        tokens = self.characters(text) + self.positions.weight
        tokens = tokens + self.mixed(functional.pad(tokens.transpose(1, 2), (3, 0))).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens))


class Causal(nn.Module):
    """Self-attention to earlier tokens, and a perceptron."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` plus the outputs of both parts."""
        packed = self.packed(self.attention_norm(tokens))
        queries, keys, values = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        tokens = tokens + self.attended(heads.transpose(1, 2).flatten(-2))
        return tokens + self.perceptron(self.perceptron_norm(tokens))


def _text(steps: int, seed: int) -> tuple[nn.Module, Iterator[Batch], list[Batch]]:
    """Return the task on Python's documentation, whose last tenth is for the final loss."""
    text = torch.tensor(list("".join(topics.values()).encode("ascii", "replace")))
    limit = len(text) * 9 // 10
    generator = torch.Generator().manual_seed(seed)

    def batch(text: Tensor, count: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - CONTEXT, (count,), generator=generator)
        cut = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        return cut[:, :-1], cut[:, 1:]

    batches = (batch(text[:limit], BATCH, generator) for _ in range(steps))
    return LanguageModel(), batches, [batch(text[limit:], 256, torch.Generator().manual_seed(1))]


def _digits(steps: int, seed: int) -> tuple[nn.Module, Iterator[Batch], list[Batch]]:
    """Return the task on the images and the model of the demo."""
    train, test = digits.load()
    epochs = -(-steps // digits.batches_per_epoch(train))
    batches = digits.batches(train, epochs, torch.Generator().manual_seed(seed))
    return digits.VisionTransformer(), itertools.islice(batches, steps), [test]


TASKS: dict[str, Task] = {"digits": _digits, "text": _text}


def trained(
    task: str, seed: int, steps: int, make: Callable[[nn.Module], Any], lr: float, dtype: torch.dtype = torch.float32
) -> tuple[list[float], float]:
    """Train, and return the loss of each step and the final held-out loss, in nats. The rate rises to ``lr`` and falls."""
    torch.manual_seed(seed)
    model, batches, held_out = TASKS[task](steps, seed)
    model = model.to(dtype)
    optimizer = make(model)
    optimizer.schedule(lr=lambda step: lr * torch.minimum(step / (0.1 * steps), (1.02 - step / steps) / 0.9))

    def loss_of(batch: Batch) -> Tensor:
        inputs, targets = batch
        logits = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
        return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    losses = []
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, sum(loss_of(batch).item() for batch in held_out) / len(held_out)


def final_loss(task: str, precision: str, seed: int, steps: int) -> float:
    """Return the held-out loss, in nats, after ``steps`` of AdamW whose learning rate rises and falls."""

    def make(model: nn.Module) -> co.AdamW:
        return co.AdamW(model.named_parameters(), lr=0.0, weight_decay=0.1, **PRECISIONS[precision])

    dtype = torch.float32 if precision == FLOAT32 else torch.bfloat16
    return trained(task, seed, steps, make, 3e-3, dtype)[1]


def bound(differences: Sequence[float]) -> float:
    """Return the upper bound of the mean difference, one-sided, with a confidence of 95 % for eight differences."""
    values = torch.tensor(differences, dtype=torch.float64)
    return (values.mean() + QUANTILE * values.std() / math.sqrt(len(values))).item()


def measure_convergence(task: str, *, steps: int, seeds: Sequence[int] = SEEDS) -> Iterator[list[Row]]:
    """Measure final losses of every precision over the seeds, their excess over float32's, and its bound."""
    losses: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for name, values in losses.items():
        take = functools.partial(_train, task, name, seeds, steps, values)
        yield from kept(take, functools.partial(_rows, f"{task}, {steps} steps", name, values, losses[FLOAT32]))


def _train(task: str, precision: str, seeds: Sequence[int], steps: int, losses: list[float]) -> None:
    for seed in seeds:
        losses.append(final_loss(task, precision, seed, steps))


def _rows(workload: str, name: str, values: Sequence[float], full: Sequence[float]) -> list[Row]:
    if not values:
        return []
    metrics = {"final loss": percentiles(values)}
    above = [low - exact for low, exact in zip(values, full, strict=False)]  # they may be fewer, if interrupted
    if name != FLOAT32:
        metrics["above float32"] = percentiles(above)
        if len(above) > 1:
            metrics["above float32, at most (95 %)"] = (bound(above),) * 3
    return [
        Row("convergence", workload, "adamw", name, metric, "nats", *numbers, None, len(values))
        for metric, numbers in metrics.items()
    ]
