"""A training that is resumed by name, and the ways to run its steps."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import compiled_optim as co

from .digits import Images, VisionTransformer, parameter_groups


class Leg(NamedTuple):
    """Steps in one mode, with the seconds and the loss of each. The mode is eager if nothing was compiled or captured."""

    mode: str
    seconds: list[float]
    losses: list[float]


class Training:
    """A new model with its optimizer and schedule: linear warm-up over a tenth of ``steps``, then half a cosine to 0."""

    def __init__(self, steps: int, device: str, *, backwards: bool = False) -> None:
        self.steps, self.device, self.backwards = steps, device, backwards
        self.model = VisionTransformer().to(device)
        self.optimizer = co.AdamW(parameter_groups(self.model, backwards=backwards), lr=2e-3, weight_decay=0.05)
        warm_up = max(1, steps // 10)
        rise = LinearLR(self.optimizer, start_factor=1 / warm_up, total_iters=warm_up)
        fall = CosineAnnealingLR(self.optimizer, T_max=steps - warm_up)
        self.scheduler = SequentialLR(self.optimizer, [rise, fall], milestones=[warm_up])

    def step(self, pixels: Tensor, digits: Tensor) -> Tensor:
        """Run forward, backward, the optimizer's step and zero_grad. Return the loss."""
        loss = functional.cross_entropy(self.model(pixels), digits)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, mode: str, batches: Iterable[Images]) -> Leg:
        """Take a step with each batch, in one of ``options.MODES``.

        Raises:
            compiled_optim.RecompileError: a step after the first would compile anything again.
        """
        step, seconds, losses = self.step, [], []
        if mode == "model":
            self.model.compile(fullgraph=True)
        elif mode == "whole-step":
            step = torch.compile(step, fullgraph=True)
        elif mode == "captured":
            step = co.CUDAGraphRunner(step, optimizers=self.optimizer)
        counted = torch._dynamo.utils.counters["stats"]
        before = counted["unique_graphs"]

        def take(batch: Images) -> None:
            started = time.perf_counter()
            losses.append(step(*(tensor.to(self.device) for tensor in batch)).item())
            self.scheduler.step()
            seconds.append(time.perf_counter() - started)

        batches = iter(batches)
        take(next(batches))
        with co.no_recompiles():
            for batch in batches:
                take(batch)
        compiled = counted["unique_graphs"] - before + len(co.compile_report(self.optimizer).captures)
        return Leg(mode if compiled else "eager", seconds, losses)

    def resumed(self) -> Training:
        """Return a new training from a checkpoint of this one. Its optimizer lists parameters in the opposite order.

        Raises:
            AssertionError: a parameter's state in the optimizer is not the one that was saved for it.
        """
        file = io.BytesIO()
        torch.save({part: getattr(self, part).state_dict() for part in ("model", "optimizer", "scheduler")}, file)
        file.seek(0)
        new = Training(self.steps, self.device, backwards=not self.backwards)
        for part, saved in torch.load(file, weights_only=True).items():
            getattr(new, part).load_state_dict(saved)
        states = [co.named_state_dict(training.optimizer)["state"] for training in (new, self)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
        return new
