"""Functions that Inductor compiles, and how its code is called past Dynamo's guards."""

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
    """A context in which new tensors have no memory. They are enough to compile with, whatever their size."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return contextlib.nullcontext() if fakes_are_made() else FakeTensorMode()


def decompositions_of_inductor() -> dict[Any, Callable[..., Any]]:
    """By operator, how Inductor writes it with others."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


class CompiledGraph(NamedTuple):
    """What Inductor compiled for ``obtain_graph``.

    ``code`` takes a list of ``order``: for each input which of the tensors it is, or whose size, and along which dimension.
    ``returned`` are the positions of the function's results among those of ``code``.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    order: Sequence[tuple[int, int | None]]
    returned: Sequence[int]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The function's results."""
        made = self.code([tensors[i] if dim is None else tensors[i].shape[dim] for i, dim in self.order])
        return [made[i] for i in self.returned]


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
        name: what the code is called, with a number.
        function: traced once, and not by Dynamo.
        example: makes tensors on a device to compile with, no two the same object, and for each its dimensions that may have
            any size, from 1 on; those of equal size stay equal.
        device: where the code is to run.
        options: Inductor options.
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

    def traced(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return function(tensors)

    def compiled(*tensors: Tensor) -> tuple[Tensor, ...]:
        return traced(list(tensors))

    let_compilers_trace(traced)
    # Dynamo's recompile limit counts per code object, and it remembers the shapes it saw per name.
    compiled.__code__ = compiled.__code__.replace(co_name=f"{name}_{next(_serial)}")
    oblivious = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    # The CPU's own word for its vector instructions is trusted: to try them out takes several seconds in a fresh cache.
    trusting = config.patch({"cpp.vec_isa_ok": True, **options})
    with without_memory(), torch.no_grad(), torch.compiler.set_stance("default"), trusting, oblivious:
        args, dynamic = example(device)
        for arg, dimensions in zip(args, dynamic, strict=True):
            for dimension in dimensions:
                mark_dynamic(arg, dimension)
        backend = _Backend(args, dynamic, decompositions)
        try:
            results = torch.compile(compiled, backend=backend, fullgraph=True)(*args)
        except BackendCompilerFailed as error:
            message = getattr(error.inner_exception, "output", "") or str(error.inner_exception)  # the compiler's own first
            return f"Inductor failed: {textwrap.shorten(message, 500, placeholder=' ...')}"
    return backend.compiled(results) or switched_off


class _Backend:
    """A backend of Dynamo that compiles one graph with Inductor, and notes how it is called in place of running it."""

    def __init__(
        self,
        args: list[Tensor],
        dynamic: Sequence[Sequence[int]],
        decompositions: Mapping[Any, Callable[..., Any]] | None,
    ) -> None:
        self._args = args
        self._sizes = {arg.shape[dim]: (i, dim) for i, arg in enumerate(args) for dim in dynamic[i]}
        self._options = {} if decompositions is None else {"decompositions": decompositions}
        self._call: tuple[Callable[..., Any], list[tuple[int, int | None]], list[Tensor]] | None = None

    def __call__(self, module: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        code = lookup_backend("inductor")(module, example, **self._options)
        count = len(module.graph.output_node().args[0])  # type: ignore[arg-type]

        def first_call(*inputs: Any) -> list[Tensor]:
            """The results are stand-ins."""
            self._call = code, list(map(self._place, inputs)), [torch.empty(0) for _ in range(count)]
            return self._call[2]

        return first_call

    def _place(self, given: Any) -> tuple[int, int | None]:
        """Which of the example's tensors ``given`` is; or whose size it is, an int, and in which dimension."""
        if isinstance(given, Tensor):
            return next(i for i, arg in enumerate(self._args) if arg is given), None
        return self._sizes[int(given)]

    def compiled(self, results: Sequence[Tensor]) -> CompiledGraph | None:
        """What was compiled for a function with these ``results``; None if nothing was."""
        if self._call is None:
            return None
        code, order, outputs = self._call
        returned = [next(i for i, o in enumerate(outputs) if o is r) for r in results]
        return CompiledGraph(lambda values: code(*values), order, returned)
