"""Training of a GPT from random weights on made text, in the ways that there are to take its steps.

All ways begin with equal weights and read equal batches, so that AdamW's losses must be torch's. :func:`measure_training`
gives the rows of one way after the other: tokens per second, memory, losses, and the optimizer's share of the step.
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
        lr: after the warm-up, from where it falls along a cosine to a tenth.
        block: steps between two looks at the clock. The first block compiles and captures, and its time does not count.
    """

    size: Size
    lr: float
    block: int
    blocks: int

    @property
    def steps(self) -> int:
        """All of them."""
        return self.block * self.blocks

    def rate(self, step: int) -> float:
        """The learning rate of a step: each has another one."""
        done = (step + 1) / self.steps
        return self.lr * min(10 * done, 0.55 + 0.45 * math.cos(math.pi * done))


MODELS = {
    "gpt2": Training(Size(768, 12, 50304, 16, 1024), 6e-4, 20, 8),  # 124 million parameters
    "small": Training(Size(64, 1, 256, 16, 32), 3e-3, 10, 8),  # in two minutes on a CPU
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
"""Those worth most first, after what the others are compared with; last those that compile long."""

FOLLOWERS = 8
"""How many words may come after a word."""

TOLERANCE = 0.01
"""Nats by which the losses of a block may differ from those with torch's AdamW, in the mean.

Sums have another order, autocast rounds to bfloat16, and on GPUs attention adds up gradients in any order.
"""

DIFFERENCE = f"largest mean difference of a block's losses from those of {FUSED}"


def measure_training(
    name: str, device: torch.device, *, deadline: Deadline | None = None, ways: Sequence[Way] = tuple(WAYS)
) -> Iterator[list[Row]]:
    """The rows of each way as soon as it is done; a way that fails, or would not fit into the time left, says so."""
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
            except Exception as error:  # packages raise what they like, compilers too
                why = reason(error)
            except KeyboardInterrupt as error:
                why, interrupt = INTERRUPTED, error
        yield left_out("train", str(training.size), "adamw", {str(way): why}) if why else list(_rows(way, training, done))
        if interrupt is not None:
            raise interrupt


def made_texts(training: Training, seed: int = 0) -> tuple[Tensor, float]:
    """A batch of texts for each step, and about the least loss that a model can reach on them.

    A word is followed by one of a few, of which each is half as likely as the one before. Frequent words are learned first,
    as in a language: the followers are drawn so that a word is the rarer the later it comes in the vocabulary.
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
    """What became of a training.

    Attributes:
        losses: of each step.
        first: seconds of the first block by the wall clock.
        seconds: of each block after it; on a CPU those of processors, so that other work on the machine counts little.
        memory: the most that was in use, in bytes.
    """

    losses: Tensor
    first: float
    seconds: list[float]
    memory: int


def _train(way: Way, training: Training, texts: Tensor) -> Trained:
    """Train a model of its own.

    Raises:
        RuntimeError: the loss does not fall.
    """
    device = texts.device
    gc.collect()  # of the way before
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
    found = torch.stack(losses).float().cpu()
    if way.competitor != NONE and not found[-training.block :].mean() < 0.9 * found[0]:
        raise RuntimeError(f"it does not train: losses {found[:: training.block].tolist()}")
    return Trained(found, first, seconds[1:], _allocated(device, most=True) - before)


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
    """The optimizer of ``way``, with AdamW's hyperparameters of this folder where it takes them."""
    if way.competitor == HYBRID:
        return co.MuonAdamW(model, weight_decay=1e-2)
    if way.competitor == NONE:  # a runner needs one: it has a single number, which has no gradient
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
    """Bytes of the GPU's memory; 0 on a CPU, where much else is in a process's memory."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if most else torch.cuda.memory_allocated(device)


def _rows(way: Way, training: Training, done: dict[Way, Trained]) -> Iterator[Row]:
    """All that is known of a way; it is compared with what is done."""
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
    """Whether losses are not torch's."""
    return row.benchmark == "train" and row.metric == DIFFERENCE and not row.p50 <= TOLERANCE
