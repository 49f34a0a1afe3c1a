"""The launches of an optimizer's step as a graph, and what it shares with a whole training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from compiled_optim.capture.graph import GRAPHS, Graph
from compiled_optim.capture.guards import described, differences
from compiled_optim.groups.parameters import named_parameters
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.plan.compilations import spend
from compiled_optim.step.engine import Engine
from compiled_optim.step.step import Step


def graph_of(step: Step | None) -> Step:
    """``step``, or a ``ValueError`` where no graph can hold it."""
    assert step is not None
    if step.refusal:
        raise ValueError(step.refusal)
    return step


class Slot:
    """Where a runner's graph is: apart from everything that may lead back to the runner and keep it alive."""

    graph: Graph | None = None

    def release(self) -> None:
        """Free the graph."""
        if self.graph is not None:
            self.graph.release()


class Run:
    """One graph, and when it may be captured; the arguments are those of ``CUDAGraphRunner``."""

    alone: ClassVar[bool]  # whether the graph holds a step and nothing else

    def __init__(
        self, optimizers: Sequence[CompiledOptimizer], warmup: int, recaptures: int, stream: torch.Stream | None
    ) -> None:
        self._optimizers = list(optimizers)
        self._engines = [engine_of(o) for o in optimizers]
        self._stream = stream
        self.slot = Slot()
        self.device = self._common_device()
        self.slot.graph = self._new_graph()
        self._captured = False
        self._facts: list[dict[str, str]] = []
        self._cause = ""
        self._pending = warmup
        self._recaptures = self._left = recaptures
        self.released = False

    @property
    def _graph(self) -> Graph | None:
        return self.slot.graph

    def _common_device(self) -> torch.device:
        placed: dict[torch.device, str] = {
            param.device: name for o in self._optimizers for name, param in named_parameters(o.param_groups)
        }
        if len(placed) != 1:
            where = ", ".join(f"'{name}' on {device}" for device, name in placed.items())
            raise ValueError(f"a graph holds work of one device; the parameters are on {len(placed)}: {where}")
        return next(iter(placed))

    def _moved(self) -> bool:
        return next((p.device for engine in self._engines for p in engine.params), self.device) != self.device

    def _follow_device(self) -> bool:
        """Go to where the parameters are; whether they were there already. ``ValueError`` if no graph can hold steps."""
        device = self._common_device()
        if device == self.device:
            return True
        before, self.device = self.device, device
        try:
            self.slot.graph = self._new_graph()
        except ValueError:
            self.device = before
            raise
        return False

    def _new_graph(self) -> Graph | None:
        if (make := GRAPHS.get(self.device.type)) is None:
            for engine in self._engines:
                name = engine.kind.__name__
                engine.log.fall_back(
                    f"CUDAGraphRunner runs {name} uncaptured: {self.device.type} has no CUDA graphs",
                    "use it for parameters on CUDA",
                )
            return None
        for engine in self._engines:
            graph = graph_of(engine.current())
            if self.alone and graph.only_whole:
                raise ValueError(graph.only_whole)
        return make(self.device, self._stream)

    def _drop(self, cause: str) -> None:
        """Let go of the stale graph; the next call captures again. An error, and no change, where that is not allowed."""
        stale = self._graph
        assert stale is not None
        if self._left == 0:
            raise RuntimeError(
                f"CUDAGraphRunner would capture its graph again, after {self._recaptures} times: {cause}; "
                "keep that as it is between calls, or allow more recaptures"
            )
        self._common_device()
        spend(f"CUDAGraphRunner would capture its graph again: {cause}")
        self._follow_device()
        self._left -= 1
        self._cause = cause
        self._pending = 1
        self._captured = False
        stale.release()

    def _note_capture(self) -> None:
        self._captured = True
        self._facts = [described(o) for o in self._optimizers]
        for engine in self._engines:
            engine.log.captures.append(self._cause)

    def _explain(self) -> str:
        for optimizer, facts in zip(self._optimizers, self._facts, strict=True):
            if found := differences(facts, described(optimizer)):
                return found
        return "tables were made anew"

    def release(self) -> None:
        self.released = True
        self._captured = False
        self.slot.release()


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
        self._engine.log.replays += 1
        return None
