"""The optimizers by name: constructed, listed and described, from the declaration of each class."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from compiled_optim import optimizers
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule.storage import INT8, MODES
from compiled_optim.state import StateForm

_SIDE = 1024  # rows and columns of the matrix whose bytes are counted
IN_OPTIMI = ("SGD", "Adam", "AdamW", "RAdam", "Lion", "Adan", "StableAdamW", "Ranger")
"""The optimizers that optimi has, too."""
_SOURCES = re.compile(r"arXiv:\d+\.\d+|doi:[^\s;,)]+|[\w.]+\.io/[\w/-]+")


class Argument(NamedTuple):
    """One argument of an optimizer: its name, its default, ``inspect.Parameter.empty`` if there is none, and its meaning."""

    name: str
    default: Any
    help: str


@dataclass(frozen=True)
class OptimizerInfo:
    """The declaration of an optimizer.

    Attributes:
        name: its name for :func:`create`.
        cls: the class.
        summary: the first line of its docstring.
        sources: the papers in its docstring, such as ``"arXiv:1711.05101"``, the first one first.
        kind: the input of an update: an ``"element"``, a ``"tensor"``, a ``"matrix"``, the rows of a ``"sparse"`` gradient,
            or the loss of a ``"closure"``.
        arguments: the constructor's arguments after ``params``.
        states: the names of the entries that the state of a parameter may hold.
        bytes_per_parameter: bytes of weight, gradient and state for each element of a large matrix, with the class's
            defaults: for ``"float32"``, ``"bfloat16"``, and its choices of ``weights`` and 8-bit state, such as
            ``"bfloat16, weights=split8, state_dtype=int8"``. Empty if steps need a closure.
        counterparts: the classes of torch.optim and optimi that have this name, and whose state dicts it loads.
    """

    name: str
    cls: type[CompiledOptimizer]
    summary: str
    sources: tuple[str, ...]
    kind: str
    arguments: tuple[Argument, ...]
    states: tuple[str, ...]
    bytes_per_parameter: dict[str, float]
    counterparts: tuple[str, ...]


def create(name: str, params: Any, **options: Any) -> CompiledOptimizer:
    """Make the optimizer that is called ``name``: ``co.create("adamw", model, lr=3e-4)``.

    Args:
        name: one of :func:`list_optimizers`, in any case, with or without underscores, so a class's name too.
        params: a module, whose parameters keep their names, or any ``params`` of the class.
        **options: arguments of the class.

    Raises:
        ValueError: no optimizer has this name, or an option is out of range.
        TypeError: ``name`` is no string, or the class does not take an option.
    """
    kind = named(name)[1]
    if isinstance(params, nn.Module) and not kind._takes_module:
        params = params.named_parameters(remove_duplicate=False)
    return kind(params, **options)


def list_optimizers(pattern: str = "*") -> list[str]:
    """List the names of optimizers.

    Args:
        pattern: shell-style, such as ``"*adam*"``, in any case, with or without underscores.

    Returns:
        The matching names, sorted.

    Raises:
        TypeError: ``pattern`` is no string.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"the pattern of names of optimizers must be a string, got {pattern!r}")
    every = (name for file in _files() for name, _ in _in_file(file))
    return sorted(n for n in every if any(fnmatchcase(spelled, pattern.lower()) for spelled in (n, n.replace("_", ""))))


def optimizer_info(name: str) -> OptimizerInfo:
    """Describe the optimizer that is called ``name``, from its declaration.

    Args:
        name: as for :func:`create`.

    Raises:
        ValueError: no optimizer has this name.
        TypeError: ``name`` is no string.
    """
    name, kind = named(name)
    doc = inspect.getdoc(kind) or ""
    docs = {**_explained(CompiledOptimizer), **_explained(kind)}
    signature = inspect.signature(kind).parameters
    libraries = [("torch.optim", hasattr(torch.optim, kind.__name__)), ("optimi", kind.__name__ in IN_OPTIMI)]
    return OptimizerInfo(
        name,
        kind,
        doc.partition("\n")[0],
        tuple(dict.fromkeys(_SOURCES.findall(doc.partition("\nArgs:")[0]))),
        "closure" if not hasattr(kind, "_rule") else "sparse" if kind._gradients == "sparse" else kind._granularity,
        tuple(Argument(p.name, p.default, docs.get(p.name, "")) for p in signature.values() if p.name != "params"),
        tuple(kind._state_names()),
        _bytes_by_precision(kind),
        tuple(f"{library}.{kind.__name__}" for library, has_it in libraries if has_it and "." not in name),
    )


def named(name: str) -> tuple[str, type[CompiledOptimizer]]:
    """Return the full name and the class of the optimizer that is called ``name``; import no other file."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an optimizer must be a string, got {name!r}")
    for file in _files():
        if _plain(file) == _plain(name).partition(".")[0]:
            for full, kind in _in_file(file):
                if _plain(full) == _plain(name):
                    return full, kind
    known = list_optimizers()
    near = list_optimizers(f"{name}.*") or difflib.get_close_matches(name.lower(), known, n=5)
    near = near or difflib.get_close_matches(name.lower().rpartition(".")[2], known, n=5)
    hint = f"did you mean {' or '.join(near)}?" if near else "co.list_optimizers() lists all"
    raise ValueError(f"no optimizer is called {name!r}; {hint}")


def every_optimizer() -> list[type[CompiledOptimizer]]:
    """Return the classes of all optimizers."""
    return [kind for file in _files() for _, kind in _in_file(file)]


def _files() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(optimizers.__path__)]


def _in_file(file: str) -> Iterator[tuple[str, type[CompiledOptimizer]]]:
    """Yield the name and class of each optimizer in one file: the name is the file's, or the file's and the class's."""
    module = importlib.import_module(f"{optimizers.__name__}.{file}")
    for name, kind in vars(module).items():
        is_public = isinstance(kind, type) and issubclass(kind, CompiledOptimizer) and not name.startswith("_")
        if is_public and kind.__module__ == module.__name__:
            yield file if _plain(name) == _plain(file) else f"{file}.{name.lower()}", kind


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _bytes_by_precision(kind: type[CompiledOptimizer]) -> dict[str, float]:
    if not hasattr(kind, "_rule"):
        return {}
    modes = [{"weights": mode} for mode in MODES] if any(o.name == "weights" for o in kind._declaration.options) else []
    sizes = {"float32": _bytes(kind, torch.float32, {})}
    for options in [
        {**mode, **state} for mode in [{}, *modes] for state in ([{}, {"state_dtype": INT8}] if modes else [{}])
    ]:
        with contextlib.suppress(ValueError):  # none of its state can have 8 bits
            name = ", ".join(["bfloat16", *(f"{key}={value}" for key, value in options.items())])
            sizes[name] = _bytes(kind, torch.bfloat16, options)
    return sizes


def _explained(kind: type[CompiledOptimizer]) -> dict[str, str]:
    """Return the texts in the docstring of ``kind`` about its arguments, by argument."""
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
    listed = re.findall(r"^    (\w[\w, ]*): (\S.*(?:\n     .*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in listed for name in names.split(", ")}


def _bytes(kind: type[CompiledOptimizer], dtype: torch.dtype, options: Mapping[str, Any]) -> float:
    """Return the bytes of weight, gradient and state for each element of a matrix; ``ValueError`` if options do not fit."""
    declaration, param = kind._declaration, torch.empty(_SIDE, _SIDE, dtype=dtype, device="meta")
    for option in declaration.options:
        option.check(options.get(option.name, option.default))
    group = {f.name: f.default for f in declaration.group_fields}
    group |= {**options, "params": [param]}
    form = StateForm.of_group(declaration, [group], 0, group)(0)  # type: ignore[list-item]
    sizes = [math.prod(form.shape_of(b)) * form.dtype_of(b).itemsize for b in declaration.buffers if b.name in form.buffers]
    return 2 * dtype.itemsize + sum(sizes) / param.numel()
