"""What the CUDA graph asks of torch, in which order: torch.cuda is replaced by stand-ins that fail as it does."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
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


class Workspaces:
    """The memory that cuBLAS works in, as torch hands it out.

    Attributes:
        are_cached: whether the process has one for each stream; else each call takes its own.
        error: of the next captured product.
        used: by the products of each capture, in order.
    """

    def __init__(self, cuda: Cuda, *, are_cached: bool) -> None:
        self._cuda, self.are_cached = cuda, are_cached
        self.error: Exception | None = None
        self._map: dict[Stream, SimpleNamespace] = {}
        self.used: list[SimpleNamespace] = []

    def product(self, *, by_an_extension: bool = False) -> None:
        """Multiply on the current stream, or on the one that is being captured; an extension takes what is cached."""
        stream = next(iter(self._cuda.capturing), self._cuda.current)
        made = SimpleNamespace(pool=next(iter(self._cuda.recording), None), is_freed=False)
        memory = self._map.setdefault(stream, made) if self.are_cached or by_an_extension else made
        if self._cuda.recording:
            self.used.append(memory)
        if self.error is not None and self._cuda.recording:
            raise self.error

    def clear(self) -> None:
        """Forget what the process has; the pool of a graph keeps its memory."""
        for memory in self._map.values():
            memory.is_freed = memory.pool is None
        self._map.clear()


TORCHES = {
    "2.11": ("2.11.0+cu130", None, None, True),
    "2.14": ("2.14.1", None, None, True),
    "2.14, told not to cache": ("2.14.1", "0", None, True),
    "2.15": ("2.15.0", None, None, False),
    "nightly": ("2.15.0a0+git1234", None, None, False),
    "3.0": ("3.0.0", "0", None, False),
    "2.15, told to cache": ("2.15.0", "1", None, True),
    "2.15, ROCm": ("2.15.0", None, "7.2", True),
    "2.15, ROCm, told not to cache": ("2.15.0", "0", "7.2", False),
}
"""By name: version, what the variable says, ROCm's version, and whether workspaces are the process's."""


@pytest.fixture(params=TORCHES)
def workspaces(request: pytest.FixtureRequest, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Workspaces:
    version, told, hip, cached = TORCHES[request.param]
    workspaces = Workspaces(cuda, are_cached=cached)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces.clear, raising=False)
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    if told is not None:
        monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", told)
    return workspaces


@pytest.mark.quick
@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_has_workspaces_of_its_own(fails: bool, workspaces: Workspaces) -> None:
    """Whatever torch.compile frees before it captures, and whatever is captured next."""
    graphs = [CudaGraph(DEVICE) for _ in range(2)]
    for graph in graphs:
        graph.warm_up(workspaces.product)
        workspaces.error = KeyError() if fails and graph is graphs[0] else None
        with contextlib.suppress(KeyError):
            graph.capture(workspaces.product)
        workspaces.error = None
        graph.warm_up(workspaces.product)  # outside of the graph's memory
        workspaces.clear()
    assert [memory.pool for memory in workspaces.used] == [1, 2]
    assert not any(memory.is_freed for memory in workspaces.used)


@pytest.mark.quick
@pytest.mark.parametrize("by_an_extension", [False, True])
def test_a_graph_of_others_keeps_its_workspaces_where_each_call_has_its_own(
    by_an_extension: bool, workspaces: Workspaces, cuda: Cuda
) -> None:
    """Where they are the process's, a capture frees those that somebody's graph uses, as this package's README says."""
    stream, theirs = Stream(), cuda.CUDAGraph()
    with cuda.stream(stream):
        workspaces.product(by_an_extension=by_an_extension)
    with cuda.graph(theirs, stream=stream, capture_error_mode="thread_local", pool=9):
        workspaces.product(by_an_extension=by_an_extension)
    CudaGraph(DEVICE).capture(workspaces.product)
    assert [memory.is_freed for memory in workspaces.used] == [workspaces.are_cached, False]


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


class _Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([float(i) for i in range(97)])  # too many for code to name each


def test_dynamos_reset_frees_no_constant_that_a_graph_of_a_compiled_model_reads() -> None:
    """They belong to the code that was made, which stays in the process; a graph has their addresses alone."""

    def constants() -> list[torch.Tensor]:
        found = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (97,)]
        return [x for x in found if x.dtype == torch.float32 and float(x.detach()[-1]) == 96.0]

    model = torch.compile(_Scaled())
    assert float(model(torch.ones(97)).sum()) == 96 * 97 / 2
    gc.collect()
    before = {x.data_ptr() for x in constants()}
    torch._dynamo.reset()
    del model
    gc.collect()
    after = {x.data_ptr() for x in constants()}
    assert after
    assert after <= before
