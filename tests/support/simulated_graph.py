"""A CUDA graph on the CPU: device work is recorded with the memory it had, and done again by a replay.

Torch operations are recorded by a dispatch mode, the package's kernels by wrappers that keep what they are called with.
As on a GPU, a capture changes nothing, Python runs once, and what a replay reads and writes is where it was in the capture:
a parameter that got other memory, a gradient that is a new tensor or an assigned hyperparameter are not seen by it. Memory
that was made in a capture holds nothing of use before the first replay, and a replay of memory that nobody else keeps fails.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from compiled_optim.capture import graph as graphs
from compiled_optim.lowering import coefficients, stack_code, stack_loops
from compiled_optim.lowering.kernels import cpp, triton
from compiled_optim.lowering.kernels.table import Kernel, Launches
from compiled_optim.lowering.stack_loops import LoopKernels, Loops
from compiled_optim.memory import torch_internals
from compiled_optim.memory.torch_compiler import ListFunction
from compiled_optim.memory.torch_internals import wraps_others
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.step import traced

_COEFFICIENTS = ("inputs", "hypers", "coefficients", "all_square_sums", "outcome")
_TENSORS = ("tensors", "grads", "blocks", "reduce_blocks", "square_sums", "ranges", "sums", "output_ranges", "totals")


def _pieces(tree: Any) -> list[Tensor]:
    """The tensors in ``tree`` that have memory; of sparse ones the indices and the values."""
    found = [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor) and not wraps_others(x)]
    return [piece for x in found for piece in ((x._indices(), x._values()) if x.is_sparse else (x,))]


def own_operator(func: Any) -> Callable[..., None] | None:
    """What runs an operator of the package, whose work is what it launches; None of another one."""
    namespace, _, name = func.name().partition("::")
    return traced.OPERATORS[name] if namespace == "compiled_optim" else None


class SimulatedGraph(TorchDispatchMode):
    """See the module's docstring."""

    recording: SimulatedGraph | None = None

    def __init__(self, device: torch.device, stream: object = None) -> None:
        super().__init__()
        assert device.type == "cpu"
        self._work: list[Callable[[], None]] = []
        self.nodes: list[str] = []  # the name of each piece of work
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: dict[int, Tensor] = {}
        self._found: dict[int, list[Tensor]] = {}
        self.captured = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Yes: what Dynamo compiled runs under it."""
        return True

    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    def capture(self, work: Callable[[], Any]) -> Any:
        with self.capturing():
            return work()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Record what happens inside."""
        self.release()
        random = torch.get_rng_state()
        SimulatedGraph.recording = self
        try:
            with self:
                yield
        finally:
            torch.set_rng_state(random)
            for memory, bytes_before in self._before.values():
                memory.untyped_storage().copy_(bytes_before.untyped_storage())
            self._before.clear()
            for made in self._made.values():
                made.untyped_storage().fill_(0xFF)  # NaN, or an address that is none
            SimulatedGraph.recording = None
        self.captured = True

    @property
    def is_empty(self) -> bool:
        """Whether a replay would do nothing."""
        return not self._work

    def replay(self) -> None:
        assert self.captured, "there is nothing to replay"
        for aliases in self._found.values():
            storage = aliases[0].untyped_storage()  # which counts as one more
            users = torch._C._storage_Use_Count(storage._cdata) - len(aliases) - 1
            assert users > 0, f"a replay uses memory that was freed, of {tuple(aliases[0].shape)}"
        with torch.no_grad():
            for work in self._work:
                work()

    def release(self) -> None:
        self._work, self.nodes, self._made, self._found, self.captured = [], [], {}, {}, False

    def record(self, name: str, work: Callable[[], None]) -> None:
        self._work.append(work)
        self.nodes.append(name)

    def hold(self, made: Sequence[Tensor]) -> None:
        """Take tensors that were made in the capture: the graph's own memory."""
        self._made |= {x.untyped_storage().data_ptr(): x for x in made}

    def where_it_is(self, x: Any) -> Any:
        """An alias that keeps its memory whatever happens to the tensor object."""
        if not isinstance(x, Tensor):
            return x
        alias = x.detach()
        for piece in _pieces(alias):
            at = piece.untyped_storage().data_ptr()
            if at and piece.dim() and at not in self._made:
                self._found.setdefault(at, []).append(piece)
        return alias

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if (operator := own_operator(func)) is not None:
            with self:
                return operator(*args)
        inputs = _pieces((args, kwargs))
        memory = {x.untyped_storage().data_ptr() for x in inputs}
        if func._schema.is_mutable:
            for x in inputs:
                at = x.untyped_storage().data_ptr()
                if at not in self._made and at not in self._before:
                    self._before[at] = (x.detach(), torch.empty(0).set_(x.untyped_storage().clone()))
        result = func(*args, **kwargs)
        outputs = [x.detach() for x in _pieces(result)]
        fresh = [x.untyped_storage().data_ptr() not in memory for x in outputs]
        self.hold([x for x, is_fresh in zip(outputs, fresh, strict=True) if is_fresh])
        if not func._schema.is_mutable and not any(fresh):
            return result  # a view
        if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            return result
        kept_args, kept_kwargs = tree_map(self.where_it_is, (args, kwargs))

        def again() -> None:
            new = _pieces(func(*kept_args, **kept_kwargs))
            for own, value, is_fresh in zip(outputs, new, fresh, strict=True):
                if is_fresh:
                    own.copy_(value)

        self.record(func._schema.name.removeprefix("aten::"), again)
        return result


class RecordedKernel:
    """A kernel whose launches a simulated graph records."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.block, self.reduce_block = kernel.block, kernel.reduce_block
        self.most_sums = kernel.most_sums
        self.drawback = kernel.drawback

    def measure(self, table: Any) -> None:
        self._run(self._kernel.measure, table)

    def evaluate(self, coefficients: Any) -> None:
        self._run(self._kernel.evaluate, coefficients)

    def average(self, stage: int, table: Any, coefficients: Any) -> None:
        self._run(functools.partial(self._kernel.average, stage), table, coefficients)

    def update(self, table: Any, coefficients: Any) -> None:
        self._run(self._kernel.update, table, coefficients)

    def total(self, table: Any, coefficients: Any) -> None:
        self._run(self._kernel.total, table, coefficients)

    def step(self, table: Any, coefficients: Any) -> None:
        self._run(self._kernel.step, table, coefficients)

    def _run(self, launch: Callable[..., None], *tables: Any) -> None:
        graph = SimulatedGraph.recording
        if graph is None:
            launch(*tables)
            return
        baked = [_baked(graph, table) for table in tables]
        graph.record("kernel", lambda: launch(*baked))


def _baked(graph: SimulatedGraph, table: Any) -> SimpleNamespace:
    """What a launch with ``table`` keeps of it."""
    fields = {name: getattr(table, name) for name in (*_COEFFICIENTS, *_TENSORS) if hasattr(table, name)}
    kept = SimpleNamespace(**{name: graph.where_it_is(tensor) for name, tensor in fields.items()}, launches=Launches())
    if hasattr(table, "inputs"):
        kept.leads, kept.scalars = table.leads, table.scalars
    else:
        kept.elements = table.elements
        kept.output_sums = [graph.where_it_is(tensor) for tensor in table.output_sums]
    return kept


class RecordedStackKernel:
    """A kernel of Inductor's, whose results a simulated graph makes anew in every replay."""

    def __init__(self, kernel: ListFunction) -> None:
        self._kernel = kernel

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        graph = SimulatedGraph.recording
        if graph is None:
            return self._kernel(tensors)
        kept = [graph.where_it_is(t) for t in tensors]
        with _disable_current_modes():
            results = self._kernel(kept)
        graph.hold(results)

        def again() -> None:
            torch._foreach_copy_(list(results), list(self._kernel(kept)))

        graph.record("stack", again)
        return results


class RecordedLoops:
    """Loops over a stack, whose runs a simulated graph records."""

    def __init__(self, loops: LoopKernels) -> None:
        self._loops = loops

    def run(self, arguments: Mapping[str, Tensor], columns: int) -> None:
        graph = SimulatedGraph.recording
        if graph is None:
            with _disable_current_modes():  # each thread keeps the memory of C++ loops
                self._loops.run(arguments, columns)
            return
        kept = {name: graph.where_it_is(tensor) for name, tensor in arguments.items()}
        graph.record("loops", lambda: self._loops.run(kept, columns))


def _recorded(loops: Loops) -> Loops:
    def kernels_of(key: KernelKey) -> Callable[[Sequence[int]], RecordedLoops]:
        of_shape = loops.kernels_of(key)
        return lambda shape: RecordedLoops(of_shape(shape))

    return loops._replace(kernels_of=kernels_of)


_stack_kernels: dict[KernelKey, ListFunction] = {}  # kept from test to test, since they take seconds to compile


def _build(signature: KernelKey) -> Kernel:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return RecordedKernel(triton.TritonKernel(signature) if interpreted else cpp.CppKernel(signature))


def recording_here() -> SimulatedGraph | None:
    """The graph that records this thread: any that works on the stream of the capture, and none that works beside it."""
    beside = threading.current_thread().name.startswith(torch_internals.BESIDE_GRAPHS)
    return None if beside else SimulatedGraph.recording


def install(patch: Any) -> None:
    """Let CPU tensors have graphs, for as long as the monkeypatch ``patch`` lasts."""
    patch.setitem(graphs.GRAPHS, "cpu", SimulatedGraph)
    patch.setitem(torch_internals.CAPTURING, "cpu", recording_here)
    patch.setitem(coefficients.BACKENDS, "cpu", _build)
    patch.setattr(coefficients, "_kernels", {})
    patch.setattr(stack_loops, "LOOPS", {"cpu": _recorded(stack_loops.LOOPS["cpu"])})
    patch.setattr(stack_loops, "_kernels", {})
    make = stack_code._make
    patch.setattr(stack_code, "_make", lambda signature: RecordedStackKernel(make(signature)))
    patch.setattr(stack_code, "_kernels", _stack_kernels)
