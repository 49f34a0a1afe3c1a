"""One step of an optimizer on a simulated device: kernels, launches, memory traffic, registers, sources."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

from compiled_optim.lowering import coefficients, stack_loops
from compiled_optim.lowering.kernels import cpp, triton
from compiled_optim.lowering.kernels.table import Kernel
from compiled_optim.memory import cache
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.simulated import ptx
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import Record, recording


class KernelReport(NamedTuple):
    """One Triton kernel of a step. Its full path is the one in :class:`ptx.PtxKernel`."""

    name: str  # in its source
    launches: int  # per step
    bytes_per_param: float | None  # of loads and stores of the full path; None where work is per tensor
    resources: ptx.Resources
    widths: Sequence[str]  # of the element accesses on the full path, ``v4.b32``
    masked: bool  # whether the full path has predicated element accesses
    extern: Sequence[str]  # functions that it calls and does not contain
    operations: float | None  # per element on the full path; None where work is per tensor
    barriers: int  # barriers of a program's threads on the full path


def kernel_report(name: str, launches: int, kernel: Any, arch: int, elements: float | None = None) -> KernelReport:
    """Report a kernel whose programs have ``elements`` each: 0 if it works on complete tensors, None if unknown."""
    text = ptx.read(kernel.asm["ptx"])
    resources = ptx.resources(kernel.asm["ptx"], arch)
    path = [] if elements == 0 else [a for a in text.full_path if a.elementwise]
    return KernelReport(
        name,
        launches,
        sum(a.program_bytes for a in path) / elements if elements else None,
        resources._replace(shared=max(resources.shared, kernel.metadata.shared)),
        widths=sorted({a.width for a in path}),
        masked=any(a.masked for a in path),
        extern=text.extern,
        operations=text.operations * text.threads / elements if elements else None,
        barriers=text.barriers,
    )


def own_kernels(record: Record, dtype: torch.dtype, arch: int, *, elementwise: bool) -> list[KernelReport]:
    """Report this package's kernels in a step with gradients of ``dtype``; bytes are known for ``elementwise`` ones."""
    counts = Counter((launch.name, launch.kernel) for launch in record.launches)
    per_program = {"evaluate": 0, "average": 0, "square_sums": triton.REDUCE_BYTES // dtype.itemsize}
    elements = {name: per_program.get(name, triton.BLOCK) if elementwise else 0 for name, _ in counts}
    return [kernel_report(name, count, kernel, arch, elements[name]) for (name, kernel), count in counts.items()]


def processor_seconds() -> float:
    """Return the processor time of this process and of child processes that it waited for, in seconds."""
    return sum(os.times()[:4])


@dataclass(frozen=True)
class SimulatedStep:
    """The work of one step, once everything is compiled.

    Attributes:
        optimizer: the optimizer; its tensors are fake, except on the CPU.
        launches: the number of launches of kernels of this package.
        operators: the number of torch operators and library calls on the device.
        kernels: the distinct Triton kernels; none for the CPU.
        bytes_per_parameter: bytes that the kernels move per element; None if an operator moves some, or for the CPU.
        sources: the text of each kernel.
        seconds: processor time of the first step, most of it spent compiling.
    """

    optimizer: CompiledOptimizer
    launches: int
    operators: int
    kernels: list[KernelReport]
    bytes_per_parameter: float | None
    sources: list[str]
    seconds: float


def simulated_step(make: Callable[[], CompiledOptimizer], arch: int | None) -> SimulatedStep:
    """Step twice with the optimizer that ``make`` returns, on a simulated GPU.

    Args:
        make: called while the default device is that GPU, whose tensors take no memory.
        arch: its compute capability, 90 for sm_90. None is this machine's CPU, on which the steps are real.
    """
    calls: list[str] = []
    texts: dict[str, None] = {}
    device, context = ("cpu", _noting_cpp(calls, texts)) if arch is None else ("cuda", fake_cuda(arch))
    with context, torch.device(device):
        optimizer = make()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            param.grad = torch.zeros_like(param, requires_grad=False)
        with recording(device) as record:
            started = processor_seconds()
            optimizer.step()
            seconds = processor_seconds() - started
            record.take()
            calls.clear()
            optimizer.step()
            steady = record.take()
        dtype = max((param.dtype for param in params), key=lambda dtype: dtype.itemsize, default=torch.float32)
        is_elementwise = not steady.operators and device == "cuda"
        kernels = [] if arch is None else own_kernels(steady, dtype, arch, elementwise=is_elementwise)
    texts.update(dict.fromkeys(launch.kernel.src.fn.src for launch in steady.launches))
    moved = sum((kernel.bytes_per_param or 0) * kernel.launches for kernel in kernels)
    is_one_table = len({kernel.name for kernel in kernels}) == len(kernels)  # else each moves some of the tensors
    return SimulatedStep(
        optimizer,
        len(steady.launches) + len(calls),
        len(steady.operators),
        kernels,
        moved if is_elementwise and is_one_table else None,
        list(texts),
        seconds,
    )


@contextlib.contextmanager
def _noting_cpp(calls: list[str], texts: dict[str, None]) -> Iterator[None]:
    """Record the names of called functions of C++ kernels in ``calls``, and the compiled sources in ``texts``."""
    compile_library, launch = cache.library, Kernel._launch

    def library(text: str) -> Any:
        texts[text] = None
        return compile_library(text)

    def noting(kernel: Kernel, name: str, *args: Any) -> Any:
        calls.append(name)
        return launch(kernel, name, *args)

    with contextlib.ExitStack() as stack:
        for module in (coefficients, stack_loops):  # else kernels that the process has would not be compiled
            stack.enter_context(mock.patch.object(module, "_kernels", {}))
        stack.enter_context(mock.patch.object(cpp, "library", library))
        stack.enter_context(mock.patch.object(Kernel, "_launch", noting))
        yield
