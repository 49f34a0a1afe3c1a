"""A device on the CPU whose streams do their work in no order but the one that waits give it.

Work is done at once, in the order in which it is handed over. What is found is what could go wrong on a real device, where
two streams run at their own speed: work that touches memory which work of another stream writes, without having waited for
it; memory that is given out anew while another stream may still use it, as torch's allocator does on the stream on which it
was made; work on another device than its memory; a host that waits in a capture. Vector clocks say what has waited for what.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simulated_graph
import torch
from simulated_graph import RecordedKernel, SimulatedGraph
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_optim.capture import graph as graphs
from compiled_optim.lowering import coefficients
from compiled_optim.lowering.kernels import cpp, triton
from compiled_optim.lowering.kernels.table import BUFFERS, PARAM, Kernel
from compiled_optim.memory import addresses


class Fault(AssertionError):
    """What would go wrong on a real device, sometimes."""


class Stream:
    """One of a device's streams.

    Attributes:
        clock: by stream, how much of its work is done before what is handed over here next.
    """

    def __init__(self, device: torch.device | int | None = None) -> None:
        simulated = SimulatedDevice.installed()
        self.device = torch.device("cpu")
        self.index = simulated.index_of(device)
        self.clock: dict[Stream, int] = {}
        simulated.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        """Let what is handed over here later come after all that ``other`` has now."""
        for stream, done in other.clock.items():
            self.clock[stream] = max(done, self.clock.get(stream, 0))


Access = tuple[Stream, int]


@dataclass
class Memory:
    """What a storage was used for, last."""

    storage: StorageWeakRef
    size: int
    home: Stream | None  # where its memory is given out anew; None in the pool of a graph
    written: Access | None = None
    read: dict[Stream, int] = field(default_factory=dict)

    @property
    def accesses(self) -> list[Access]:
        return [*self.read.items(), *([self.written] if self.written else [])]


class SimulatedDevice(TorchDispatchMode):
    """The device, while it is entered: every tensor on the CPU that is made meanwhile lies on it.

    Args:
        index: of the device; the current one is 0 unless somebody enters another.
    """

    _installed: SimulatedDevice | None = None

    def __init__(self, index: int = 1) -> None:
        super().__init__()
        self.index = index
        self.streams: list[Stream] = []
        self._memory: dict[int, Memory] = {}  # by address
        self._given_back: dict[Stream, list[Access]] = {}
        self.current_index = 0
        SimulatedDevice._installed = self
        self._current = {i: Stream(i) for i in (0, index)}  # by device
        self.host = Stream(0)  # whose clock says what the host has waited for

    @classmethod
    def installed(cls) -> SimulatedDevice:
        assert cls._installed is not None
        return cls._installed

    def index_of(self, device: torch.device | int | None) -> int:
        if device is None:
            return self.current_index
        return device if isinstance(device, int) else self.index

    def current_stream(self, device: torch.device | int | None = None) -> Stream:
        return self._current[self.index_of(device)]

    def device(self, device: torch.device | int) -> _Current:
        """As ``torch.cuda.device``."""
        return _Current(self, self.index_of(device))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """As ``torch.cuda.stream``."""
        before = self._current[stream.index]
        with self.device(stream.index):
            self._current[stream.index] = stream
            try:
                yield
            finally:
                self._current[stream.index] = before

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Let the host wait for all work."""
        self._let_host_wait(self.streams)

    def _let_host_wait(self, streams: Sequence[Stream]) -> None:
        if SimulatedGraph.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        for stream in streams:
            self.host.wait_stream(stream)
        for stream in self.streams:
            stream.wait_stream(self.host)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        names = [a.name for a in func._schema.arguments][: len(args)] + list(kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        inputs = [(x, name in written) for name, value in zip(names, values, strict=True) for x in pieces(value)]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # of numbers that the host hands over
            inputs = []
        elif func.is_view:
            return result
        known = {address(x) for x, _ in inputs}
        made = [x for x in pieces(result) if address(x) not in known]
        if made:
            self.sweep()
        for x in made:
            self._give_out(x)
        if not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.run([x for x, _ in inputs], [x for x, writes in inputs if writes] + made, self._current[self.index])
        if func is torch.ops.aten._local_scalar_dense.default:
            self._let_host_wait([self._current[self.index]])
        return result

    def run(self, reads: Sequence[Tensor | int], writes: Sequence[Tensor | int], stream: Stream) -> None:
        """Hand work over that reads and writes memory, given by a tensor or an address.

        Raises:
            Fault: it may find there what other work is writing, or it is on another device.
        """
        if SimulatedGraph.recording is not None:
            return
        if stream.index != self.index:
            raise Fault(f"work on device {stream.index} with memory of device {self.index}")
        now = stream.clock[stream] = stream.clock.get(stream, 0) + 1
        starts = sorted(self._memory) if any(isinstance(place, int) for place in reads) else []
        for place in reads:
            memory = self._of(place, starts)
            if memory is not None:
                self._check(stream, [memory.written] if memory.written else [], "reads what another stream writes")
                memory.read[stream] = now
        for place in writes:
            memory = self._of(place, starts)
            if memory is not None:
                self._check(stream, memory.accesses, "writes what another stream uses")
                memory.written, memory.read = (stream, now), {}

    def _of(self, place: Tensor | int, starts: Sequence[int]) -> Memory | None:
        if isinstance(place, Tensor):
            return self._memory.get(address(place))
        start = starts[bisect.bisect_right(starts, place) - 1]
        memory = self._memory[start]
        if not start <= place < start + memory.size:
            raise Fault("a kernel uses memory that was freed")
        return memory

    def _check(self, stream: Stream, accesses: Sequence[Access], what: str) -> None:
        for other, when in accesses:
            if stream.clock.get(other, 0) < when:
                raise Fault(f"a stream {what}, without waiting for it")

    def _give_out(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        home = None
        if SimulatedGraph.recording is None:
            home = self._current[self.index]
            self._check(home, self._given_back.pop(home, []), "is given memory that another stream uses")
        if storage.nbytes():
            self._memory[storage.data_ptr()] = Memory(StorageWeakRef(storage), storage.nbytes(), home)

    def sweep(self) -> None:
        """Note which memory was freed."""
        for start, memory in [(s, m) for s, m in self._memory.items() if m.storage.expired()]:
            del self._memory[start]
            if memory.home is not None:
                self._given_back.setdefault(memory.home, []).extend(memory.accesses)


class _Current:
    """Makes a device the current one, as often as it is entered."""

    def __init__(self, simulated: SimulatedDevice, index: int) -> None:
        self._simulated, self._index = simulated, index
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(self._simulated.current_index)
        self._simulated.current_index = self._index

    def __exit__(self, *error: object) -> None:
        self._simulated.current_index = self._before.pop()


def pieces(tree: Any) -> list[Tensor]:
    """The tensors in ``tree``, of sparse ones what they consist of."""
    return simulated_graph._pieces(tree)


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Kernel:
    """A multi-tensor kernel, which finds the addresses of most that it uses in a table."""

    def __init__(self, kernel: Kernel, device: SimulatedDevice) -> None:
        self._kernel = kernel
        self._device = device
        self.block, self.reduce_block = kernel.block, kernel.reduce_block
        self.most_sums = kernel.most_sums
        self.drawback = kernel.drawback

    def measure(self, table: Any) -> None:
        reads = [table.tensors, table.grads, table.reduce_blocks, *filter(None, table.grads.tolist())]
        self._run(reads, [table.square_sums])
        self._kernel.measure(table)

    def evaluate(self, coefficients: Any) -> None:
        self._run(*self._evaluated(coefficients))
        self._kernel.evaluate(coefficients)

    def average(self, stage: int, table: Any, coefficients: Any) -> None:
        reads, read_too = self._updated(table, coefficients)
        self._run([*reads, *read_too, table.ranges], [table.sums, coefficients.coefficients])
        self._kernel.average(stage, table, coefficients)

    def update(self, table: Any, coefficients: Any) -> None:
        self._run(*self._updated(table, coefficients))
        self._kernel.update(table, coefficients)

    def step(self, table: Any, coefficients: Any) -> None:
        evaluated, updated = self._evaluated(coefficients), self._updated(table, coefficients)
        self._run([*evaluated[0], *updated[0]], [*evaluated[1], *updated[1]])
        self._kernel.step(table, coefficients)

    @staticmethod
    def _evaluated(table: Any) -> tuple[list[Any], list[Any]]:
        """What ``evaluate`` reads and what it writes."""
        marks = table.grads
        scalars = table.scalars[:, marks != 0]
        reads = [table.inputs, marks, table.hypers, table.all_square_sums, *filter(None, table.hypers.tolist())]
        return reads, [table.coefficients, table.outcome, *scalars.flatten().tolist()]

    @staticmethod
    def _updated(table: Any, coefficients: Any) -> tuple[list[Any], list[Any]]:
        """What ``update`` reads and what it writes."""
        present = table.tensors[:, table.grads != 0]
        written = [*present[PARAM].tolist(), *present[BUFFERS:].flatten().tolist()]
        reads = [table.tensors, table.grads, table.blocks, coefficients.coefficients, coefficients.outcome]
        return [*reads, *filter(None, table.grads.tolist())], [*filter(None, written)]

    def _run(self, reads: Sequence[Tensor | int], writes: Sequence[Tensor | int]) -> None:
        self._device.sweep()
        self._device.run(reads, writes, self._device.current_stream())


class _Graph:
    """A ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.simulated = SimulatedGraph(torch.device("cpu"))
        self._replayed: Access | None = None

    def pool(self) -> int:
        if not self.simulated.captured:
            raise RuntimeError("nothing was captured")
        return 0

    def replay(self) -> None:
        device = SimulatedDevice.installed()
        with device.device(device.index):
            self.simulated.replay()
        stream = device.current_stream(device.index)
        self._replayed = (stream, stream.clock.get(stream, 0))

    def reset(self) -> None:
        if self._replayed is not None:
            stream, when = self._replayed
            if SimulatedDevice.installed().host.clock.get(stream, 0) < when:
                raise Fault("a graph is freed while a replay of it may be running")
        self.simulated.release()


class _Capture:
    """A ``torch.cuda.graph``."""

    default_capture_stream: Stream | None = None

    def __init__(
        self, graph: _Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = ""
    ) -> None:
        self._graph, self._stream = graph, stream or Stream()

    def __enter__(self) -> None:
        device = SimulatedDevice.installed()
        device.synchronize()
        self._exits = contextlib.ExitStack()
        self._exits.enter_context(device.stream(self._stream))
        self._exits.enter_context(self._graph.simulated.capturing())

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)


@contextlib.contextmanager
def simulated_device(patch: Any) -> Iterator[SimulatedDevice]:
    """Let the CPU be such a device, with the package's own CUDA graphs, inside and while ``patch`` lasts."""
    device = SimulatedDevice()
    addresses.reader()  # which looks once at tensors that such a device does not have
    simulated_graph.install(patch)
    stand_ins = {
        "CUDAGraph": _Graph,
        "Stream": Stream,
        "current_stream": device.current_stream,
        "device": device.device,
        "graph": _Capture,
        "graph_pool_handle": lambda: 0,
        "is_current_stream_capturing": lambda: SimulatedGraph.recording is not None,
        "stream": device.stream,
        "synchronize": device.synchronize,
    }
    for name, stand_in in stand_ins.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setitem(graphs.GRAPHS, "cpu", graphs.CudaGraph)
    for module in (coefficients, triton):
        patch.setattr(module, "current_device", device.device)
    patch.setitem(coefficients.BACKENDS, "cpu", lambda s: RecordedKernel(_Kernel(cpp.CppKernel(s), device)))
    with device:
        yield device
