"""Functions that Inductor compiles, kept on disk: a later process runs them without torch's compiler.

An entry is found by what the function does, the operations that it performs on examples of two sizes, and by whatever else
Inductor's code depends on: the build of torch, the processor, the process's settings.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.cache import load_kept
from compiled_optim.memory.cpp_library import processor
from compiled_optim.torch_compiler import (
    CompiledGraph,
    compile_graph,
    compiler_settings,
    load_library,
    load_standalone,
    operations_of,
    without_memory,
)
from compiled_optim.torch_internals import build_identity

Example = Callable[[str], tuple[list[Tensor], Sequence[Sequence[int]]]]
"""Tensors on a device to compile with, no two the same object, and for each its dimensions that may have any size."""

_FORMAT = 1  # of an entry
_KEPT = {"cpu"}  # the devices whose code runs without Inductor


def obtain_graph(
    function: Callable[..., Any],
    example: Example,
    device: str,
    options: dict[str, Any],
    *,
    from_one: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> CompiledGraph | str:
    """What :func:`~compiled_optim.torch_compiler.compile_graph` makes of ``function``, compiled now or kept."""

    @functools.cache
    def compiled() -> CompiledGraph | str:
        with without_memory():
            args, dynamic = example(device)
            return compile_graph(function, args, dynamic, options, from_one=from_one, decompositions=decompositions)

    identity = _identity(function, example, options, from_one) if device in _KEPT else None
    if identity is None:
        return compiled()
    name = f"{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:32]}.graph"
    libraries: dict[str, bytes] = {}  # by name of the file, once they are compiled
    try:
        return load_kept(name, lambda: _written(compiled(), libraries), lambda path: _read(path, libraries))
    except _NotKeptError:
        return compiled()
    except OSError as error:
        warnings.warn(
            f"compiled_optim: code of Inductor is not kept: {error}; every process compiles it again",
            RuntimeWarning,
            stacklevel=2,
        )
        return compiled()


class _NotKeptError(Exception):
    """There is nothing to keep: the function could not be compiled, or its code needs Inductor."""


def _written(graph: CompiledGraph | str, libraries: dict[str, bytes]) -> bytes:
    """An entry: the text of Inductor's code and the names of its libraries, which are files of their own."""
    if isinstance(graph, str) or graph.standalone is None:
        raise _NotKeptError
    places = {}
    for name, path in graph.standalone.libraries.items():
        content = Path(path).read_bytes()
        places[name] = f"{hashlib.sha256(content).hexdigest()[:32]}.so"
        libraries[places[name]] = content
    entry = {"text": graph.standalone.text, "libraries": places, "order": graph.order, "returned": graph.returned}
    return json.dumps(entry).encode() + b"\n"


def _read(path: Path, libraries: Mapping[str, bytes]) -> CompiledGraph:
    """The graph of an entry; ``OSError`` where a library is missing that this process did not compile."""

    def library(file: str) -> bytes:
        if file not in libraries:
            raise FileNotFoundError(f"{file} is missing")
        return libraries[file]

    entry = json.loads(path.read_bytes().partition(b"\n")[0])
    files = entry["libraries"].items()
    kernels = {name: load_kept(file, functools.partial(library, file), load_library) for name, file in files}
    return CompiledGraph(load_standalone(entry["text"], kernels), entry["order"], entry["returned"])


def _identity(function: Callable[..., Any], example: Example, options: Mapping[str, Any], from_one: bool) -> str | None:
    """A text that differs between functions, and where Inductor would compile one differently; None to keep nothing."""
    if (settings := compiler_settings()) is None:
        return None
    args, dynamic = example("meta")
    try:
        traces = [operations_of(function, _empty(args, dynamic, larger)) for larger in (False, True)]
    except Exception:  # the function does what empty tensors cannot: it is compiled in every process
        return None
    described = [(arg.dtype, arg.shape, arg.stride()) for arg in args]
    return "\0".join(
        [str(_FORMAT), *traces, repr((described, dynamic, options, from_one)), settings, build_identity(), processor()]
    )


def _empty(args: Sequence[Tensor], dynamic: Sequence[Sequence[int]], larger: bool) -> list[Tensor]:
    """Tensors on the CPU like ``args``, whose first dimension is 0 where it is dynamic: operations on them take no time.

    Other dynamic dimensions may be ``larger``, since a function may compute with sizes.
    """
    shapes = [list(arg.shape) for arg in args]
    for shape, dimensions in zip(shapes, dynamic, strict=True):
        for d in dimensions:
            shape[d] = 0 if d == 0 else 2 * shape[d] + 1 if larger else shape[d]
    return [torch.zeros(shape, dtype=arg.dtype, device="cpu") for shape, arg in zip(shapes, args, strict=True)]
