"""The modules that a function refers to without being told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CellType, ModuleType
from typing import Any

from torch import nn


def modules_of(function: Callable[..., Any], seen: set[int] | None = None) -> Iterator[nn.Module]:
    """The modules that ``function`` refers to: by closure, default, global, or attribute of what it is bound to."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, nn.Module):
        yield function
        return
    if (getattr(function, "__module__", None) or "").partition(".")[0] == "torch":
        return
    if isinstance(function, functools.partial):
        values: list[Any] = [function.func, *function.args, *function.keywords.values()]
    else:
        inner = getattr(function, "__func__", function)
        owner = getattr(function, "__self__", None)
        bound = hasattr(owner, "__dict__") and not isinstance(owner, (type, ModuleType))
        values = [*vars(owner).values()] if bound else []
        values += [owner, getattr(function, "__wrapped__", None), getattr(function, "_torchdynamo_orig_callable", None)]
        if (code := getattr(inner, "__code__", None)) is not None:
            cells = (c.cell_contents for c in inner.__closure__ or () if c != CellType())  # an empty one equals another
            names = (inner.__globals__.get(n) for n in code.co_names)
            values += [*cells, *(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values(), *names]
        elif hasattr(function, "__dict__"):
            values += [*vars(function).values(), type(function).__call__]
    for value in values:
        nested = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
        for item in nested:
            if isinstance(item, nn.Module) or (callable(item) and not isinstance(item, type)):
                yield from modules_of(item, seen)
