"""Device work that is recorded once and then replayed: the CUDA graph, behind a protocol that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    """Work of one device that can be repeated without its Python."""

    def warm_up(self, work: Callable[[], T]) -> T:
        """Do ``work`` once, where :meth:`capture` is going to record it."""

    def capture(self, work: Callable[[], T]) -> T:
        """Record ``work`` without doing it. What it returns is written by every replay."""

    def replay(self) -> None:
        """Do what was recorded, with the addresses it had then."""

    def release(self) -> None:
        """Let go of what was recorded and of its memory."""


class CudaGraph:
    """A CUDA graph, recorded on a stream of its own and replayed on the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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
        """Record ``work``; other threads, such as NCCL's watchdog, may go on calling CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),  # a capture that fails leaves its own behind
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        self._graph = graph
        return result

    def replay(self) -> None:
        """Do what was recorded, after what the current stream did."""
        assert self._graph is not None
        self._graph.replay()

    def release(self) -> None:
        """Free the graph; tensors that live in its memory stay valid for as long as somebody holds them."""
        if self._graph is not None:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self._device)  # a replay may still be using the memory
            self._graph.reset()
            self._graph = None


GRAPHS: dict[str, Callable[[torch.device], Graph]] = {"cuda": CudaGraph}
"""By device type, what captures work there; a device that is not here has no graphs."""
