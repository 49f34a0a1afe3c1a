"""Training of a GPT from random weights on generated text, in every way to take its steps.

All ways begin with equal weights and read equal batches, so that AdamW's losses must be torch's. :func:`measure_training`
yields the rows of one way after the other: tokens per second, memory, losses, and the optimizer's share of the step.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co
from perf.budget import INTERRUPTED, Deadline
from perf.competitors import FUSED, OURS, PEERS, competitor, reason
from perf.compiled_steps import INLINED
from perf.interrupts import let_in
from perf.loops import GPT, Size, Way, training_step
from perf.results import OUT_OF_TIME, Row, left_out, percentiles
from perf.turns import clock_of_processors, synchronize


@dataclass(frozen=True)
class Training:
    """A model and how it is trained.

    Attributes:
        lr: the learning rate after the warm-up. Then it falls along a cosine to a tenth.
        block: steps that are timed together. The first block compiles and captures, and its time does not count.
    """

    size: Size
    lr: float
    block: int
    blocks: int

    @property
    def steps(self) -> int:
        """The number of all steps."""
        return self.block * self.blocks

    def rate(self, step: int) -> float:
        """Return the learning rate of a step. Each step has another one."""
        done = (step + 1) / self.steps
        return self.lr * min(10 * done, 0.55 + 0.45 * math.cos(math.pi * done))


MODELS = {
    "gpt2": Training(Size(768, 12, 50304, 16, 1024), 6e-4, 20, 8),  # 124 million parameters
    "small": Training(Size(64, 1, 256, 16, 32), 3e-3, 10, 8),  # two minutes on a CPU
}

NONE, HYBRID = "no optimizer", "compiled_optim MuonAdamW"
WAYS = [
    Way(NONE, "model"),
    Way(FUSED, "model"),
    Way(OURS, "model"),
    Way(NONE, "model", runner=True),
    Way(OURS, "model", runner=True),
    Way(HYBRID, "model"),
    Way(HYBRID, "model", runner=True),
    Way(OURS, "step"),
    Way(INLINED, "step"),
    Way("torch foreach", "model"),
    Way("optimi", "model"),
    Way("schedulefree", "model"),
    Way("heavyball", "model"),
    Way("torch foreach capturable compiled", "model"),
    Way("torchao", "model"),
]
"""The references of comparisons first, then the most important ways, last those that compile long."""

FOLLOWERS = 8
"""The number of words that may follow a word."""

TOLERANCE = 0.01
"""Nats by which the losses of a block may differ in the mean from torch's AdamW.

Sums have another order, autocast rounds to bfloat16, and on GPUs attention adds up gradients in any order.
"""

DIFFERENCE = f"largest mean difference of a block's losses from those of {FUSED}"


def measure_training(
    name: str, device: torch.device, *, deadline: Deadline | None = None, ways: Sequence[Way] = tuple(WAYS)
) -> Iterator[list[Row]]:
    """Yield the rows of each way as soon as it ends. A way that fails, or would take too long, has a row with the reason."""
    training, deadline, done = MODELS[name], deadline or Deadline(), {}
    texts, least = made_texts(training)
    texts = texts.to(device)
    yield [_row(training, "the made text", "least loss that there can be, about", "nats", [least])]
    for way in ways:
        why, interrupt = OUT_OF_TIME, None
        if deadline.allows_another():
            try:
                with let_in(), deadline.piece(), torch._dynamo.config.patch(trace_autograd_ops=True):
                    done[way] = _train(way, training, texts)
                    why = ""
            except Exception as error:  # packages and compilers may raise any error
                why = reason(error)
            except KeyboardInterrupt as error:
                why, interrupt = INTERRUPTED, error
        yield left_out("train", str(training.size), "adamw", {str(way): why}) if why else list(_rows(way, training, done))
        if interrupt is not None:
            raise interrupt


def made_texts(training: Training, seed: int = 0) -> tuple[Tensor, float]:
    """Generate a batch of texts for each step. Return also about the least loss that a model can reach on them.

    A word is followed by one of a few words, each half as likely as the one before. Frequent words are learned first, as in
    a language: followers are drawn so that words late in the vocabulary are rare.
    """
    size, generator = training.size, torch.Generator().manual_seed(seed)
    followers = (size.words ** torch.rand(size.words, FOLLOWERS, generator=generator)).long() - 1
    likely = 0.5 ** torch.arange(1.0, FOLLOWERS + 1)
    chosen = torch.multinomial(likely, training.steps * size.batch * size.length, replacement=True, generator=generator)
    text = [torch.randint(size.words, (training.steps * size.batch,), generator=generator)]
    for choice in chosen.view(size.length, -1):
        text.append(followers[text[-1], choice])
    least = torch.distributions.Categorical(likely).entropy()
    return torch.stack(text, 1).view(training.steps, size.batch, -1), float(least)


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of a training.

    Attributes:
        losses: the loss of each step.
        first: seconds of the first block by the wall clock.
        seconds: of each later block; on a CPU of processor time, so that other work on the machine counts little.
        memory: the most memory in use, in bytes.
    """

    losses: Tensor
    first: float
    seconds: list[float]
    memory: int


def _train(way: Way, training: Training, texts: Tensor) -> Trained:
    """Train a new model.

    Raises:
        RuntimeError: the loss does not fall.
    """
    device = texts.device
    gc.collect()  # after the previous way
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = _allocated(device)
    torch.manual_seed(0)
    model = GPT(training.size).to(device)
    _initialize(model)
    optimizer = _optimizer(way, model)
    clock, losses, seconds = clock_of_processors(device), [], []
    step = training_step(way, model, optimizer)
    begun = time.perf_counter()
    for start in range(0, training.steps, training.block):
        started = clock()
        for index in range(start, start + training.block):
            _set_rate(optimizer, training.rate(index))
            losses.append(step(texts[index]))
        synchronize(device)
        seconds.append(clock() - started)
        if start == 0:
            first = time.perf_counter() - begun
    curve = torch.stack(losses).float().cpu()
    if way.competitor != NONE and not curve[-training.block :].mean() < 0.9 * curve[0]:
        raise RuntimeError(f"it does not train: losses {curve[:: training.block].tolist()}")
    return Trained(curve, first, seconds[1:], _allocated(device, most=True) - before)


def _initialize(model: GPT) -> None:
    """Draw GPT-2's first weights."""
    layers = len(model.blocks)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            adds_up = name.endswith(("attended.weight", "perceptron.2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds_up else 0.02)


def _optimizer(way: Way, model: nn.Module) -> Any:
    """Return the optimizer of ``way``, with this folder's hyperparameters of AdamW if it takes them."""
    if way.competitor == HYBRID:
        return co.MuonAdamW(model, weight_decay=1e-2)
    if way.competitor == NONE:  # a runner needs one: its only parameter has no gradient
        optimizer = co.SGD([nn.Parameter(torch.zeros(1, device=next(model.parameters()).device))])
        optimizer.zero_grad = model.zero_grad
        return optimizer
    kind = "adamwschedulefree" if way.competitor == "schedulefree" else "adamw"
    optimizer = competitor(kind, way.competitor).make(list(model.parameters()))
    for group in optimizer.param_groups if PEERS[way.competitor].compiled else ():
        group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)  # a number would be compiled into the step
    return optimizer


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _allocated(device: torch.device, *, most: bool = False) -> int:
    """Return bytes of the GPU's memory. On a CPU it is 0, since a process holds much else."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if most else torch.cuda.memory_allocated(device)


def _rows(way: Way, training: Training, done: dict[Way, Trained]) -> Iterator[Row]:
    """Yield the rows of a way. It is compared with the ways that are ``done``."""
    trained, size = done[way], training.size
    steps = [1e3 * s / training.block for s in trained.seconds]
    yield _row(training, str(way), "training step", "ms", steps)
    tokens = size.batch * size.length
    yield _row(training, str(way), "speed", "tokens/s", [1e3 * tokens / ms for ms in steps])
    yield _row(training, str(way), f"first {training.block} steps, with compiling", "s", [trained.first])
    if trained.memory:
        yield _row(training, str(way), "most memory", "GiB", [trained.memory / 2**30])
    if way.competitor == NONE:
        return
    without = done.get(Way(NONE, "model", runner=way.runner))
    if without is not None:
        share = 1 - percentiles(without.seconds)[1] / percentiles(trained.seconds)[1]
        yield _row(training, str(way), "the optimizer's share of the step", "%", [100 * share])
    for step in sorted({1, *range(training.steps // 4, training.steps + 1, training.steps // 4)}):
        yield _row(training, str(way), f"loss of step {step}", "nats", [float(trained.losses[step - 1])])
    reference = next((other for other_way, other in done.items() if other_way.competitor == FUSED), None)
    if reference not in (None, trained) and way.competitor.startswith(("torch ", OURS)) and way.competitor != HYBRID:
        by_block = (trained.losses - reference.losses).abs().view(-1, training.block).mean(1)
        yield _row(training, str(way), DIFFERENCE, "nats", [float(by_block.max())])


def _row(training: Training, way: str, metric: str, unit: str, values: Sequence[float]) -> Row:
    optimizer = "muonadamw" if way.startswith(HYBRID) else "adamw"
    return Row("train", str(training.size), optimizer, way, metric, unit, *percentiles(values), None, len(values))


def failed(row: Row) -> bool:
    """Return whether losses differ from torch's."""
    return row.benchmark == "train" and row.metric == DIFFERENCE and not row.p50 <= TOLERANCE
