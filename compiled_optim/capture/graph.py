"""CUDA graphs, and graphs of the launches of an optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch

from compiled_optim.groups.parameters import named_parameters
from compiled_optim.memory.torch_internals import abandon_capture, any_stream_captures, in_range, own_workspaces
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.plan.compilations import spend
from compiled_optim.step.step import STEP, Step

T = TypeVar("T")


class CudaGraph:
    """A CUDA graph, recorded on ``stream``, by default a new one of ``device``, and replayed on the current one.

    A replay uses the addresses of the capture.
    """

    _underway: ClassVar[list[object]] = []  # the current captures of this class, on all threads

    _postponed: ClassVar[list[tuple[torch.device, torch.cuda.CUDAGraph]]] = []
    """Graphs that were released while something was captured."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        elif not isinstance(stream, torch.cuda.Stream):
            raise TypeError(f"stream must be a torch.cuda.Stream, got {type(stream).__name__}")
        elif stream.device != device:
            raise ValueError(f"stream must be on {device}, where the parameters are, but is on {stream.device}")
        self._device = device
        self._stream = stream
        self._graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the stream of the capture, after earlier and before later work of the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return work()
        finally:
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], T]) -> T:
        """Record ``work`` without doing it, and return its result, which every replay writes.

        Other threads, such as NCCL's watchdog, may go on calling CUDA meanwhile.
        """
        self._free_postponed()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        self._underway.append(pool)
        try:
            with (
                torch.cuda.device(self._device),
                own_workspaces(),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),  # a failed capture leaves its own current
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = work()
        except BaseException:
            abandon_capture(graph, self._device, pool)
            raise
        finally:
            self._underway.remove(pool)
        self._graph = graph
        return result

    def replay(self) -> None:
        """Replay the recorded work, after earlier work of the current stream."""
        assert self._graph is not None
        in_range("replay", self._graph.replay)

    def release(self) -> None:
        """Free the graph; tensors in its memory stay valid as long as references to them exist.

        During a capture, freeing is postponed: waiting for the last replay would end that capture.
        """
        if self._graph is not None:
            self._postponed.append((self._device, self._graph))
            self._graph = None
            self._free_postponed()

    def _free_postponed(self) -> None:
        if self._underway or any_stream_captures():
            return
        postponed, self._postponed[:] = self._postponed[:], []
        for device, graph in postponed:
            torch.cuda.synchronize(device)  # a replay may still be using the memory
            graph.reset()


GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}
"""The classes of graphs by device type; other devices have no graphs."""


def graph_of(step: Step | None) -> Step:
    """Return ``step``; ``ValueError`` if no graph can hold it."""
    assert step is not None
    if step.refusal:
        raise ValueError(step.refusal)
    return step


def difference(before: Mapping[str, object], now: Mapping[str, object], rebuilt: str) -> str:
    """Return in words what differs between two keys of a step, which was ``rebuilt`` last for this reason; empty if nothing.

    See :meth:`Step.key`.
    """
    changes = ((name, before.get(name), now.get(name)) for name in {**before, **now})
    for name, old, new in changes:
        if old != new:
            if name == STEP:
                return rebuilt or "the step was rebuilt"
            return f"{name} {old} -> {new}" if isinstance(old, str) and isinstance(new, str) else f"{name} changed"
    return ""


class Run:
    """One graph, and the counts of its warm-ups and captures; the arguments are those of ``CUDAGraphRunner``."""

    alone: ClassVar[bool] = False  # whether the graph holds only a step

    def __init__(
        self, optimizers: Sequence[CompiledOptimizer], warmup: int, recaptures: int, stream: torch.Stream | None
    ) -> None:
        self.optimizers = list(optimizers)
        self._engines = [engine_of(o) for o in optimizers]
        self._stream = stream
        self._device = self._common_device()
        self._graph = self._new_graph(self._device)
        self._is_captured = False
        self._cause = ""  # of the next capture
        self._pending = warmup  # calls that run as usual before it
        self._recaptures = self._recaptures_left = recaptures

    def _common_device(self) -> torch.device:
        devices: dict[torch.device, str] = {
            param.device: name for engine in self._engines for name, param in named_parameters(engine.groups.listed)
        }
        if len(devices) != 1:
            examples = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
            raise ValueError(f"a graph holds work of one device; the parameters are on {len(devices)}: {examples}")
        return next(iter(devices))

    def _has_moved(self) -> bool:
        """Return whether the first parameter is on another device."""
        params = (param for o in self.optimizers for _, param in named_parameters(o.param_groups))
        return next((param.device for param in params), self._device) != self._device

    def _follow_device(self) -> None:
        """Make a graph on the parameters' device, if that changed; ``ValueError``, and no change, if none can hold steps."""
        if (device := self._common_device()) != self._device:
            self._graph, self._device = self._new_graph(device), device

    def _new_graph(self, device: torch.device) -> CudaGraph | None:
        make = GRAPHS.get(device.type)
        for engine in self._engines:
            if make is None:
                engine.log.fall_back(
                    f"CUDAGraphRunner runs {engine.kind.__name__} uncaptured: {device.type} has no CUDA graphs",
                    "use it for parameters on CUDA",
                )
            elif (refusal := graph_of(engine.current()).only_whole) and self.alone:
                raise ValueError(refusal)
        if make is None:
            return None
        graph = make(device, self._stream)
        weakref.finalize(self, graph.release)
        return graph

    def _drop(self, cause: str) -> None:
        """Release the stale graph; a later call captures again. An error, and no change, if that is not allowed."""
        stale = self._graph
        assert stale is not None
        if self._recaptures_left == 0:
            raise RuntimeError(
                f"CUDAGraphRunner would capture its graph again, after {self._recaptures} times: {cause}; "
                "avoid this change between calls, or pass a larger recaptures="
            )
        self._common_device()
        spend(f"CUDAGraphRunner would capture its graph again: {cause}")
        self._follow_device()
        self._recaptures_left -= 1
        self._cause, self._pending, self._is_captured = cause, 1, False
        stale.release()

    def _note_capture(self) -> None:
        self._is_captured = True
        for engine in self._engines:
            engine.log.captures.append(self._cause)

    def release(self) -> None:
        """Free the graph. Then the run can only end a current step."""
        self._is_captured = False
        if self._graph is not None:
            self._graph.release()


class StepRun(Run):
    """The launches of one optimizer's step."""

    alone = True

    _key: Mapping[str, object] = MappingProxyType({})  # of the graph, or of the last launch where there is none

    def step(self, closure: Callable[[], Any] | None, scaler: dict[str, Any]) -> Any:
        """Take one step, with its launches replayed; ``scaler`` has attributes that a gradient scaler set."""
        (engine,), (optimizer,) = self._engines, self.optimizers
        for name, value in scaler.items():
            setattr(optimizer, name, value)
        try:
            engine.launcher = self._launch
            return optimizer.step(closure)
        finally:
            engine.launcher = None
            for name in scaler:
                delattr(optimizer, name)

    def _launch(self, step: Step, closure: Callable[[], Any] | None) -> Any:
        """Do as ``step.launch``, after ``prepare``, with the graph."""
        is_captured = self._is_captured
        if not is_captured and (self._graph is not None or self._has_moved()):
            self._follow_device()
        if self._graph is None:
            return step.launch(closure)
        part = graph_of(step)
        key = part.key()
        if is_captured and key != self._key:
            self._drop(difference(self._key, key, self._engines[0].log.rebuilt))
        if self._graph is None or self._pending or key != self._key:
            step.launch()  # this also loads kernels, which a capture cannot
            self._pending = max(self._pending - 1, 0)
            self._key = key
            return None
        part.copy_gradients()
        if not is_captured:
            self._graph.capture(step.launch)
            self._note_capture()
        self._graph.replay()
        self._engines[0].log.replays += 1
        return None
