"""Functions that Inductor compiles, and calls of its code that bypass Dynamo's guards."""

from __future__ import annotations

import contextlib
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.memory.torch_internals import fakes_are_made, let_compilers_trace

_serial = itertools.count()


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors have no memory. They suffice to compile with, whatever their size."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return contextlib.nullcontext() if fakes_are_made() else FakeTensorMode()


class CompiledGraph(NamedTuple):
    """The code that Inductor compiled for ``obtain_graph``.

    ``code`` takes a list in ``order``: for each input the index of a tensor and, if the input is a size, its dimension.
    ``returned`` are the indices of the function's results among those of ``code``.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    order: Sequence[tuple[int, int | None]]
    returned: Sequence[int]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the code on ``tensors``, and return the function's results."""
        outputs = self.code([tensors[i] if dim is None else tensors[i].shape[dim] for i, dim in self.order])
        return [outputs[i] for i in self.returned]


def obtain_graph(
    name: str,
    function: Callable[[list[Tensor]], tuple[Tensor, ...]],
    example: Callable[[str], tuple[list[Tensor], Sequence[Sequence[int]]]],
    device: str,
    options: dict[str, Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> CompiledGraph | str:
    """Compile ``function``, which writes into its tensors or returns new ones, with Inductor.

    Args:
        name: of the code, before a number.
        function: traced once, and not by Dynamo.
        example: returns distinct tensors on a device to compile with, and for each its dimensions that may have any size,
            from 1 on; those of equal size stay equal.
        device: of the code.
        options: Inductor options.
        decompositions: by operator, a function of other operators that replaces it, instead of Inductor's.

    Returns:
        The compiled code, or a text with the reason for its absence: compilation is switched off for the process, or fails
        on this machine. It runs without Dynamo's guards, so the caller must pass tensors with the dtypes, devices, strides
        and other sizes of the example.
    """
    from torch._dynamo import config as dynamo
    from torch._dynamo import mark_dynamic
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config
    from torch.fx.experimental import _config as symbolic_shapes

    switched_off = "torch.compile is switched off"
    if dynamo.disable:  # then torch.compile with fullgraph=True raises an error
        return switched_off

    def traced(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return function(tensors)

    def compiled(*tensors: Tensor) -> tuple[Tensor, ...]:
        return traced(list(tensors))

    let_compilers_trace(traced)
    # Dynamo's recompile limit counts per code object, and it remembers the shapes it saw per name.
    compiled.__code__ = compiled.__code__.replace(co_name=f"{name}_{next(_serial)}")
    oblivious = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    # The CPU's list of its vector instructions is trusted: a trial takes several seconds in a fresh cache.
    trusting = config.patch({"cpp.vec_isa_ok": True, **options})
    with without_memory(), torch.no_grad(), torch.compiler.set_stance("default"), trusting, oblivious:
        args, dynamic = example(device)
        for arg, dimensions in zip(args, dynamic, strict=True):
            for dimension in dimensions:
                mark_dynamic(arg, dimension)
        sizes = {arg.shape[dim]: (i, dim) for i, arg in enumerate(args) for dim in dynamic[i]}
        try:
            return _compiled(compiled, args, sizes, decompositions) or switched_off
        except BackendCompilerFailed as error:
            message = getattr(error.inner_exception, "output", "") or str(error.inner_exception)  # first a C++ compiler's
            return f"Inductor failed: {textwrap.shorten(message, 500, placeholder=' ...')}"


def _compiled(
    function: Callable[..., Any],
    args: list[Tensor],
    sizes: Mapping[int, tuple[int, int]],
    decompositions: Mapping[Any, Callable[..., Any]] | None,
) -> CompiledGraph | None:
    """Return Inductor's code for ``function`` and ``args``, as Dynamo calls it. The call is recorded, and not run.

    ``sizes`` are those of dynamic dimensions, with an argument and a dimension for each.
    """
    from torch._dynamo import lookup_backend
    from torch._inductor.decomposition import select_decomp_table

    inductor: Callable[..., Any] = lookup_backend("inductor")
    calls: list[tuple[Callable[..., Any], list[tuple[int, int | None]], list[Tensor]]] = []

    def index_of(value: Any) -> tuple[int, int | None]:
        """Return the index of ``value`` in ``args``; for a size, the index of a tensor and the dimension of that size."""
        return (next(i for i, a in enumerate(args) if a is value), None) if isinstance(value, Tensor) else sizes[int(value)]

    def backend(module: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        table = decompositions and {**select_decomp_table(), **decompositions}
        code = inductor(module, example, decompositions=table)
        count = len(module.graph.output_node().args[0])  # type: ignore[arg-type]

        def first_call(*inputs: Any) -> list[Tensor]:
            """Record the call, and return stand-ins for the results."""
            calls.append((code, list(map(index_of, inputs)), [torch.empty(0, device="cpu") for _ in range(count)]))
            return calls[0][2]

        return first_call

    results = torch.compile(function, backend=backend, fullgraph=True)(*args)
    if not calls:
        return None
    (code, order, outputs), *_ = calls
    returned = [next(i for i, o in enumerate(outputs) if o is r) for r in results]
    return CompiledGraph(lambda values: code(*values), order, returned)
