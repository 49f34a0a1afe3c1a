"""The ways to run one training step, and how they compare."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import lookup_backend

import compiled_optim as co

from .data import Images
from .options import MODES
from .training import Training

WARM_UP_STEPS = 4


class Stepper:
    """Runs the steps of one training in one mode.

    Args:
        training: whose steps.
        mode: ``eager``; ``model``: torch.compile of the model, backward and the optimizer's step outside; ``whole-step``:
            forward, backward, step and zero_grad as one graph; ``captured``: all of it in one CUDA graph, which follows the
            schedule. Without CUDA the latter runs what ``eager`` runs, and says so.
    """

    def __init__(self, training: Training, mode: str) -> None:
        self.mode = mode
        self.training = training
        self.graphs = 0
        inductor = lookup_backend("inductor")

        def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            self.graphs += 1
            return inductor(graph, inputs)

        self._step: Callable[..., Tensor] = training.train_step
        if mode == "model":
            model = torch.compile(training.model, backend=counting, fullgraph=True)
            self._step = lambda pixels, digits: training.train_step(pixels, digits, model)
        elif mode == "whole-step":
            self._step = torch.compile(training.train_step, backend=counting, fullgraph=True)
        elif mode == "captured":
            self._step = co.CUDAGraphRunner(training.train_step, optimizers=training.optimizer)

    def __call__(self, batch: Images) -> float:
        """Take one step and return its loss."""
        with tracing_backward():
            return self._step(*batch).item()


@contextlib.contextmanager
def tracing_backward() -> Iterator[None]:
    """Let Dynamo trace ``loss.backward()``, which it does not by default."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


@dataclass(frozen=True)
class ModeResult:
    """One mode in the comparison; ``seconds`` is the median time of a step, ``first`` that of the first one.

    Attributes:
        graphs: graphs that torch.compile made.
        kernels: kernels that were compiled for the optimizer.
        recompiles: how many of either after the first step.
        captures: CUDA graphs captured.
    """

    mode: str
    first: float
    seconds: float
    graphs: int
    kernels: int
    recompiles: int
    captures: int


@dataclass
class _Entrant:
    stepper: Stepper
    taken: list[float] = field(default_factory=list)
    graphs_at_first: int = 0


def compare(batches: Sequence[Images], modes: Sequence[str] = MODES) -> list[ModeResult]:
    """Train a new model in each of ``modes`` on the same ``batches``, taking turns; the learning rate moves all along."""
    entrants = [_Entrant(Stepper(Training(len(batches)), mode)) for mode in modes]
    for turn, batch in enumerate(batches):
        for entrant in entrants[turn % len(entrants) :] + entrants[: turn % len(entrants)]:
            started = time.perf_counter()
            entrant.stepper(batch)
            entrant.taken.append(time.perf_counter() - started)
            entrant.stepper.training.scheduler.step()
            if turn == 0:
                entrant.graphs_at_first = entrant.stepper.graphs
    return [_result(entrant) for entrant in entrants]


def _result(entrant: _Entrant) -> ModeResult:
    stepper = entrant.stepper
    report = co.compile_report(stepper.training.optimizer)
    return ModeResult(
        mode=stepper.mode,
        first=entrant.taken[0],
        seconds=median(entrant.taken[WARM_UP_STEPS:]),
        graphs=stepper.graphs,
        kernels=report.compiles,
        recompiles=stepper.graphs - entrant.graphs_at_first + report.recompiles,
        captures=len(report.captures),
    )
