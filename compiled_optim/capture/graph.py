"""Device work that is recorded once and then replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch

from compiled_optim.memory.torch_internals import abandon_capture, any_stream_captures

T = TypeVar("T")


class CudaGraph:
    """A CUDA graph, recorded on ``stream``, by default a new one of ``device``, and replayed on the current one.

    A replay uses the addresses that the capture found.
    """

    _underway: ClassVar[list[object]] = []  # the captures of this class that are going on, on all threads

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
        """Do ``work`` on the stream of the capture, between what the current stream did and will do."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return work()
        finally:
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], T]) -> T:
        """Record ``work`` without doing it, and return what it returns, which every replay writes.

        Other threads, such as NCCL's watchdog, may go on calling CUDA meanwhile.
        """
        self._free_postponed()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        self._underway.append(pool)
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),  # a capture that fails leaves its own behind
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
        """Do what was recorded, after what the current stream did."""
        assert self._graph is not None
        self._graph.replay()

    def release(self) -> None:
        """Free the graph; tensors that live in its memory stay valid for as long as somebody holds them.

        While something is captured it is not freed yet, since to wait for its last replay would end that capture.
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
"""By device type, what captures work there; a device that is not here has no graphs."""
