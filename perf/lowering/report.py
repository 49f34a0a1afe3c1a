"""What one step of an optimizer lowers to on a GPU that need not be there: the lowerings, and stock torch.optim."""

from __future__ import annotations

import contextlib
import functools
import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.optim import Optimizer

import compiled_optim
from compiled_optim.lowering import multi_tensor, stacked
from compiled_optim.lowering.kernels import triton
from compiled_optim.lowering.torch_ops import inductor
from compiled_optim.optimizer import engine_of
from perf.lowering import inductor_source, ptx
from perf.lowering.fake_cuda import fake_cuda, triton_target
from perf.lowering.record import Decisions, Record, recording
from perf.lowering.workload import Workload, gradient, ours, stock

_OWN = {"operator": "multi_tensor", "inlined": "inductor"}
"""The lowerings of steps in functions that the user compiles."""

_PROBES = (1 << 14, 1 << 15)


@dataclass(frozen=True)
class KernelReport:
    """One Triton kernel of a step.

    Attributes:
        name: as its source calls it.
        launches: per step.
        bytes_per_param: counted from loads and stores of the full path; None where work is per tensor.
        resources: registers, spills and shared memory.
        loads, stores: widths of the element accesses on the full path, ``v4.b32``.
        masked: whether the full path has predicated element accesses.
        extern: functions it calls and does not contain.
        barriers: how often the threads of a program wait for each other on the full path.
    """

    name: str
    launches: int
    bytes_per_param: float | None
    resources: ptx.Resources
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    masked: bool
    extern: tuple[str, ...]
    barriers: int


@dataclass(frozen=True)
class Report:
    """What one step lowers to.

    Attributes:
        lowering: as given to :func:`lower`.
        graphs: graphs that Inductor compiled; 0 where none is needed.
        launches: of Triton kernels, per step.
        operators: torch operators and library calls on the device, per step.
        cpp: C++ kernels, per step.
        waits: times the host waits for the device in a step whose gradients all have new addresses.
        uploads: copies from host to device, in a step whose gradients all have new addresses.
        moved_operators: those of them in a step whose gradients all have new addresses.
        bytes_per_param: moved by kernels and operators together, tables of a few bytes per tensor not counted; None where an
            operator's content is not known here.
        kernels: the distinct Triton kernels; empty if they were not compiled.
        sources: their text, and that of the modules around them.
        seconds: of processors, for the first step, compiling included.
        partitions: CUDA graphs that Inductor makes of a step with ``mode="reduce-overhead"``; None of steps that the user
            does not compile, and so the following two.
        copied: tensors that are copied into those before each replay.
        cuda_graph: what they hold, or why there are none.
    """

    lowering: str
    workload: Workload
    arch: str
    graphs: int
    launches: int
    operators: int
    cpp: int
    waits: int
    uploads: int
    moved_operators: int
    bytes_per_param: float | None
    kernels: tuple[KernelReport, ...]
    sources: tuple[str, ...]
    seconds: float
    partitions: int | None = None
    copied: int | None = None
    cuda_graph: str = ""


def lower(lowering: str, workload: Workload, arch: int, *, stand_in: bool = False) -> Report:
    """What ``workload`` lowers to.

    Args:
        lowering: ``multi_tensor`` or ``inductor``, called as usual; ``operator`` or ``inlined``, these two in a function
            that the user compiles whole; ``torch``, torch.optim with foreach and compiled; ``auto``, the only one of
            optimizers that are not elementwise.
        workload: what is stepped.
        arch: compute capability, 90 for sm_90.
        stand_in: let CPU tensors stand in for those of the GPU, much faster where tensors are many. The launches are the
            same, but what the host does for a GPU alone is not seen. Only for ``multi_tensor``.

    Raises:
        ValueError: torch.optim has no such optimizer.
    """
    device, own, compiled = "cpu" if stand_in else "cuda", lowering == "multi_tensor", lowering in (*_OWN, "torch")
    place = cpu_in_place_of_cuda if stand_in else fake_cuda if own else _fake_cuda_anew
    with place(arch):
        optimizer = stock(workload) if lowering == "torch" else ours(workload, device, _OWN.get(lowering, lowering))
        steps = _steps(optimizer, device, compiled=compiled, inlined=lowering == "inlined")
        graphs, steady = steps.steady.graphs, steps.steady.operators
        modules = [inductor_source.read(g.source, g.inputs if lowering != "auto" else None) for g in graphs]
        launched = Counter(name for module in modules for name in module.launches)
        kernels = [
            _kernel(name, launched[name], _compiled(name, text), arch)
            for name, text in {n: t for m in modules for n, t in m.kernels.items()}.items()
        ]
    per_program: Mapping[str, float] = {}
    if lowering in ("multi_tensor", "operator"):
        per_program = _elements_per_program(workload.optimizer, workload.dtype, workload.options, arch)
    counts = Counter(launch.name for launch in steps.steady.launches)
    first = {launch.name: launch.kernel for launch in reversed(steps.steady.launches)}
    of_package = [_kernel(name, count, first[name], arch, per_program.get(name, 0)) for name, count in counts.items()]
    moved = sum((k.bytes_per_param or 0) * k.launches for k in of_package)
    if not own:  # whose operators touch tables alone
        moved += (sum(m.bytes or 0 for m in modules) + sum(o.bytes for o in steady)) / workload.elements
    is_known = lowering != "auto" and all("compiled_optim" in name for m in modules for name in m.externs)
    decided = list({id(g.decisions): g.decisions for g in graphs}.values())
    partitions = [partition for decisions in decided for partition in decisions.partitions]
    externs = sum(len(m.externs) for m in modules)
    return Report(
        lowering=lowering,
        workload=workload,
        arch=f"sm_{arch}",
        graphs=len({g.source for g in graphs}),
        launches=counts.total() + launched.total(),
        operators=len(steady) + externs,
        cpp=sum(len(m.cpp) for m in modules),
        waits=sum(o.waits for o in steps.moved.operators) + sum(len(m.waits) for m in modules),
        uploads=sum(o.crosses for o in steps.moved.operators),
        moved_operators=len(steps.moved.operators) + externs,
        bytes_per_param=moved if is_known else None,
        kernels=(*kernels, *of_package),
        sources=tuple(dict.fromkeys([*(g.source for g in graphs), *(kernel.src.fn.src for kernel in first.values())])),
        seconds=steps.first,
        partitions=len(partitions) if compiled else None,
        copied=sum(part.copied for part in partitions) if compiled else None,
        cuda_graph=_decision(decided, sum(m.outside for m in modules)) if compiled else "",
    )


def launches(workload: Workload, arch: int = 90) -> list[str]:
    """The Triton kernels that one step of the multi-tensor lowering launches, in order; CPU tensors stand in for a GPU's."""
    with cpu_in_place_of_cuda(arch):
        optimizer = ours(workload, "cpu", "multi_tensor")
        with recording("cpu") as recorder:
            optimizer.step()
            return [launch.name for launch in recorder.take().launches]


@contextlib.contextmanager
def cpu_in_place_of_cuda(arch: int) -> Iterator[None]:
    """Let CPU tensors take the lowering of a GPU."""
    with (
        triton_target(arch),
        mock.patch.dict(multi_tensor.BACKENDS, {"cpu": triton.TritonKernel}),
        mock.patch.object(multi_tensor, "_kernels", {}),
    ):
        yield


@contextlib.contextmanager
def _fake_cuda_anew(arch: int) -> Iterator[None]:
    """``fake_cuda`` where nothing is compiled yet."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_cuda(arch))
        for module in (inductor, multi_tensor, stacked):
            stack.enter_context(mock.patch.object(module, "_kernels", {}))
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


def _decision(decided: Sequence[Decisions], outside: int) -> str:
    """What CUDA graphs hold of a step that makes so many calls ``outside`` of them; or why there are none."""
    reasons = [reason for decisions in decided for reason in decisions.skipped]
    if reasons:
        return "; ".join(dict.fromkeys(reasons))
    return f"all but {outside} calls" if outside else "all"


class _Steps(NamedTuple):
    """The processor seconds of the first step, a step like the one before, and one after all gradients moved."""

    first: float
    steady: Record
    moved: Record


def _steps(optimizer: Optimizer, device: str, *, compiled: bool = False, inlined: bool = False) -> _Steps:
    """Three steps, ``compiled`` by the caller, in ours whole; ``inlined``, as operations of the caller's graph."""
    is_own = isinstance(optimizer, compiled_optim.CompiledOptimizer)
    step = torch.compile(optimizer.step, fullgraph=is_own, mode="reduce-overhead") if compiled else optimizer.step
    if isinstance(optimizer, compiled_optim.LBFGS):
        step = functools.partial(step, lambda: torch.empty((), device=device))
    with recording(device) as record:
        started = processor_seconds()
        if compiled and is_own:  # what Dynamo has done while it traces, when nothing can be made on such a device
            engine = engine_of(optimizer)
            settled = engine.inline(range(len(engine.params))) if inlined else engine.preallocate_for_graphs()
            assert settled, "the step has another form"
        step()
        first = processor_seconds() - started
        record.take()
        step()
        steady = record.take()
        if compiled and is_own and not inlined:
            optimizer.step()  # what the operator does, of which the graph has the name alone
            steady.launches += record.take().launches
        with record.paused():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = gradient(param, type(optimizer))
        step()
        return _Steps(first, steady, record.take())


def processor_seconds() -> float:
    """The time that processors spent on this process and those it waited for, in seconds."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


@functools.cache
def _elements_per_program(
    optimizer: str, dtype: torch.dtype, options: tuple[tuple[str, Any], ...], arch: int
) -> Mapping[str, float]:
    """For each kernel whose number of programs grows with the elements: how many elements a program has."""
    programs: list[dict[str, int]] = []
    with cpu_in_place_of_cuda(arch):
        for numel in _PROBES:
            steps = _steps(ours(Workload(optimizer, 1, 1, dtype, numel, options), "cpu", "multi_tensor"), "cpu")
            programs.append({launch.name: launch.programs for launch in steps.steady.launches})
    small, large = programs
    growing = [n for n in small if large[n] != small[n]]
    assert all(large[n] * _PROBES[0] == small[n] * _PROBES[1] for n in growing), "a program has more than one chunk"
    return {n: _PROBES[0] / small[n] for n in growing}


def _compiled(name: str, text: str) -> Any:
    """A kernel that Inductor wrote, compiled as Inductor's worker processes do."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    with config.patch({"use_static_triton_launcher": False}):
        tuner = getattr(PyCodeCache.load(text), name)
        tuner.precompile(warm_cache_only=True)
        return tuner.compile_results[0].kernel


def _kernel(name: str, launches: int, kernel: Any, arch: int, elements: float | None = None) -> KernelReport:
    """A program of the kernel has so many ``elements``: 0 where it works on whole tensors, None if nobody knows."""
    text = kernel.asm["ptx"]
    made = ptx.resources(text, arch)
    path = [] if elements == 0 else [a for a in ptx.full_path(text) if a.elementwise]
    return KernelReport(
        name,
        launches,
        sum(a.program_bytes for a in path) / elements if elements else None,
        replace(made, shared=max(made.shared, kernel.metadata.shared)),
        loads=tuple(sorted({a.width for a in path if a.kind == "ld"})),
        stores=tuple(sorted({a.width for a in path if a.kind != "ld"})),
        masked=any(a.masked for a in path),
        extern=tuple(ptx.external_functions(text)),
        barriers=ptx.barriers(text),
    )
