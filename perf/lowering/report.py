"""What one step of an optimizer lowers to on a GPU that need not be there: the lowerings, and stock torch.optim."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer

import compiled_optim
from compiled_optim.lowering import multi_tensor, stacked
from compiled_optim.lowering.kernels import triton
from compiled_optim.lowering.torch_ops import inductor
from perf.competitors import arguments
from perf.lowering import inductor_source, ptx
from perf.lowering.fake_cuda import fake_cuda, triton_target
from perf.lowering.ptx import Access
from perf.lowering.record import Record, recording

NUMEL = 4096  # elements of each tensor of a workload: whole chunks
STOCK_LIMIT = 10  # tensors above which Inductor takes long, up to minutes, for torch.optim
REGION_LIMIT = 148  # tensors above which the passes over a graph with the step in it take minutes

_PROBES = (1 << 14, 1 << 15)
_ENTRIES = 5  # of a sparse gradient
_WITHOUT_HOST = {"lbfgs": {"fixed_iterations": True, "max_iter": 1}}  # for what else it does, a host has to decide


@dataclass(frozen=True)
class Workload:
    """What is stepped.

    Attributes:
        optimizer: lower-case name.
        tensors: their number.
        groups: parameter groups they are spread over.
        dtype: of parameters, gradients and state.
        numel: elements of each tensor.
        options: further arguments of this package's optimizer.
    """

    optimizer: str
    tensors: int
    groups: int = 1
    dtype: torch.dtype = torch.float32
    numel: int = NUMEL
    options: tuple[tuple[str, Any], ...] = ()

    def split(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """``params`` as groups."""
        return [{"params": list(params[i :: self.groups])} for i in range(self.groups)]

    @property
    def elements(self) -> int:
        """Real numbers in all parameters."""
        return self.tensors * self.numel


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


def optimizers() -> dict[str, type[compiled_optim.CompiledOptimizer]]:
    """The package's optimizers by lower-case name."""
    exported = (getattr(compiled_optim, name) for name in compiled_optim.__all__)
    classes = [c for c in exported if isinstance(c, type) and issubclass(c, compiled_optim.CompiledOptimizer)]
    return {c.__name__.lower(): c for c in classes if c is not compiled_optim.CompiledOptimizer}


def elementwise() -> list[str]:
    """The names of those that are an elementwise rule over dense gradients; the others have the lowering ``auto`` only."""
    ruled = {name: c for name, c in optimizers().items() if hasattr(c, "rule") and c.gradients == "dense"}
    return [name for name, c in ruled.items() if c.granularity == "element"]


def lower(lowering: str, workload: Workload, arch: int, *, stand_in: bool = False) -> Report:
    """What ``workload`` lowers to.

    Args:
        lowering: ``multi_tensor`` or ``inductor``; ``torch``, torch.optim with foreach and compiled; ``region``, the step
            in a function that the user compiles whole; ``auto``, the only one of optimizers that are not elementwise.
        workload: what is stepped.
        arch: compute capability, 90 for sm_90.
        stand_in: let CPU tensors stand in for those of the GPU, much faster where tensors are many. The launches are the
            same, but what the host does for a GPU alone is not seen. Only for ``multi_tensor``.

    Raises:
        ValueError: torch.optim has no such optimizer.
    """
    if lowering == "multi_tensor":
        return _multi_tensor(workload, arch, stand_in)
    if lowering == "auto":
        return _auto(workload, arch)
    return _through_inductor(lowering, workload, arch)


def launches(workload: Workload, arch: int = 90) -> list[str]:
    """The Triton kernels that one step of the multi-tensor lowering launches, in order; CPU tensors stand in for a GPU's."""
    with cpu_in_place_of_cuda(arch):
        optimizer = _ours(workload, "cpu", "multi_tensor")
        with recording("cpu") as recorder:
            optimizer.step()
            return [launch.name for launch in recorder.take().launches]


def _multi_tensor(workload: Workload, arch: int, stand_in: bool) -> Report:
    device = "cpu" if stand_in else "cuda"
    with cpu_in_place_of_cuda(arch) if stand_in else fake_cuda(arch):
        steps = _steps(_ours(workload, device, "multi_tensor"), device)
    per_program = _elements_per_program(workload.optimizer, workload.dtype, workload.options, arch)
    kernels = []
    for name in dict.fromkeys(launch.name for launch in steps.steady.launches):
        launches = [launch for launch in steps.steady.launches if launch.name == name]
        kernels.append(_kernel(name, len(launches), launches[0].kernel, arch, per_program.get(name)))
    return Report(
        lowering="multi_tensor",
        workload=workload,
        arch=f"sm_{arch}",
        graphs=len(steps.steady.graphs),
        launches=len(steps.steady.launches),
        operators=len(steps.steady.operators),
        cpp=0,
        waits=sum(o.waits for o in steps.moved.operators),
        uploads=sum(o.crosses for o in steps.moved.operators),
        moved_operators=len(steps.moved.operators),
        bytes_per_param=sum(k.bytes_per_param * k.launches for k in kernels if k.bytes_per_param is not None),
        kernels=tuple(kernels),
        sources=tuple({launch.kernel.src.fn.src: None for launch in steps.steady.launches}),
        seconds=steps.first,
    )


def _through_inductor(lowering: str, workload: Workload, arch: int) -> Report:
    with fake_cuda(arch):
        torch._dynamo.reset()
        own = {"inductor": "inductor", "region": "auto"}
        optimizer = _stock(workload) if lowering == "torch" else _ours(workload, "cuda", own[lowering])
        with mock.patch.object(inductor, "_kernels", {}):
            steps = _steps(optimizer, "cuda", compiled=lowering != "inductor", whole=lowering == "region")
        modules = [inductor_source.read(g.source, g.elements) for g in steps.steady.graphs]
        kernels = tuple(
            _compiled_kernel(name, text, sum(m.launches.count(name) for m in modules), arch)
            for name, text in {n: t for m in modules for n, t in m.kernels.items()}.items()
        )
    torch._dynamo.reset()
    opaque = any(m.externs for m in modules)
    moved = sum(m.bytes or 0 for m in modules) + sum(o.bytes for o in steps.steady.operators)
    sources = tuple(dict.fromkeys(g.source for g in steps.steady.graphs))
    return Report(
        lowering=lowering,
        workload=workload,
        arch=f"sm_{arch}",
        graphs=len(sources),
        launches=sum(len(m.launches) for m in modules),
        operators=len(steps.steady.operators) + sum(len(m.externs) for m in modules),
        cpp=sum(len(m.cpp) for m in modules),
        waits=sum(o.waits for o in steps.moved.operators) + sum(len(m.waits) for m in modules),
        uploads=sum(o.crosses for o in steps.moved.operators),
        moved_operators=len(steps.moved.operators) + sum(len(m.externs) for m in modules),
        bytes_per_param=None if opaque else moved / workload.elements,
        kernels=kernels,
        sources=sources,
        seconds=steps.first,
    )


def _auto(workload: Workload, arch: int) -> Report:
    with fake_cuda(arch), mock.patch.object(stacked, "_kernels", {}), mock.patch.object(multi_tensor, "_kernels", {}):
        torch._dynamo.reset()
        steps = _steps(_ours(workload, "cuda", "auto"), "cuda")
        modules = [inductor_source.read(g.source, None) for g in steps.steady.graphs]
        kernels = [
            _compiled_kernel(name, text, m.launches.count(name), arch) for m in modules for name, text in m.kernels.items()
        ]
    for name in dict.fromkeys(launch.name for launch in steps.steady.launches):
        own = [launch for launch in steps.steady.launches if launch.name == name]
        kernels.append(_kernel(name, len(own), own[0].kernel, arch, None))
    torch._dynamo.reset()
    return Report(
        lowering="auto",
        workload=workload,
        arch=f"sm_{arch}",
        graphs=len(modules),
        launches=len(steps.steady.launches) + sum(len(m.launches) for m in modules),
        operators=len(steps.steady.operators) + sum(len(m.externs) for m in modules),
        cpp=sum(len(m.cpp) for m in modules),
        waits=sum(o.waits for o in steps.moved.operators) + sum(len(m.waits) for m in modules),
        uploads=sum(o.crosses for o in steps.moved.operators),
        moved_operators=len(steps.moved.operators) + sum(len(m.externs) for m in modules),
        bytes_per_param=None,
        kernels=tuple(kernels),
        sources=tuple(g.source for g in steps.steady.graphs),
        seconds=steps.first,
    )


@dataclass(frozen=True)
class _Steps:
    """The processor seconds of the first step, a step like the one before, and one after all gradients moved."""

    first: float
    steady: Record
    moved: Record


def _steps(optimizer: Optimizer, device: str, *, compiled: bool = False, whole: bool = False) -> _Steps:
    """Three steps, compiled by the caller where ``compiled``; ``whole`` allows no graph break."""
    step = torch.compile(optimizer.step, fullgraph=whole) if compiled else optimizer.step
    if isinstance(optimizer, compiled_optim.LBFGS):
        step = functools.partial(step, lambda: torch.empty((), device=device))
    with recording(device) as record:
        started = processor_seconds()
        step()
        first = processor_seconds() - started
        record.take()
        step()
        steady = record.take()
        with record.paused():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = _gradient(param, type(optimizer))
        step()
        return _Steps(first, steady, record.take())


def processor_seconds() -> float:
    """The time that processors spent on this process and those it waited for, in seconds."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def _parameters(workload: Workload, device: str) -> list[Tensor]:
    """Vectors for elementwise optimizers, square matrices for others."""
    side = math.isqrt(workload.numel)
    shape = [workload.numel] if workload.optimizer in elementwise() else [side, side]
    params = [torch.empty(shape, dtype=workload.dtype, device=device) for _ in range(workload.tensors)]
    cls = optimizers()[workload.optimizer]
    for param in params:
        param.grad = _gradient(param, cls)
    return params


def _gradient(param: Tensor, optimizer: type[Optimizer]) -> Tensor:
    if getattr(optimizer, "gradients", "dense") == "dense":
        return torch.empty_like(param)
    indices = torch.empty(1, _ENTRIES, dtype=torch.int64, device=param.device)
    values = torch.empty(_ENTRIES, *param.shape[1:], dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def _ours(workload: Workload, device: str, lowering: str) -> Optimizer:
    made = [p.requires_grad_() for p in _parameters(workload, device)]
    cls = optimizers()[workload.optimizer]
    options = {**arguments(cls), **_WITHOUT_HOST.get(workload.optimizer, {})}
    options |= {**dict(workload.options), "lowering": lowering}
    optimizer: Optimizer = cls(workload.split(made), **options)
    return optimizer


def _stock(workload: Workload) -> Optimizer:
    """torch.optim's optimizer, foreach, with state and learning rate on the device; a first step made the state."""
    cls = getattr(torch.optim, optimizers()[workload.optimizer].__name__, None)
    if cls is None:
        raise ValueError(f"torch.optim has no {workload.optimizer}")
    if workload.options:
        raise ValueError(f"torch.optim's step has no {', '.join(name for name, _ in workload.options)}")
    options: dict[str, Any] = {name: True for name in ("foreach", "capturable") if name in inspect.signature(cls).parameters}
    made = [p.requires_grad_() for p in _parameters(workload, "cuda")]
    optimizer: Optimizer = cls(workload.split(made), **options, **arguments(cls))
    optimizer.step()
    if "capturable" in options:
        for group in optimizer.param_groups:
            group["lr"] = torch.empty((), device="cuda")
    return optimizer


@contextlib.contextmanager
def cpu_in_place_of_cuda(arch: int) -> Iterator[None]:
    """Let CPU tensors take the lowering of a GPU."""
    with (
        triton_target(arch),
        mock.patch.dict(multi_tensor.BACKENDS, {"cpu": triton.build}),
        mock.patch.object(multi_tensor, "_kernels", {}),
    ):
        yield


@functools.cache
def _elements_per_program(
    optimizer: str, dtype: torch.dtype, options: tuple[tuple[str, Any], ...], arch: int
) -> Mapping[str, float]:
    """For each kernel whose number of programs grows with the elements: how many elements a program has."""
    programs: list[dict[str, int]] = []
    with cpu_in_place_of_cuda(arch):
        for numel in _PROBES:
            steps = _steps(_ours(Workload(optimizer, 1, 1, dtype, numel, options), "cpu", "multi_tensor"), "cpu")
            programs.append({launch.name: launch.programs for launch in steps.steady.launches})
    small, large = programs
    growing = [n for n in small if large[n] != small[n]]
    assert all(large[n] * _PROBES[0] == small[n] * _PROBES[1] for n in growing), "a program has more than one chunk"
    return {n: _PROBES[0] / small[n] for n in growing}


def _kernel(name: str, launches: int, kernel: Any, arch: int, elements: float | None) -> KernelReport:
    text = kernel.asm["ptx"]
    made = ptx.resources(text, arch)
    resources = ptx.Resources(made.registers, made.spills, max(made.shared, kernel.metadata.shared))
    path: list[Access] = [] if elements is None else [a for a in ptx.full_path(text) if a.elementwise]
    moved = None if elements is None else sum(a.program_bytes for a in path) / elements
    extern = tuple(ptx.external_functions(text))
    return KernelReport(name, launches, moved, resources, *_widths(path), extern, ptx.barriers(text))


def _widths(path: Sequence[Access]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    loads = tuple(sorted({str(a).partition(".")[2] for a in path if a.kind == "ld"}))
    stores = tuple(sorted({str(a).partition(".")[2] for a in path if a.kind != "ld"}))
    return loads, stores, any(a.masked for a in path)


def _compiled_kernel(name: str, text: str, launches: int, arch: int) -> KernelReport:
    """A kernel that Inductor wrote, compiled as Inductor's worker processes do."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    with config.patch({"use_static_triton_launcher": False}):
        tuner = getattr(PyCodeCache.load(text), name)
        tuner.precompile(warm_cache_only=True)
        kernel = tuner.compile_results[0].kernel
    text = kernel.asm["ptx"]
    made = ptx.resources(text, arch)
    path = [a for a in ptx.full_path(text) if a.elementwise]
    resources = ptx.Resources(made.registers, made.spills, max(made.shared, kernel.metadata.shared))
    extern = tuple(ptx.external_functions(text))
    return KernelReport(name, launches, None, resources, *_widths(path), extern, ptx.barriers(text))
