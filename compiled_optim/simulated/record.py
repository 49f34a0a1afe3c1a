"""Records of the work of a step on a device, which may be simulated: Triton launches, compiled graphs, operators, waits."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique2"}
_WRITE_ONLY = {"copy_", "_foreach_copy_", "fill_", "zero_"}
_WITHOUT_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "lift_fresh", "_pin_memory"}
_WITHOUT_LAUNCH |= {"sparse_dim", "_nnz", "is_coalesced"}


class TritonLaunch(NamedTuple):
    """One launch of a Triton kernel."""

    name: str
    device: int
    kernel: Any  # as Triton compiled it


class Operator(NamedTuple):
    """One operator that a device would run."""

    name: str  # without overload
    bytes: int  # of the tensors that it reads and of those that it writes
    waits: bool  # whether the host waits for its result
    crosses: bool  # whether it copies between host and device


class Partition(NamedTuple):
    """A part of a compiled function, for one CUDA graph."""

    inputs: int
    copied: int  # inputs that are copied into the graph's own memory before each replay
    static: Sequence[int]  # positions of the inputs that are not copied, but read and written at their addresses
    written: Sequence[int]  # positions of the inputs that it writes
    source: str  # Inductor's code for the complete function


@dataclass
class Decisions:
    """The decisions of Inductor when it compiled functions, in order."""

    sources: list[str] = field(default_factory=list)  # its code of each function
    partitions: list[Partition] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # reasons why functions run without CUDA graphs


class Graph(NamedTuple):
    """One run of a graph that Inductor compiled."""

    source: str
    inputs: Sequence[int | tuple[int, ...]]  # their shapes, or sizes
    decisions: Decisions


@dataclass
class Record:
    """The events since the last :meth:`take`, in order."""

    launches: list[TritonLaunch] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)

    def take(self) -> Record:
        """Return the events since the last call."""
        taken = Record(**vars(self))
        vars(self).update(vars(Record()))
        return taken

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside a ``with`` block."""
        before = self.take()
        try:
            yield
        finally:
            vars(self).update(vars(before))


@contextlib.contextmanager
def deciding() -> Iterator[Decisions]:
    """Record Inductor's code and decisions under ``fake_cuda``. None of the functions that it compiles can run.

    CUDA graphs are those of functions compiled with ``mode="reduce-overhead"``.
    """
    from torch._inductor import compile_fx, config, output_code
    from torch._inductor.graph import GraphLowering

    decisions = Decisions()

    def call(inputs: list[Any]) -> list[Any]:
        raise NotImplementedError("a function compiled for a simulated GPU")

    def load(graph: GraphLowering, code: Any) -> types.SimpleNamespace:
        decisions.sources.append(code.value)
        runner = types.SimpleNamespace(partitions=[call], recursively_apply_fns=lambda wrappers: [w(call) for w in wrappers])
        return types.SimpleNamespace(call=call, runner=runner, __file__=__file__, __name__=__name__)

    def cudagraphify(model: Any, static_input_idxs: Sequence[int] = (), **kwargs: Any) -> Any:
        inputs, written = len(kwargs["placeholders"]), kwargs["mutated_input_idxs"]
        copied = len({*range(inputs)} - {*static_input_idxs})
        decisions.partitions.append(Partition(inputs, copied, static_input_idxs, written, decisions.sources[-1]))
        return model

    with (
        config.patch(shape_padding=False),  # it depends on timings
        mock.patch.object(GraphLowering, "_compile_to_module_lines", load),
        mock.patch.object(compile_fx, "cudagraphify", cudagraphify),
        mock.patch.object(output_code, "log_cudagraph_skip_and_bump_counter", decisions.skipped.append),
    ):
        yield decisions


@contextlib.contextmanager
def recording(device: str) -> Iterator[Record]:
    """Record the launches of Triton and Inductor, under ``fake_cuda`` or ``triton_target``, instead of running them.

    Everything else runs, and is recorded if it involves a tensor on ``device``.
    """
    from torch._inductor import compile_fx
    from triton.compiler import CompiledKernel

    record = Record()
    compile_graph = compile_fx.compile_fx

    def run(kernel: Any) -> Callable[..., None]:
        def record_launch(*args: Any) -> None:
            current = torch.cuda.current_device() if device == "cuda" else 0
            record.launches.append(TritonLaunch(kernel.src.fn.__name__, current, kernel))

        return record_launch

    def record_graph(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        itself = mock.patch.object(compile_fx, "compile_fx", compile_graph)  # it calls itself again with its options
        with record.paused(), deciding() as decisions, itself:
            compile_graph(module, inputs, *args, **kwargs)

        def call(*values: Any) -> Any:
            shapes = [tuple(v.shape) if isinstance(v, Tensor) else int(v) for v in values]
            record.graphs.extend(Graph(source, shapes, decisions) for source in decisions.sources)
            with record.paused():
                return module(*values)

        return call

    with (
        mock.patch.object(CompiledKernel, "run", property(run)),
        mock.patch.object(compile_fx, "compile_fx", record_graph),
        _Operators(record, device),
    ):
        yield record


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators on tensors of one device type; views and allocations do not reach it."""

    def __init__(self, record: Record, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record, self._device = record, device

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # Dynamo may trace under it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):  # a Triton kernel of the package's own in a graph
            return result
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or func.namespace != "aten" or name in _WITHOUT_LAUNCH:
            return result
        values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        reads = _tensors([v for key, v in values.items() if key not in written or name not in _WRITE_ONLY])
        writes = {id(t): t for t in _tensors([[v for key, v in values.items() if key in written], result])}.values()
        devices = {t.device.type for t in (*reads, *writes)}
        if self._device in devices:
            moved, crosses = sum(t.numel() * t.itemsize for t in (*reads, *writes)), len(devices) > 1
            waits = name in _WAITS or (crosses and not values.get("non_blocking", False))
            self._record.operators.append(Operator(name, moved, waits, crosses))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor)]
