"""Parameters and their names: the forms in which users pass them, and which tensors an optimizer can update."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from compiled_optim.memory.layout import is_sharded
from compiled_optim.rule.declared import Declared

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def parameter_name(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """Return the name of a parameter for messages, or its index where it has no name."""
    names = group.get("param_names") or ()
    return names[index] if index < len(names) else f"param_groups[{group_index}]['params'][{index}]"


def parameter_names(group: Mapping[str, Any], group_index: int) -> list[str]:
    """Return the :func:`parameter_name` of each parameter of a group."""
    names, count = list(group.get("param_names") or ()), len(group["params"])
    return names[:count] + [f"param_groups[{group_index}]['params'][{index}]" for index in range(len(names), count)]


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Add advice on names to an error that identifies a parameter by its index."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if len(error.args) == 1 and re.search(r"param_groups\[\d+\]\['params'\]\[\d+\]", str(error)):
            error.args = (f"{error}; pass model.named_parameters() to get names",)
        raise


def parameters_of(group: Mapping[str, Any]) -> dict[Any, int]:
    """Map each parameter of a group to its first index there."""
    indices: dict[Any, int] = {}
    for index, param in enumerate(group["params"]):
        indices.setdefault(param, index)
    return indices


def named_parameters(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield all parameters in ``groups``, each after its name in messages."""
    for index, group in enumerate(groups):
        yield from zip(parameter_names(group, index), group["params"], strict=True)


def first_few(names: Iterable[str], most: int = 3) -> str:
    """Join up to ``most`` of ``names`` for a message, and count the others."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def alternatives(pattern: str) -> list[str]:
    """Split ``pattern``, such as ``"*.bias|*norm*"``. Raise ``ValueError`` if one of its alternatives is empty."""
    parts = pattern.split("|")
    if not all(parts):
        raise ValueError(f"the pattern {pattern!r} has an empty alternative")
    return parts


def matches(pattern: str, names: Collection[str]) -> bool:
    """Return whether ``pattern`` matches one of ``names``, with or without the prefixes of module wrappers."""
    spellings = {*names, *map(canonical_name, names)}
    return any(fnmatchcase(name, wanted) for wanted in alternatives(pattern) for name in spellings)


def canonical_name(name: str) -> str:
    """Return ``name`` without the prefixes that module wrappers insert at any level."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(f".{prefix}", ".").removeprefix(prefix)
    return name


def numbered(names: Sequence[str]) -> list[str]:
    """Return ``names``, where equal ones become ``"name (1 of 2)"`` and ``"name (2 of 2)"``."""
    counts = Counter(names)
    counters = {name: itertools.count(1) for name in counts}
    return [f"{name} ({next(counters[name])} of {counts[name]})" if counts[name] > 1 else name for name in names]


def without_aliases(names: Sequence[str], params: Sequence[Any]) -> tuple[list[str], list[Any], dict[str, str]]:
    """Return the first name of each tensor, each tensor once, and further names -> first. Without ``names``: all tensors."""
    if not names:
        return [], list(params), {}
    first: dict[int, tuple[str, Any]] = {}
    for name, param in zip(names, params, strict=True):
        first.setdefault(id(param), (name, param))
    first_names, tensors = map(list, zip(*first.values(), strict=True))
    unaliased = {*first_names}
    return first_names, tensors, {n: first[id(p)][0] for n, p in zip(names, params, strict=True) if n not in unaliased}


def first_repeat(keys: Iterable[Hashable], taken: Iterable[Hashable] = ()) -> int | None:
    """Return the index of the first of ``keys`` that occurred before or is ``taken``; None if there is none."""
    seen = set(taken)
    for index, key in enumerate(keys):
        if key in seen:
            return index
        seen.add(key)
    return None


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Return the constructor's ``params`` as a list of new group dicts. Raise an error if they are empty or no iterable."""
    _check_iterable(params, "params argument given to the optimizer")
    if isinstance(params, Mapping) and params:
        return [{"params": params}]
    entries = list(params) if not isinstance(params, set) else [{"params": params}]
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    return [dict(e) for e in entries] if isinstance(entries[0], Mapping) else [{"params": entries}]


def _check_iterable(params: Any, what: str) -> None:
    """Raise ``TypeError``, with a hint, unless ``params``, named ``what`` in messages, are an iterable of parameters."""
    hint = None
    if isinstance(params, Tensor):
        hint = ""
    elif isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        hint = "; did you mean its parameters()?"
    elif not hasattr(params, "__iter__") and not hasattr(params, "__getitem__"):
        hint = f"; did you mean to call it: {getattr(params, '__name__', 'it')}()?" if callable(params) else ""
    elif isinstance(params, Mapping) and params:
        tensors = params.values()
        if all(isinstance(t, Tensor) and not (t.requires_grad or isinstance(t, nn.Parameter)) for t in tensors):
            hint = " of tensors without gradients; did you mean named_parameters() instead of state_dict()?"
    if hint is not None:
        raise TypeError(f"{what} should be an iterable of Tensors or dicts, but got {torch.typename(params)}{hint}")


def names_and_tensors(params: Any, what: str) -> tuple[list[str], list[Any]]:
    """Return the names, if any, and the tensors in one group's ``params``. Raise an error where they do not fit."""
    if isinstance(params, Tensor):
        return [], [params]
    _check_iterable(params, what)
    if isinstance(params, set):
        unordered = "but the ordering of tensors in sets will change between runs. Please use a list instead."
        raise TypeError(f"optimizer parameters need to be organized in ordered collections, {unordered}")
    entries = list(params.items() if isinstance(params, Mapping) else params)
    pairs = [e for e in entries if isinstance(e, tuple)]
    if pairs and len(pairs) != len(entries):
        raise ValueError("all optimizer params should be with/without names. Some param names are missing")
    if foreign := next((pair for pair in pairs if len(pair) != 2 or not isinstance(pair[0], str)), None):
        forms = [f"{type(v).__name__}{f' of shape {tuple(v.shape)}' if isinstance(v, Tensor) else ''}" for v in foreign]
        raise TypeError(f"pairs are (name, parameter); got ({', '.join(forms)})")
    return [name for name, _ in pairs], [tensor for _, tensor in pairs] if pairs else entries


@advising()
def check_params(
    optimizer: type[Declared], group: Mapping[str, Any], index: int, elsewhere: Mapping[int, str], first: Mapping[str, Any]
) -> None:
    """Raise an error unless ``optimizer`` takes ``group``, at ``index``. Integer tensors pass: they get no gradients.

    ``elsewhere`` has the names of tensors in earlier groups, by ``id``. ``group`` has names if ``first`` has, else none.
    """
    differentiable, stacks = group.get("differentiable", False), group.get("stacks") or ()
    for name, param in zip(parameter_names(group, index), group["params"], strict=True):
        is_stack = any(matches(pattern, [name]) for pattern in stacks)
        _check_kind(optimizer, param, name, differentiable=differentiable, is_stack=is_stack)
        if (other := elsewhere.get(id(param))) is not None:
            raise ValueError(f"some parameters appear in more than one parameter group: '{name}' is also '{other}'")
    if ("param_names" in group) != ("param_names" in first):
        refused = f"cannot add param group {'with' if 'param_names' in group else 'without'} names to the optimizer"
        raise ValueError(f"all optimizer param groups should be with/without names. {refused}")


def _check_kind(optimizer: type[Declared], param: Any, name: str, *, differentiable: bool, is_stack: bool) -> None:
    kind = optimizer.__name__
    if not isinstance(param, Tensor):
        hint = "; did you mean its parameters()?" if isinstance(param, nn.Module) else ""
        got = f"{torch.typename(param)} ('{name}'){hint}"
        raise TypeError(f"optimizer can only optimize Tensors, but one of the params is {got}")
    if param.layout is not torch.strided:
        raise ValueError(f"{kind} requires dense parameter tensors; '{name}' is {param.layout}")
    is_elementwise = optimizer._gradients == "dense" and optimizer._granularity == "element"
    if not is_elementwise and param.is_complex():
        raise ValueError(f"{kind} does not support complex parameters; '{name}' is one")
    if optimizer._gradients == "sparse" and is_sharded(param):
        raise ValueError(f"{kind} does not support DTensors; '{name}' is one; use an optimizer that takes dense gradients")
    if optimizer._granularity == "matrix" and not is_lazy(param) and param.dim() != 2 and not (is_stack and param.dim() > 2):
        size = f"we found a parameter with size: {param.shape} ('{name}')"
        advice = "give the others to an elementwise optimizer"
        advice += ", or name in stacks= what holds matrices in its last two dimensions" if param.dim() > 2 else ""
        raise ValueError(f"{kind} only supports 2D parameters whereas {size}; {advice}")
    if differentiable and is_sharded(param):
        raise ValueError(f"differentiable=True does not work with DTensors; '{name}' is one")
    if not differentiable and not (param.is_leaf or param.retains_grad):
        advice = "pass the other one, or .detach().requires_grad_() of it"
        raise ValueError(f"can't optimize a non-leaf Tensor: '{name}' was computed from another, as .to() does; {advice}")
