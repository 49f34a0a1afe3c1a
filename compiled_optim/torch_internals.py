"""The few parts of torch without a public name that the package needs, each behind one function."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import TracingContext

outside_dynamo = _disable_dynamo
"""Decorator: never traced. Unlike ``torch.compiler.disable`` it does not import the compiler."""


@functools.cache
def pointer_offset() -> int | None:
    """How many bytes into a Python tensor its pointer to torch's own tensor lies; None if that cannot be told.

    It is found by its value, whatever the layout of the object in this version of torch.
    """
    example = torch.empty(0)
    words = (ctypes.c_uint64 * (torch.Tensor.__basicsize__ // 8)).from_address(id(example))
    found = [8 * i for i, word in enumerate(words) if word == example._cdata]
    return found[0] if len(found) == 1 else None


def build_identity() -> str:
    """What tells this build of torch from another one, also of the same version."""
    built = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    parts = [torch.__version__, torch.version.git_version, torch.version.debug]
    with contextlib.suppress(OSError):
        parts += [built.stat().st_size, built.stat().st_mtime_ns]
    return " ".join(map(str, parts))


def default_cache_directory() -> str:
    """Where Inductor keeps its code unless it is told otherwise; it writes that into ``TORCHINDUCTOR_CACHE_DIR``."""
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # type: ignore[attr-defined]

    return os.path.abspath(default_cache_dir())


def is_fake(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one of FakeTensorMode's, which warns where its address is asked for."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def fakes_are_made() -> bool:
    """Whether FakeTensorMode is on, in which every new tensor is a fake one."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def wraps_others(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a subclass whose operations are its own, so that its elements may lie in other tensors."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def local_tensor(tensor: Any) -> Tensor:
    """The tensor that a DTensor wraps: ``to_local`` makes a new one in every call."""
    wrapped: Tensor = tensor._local_tensor
    return wrapped


def _capturing_stream() -> int | None:
    if not torch.cuda.is_current_stream_capturing():
        return None
    handle: int = torch.cuda.current_stream().cuda_stream
    return handle


CAPTURING: dict[str, Callable[[], object | None]] = {"cuda": _capturing_stream}
"""By device type, what tells the capture by which work handed to the current stream is recorded; None where it is done."""


def current_capture(device: torch.device) -> object | None:
    """What tells the capture of work of ``device`` from others, on every thread; None without one."""
    ask = CAPTURING.get(device.type)
    return None if ask is None else ask()


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Tensors made inside a ``with`` block can be written everywhere; autograd records what it would have recorded."""
    recording = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recording):
        yield


def is_capturing(device: torch.device) -> bool:
    """Whether a graph of ``device`` is being captured."""
    return current_capture(device) is not None


def any_stream_captures() -> bool:
    """Whether the current stream or the one that ``torch.cuda.graph`` takes is being captured; nothing tells of others."""
    by_default = torch.cuda.graph.default_capture_stream
    streams = [torch.cuda.current_stream(), *([] if by_default is None else [by_default])]
    for stream in streams:
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


def abandon_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Let others capture after one into ``pool`` failed; nothing where it has ended all the same.

    Torch 2.11 goes on giving out memory of ``pool`` then, by a rule that belongs to ``graph``, and refuses every later
    capture in the process. Later versions stop by themselves (pytorch/pytorch#180395).
    """
    try:
        graph.pool()
    except RuntimeError:
        _ABANDONED.append(graph)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)


_ABANDONED: list[torch.cuda.CUDAGraph] = []


def shape_of_part(tensor: Any) -> tuple[int, ...]:
    """The shape that the tensor which a DTensor wraps must have on this process."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail as a wrong index does where ``condition``, a single bool, is false: on an accelerator without waiting for it."""
    torch._assert_async(condition, message)


def refuse_tracing(what: str, advice: str) -> None:
    """Do nothing, but break the graph, or say why it cannot be whole, if Dynamo is what is calling.

    Raises:
        torch._dynamo.exc.Unsupported: Dynamo is tracing. With ``fullgraph=False`` the frame runs uncompiled.
    """
    if TracingContext.try_get() is not None:
        from torch._dynamo.exc import Unsupported

        raise Unsupported(f"{what} cannot be traced by torch.compile; {advice}")


def mend_tracing() -> None:
    """Undo what tracing a training step does to everything that Dynamo traces after it.

    Where ``param.grad`` was set to None and is read in the same trace, torch 2.13 notes that place as the source of the one
    object that stands for None in all traces; later ones then read a variable that they do not have
    (pytorch/pytorch#193869).
    """
    from torch._dynamo.variables import ConstantVariable

    ConstantVariable.create(None).source = None


# What torch.compiler.assume_constant_result does, without importing the compiler: Dynamo calls it while it traces.
mend_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """Lets new tensors have no memory: enough to compile with, whatever their size."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    is_active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return contextlib.nullcontext() if is_active else FakeTensorMode()


def compile_graph(
    function: Callable[..., Any],
    args: list[Tensor],
    dynamic: Sequence[Sequence[int]],
    options: dict[str, Any],
    *,
    from_one: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[[Mapping[int, int], list[Tensor]], list[Tensor]] | str:
    """Compile ``function(*args)``, which writes into its arguments or returns a tuple of new tensors, with Inductor.

    Args:
        function: traced once; it must have a code object of its own.
        args: example tensors, no two the same object; see :func:`without_memory`.
        dynamic: for each argument, the dimensions that may have any size; those of equal size stay equal.
        options: Inductor options.
        from_one: whether "any size" includes 1; otherwise it begins with 2.
        decompositions: by operator, how to write it in others; None for Inductor's own.

    Returns:
        ``run(sizes, args)``, which calls Inductor's code without Dynamo's guards: the caller answers for dtypes, devices,
        other sizes and strides being those of the example. ``sizes`` maps the example's sizes of dynamic dimensions to
        those of ``args``. Or why there is none: compilation is switched off for the process, or fails on this machine.
    """
    from torch._dynamo import lookup_backend, mark_dynamic
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config
    from torch.fx.experimental import _config as symbolic_shapes

    inductor = lookup_backend("inductor")
    own = {} if decompositions is None else {"decompositions": decompositions}
    compiled: list[tuple[Callable[..., Any], list[tuple[bool, int]]]] = []
    outputs: list[Tensor] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        code = inductor(graph, example, **own)
        made = cast("Sequence[Any]", graph.graph.output_node().args[0])

        def first_call(*inputs: Any) -> Any:
            # Dynamo orders inputs by first use; the tensors themselves tell which is which, a size is an int.
            order = [
                (True, next(i for i, a in enumerate(args) if a is x)) if isinstance(x, Tensor) else (False, int(x))
                for x in inputs
            ]
            compiled.append((code, order))
            outputs.extend(torch.empty(0) for _ in made)
            return outputs

        return first_call

    for arg, dimensions in zip(args, dynamic, strict=True):
        for dimension in dimensions:
            mark_dynamic(arg, dimension)
    oblivious = symbolic_shapes.patch(backed_size_oblivious=from_one)  # type: ignore[attr-defined]
    # The CPU's own word for its vector instructions is trusted: to try them out takes several seconds in a fresh cache.
    trusting = config.patch({"cpp.vec_isa_ok": True, **options})
    with torch.no_grad(), torch.compiler.set_stance("default"), trusting, oblivious:
        try:
            results = torch.compile(function, backend=backend, fullgraph=True)(*args)
        except BackendCompilerFailed as error:
            return f"Inductor failed: {_message(error.inner_exception)}"
    if not compiled:
        return "torch.compile is switched off"
    code, order = compiled[0]
    returned = [next(i for i, o in enumerate(outputs) if o is r) for r in results or ()]

    def run(sizes: Mapping[int, int], tensors: list[Tensor]) -> list[Tensor]:
        made = code(*[tensors[i] if is_tensor else sizes[i] for is_tensor, i in order])
        return [made[i] for i in returned]

    return run


def _message(error: Exception) -> str:
    """The beginning of what ``error`` says; of a compiler that failed, of what that said."""
    return textwrap.shorten(getattr(error, "output", "") or str(error), 500, placeholder=" ...")
