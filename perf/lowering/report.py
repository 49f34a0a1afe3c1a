"""Reports on one step of an optimizer on a GPU, without a GPU: the lowerings, and stock torch.optim."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer

import compiled_optim
from compiled_optim.lowering import coefficients, lists, stack_code, stack_loops
from compiled_optim.lowering.kernels import triton
from compiled_optim.optimizer import engine_of
from compiled_optim.simulated.fake_cuda import fake_cuda, triton_target
from compiled_optim.simulated.record import Decisions, Record, recording
from compiled_optim.simulated.step import KernelReport, kernel_report, own_kernels, processor_seconds
from compiled_optim.step.engine import Engine
from perf import competitors, workloads
from perf.competitors import exported
from perf.lowering import inductor_source

_OWN: dict[str, tuple[str, Callable[[Engine], bool]]] = {
    "operator": ("multi_tensor", lambda engine: engine.preallocate_for_graphs()),
    "inlined": ("inductor", lambda engine: not engine.inline(range(len(engine.params)))),
}
"""Steps in functions that the user compiles: their lowerings, and calls that prepare the trace, False if they cannot."""

_NUMEL = 4096  # elements of each of several equal tensors: whole chunks
_MIXED = [(64, 64), (4096,), (768,), (768, 768)]
_ENTRIES = 5  # entries of a sparse gradient
_WITHOUT_HOST = {"lbfgs": {"fixed_iterations": True, "max_iter": 1}}  # otherwise the host decides


@dataclass(frozen=True)
class Workload:
    """The parameters of a step, and their optimizer by its lower-case name."""

    optimizer: str
    tensors: int
    groups: int = 1  # that the tensors are spread over
    dtype: torch.dtype = torch.float32  # of parameters, gradients and state
    numel: int = _NUMEL  # of each of several equal tensors
    options: tuple[tuple[str, Any], ...] = ()  # further arguments of this package's optimizer
    shapes: str = "equal"  # or ``mixed``, four shapes in turn; or ``gpt2``, the first tensors of GPT-2 small, which has 148

    @property
    def sizes(self) -> workloads.Shapes:
        """The shapes of the parameters. Equal ones are vectors for elementwise optimizers, square matrices for others."""
        side = math.isqrt(self.numel)
        equal = (self.numel,) if self.optimizer in elementwise() else (side, side)
        kinds = {"equal": [equal], "mixed": _MIXED, "gpt2": workloads.shapes("gpt2-124m")}
        return list(islice(cycle(kinds[self.shapes]), self.tensors))

    @property
    def elements(self) -> int:
        """The number of elements in all parameters."""
        return sum(map(math.prod, self.sizes))


def elementwise() -> list[str]:
    """List the optimizers with an elementwise rule over dense gradients. Others have only the lowering ``auto``."""
    return [name for name, (cls, _) in competitors.optimizers().items() if cls._granularity == "element"]


@dataclass(frozen=True)
class Report:
    """The parts of one step. A "moved" step is one whose gradients all have new addresses."""

    lowering: str  # the argument of :func:`lower`
    workload: Workload
    arch: str
    graphs: int  # that Inductor compiled; 0 if none is needed
    launches: int  # of Triton kernels, per step
    operators: int  # torch operators and library calls on the device, per step
    cpp: int  # C++ kernels, per step
    waits: int  # times that the host waits for the device in a moved step
    uploads: int  # copies between host and device in a moved step
    moved_operators: int  # operators of a moved step
    bytes_per_param: float | None  # of kernels and operators, without tables; None if an operator is unknown
    kernels: Sequence[KernelReport]  # the distinct Triton kernels
    sources: Sequence[str]  # their text, and that of the modules around them
    seconds: float  # of processor time that the first step took
    calls: int | None  # of functions in the first step, as cProfile counts them, if it did
    partitions: int | None  # parts for CUDA graphs; None if the user compiles nothing
    copied: int | None  # tensors copied into CUDA graphs before each replay
    cuda_graph: str  # the part of the step in CUDA graphs, or why it has none


def lower(lowering: str, workload: Workload, arch: int, *, stand_in: bool = False, counted: bool = False) -> Report:
    """Report the parts of a step of ``workload``.

    Args:
        lowering: one of the command's ``--lowering``.
        workload: the parameters and their optimizer.
        arch: compute capability, 90 for sm_90.
        stand_in: use CPU tensors instead of the GPU's, much faster with many tensors. The launches are the same, but the
            host's work for a GPU is missing. Only for ``multi_tensor``.
        counted: count the calls of functions in the first step, which then takes several times as long.

    Raises:
        ValueError: torch.optim has no such optimizer.
    """
    device, multi, compiled = "cpu" if stand_in else "cuda", lowering == "multi_tensor", lowering in (*_OWN, "torch")
    gpu = cpu_in_place_of_cuda if stand_in else fake_cuda if multi else _fake_cuda_anew
    with gpu(arch):
        profile = cProfile.Profile() if counted else None
        first, steady, moved = _steps(_optimizer(workload, lowering, device), lowering, device, profile)
        modules = [inductor_source.read(g.source, None if lowering == "auto" else g.inputs) for g in steady.graphs]
        launched = Counter(name for module in modules for name in module.launches)
        texts = {name: text for module in modules for name, text in module.kernels.items()}
        kernels = [kernel_report(name, launched[name], _compiled(name, text), arch) for name, text in texts.items()]
    of_package = own_kernels(steady, workload.dtype, arch, elementwise=lowering != "auto")
    bytes_per_param = sum((k.bytes_per_param or 0) * k.launches for k in of_package)
    if not multi:  # the operators of multi_tensor touch only tables
        bytes_per_param += (sum(m.bytes or 0 for m in modules) + sum(o.bytes for o in steady.operators)) / workload.elements
    externs = [name for module in modules for name in module.externs]
    is_known = lowering != "auto" and all("compiled_optim" in name for name in externs)
    decided = list({id(g.decisions): g.decisions for g in steady.graphs}.values())
    partitions = [partition for decisions in decided for partition in decisions.partitions]
    return Report(
        lowering=lowering,
        workload=workload,
        arch=f"sm_{arch}",
        graphs=len({g.source for g in steady.graphs}),
        launches=len(steady.launches) + launched.total(),
        operators=len(steady.operators) + len(externs),
        cpp=sum(len(m.cpp) for m in modules),
        waits=sum(o.waits for o in moved.operators) + sum(len(m.waits) for m in modules),
        uploads=sum(o.crosses for o in moved.operators),
        moved_operators=len(moved.operators) + len(externs),
        bytes_per_param=bytes_per_param if is_known else None,
        kernels=[*kernels, *of_package],
        sources=list(
            dict.fromkeys([*(g.source for g in steady.graphs), *(launch.kernel.src.fn.src for launch in steady.launches)])
        ),
        seconds=first,
        calls=None if profile is None else sum(entry.callcount for entry in profile.getstats()),
        partitions=len(partitions) if compiled else None,
        copied=sum(part.copied for part in partitions) if compiled else None,
        cuda_graph=_decision(decided, sum(m.outside for m in modules)) if compiled else "",
    )


@contextlib.contextmanager
def cpu_in_place_of_cuda(arch: int) -> Iterator[None]:
    """Let CPU tensors take the lowering of a GPU."""
    backends = mock.patch.dict(coefficients.BACKENDS, {"cpu": triton.TritonKernel})
    with triton_target(arch), backends, mock.patch.object(coefficients, "_kernels", {}):
        yield


@contextlib.contextmanager
def _fake_cuda_anew(arch: int) -> Iterator[None]:
    """Use ``fake_cuda`` with no compiled kernels yet."""
    with fake_cuda(arch), contextlib.ExitStack() as stack:
        for module in (coefficients, lists, stack_code, stack_loops):
            stack.enter_context(mock.patch.object(module, "_kernels", {}))
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


def _optimizer(workload: Workload, lowering: str, device: str) -> Optimizer:
    """Make the optimizer. torch.optim's is foreach, with learning rate and state, after a first step, on the device."""
    ours = exported()[workload.optimizer]
    cls = getattr(torch.optim, ours.__name__, None) if lowering == "torch" else ours
    if cls is None:
        raise ValueError(f"torch.optim has no {workload.optimizer}")
    params = [torch.empty(s, dtype=workload.dtype, device=device, requires_grad=True) for s in workload.sizes]
    _set_gradients(params, ours)
    groups = [{"params": params[i :: workload.groups]} for i in range(workload.groups)]
    options = competitors.arguments(cls)
    if cls is ours:
        options |= _WITHOUT_HOST.get(workload.optimizer, {}) | dict(workload.options)
        return cls(groups, lowering=_OWN[lowering][0] if lowering in _OWN else lowering, **options)
    if workload.options:
        raise ValueError(f"torch.optim's step has no {', '.join(name for name, _ in workload.options)}")
    options |= dict.fromkeys({"foreach", "capturable"} & inspect.signature(cls).parameters.keys(), True)
    optimizer: Optimizer = cls(groups, **options)
    optimizer.step()
    for group in optimizer.param_groups if "capturable" in options else []:
        group["lr"] = torch.empty((), device=device)
    return optimizer


def _set_gradients(params: Sequence[Tensor], optimizer: type[Optimizer]) -> None:
    """Give ``params`` new gradients, dense or sparse as the optimizer needs them."""
    for param in params:
        if getattr(optimizer, "_gradients", "dense") == "dense":
            param.grad = torch.empty_like(param, requires_grad=False)
        else:
            indices = torch.empty(1, _ENTRIES, dtype=torch.int64, device=param.device)
            values = torch.empty(_ENTRIES, *param.shape[1:], dtype=param.dtype, device=param.device)
            with torch._C.DisableTorchFunction():  # a default device would make a fake one of the meta device
                param.grad = torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def _steps(
    optimizer: Optimizer, lowering: str, device: str, profile: cProfile.Profile | None
) -> tuple[float, Record, Record]:
    """Return the processor seconds of the first step, and records of an equal step and of one after gradients moved.

    ``profile`` is of the first step.
    """
    step = optimizer.step
    if lowering in (*_OWN, "torch"):
        step = torch.compile(step, fullgraph=lowering in _OWN, mode="reduce-overhead")
    if isinstance(optimizer, compiled_optim.LBFGS):
        step = functools.partial(step, lambda: torch.empty((), device=device))
    with recording(device) as record:
        started = processor_seconds()
        with profile or contextlib.nullcontext():
            if lowering in _OWN:  # Dynamo cannot create tensors on a fake device
                assert _OWN[lowering][1](engine_of(optimizer)), "the step has another form"
            step()
        first = processor_seconds() - started
        record.take()
        step()
        steady = record.take()
        if lowering == "operator":
            optimizer.step()  # the operator's launches; the graph has only its name
            steady.launches += record.take().launches
        with record.paused():
            _set_gradients([param for group in optimizer.param_groups for param in group["params"]], type(optimizer))
        step()
        return first, steady, record.take()


def _compiled(name: str, text: str) -> Any:
    """Compile a kernel that Inductor wrote, as Inductor's worker processes do."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    with config.patch({"use_static_triton_launcher": False}):
        tuner = getattr(PyCodeCache.load(text), name)
        tuner.precompile(warm_cache_only=True)
        return tuner.compile_results[0].kernel


def _decision(decided: Sequence[Decisions], outside: int) -> str:
    """Describe the part of a step in CUDA graphs, given the number of calls ``outside``, or why it has none."""
    reasons = dict.fromkeys(reason for decisions in decided for reason in decisions.skipped)
    return "; ".join(reasons) or (f"all but {outside} calls" if outside else "all")
