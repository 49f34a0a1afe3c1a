"""The launches of an optimizer's step as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compiled_optim.capture.run import Run, graph_of
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.step.engine import Engine
from compiled_optim.step.step import Step


class StepRun(Run):
    """The launches of one optimizer's step."""

    alone = True

    def __init__(self, optimizer: CompiledOptimizer, warmup: int, recaptures: int, stream: torch.Stream | None) -> None:
        self.optimizer = optimizer
        self._key: tuple[object, ...] = ()  # of the graph, or of the last launch where there is none
        super().__init__([optimizer], warmup, recaptures, stream)

    def step(self, closure: Callable[[], Any] | None, scaler: dict[str, Any]) -> Any:
        """One step with its launches replayed; ``scaler`` is what a gradient scaler handed over."""
        for name, value in scaler.items():
            setattr(self.optimizer, name, value)
        try:
            self._engine.launcher = self._launch
            return self.optimizer.step(closure)
        finally:
            self._engine.launcher = None
            for name in scaler:
                delattr(self.optimizer, name)

    @property
    def _engine(self) -> Engine:
        return self._engines[0]

    def _launch(self, step: Step, closure: Callable[[], Any] | None) -> Any:
        """In place of ``step.launch``, after ``prepare``."""
        if not self._captured and self._moved():
            self._follow_device()
        if self._graph is None:
            return step.launch(closure)
        part = graph_of(step)
        key = part.key()
        if self._captured and key != self._key:
            self._drop(self._explain())
        if not self._captured and not self._follow_device():
            self._pending = max(self._pending, 1)
        if self._graph is None or self._pending or key != self._key:
            step.launch()  # also loads what a capture could not
            self._pending = max(self._pending - 1, 0)
            self._key = key
            return None
        part.copy_gradients()
        if not self._captured:
            self._graph.capture(step.launch)
            self._note_capture()
        self._graph.replay()
        self._engine.holdings.log.replays += 1
        return None
