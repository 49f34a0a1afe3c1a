"""Functions of tensors of any size that Inductor compiles without Dynamo, whose guards and limits they do not have."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import SymInt, Tensor

Code: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""A function of tensors, compiled or not: it writes into them, or returns new ones."""


def compiled(
    function: Code,
    examples: Sequence[Tensor],
    varying: Sequence[Sequence[int]],
    device: str,
    options: dict[str, Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Code | str:
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
        The compiled code, or a text with the reason for its absence: compilation is switched off for the process, or fails
        on this machine. It checks nothing, so the caller must pass tensors with the dtypes, strides and other sizes of the
        examples.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import config as dynamo
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as compile_graph
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import _config as symbolic_shapes
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
    from torch.utils._python_dispatch import _disable_current_modes

    if dynamo.disable:  # as TORCH_COMPILE_DISABLE=1 does
        return "torch.compile is switched off"
    shapes = ShapeEnv()
    mode, sizes = FakeTensorMode(shape_env=shapes), dict[int, int | SymInt]()

    def size(example: Tensor, dim: int) -> int | SymInt:
        if (number := example.shape[dim]) not in sizes:
            source = ConstantSource(f"size_{number}")
            symbol = shapes.create_symbol(number, source, DimDynamic.DYNAMIC, constraint_dim=None)
            sizes[number] = shapes.create_symintnode(symbol, hint=number, source=source)
        return sizes[number]

    # The CPU's list of its vector instructions is trusted: a trial takes several seconds in a fresh cache.
    trusting = config.patch({"cpp.vec_isa_ok": True, **options})
    oblivious = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with _disable_current_modes(), torch.device("cpu"), tracing(TracingContext(mode)), torch.no_grad(), trusting, oblivious:
        with mode, enable_python_dispatcher():
            inputs = [
                torch.empty([size(e, d) if d in dims else n for d, n in enumerate(e.shape)], dtype=e.dtype, device=device)
                for e, dims in zip(examples, varying, strict=True)
            ]
            graph = make_fx(lambda *tensors: function(list(tensors)), decompositions)(*inputs)
        try:
            code = compile_graph(graph, [*inputs])
        except BackendCompilerFailed as error:
            message = getattr(error.inner_exception, "output", "") or str(error.inner_exception)  # first a C++ compiler's
            return f"Inductor failed: {textwrap.shorten(message, 500, placeholder=' ...')}"
    return lambda tensors: code(*tensors)
