"""Functions that Inductor compiles, and how its code runs in processes that do not import it.

On a CPU the code is kept on disk. An entry is found by what the function does, the operations that it performs on examples
of two sizes, and by whatever else Inductor's code depends on: the build of torch, the processor, the process's settings.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import BuiltinFunctionType, CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from compiled_optim.memory.cache import load_kept, processor
from compiled_optim.memory.torch_internals import build_identity, fakes_are_made


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """A context in which new tensors have no memory. They are enough to compile with, whatever their size."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return contextlib.nullcontext() if fakes_are_made() else FakeTensorMode()


def decompositions_of_inductor() -> dict[Any, Callable[..., Any]]:
    """By operator, how Inductor writes it with others."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


class CompiledGraph(NamedTuple):
    """What Inductor compiled for ``compile_graph``.

    ``code`` takes a list of ``order``: for each input, whether it is a tensor, and which of the arguments or which size of
    the example. ``returned`` are the positions of the function's results among those of ``code``. ``standalone`` is the text
    of a function that takes the same list and runs without Inductor, with the extension modules whose function ``kernel`` it
    calls, by the name in the text -> their paths; None where the code runs in this process alone.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    order: Sequence[tuple[bool, int]]
    returned: Sequence[int]
    standalone: tuple[str, Mapping[str, str]] | None = None

    def run(self, sizes: Mapping[int, int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The function's results. ``sizes`` maps the example's sizes of dynamic dimensions to those of ``tensors``."""
        made = self.code([tensors[i] if is_tensor else sizes[i] for is_tensor, i in self.order])
        return [made[i] for i in self.returned]


def compile_graph(
    function: Callable[..., Any],
    args: list[Tensor],
    dynamic: Sequence[Sequence[int]],
    options: dict[str, Any],
    *,
    from_one: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> CompiledGraph | str:
    """Compile ``function(*args)``, which writes into its arguments or returns a tuple of new tensors, with Inductor.

    Args:
        function: traced once; it must have a code object of its own.
        args: example tensors, no two the same object; see :func:`without_memory`.
        dynamic: for each argument, the dimensions that may have any size; those of equal size stay equal.
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
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch.fx.experimental import _config as symbolic_shapes

    switched_off = "torch.compile is switched off"
    if dynamo.disable:  # then torch.compile of a whole function is an error
        return switched_off
    for arg, dimensions in zip(args, dynamic, strict=True):
        for dimension in dimensions:
            mark_dynamic(arg, dimension)
    backend = _Backend(args, decompositions)
    oblivious = symbolic_shapes.patch(backed_size_oblivious=from_one)  # type: ignore[attr-defined]
    # The CPU's own word for its vector instructions is trusted: to try them out takes several seconds in a fresh cache.
    trusting = config.patch({"cpp.vec_isa_ok": True, **options})
    # A hit in the cache of AOTAutograd would come without Inductor's code.
    uncached = functorch.patch(enable_autograd_cache=not backend.is_standalone)
    with torch.no_grad(), torch.compiler.set_stance("default"), trusting, oblivious, uncached:
        try:
            results = torch.compile(function, backend=backend, fullgraph=True)(*args)
        except BackendCompilerFailed as error:
            message = getattr(error.inner_exception, "output", "") or str(error.inner_exception)  # the compiler's own first
            return f"Inductor failed: {textwrap.shorten(message, 500, placeholder=' ...')}"
    return backend.compiled(results or ()) or switched_off


class _Backend:
    """A backend of Dynamo that compiles one graph with Inductor, and notes how it is called in place of running it."""

    def __init__(self, args: list[Tensor], decompositions: Mapping[Any, Callable[..., Any]] | None) -> None:
        self.is_standalone = all(arg.device.type == "cpu" for arg in args)
        self._args = args
        self._options = {} if decompositions is None else {"decompositions": decompositions}
        self._written: list[Any] = []  # what Inductor returned for AOTAutograd's graphs, with the number of their outputs
        self._calls: list[tuple[Callable[[list[Any]], Any], list[tuple[bool, int]], list[Tensor]]] = []

    def __call__(self, module: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        options = {**self._options, "inner_compile": self._compile} if self.is_standalone else self._options
        code = lookup_backend("inductor")(module, example, **options)
        count = _output_count(module)

        def first_call(*inputs: Any) -> Any:
            if len(self._written) == 1 and (results := self._call_within(code, inputs)) is not None:
                return results
            return self._note(lambda values: code(*values), count, inputs)

        return first_call

    def compiled(self, results: Sequence[Tensor]) -> CompiledGraph | None:
        """What was compiled for a function with these ``results``; None if nothing was."""
        if not self._calls:
            return None
        code, order, outputs = self._calls[-1]
        returned = [next(i for i, o in enumerate(outputs) if o is r) for r in results]
        return CompiledGraph(code, order, returned, _standalone(code))

    def _compile(self, module: torch.fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        written = compile_fx_inner(module, example, **kwargs)
        self._written.append((written, _output_count(module)))
        return written

    def _note(self, code: Callable[[list[Any]], Any], count: int, inputs: Sequence[Any]) -> list[Tensor]:
        """Note that ``code`` is called. Tensors themselves tell which is which, a size is an int; results are stand-ins."""
        order = [
            (True, next(i for i, a in enumerate(self._args) if a is x)) if isinstance(x, Tensor) else (False, int(x))
            for x in inputs
        ]
        self._calls.append((code, order, [torch.empty(0) for _ in range(count)]))
        return self._calls[-1][2]

    def _call_within(self, code: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Note how AOTAutograd calls Inductor's code; None if it does more than to pass tensors on."""
        ((written, count),) = self._written
        inner = written.current_callable
        written.current_callable = functools.partial(self._note, inner, count)
        try:
            results = code(*inputs)
        finally:
            written.current_callable = inner
        passed_on = self._calls and len(results) == count and all(any(r is o for o in self._calls[-1][2]) for r in results)
        return results if passed_on else None


def _output_count(module: torch.fx.GraphModule) -> int:
    return len(cast("Sequence[Any]", module.graph.output_node().args[0]))


def _standalone(function: Callable[..., Any]) -> tuple[str, Mapping[str, str]] | None:
    """The code of ``function``, where it is a module's that Inductor wrote and needs nothing but :func:`_names`."""
    written = getattr(function, "__func__", None)
    if written is None:
        return None
    text = textwrap.dedent(inspect.getsource(written))
    nodes = [*ast.walk(ast.parse(text))]
    offered, used = _names(), written.__globals__
    libraries: dict[str, str] = {}
    for name in _global_names(written.__code__):
        value = used.get(name)
        if isinstance(value, BuiltinFunctionType) and value.__name__ == _ENTRY:
            libraries[name] = str(cast("ModuleType", value.__self__).__file__)
        elif name == "extern_kernels":
            called = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == name}
            if any(getattr(value, c, None) is not getattr(offered[name], c, name) for c in called):
                return None
        elif value is not offered.get(name, vars(builtins).get(name)) or (value is None and name not in vars(builtins)):
            return None
    return None if any(isinstance(n, ast.Name) and n.id == "self" for n in nodes) else (text, libraries)


def compiler_settings() -> str | None:
    """A text that differs where Inductor would compile the same function differently; None where it is not to compile."""
    switched = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    dynamo = sys.modules.get("torch._dynamo.config")
    if any(os.environ.get(name, "0") != "0" for name in switched) or getattr(dynamo, "disable", False):
        return None
    of_process = [
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_default_dtype(),
        sorted((k, v) for k, v in os.environ.items() if k.startswith("TORCHINDUCTOR_") and k != "TORCHINDUCTOR_CACHE_DIR"),
    ]
    changed = []  # Inductor's settings that were written since it was imported, other than they are by default
    settings = sys.modules.get("torch._inductor.config")
    for name, entry in sorted(getattr(settings, "_config", {}).items()):
        written = entry.user_override
        value = written.get() if isinstance(written, ContextVar) else written
        default = entry.default if type(entry.env_value_default) is object else entry.env_value_default
        if type(value) is not object and value != default:  # an object of no other class stands for what is not set
            changed.append((name, value))
    return repr([sys.version, *of_process, *changed])


_ENTRY = "kernel"  # the name of the function in Inductor's extension modules


def _names() -> dict[str, Any]:
    """What the code of Inductor's modules for CPUs may refer to, by the names that it uses."""
    guards = torch._C._dynamo.guards
    return {
        **{name: getattr(guards, name) for name in ("assert_size_stride", "assert_alignment")},
        **{name: getattr(guards, f"_{name}") for name in ("empty_strided_cpu", "reinterpret_tensor")},
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "extern_kernels": SimpleNamespace(mm=torch.mm, bmm=torch.bmm, addmm=torch.addmm, baddbmm=torch.baddbmm),
    }


def load_library(path: Path) -> Callable[..., Any]:
    """The function of a library of standalone code, whose file must be named by its content.

    Raises:
        OSError: it cannot be loaded.
    """
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)  # as Inductor does, whose code reads it once
    spec = importlib.util.spec_from_file_location(f"{path.stem}.{_ENTRY}", path)
    if spec is None or spec.loader is None:
        raise OSError(f"{path} is not an extension module")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        entry: Callable[..., Any] = getattr(module, _ENTRY)
    except (ImportError, AttributeError) as error:
        raise OSError(f"{path} cannot be loaded: {error}") from error
    return entry


def _global_names(code: CodeType) -> set[str]:
    """The global names that ``code`` and the functions in it read."""
    inner = [_global_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}.union(*inner)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down in words what a function does with ``tensors``, operation by operation, and which ones it returns."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Tensor, str]] = {}
        self._lines = [self._described(tensor) for tensor in tensors]

    @classmethod
    def of(cls, function: Callable[..., Any], tensors: Sequence[Tensor]) -> str:
        """What ``function`` does. It raises if that needs memory, or if it reads other tensors than these."""
        operations = cls(tensors)
        with torch.no_grad(), operations:
            returned = function(*tensors)
        return "\n".join([*operations._lines, operations._text(returned)])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, which would import it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._text((args, kwargs or {}))
        results = func(*args, **(kwargs or {}))
        made = [self._described(t) for t in tree_leaves(results) if isinstance(t, Tensor) and id(t) not in self._known]
        self._lines.append(f"{self._text(results)} {made} = {func} {given}")
        return results

    def _described(self, tensor: Tensor) -> str:
        """A name for a new ``tensor``, and all that there is to know of it."""
        name = f"t{len(self._known)}"
        self._known[id(tensor)] = tensor, name
        return f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"

    def _text(self, value: Any) -> str:
        """``value`` in words, tensors by their names. A ``KeyError`` says that one comes from elsewhere, with numbers."""
        return repr(tree_map_only(Tensor, lambda tensor: self._known[id(tensor)][1], value))


Example = Callable[[str], tuple[list[Tensor], Sequence[Sequence[int]]]]
"""Tensors on a device to compile with, no two the same object, and for each its dimensions that may have any size."""

_FORMAT = 1  # of an entry


def obtain_graph(
    function: Callable[..., Any],
    example: Example,
    device: str,
    options: dict[str, Any],
    *,
    from_one: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> CompiledGraph | str:
    """What :func:`compile_graph` makes of ``function``, compiled now or kept."""

    @functools.cache
    def compiled() -> CompiledGraph | str:
        with without_memory():
            args, dynamic = example(device)
            return compile_graph(function, args, dynamic, options, from_one=from_one, decompositions=decompositions)

    identity = _identity(function, example, options, from_one) if device == "cpu" else None
    if identity is None:
        return compiled()
    name = f"{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:32]}.graph"
    libraries: dict[str, bytes] = {}  # by name of the file, once they are compiled
    try:
        return load_kept(name, lambda: _written(compiled(), libraries), lambda path: _read(path, libraries))
    except _NotKeptError:
        return compiled()
    except OSError as error:
        message = f"compiled_optim: code of Inductor is not kept: {error}; every process compiles it again"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return compiled()


class _NotKeptError(Exception):
    """There is nothing to keep: the function could not be compiled, or its code needs Inductor."""


def _written(graph: CompiledGraph | str, libraries: dict[str, bytes]) -> bytes:
    """An entry: the text of Inductor's code and the names of its libraries, which are files of their own."""
    if isinstance(graph, str) or graph.standalone is None:
        raise _NotKeptError
    text, paths = graph.standalone
    files = {}
    for name, path in paths.items():
        content = Path(path).read_bytes()
        files[name] = f"{hashlib.sha256(content).hexdigest()[:32]}.so"
        libraries[files[name]] = content
    entry = {"text": text, "libraries": files, "order": graph.order, "returned": graph.returned}
    return json.dumps(entry).encode() + b"\n"


def _read(path: Path, libraries: Mapping[str, bytes]) -> CompiledGraph:
    """The graph of an entry, without Inductor; ``OSError`` where a library is missing that this process did not compile."""

    def library(file: str) -> bytes:
        if file not in libraries:
            raise FileNotFoundError(f"{file} is missing")
        return libraries[file]

    entry = json.loads(path.read_bytes().partition(b"\n")[0])
    files = entry["libraries"].items()
    names = _names() | {name: load_kept(file, functools.partial(library, file), load_library) for name, file in files}
    exec(compile(entry["text"], "<kept code of Inductor>", "exec"), names)
    return CompiledGraph(functools.partial(names["call"], None), entry["order"], entry["returned"])


def _identity(function: Callable[..., Any], example: Example, options: Mapping[str, Any], from_one: bool) -> str | None:
    """A text that differs between functions, and where Inductor would compile one differently; None to keep nothing."""
    if (settings := compiler_settings()) is None:
        return None
    args, dynamic = example("meta")
    try:
        traces = [_Operations.of(function, _empty(args, dynamic, larger)) for larger in (False, True)]
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
