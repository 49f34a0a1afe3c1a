"""What the CUDA graph asks of torch, in which order: torch.cuda is replaced by stand-ins that fail as it does."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compiled_optim.capture.graph import CudaGraph
from compiled_optim.memory import torch_internals

DEVICE = torch.device("cuda", 1)


class Stream:
    """Of CUDA."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        pass


class Cuda:
    """Torch's part that captures, and what it is asked.

    Attributes:
        recording: the pools that memory is given out from, as the allocator knows; while there is one, no capture begins.
        repaired: whether the end of a capture that fails leaves the allocator as it was.
    """

    def __init__(self, repaired: bool) -> None:
        self.repaired = repaired
        self.recording: list[int] = []
        self.released: list[int] = []
        self.invalid = False
        self.capturing: set[Stream] = set()
        self.current = Stream()
        self.calls: list[str] = []
        cuda = self

        class Graph:
            def __init__(self) -> None:
                self.captured = 0

            def pool(self) -> int:
                if not self.captured:
                    raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
                return self.captured

            def replay(self) -> None:
                cuda.calls.append("replay")

            def reset(self) -> None:
                cuda.calls.append("reset")

        class Capture:
            default_capture_stream: Stream | None = None

            def __init__(self, graph: Graph, stream: Stream, capture_error_mode: str, pool: int = 0) -> None:
                assert capture_error_mode == "thread_local"
                self.graph, self.pool, self.stream = graph, pool, stream

            def __enter__(self) -> None:
                if cuda.recording:
                    raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
                cuda.recording.append(self.pool)
                cuda.capturing.add(self.stream)

            def __exit__(self, *error: object) -> None:
                cuda.capturing.remove(self.stream)
                if cuda.repaired or not cuda.invalid:
                    cuda.recording.remove(self.pool)
                if cuda.invalid:
                    cuda.invalid = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                self.graph.captured = self.pool

        self.CUDAGraph, self.graph = Graph, Capture

    def install(self, patch: pytest.MonkeyPatch) -> None:
        pools = iter(range(1, 100))
        for name, stand_in in {
            "CUDAGraph": self.CUDAGraph,
            "graph": self.graph,
            "graph_pool_handle": lambda: next(pools),
            "Stream": Stream,
            "current_stream": lambda device=None: self.current,
            "stream": self.stream,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device: self.calls.append("synchronize"),
            "is_current_stream_capturing": lambda: self.current in self.capturing,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release_pool, raising=False)
        patch.setattr(torch_internals, "_ABANDONED", [])

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def end_allocation(self, device: int, pool: int) -> None:
        assert device == 1
        self.calls.append("end")
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release_pool(self, device: int, pool: int) -> None:
        assert device == 1
        self.calls.append("release")

    def fail(self) -> None:
        self.invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(params=[False, True], ids=["2.11", "later"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda(request.param)
    cuda.install(monkeypatch)
    return cuda


def stop() -> None:
    raise KeyError("in Python")


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_has_workspaces_of_its_own(fails: bool, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS takes its memory again in the capture, and after it."""
    clear = lambda: cuda.calls.append(f"clear, {len(cuda.recording)} recording")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)

    def work() -> None:
        cuda.calls.append("work")
        if fails:
            stop()

    with contextlib.suppress(KeyError):
        CudaGraph(DEVICE).capture(work)
    assert [call for call in cuda.calls if "clear" in call or call == "work"] == [
        "clear, 0 recording",
        "work",
        "clear, 0 recording",
    ]


def test_after_a_capture_that_cuda_ended_another_can_begin(cuda: Cuda) -> None:
    graph = CudaGraph(DEVICE)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graph.capture(cuda.fail)
    assert cuda.calls == (["end"] if cuda.repaired else ["end", "release"])
    assert cuda.recording == []
    gc.collect()
    assert len(torch_internals._ABANDONED) == 1  # the allocator may still ask it
    assert graph.capture(lambda: 3) == 3
    graph.replay()
    assert len(torch_internals._ABANDONED) == 1


def test_an_error_in_python_ends_the_capture_as_usual(cuda: Cuda) -> None:
    """Nothing is ended twice, and the graph goes."""
    made: list[Any] = []
    original = cuda.CUDAGraph.__init__

    def init(graph: Any) -> None:
        made.append(weakref.ref(graph))
        original(graph)

    cuda.CUDAGraph.__init__ = init  # type: ignore[method-assign]
    graph = CudaGraph(DEVICE)
    with pytest.raises(KeyError):
        graph.capture(stop)
    assert cuda.calls == []
    gc.collect()
    assert made[0]() is None
    assert graph.capture(lambda: 3) == 3


def test_the_stream_is_the_one_that_was_given(cuda: Cuda) -> None:
    stream = Stream()
    graph = CudaGraph(DEVICE, stream)  # type: ignore[arg-type]
    seen: list[Stream] = []
    graph.warm_up(lambda: seen.append(cuda.current))
    graph.capture(lambda: seen.extend(cuda.capturing))
    assert seen == [stream] * 2


def test_a_stream_that_is_none_or_elsewhere_is_refused(cuda: Cuda) -> None:
    with pytest.raises(TypeError, match=r"stream must be a torch\.cuda\.Stream, got int"):
        CudaGraph(DEVICE, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stream must be on cuda:1, where the parameters are, but is on cuda:0"):
        CudaGraph(DEVICE, Stream(torch.device("cuda", 0)))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["own", "current", "default"])
def test_a_graph_that_is_released_while_another_is_captured_waits_for_nothing(where: str, cuda: Cuda) -> None:
    """To wait would end that capture. It is freed with the next one."""
    graph, other = CudaGraph(DEVICE), CudaGraph(DEVICE)
    graph.capture(lambda: None)
    if where == "own":
        other.capture(graph.release)
    else:
        cuda.graph.default_capture_stream = Stream()
        captured = cuda.current if where == "current" else cuda.graph.default_capture_stream
        cuda.capturing.add(captured)
        graph.release()
        cuda.capturing.clear()
    assert cuda.calls == []
    graph.release()
    assert cuda.calls == []
    other.capture(lambda: None)
    assert cuda.calls == ["synchronize", "reset"]


def test_released_graphs_are_freed_once(cuda: Cuda) -> None:
    graph = CudaGraph(DEVICE)
    graph.capture(lambda: None)
    graph.release()
    graph.release()
    assert cuda.calls == ["synchronize", "reset"]
