"""Functions that Inductor compiles, and how its code is called past Dynamo's guards."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.memory.torch_internals import fakes_are_made


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """A context in which new tensors have no memory. They are enough to compile with, whatever their size."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return contextlib.nullcontext() if fakes_are_made() else FakeTensorMode()


def decompositions_of_inductor() -> dict[Any, Callable[..., Any]]:
    """By operator, how Inductor writes it with others."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


class CompiledGraph(NamedTuple):
    """What Inductor compiled for ``obtain_graph``.

    ``code`` takes a list of ``order``: for each input, whether it is a tensor, and which of the arguments or which size of
    the example. ``returned`` are the positions of the function's results among those of ``code``.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    order: Sequence[tuple[bool, int]]
    returned: Sequence[int]

    def run(self, sizes: Mapping[int, int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The function's results. ``sizes`` maps the example's sizes of dynamic dimensions to those of ``tensors``."""
        made = self.code([tensors[i] if is_tensor else sizes[i] for is_tensor, i in self.order])
        return [made[i] for i in self.returned]


def obtain_graph(
    function: Callable[..., Any],
    example: Callable[[str], tuple[list[Tensor], Sequence[Sequence[int]]]],
    device: str,
    options: dict[str, Any],
    *,
    from_one: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> CompiledGraph | str:
    """Compile ``function``, which writes into its arguments or returns a tuple of new tensors, with Inductor.

    Args:
        function: traced once; it must have a code object of its own.
        example: makes tensors on a device to compile with, no two the same object, and for each its dimensions that may have
            any size; those of equal size stay equal.
        device: where the code is to run.
        options: Inductor options.
        from_one: whether "any size" includes 1; otherwise it begins with 2.
        decompositions: by operator, a function of other operators that replaces it; None for Inductor's own.

    Returns:
        What it compiled, or a text that says why there is nothing: compilation is switched off for the process, or fails on
        this machine. It runs without Dynamo's guards, so the caller must pass tensors with the dtypes, devices, strides and
        other sizes of the example.
    """
    from torch._dynamo import config as dynamo
    from torch._dynamo import mark_dynamic
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config
    from torch.fx.experimental import _config as symbolic_shapes

    switched_off = "torch.compile is switched off"
    if dynamo.disable:  # then torch.compile of a whole function is an error
        return switched_off
    oblivious = symbolic_shapes.patch(backed_size_oblivious=from_one)  # type: ignore[attr-defined]
    # The CPU's own word for its vector instructions is trusted: to try them out takes several seconds in a fresh cache.
    trusting = config.patch({"cpp.vec_isa_ok": True, **options})
    with without_memory(), torch.no_grad(), torch.compiler.set_stance("default"), trusting, oblivious:
        args, dynamic = example(device)
        for arg, dimensions in zip(args, dynamic, strict=True):
            for dimension in dimensions:
                mark_dynamic(arg, dimension)
        backend = _Backend(args, decompositions)
        try:
            results = torch.compile(function, backend=backend, fullgraph=True)(*args)
        except BackendCompilerFailed as error:
            message = getattr(error.inner_exception, "output", "") or str(error.inner_exception)  # the compiler's own first
            return f"Inductor failed: {textwrap.shorten(message, 500, placeholder=' ...')}"
    return backend.compiled(results or ()) or switched_off


class _Backend:
    """A backend of Dynamo that compiles one graph with Inductor, and notes how it is called in place of running it."""

    def __init__(self, args: list[Tensor], decompositions: Mapping[Any, Callable[..., Any]] | None) -> None:
        self._args = args
        self._options = {} if decompositions is None else {"decompositions": decompositions}
        self._call: tuple[Callable[..., Any], list[tuple[bool, int]], list[Tensor]] | None = None

    def __call__(self, module: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        code = lookup_backend("inductor")(module, example, **self._options)
        count = len(module.graph.output_node().args[0])  # type: ignore[arg-type]

        def first_call(*inputs: Any) -> list[Tensor]:
            """Tensors themselves tell which is which, a size is an int; the results are stand-ins."""
            order = [
                (True, next(i for i, a in enumerate(self._args) if a is x)) if isinstance(x, Tensor) else (False, int(x))
                for x in inputs
            ]
            self._call = code, order, [torch.empty(0) for _ in range(count)]
            return self._call[2]

        return first_call

    def compiled(self, results: Sequence[Tensor]) -> CompiledGraph | None:
        """What was compiled for a function with these ``results``; None if nothing was."""
        if self._call is None:
            return None
        code, order, outputs = self._call
        returned = [next(i for i, o in enumerate(outputs) if o is r) for r in results]
        return CompiledGraph(lambda values: code(*values), order, returned)
