"""Launches of what Triton compiled, without what it does before each; its parts without a public name are here alone."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Launch: TypeAlias = Callable[[], object]

_CALL = (
    "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"
)
"""How Triton launches a ``CompiledKernel``, since 3.6 at least."""


def prepared(
    function: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    counts: Sequence[int],
    options: Mapping[str, Any],
    device: torch.device,
) -> Launch:
    """What launches ``function``, which ``triton.jit`` made, on the stream that is ``device``'s current one then.

    ``device`` is the current device, now and in every launch.

    Triton's own way looks at each argument in every launch, since it compiles anew where the alignment of an address or the
    type of a number differ. These do not change here: it is asked once, and what it answers is launched with them. Hooks
    such as a profiler's are served by Triton's own way, for as long as there are any.
    """
    import triton
    from triton import knobs
    from triton.runtime import driver

    def usual() -> object:
        return function[grid](*tensors, *counts, **options)

    if not isinstance(function, triton.JITFunction) or obstacle():  # Triton's interpreter compiles nothing
        return usual
    kernel = function.warmup(*tensors, *counts, grid=grid, **options)
    if not isinstance(kernel, _compiled_kernel()):  # a hook of Triton's keeps it from compiling now
        return usual

    run, x, y, z = kernel.run, *grid, *[1] * (3 - len(grid))
    arguments = kernel.function, kernel.packed_metadata, None, None, None, *map(Tensor.data_ptr, tensors), *counts
    index = device.index or 0

    def launch() -> object:
        runtime = knobs.runtime
        if _acts(runtime.launch_enter_hook) or _acts(runtime.launch_exit_hook):
            return usual()
        return run(x, y, z, driver.active.get_current_stream(index), *arguments)

    return launch


def _acts(hook: Any) -> bool:
    """Whether a hook does anything: a chain of hooks may be empty."""
    return bool(getattr(hook, "calls", hook))


@functools.cache
def obstacle() -> str:
    """Why what this version of Triton compiled cannot be launched as :func:`prepared` does; empty if it can."""
    import triton

    try:
        text = inspect.getsource(_compiled_kernel().__getitem__)
    except (ImportError, AttributeError, OSError):
        text = ""  # which is another way
    hooks = ("launch_enter_hook", "launch_exit_hook")
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    is_known = launches_as_known(text) and all(hasattr(runtime, name) for name in hooks)
    return "" if is_known else f"Triton {triton.__version__} launches what it compiled in a way of its own"


def launches_as_known(text: str) -> bool:
    """Whether the ``text`` of ``CompiledKernel.__getitem__`` launches as :func:`prepared` does."""
    nodes = ast.walk(ast.parse(textwrap.dedent(text)))
    return _CALL in {ast.unparse(node) for node in nodes if isinstance(node, ast.Call)}


def _compiled_kernel() -> Any:
    from triton.compiler import CompiledKernel

    return CompiledKernel
