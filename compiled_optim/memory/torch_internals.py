"""The few parts of torch without a public name that the package uses, each behind one function."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import getpass
import operator
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import _TLS, TracingContext
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.optim import Optimizer, optimizer

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Captures: TypeAlias = tuple[torch.device, ...]
"""The devices that capture a graph now."""


compiler_at_work = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""The getter of the callback, such as Dynamo's, that sees each frame before it runs; None without one."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The function that ``torch.no_grad`` calls, at a tenth of its cost."""


def has_hooks(stepped: Optimizer) -> bool:
    """Return whether hooks run before or after a step of an optimizer. Dynamo can trace this."""
    hooks = len(stepped._optimizer_step_pre_hooks) + len(stepped._optimizer_step_post_hooks)
    return hooks + len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks) > 0


def is_observed(stepped: Optimizer) -> bool:
    """Return whether hooks or a profiler, even of another thread, observe a step of an optimizer."""
    is_profiled = torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled
    return is_profiled or has_hooks(stepped)


def in_range(name: str, work: Callable[..., T], *args: Any) -> T:
    """Do ``work``; while a profiler runs, in a range ``compiled_optim::name`` of torch.profiler and NVTX.

    Traced code must not call this: Dynamo would trace it anew when profiling begins.
    """
    if not profiler._is_profiler_enabled:
        return work(*args)
    with profiler.record_function(f"compiled_optim::{name}"):
        return work(*args)


def outside_dynamo(function: F) -> F:
    """Decorate a function that Dynamo must not trace. Unlike ``torch.compiler.disable`` this never imports the compiler."""
    outside: Callable[..., Any] = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A compiler that runs a traced graph has set modes, which must not change.
        if is_dynamo_compiling() or (compiler_at_work() is not None and TracingContext.try_get() is None):
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("F", call)


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def compiles_means_with_lists() -> bool:
    """Return whether Inductor compiles sums over tensors beside operations on lists: torch 2.11 fails to reorder loops."""
    return _torch_version() >= (2, 12)


def default_cache_directory() -> str:
    """Return Inductor's default cache directory. It writes this path into ``TORCHINDUCTOR_CACHE_DIR`` itself."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.abspath(os.path.join(tempfile.gettempdir(), f"torchinductor_{name}"))


def backward_number() -> int:
    """Return a number of the backward that runs on this thread, unique to it; -1 if none runs."""
    return torch._C._current_graph_task_id()


def after_backward(function: Callable[[], object]) -> None:
    """Call ``function`` when the backward that runs on this thread ends, unless it fails.

    The current streams are then those of the backward's caller, and wait for all gradients.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is one of FakeTensorMode's. Such a tensor warns when its address is read."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def fakes_are_made() -> bool:
    """Return whether FakeTensorMode is on, in which every new tensor is fake."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def outside_fakes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which FakeTensorMode is off."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def wraps_others(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is of a subclass with its own operations, so that its elements may be in other tensors."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def dispatch_keys(tensor: Tensor) -> int:
    """Return the dispatch keys of ``tensor``, by which torch selects code, as the number that its object stores."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def dispatch_key_of_subclasses() -> int:
    """Return the dispatch key of tensors for which :func:`wraps_others` is true."""
    return torch._C.DispatchKeySet(torch._C.DispatchKey.Python).raw_repr()


def zeros_without_memory(size: int) -> Tensor:
    """Return zeros without memory, as derivatives can be."""
    return torch._efficientzerotensor(size)


CAPTURING: dict[str, Callable[[], object | None]] = {
    "cuda": lambda: torch.cuda.current_stream().cuda_stream if torch.cuda.is_current_stream_capturing() else None
}
"""By device type, a function that identifies the capture which records the current stream; None where work is executed."""


def current_capture(device: torch.device) -> object | None:
    """Return an identity of the capture that records work of ``device``, the same on every thread; None without one."""
    ask = CAPTURING.get(device.type)
    return None if ask is None else ask()


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors of a ``with`` block writable in every mode. Autograd records as it did before the block."""
    recording = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recording):
        yield


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Return a context in which operations compute in the dtypes of their tensors."""
    context: contextlib.AbstractContextManager[None] = torch._C._DisableAutocast()
    return context


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph of ``device`` is being captured."""
    return current_capture(device) is not None


def captures_of(devices: Sequence[torch.device]) -> Captures:
    """Return those of ``devices`` whose work a graph is capturing. A step calls this once, and passes the result on."""
    return tuple([device for device in devices if is_capturing(device)])


def can_capture(device: torch.device) -> bool:
    """Return whether graphs of ``device`` can capture its work."""
    return device.type in CAPTURING


def inductor_captures(device: torch.device) -> bool:
    """Return whether the capture that records the current stream of ``device`` is one of Inductor's own."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda" or not is_capturing(device):
        return False
    manager = trees.get_manager(device.index or 0, create_if_none_exists=False)
    return manager is not None and torch.cuda.current_stream(device) == manager.stream


BESIDE_GRAPHS = "beside-graphs"
"""The prefix of the names of threads that :func:`beside_graphs` starts."""


def beside_graphs(function: Callable[[], T], device: torch.device | None = None) -> T:
    """Call ``function`` on a new thread, and return its result when its work on ``device`` is done.

    The current thread may be recording a graph, or warming up for one in its memory pool. A new thread does neither: its
    tensors are permanent, and its kernels run on the default stream, where graphs are usually replayed. Without ``device``
    the call does not wait for them.
    """
    cuda = device if device is not None and device.type == "cuda" else None

    def call() -> T:
        if cuda is None:
            return function()
        with torch.cuda.device(cuda):
            result = function()
            torch.cuda.current_stream(cuda).synchronize()
            return result

    if cuda is not None and not is_capturing(cuda):  # a capture begins after all other work
        torch.cuda.default_stream(cuda).wait_stream(torch.cuda.current_stream(cuda))
    with concurrent.futures.ThreadPoolExecutor(1, BESIDE_GRAPHS) as thread:
        return thread.submit(call).result()


def let_stay(tensor: Tensor) -> None:
    """Tell compilers that ``tensor``, an input of compiled code, has the same address in all calls.

    Inductor's CUDA graphs then read and write it there, and no copy, and are recorded again if it moves.
    It is what ``torch._dynamo.mark_static_address`` does, without importing the compiler.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def any_stream_captures() -> bool:
    """Return whether the current stream or ``torch.cuda.graph``'s default is capturing; others cannot be checked."""
    by_default = torch.cuda.graph.default_capture_stream
    streams = [torch.cuda.current_stream(), *([] if by_default is None else [by_default])]
    for stream in streams:
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


def abandon_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Make later captures possible after a capture into ``pool`` failed.

    After the failure torch 2.11 still allocates from ``pool``, by a rule that belongs to ``graph``, and refuses every
    later capture in the process. Later versions stop by themselves (pytorch/pytorch#180395): then this does nothing.
    """
    try:
        graph.pool()
    except RuntimeError:
        _ABANDONED.append(graph)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)


_ABANDONED: list[torch.cuda.CUDAGraph] = []


@contextlib.contextmanager
def own_workspaces() -> Iterator[None]:
    """Let cuBLAS use, in a capture, workspaces that belong to the graph, and none of these afterwards.

    Otherwise a graph uses workspaces from before its capture, which are freed when torch.compile captures a graph. Clearing
    also frees workspaces that other code's graphs use. From torch 2.15 on each call allocates a workspace, in a capture the
    graph's, unless torch is set to cache one for the process, as it does by default with ROCm.
    """
    setting = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE")
    caches = _torch_version() < (2, 15) or setting == "1" or (torch.version.hip is not None and setting != "0")
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # builds without CUDA lack it
    if not caches or clear is None:
        yield
        return
    clear()
    try:
        yield
    finally:
        clear()


def shape_of_part(tensor: Any) -> tuple[int, ...]:
    """Return the shape that a DTensor's local tensor must have on this process."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail, as an index out of range does, if ``condition``, a 1-element bool, is false. It does not wait for the device."""
    torch._assert_async(condition, message)


def refuse_tracing(what: str, advice: str) -> None:
    """Raise ``Unsupported`` where Dynamo is tracing: seen with ``fullgraph=True``, else the frame runs uncompiled."""
    if vars(_TLS).get("tracing_context") is not None:  # TracingContext.try_get, which costs a quarter of a microsecond more
        from torch._dynamo.exc import Unsupported

        raise Unsupported(f"{what} cannot be traced by torch.compile; {advice}")


def called_while_tracing(function: F) -> F:
    """Decorate a function that Dynamo calls while it traces, with a result that is a constant of the trace.

    The trace is valid while arguments that are objects are the same ones. This does the same as
    ``torch.compiler.assume_constant_result``, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def guard_items(owner: object, path: str) -> None:
    """Make the current trace invalid once tensors that it also found elsewhere are not the items of this list.

    ``owner`` is an object that Dynamo traced, and ``path`` leads from there to the list, as in ``"step.params"``. Dynamo
    itself guards neither the identity of an optimizer's tensors nor that parameters are distinct.
    """
    from torch._dynamo import config
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, ListGetItemSource, OptimizerSource, is_from_optimizer_source
    from torch._dynamo.symbolic_convert import InstructionTranslator

    def plain(source: Any) -> Any:
        if isinstance(source, OptimizerSource):
            return plain(source.base)
        return dataclasses.replace(source, base=plain(source.base)) if hasattr(source, "base") else source

    def keep_apart(builder: Any, guard: Any) -> None:
        if guard.name not in builder.no_tensor_aliasing_names:
            builder.no_tensor_aliasing_names.append(guard.name)
            builder.no_tensor_aliasing_guard_managers.append(builder.get_guard_manager(guard))

    output = InstructionTranslator.current_tx().output
    read, items = output.side_effects, operator.attrgetter(path)(owner)
    list_source = functools.reduce(AttrSource, path.split("."), plain(read[owner].source))
    unused: list[Any] = []
    for index, tensor in enumerate(items):
        item = ListGetItemSource(list_source, index)
        source: Any = read[tensor].source if tensor in read else item
        if is_from_optimizer_source(source):
            read[tensor].source = source = plain(source)  # so that Dynamo guards the tensor's source
        if source is item or getattr(source, "base", None) == list_source:
            unused.append((tensor, source))
        else:
            install_guard(source.make_guard(functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=item)))
    if not config.skip_no_tensor_aliasing_guards_on_parameters:
        return
    known = set(map(id, items))
    inputs = [(arg.example, arg.source) for arg in output.graphargs if id(arg.example) not in known]
    others = [source for tensor, source in inputs if type(tensor) is Parameter and not is_from_optimizer_source(source)]
    unread = [source for tensor, source in unused if type(tensor) is Parameter]
    if others and unread:
        install_guard(*(source.make_guard(keep_apart) for source in others + unread))


def guard_by(owner: object, holds: Callable[[Any], bool]) -> None:
    """Make the current trace invalid once ``holds`` is false for ``owner``, an object that Dynamo traced."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslator

    def add(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(holds, ["no state of an optimizer moved"], guard.user_stack)

    source: Any = InstructionTranslator.current_tx().output.side_effects[owner].source
    install_guard(source.make_guard(add))


def let_compilers_trace(function: Callable[..., Any]) -> None:
    """Let Dynamo call ``function`` on fake tensors where traced code calls it, and the graph's compiler trace it."""
    torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    torch.fx.has_side_effect(function)


def let_caches_keep(function: Callable[..., Any], digest: str) -> None:
    """Let torch's caches keep compiled code whose graph calls ``function``; ``digest`` differs where its code does."""
    from torch._inductor import config

    config.unsafe_marked_cacheable_functions[f"{function.__module__}.{function.__name__}"] = digest


@called_while_tracing
def mend_tracing() -> None:
    """Repair the damage of a traced training step to later traces.

    One object represents None in all traces of torch 2.13. A trace that sets ``param.grad`` to None and reads it records
    that attribute as the object's source. Later traces then read a variable that they lack (pytorch/pytorch#193869).
    """
    from torch._dynamo.variables import ConstantVariable

    ConstantVariable.create(None).source = None
