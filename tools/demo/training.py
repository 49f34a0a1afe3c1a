"""The training loop: a model, its optimizer, its learning rate schedule, and what they went through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import compiled_optim as co

from .data import Images
from .model import VisionTransformer, parameter_groups

PEAK_LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.05


@dataclass
class History:
    """The loss of every step and the learning rate that it was taken with."""

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)


class Training:
    """A new model with its optimizer and schedule.

    Args:
        steps: the length of the schedule: linear warm-up over the first tenth, then half a cosine down to 0.
        backwards: list the parameters last to first in the optimizer's groups.
    """

    def __init__(self, steps: int, *, backwards: bool = False) -> None:
        self.model = VisionTransformer()
        groups = parameter_groups(self.model, WEIGHT_DECAY, backwards=backwards)
        self.optimizer = co.AdamW(groups, lr=PEAK_LEARNING_RATE)
        warm_up = max(1, steps // 10)
        self.scheduler = SequentialLR(
            self.optimizer,
            [
                LinearLR(self.optimizer, start_factor=1 / warm_up, total_iters=warm_up),
                CosineAnnealingLR(self.optimizer, T_max=steps - warm_up),
            ],
            milestones=[warm_up],
        )

    def train_step(self, pixels: Tensor, digits: Tensor, model: nn.Module | None = None) -> Tensor:
        """Forward, backward, the optimizer's step and zero_grad, as one unit; returns the loss.

        Args:
            pixels: (images, 1, 8, 8).
            digits: (images,).
            model: stands for :attr:`model`, compiled for example.
        """
        loss = functional.cross_entropy((self.model if model is None else model)(pixels), digits)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(
        self,
        batches: Iterable[Images],
        history: History,
        advance: Callable[[float], None],
        step: Callable[[Images], float],
    ) -> None:
        """Take a step with each batch, write it into ``history`` and tell ``advance`` the loss.

        Args:
            batches: one per step.
            history: is appended to.
            advance: is called after every step.
            step: takes one step and returns its loss.

        Raises:
            compiled_optim.RecompileError: a step after the first would compile anything again.
        """
        self.model.train()

        def take(batch: Images) -> None:
            history.learning_rate.append(self.optimizer.hyperparameters()[0]["lr"])
            history.loss.append(step(batch))
            self.scheduler.step()
            advance(history.loss[-1])

        batches = iter(batches)
        take(next(batches))
        with co.no_recompiles():
            for batch in batches:
                take(batch)


def accuracy(model: nn.Module, images: Images) -> float:
    """The percentage of ``images`` that ``model`` recognizes."""
    model.eval()
    with torch.no_grad():
        guesses = model(images.pixels).argmax(dim=1)
    return 100 * (guesses == images.digits).double().mean().item()
