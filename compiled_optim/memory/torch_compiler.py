"""Functions of tensors of any size that Inductor compiles without Dynamo, whose guards and limits they do not have."""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import SymInt, Tensor

from compiled_optim.memory.torch_internals import without_autocast

ListFunction: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""A function of tensors, compiled or not: it writes into them, or returns new ones."""


def compiled(
    function: ListFunction,
    examples: Sequence[Tensor],
    varying: Sequence[Sequence[int]],
    device: str,
    options: dict[str, Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> ListFunction | str:
    """Compile ``function`` with Inductor for a device.

    torch's caches find the code again by the operations that ``function`` runs.

    Args:
        function: traced once, on fake tensors.
        examples: meta tensors with the shapes and dtypes to compile with.
        varying: for each of them its dimensions that may have any size, from 1 on; those of equal size stay equal.
        device: of the code.
        options: Inductor options.
        decompositions: by operator, a function of other operators that replaces it.

    Returns:
        The compiled code, or a text with the reason for its absence: compilation is switched off for the process, fails on
        this machine, or would hold for some sizes only. It must be called with the dtypes, strides and other sizes of the
        examples.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import config as dynamo
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as compile_graph
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import _config as symbolic_shapes
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    if dynamo.disable:  # as TORCH_COMPILE_DISABLE=1 does
        return "torch.compile is switched off"
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    @functools.cache
    def size(number: int) -> int | SymInt:
        """Return a size that may vary, and is ``number`` in the examples."""
        varies: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        vector, source = torch.empty(number, device="meta"), ConstantSource(f"size_{number}")
        return mode.from_tensor(vector, source=source, symbolic_context=varies).shape[0]

    def fake(example: Tensor, dims: Sequence[int]) -> Tensor:
        shape = [size(number) if dim in dims else number for dim, number in enumerate(example.shape)]
        with mode:
            return torch.empty(shape, dtype=example.dtype, device=device)

    # The CPU's list of its vector instructions is trusted: a trial takes several seconds in a fresh cache.
    trusting = {"cpp.vec_isa_ok": True, **options}
    oblivious = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with _alone(), config.patch(trusting), oblivious, tracing(TracingContext(mode)):
        inputs = list(map(fake, examples, varying))
        with mode, enable_python_dispatcher(), torch.device(device):
            graph = make_fx(lambda *tensors: function(list(tensors)), decompositions)(*inputs)
        if shapes.guards or shapes.replacements:
            return "its operations depend on the sizes of tensors"
        try:
            code = compile_graph(graph, [*inputs])
        except Exception as error:
            inner = getattr(error, "inner_exception", error)
            message = getattr(inner, "output", "") or str(inner)  # first a C++ compiler's
            return f"Inductor failed: {textwrap.shorten(message, 500, placeholder=' ...')}"
    return lambda tensors: code(*tensors)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let no other thread compile or be disturbed, and let no mode that the user entered get into code."""
    from torch._dynamo.convert_frame import compile_lock
    from torch.utils._python_dispatch import _disable_current_modes

    with compile_lock, contextlib.ExitStack() as stack:
        # Else functions under torch.compile fail in other threads, since torch knows of the process that it traces.
        stack.callback(setattr, torch.compiler, "_is_compiling_flag", torch.compiler._is_compiling_flag)
        torch.compiler._is_compiling_flag = True
        while torch._C._len_torch_function_stack():
            stack.callback(torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack())
        for context in (_disable_current_modes(), torch.inference_mode(False), torch.no_grad(), without_autocast()):
            stack.enter_context(context)
        yield
