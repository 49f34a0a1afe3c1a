"""The names of parameters: in messages, and as keys of checkpoints."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def parameter_name(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """The name of a parameter in messages, or its position where it has no name."""
    names = group.get("param_names") or ()
    return names[index] if index < len(names) else f"param_groups[{group_index}]['params'][{index}]"


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Let an error that tells a parameter by its position say how to get names."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if len(error.args) == 1 and re.search(r"param_groups\[\d+\]\['params'\]\[\d+\]", str(error)):
            error.args = (f"{error}; made from model.named_parameters(), the optimizer would tell names",)
        raise


def parameters_of(group: Mapping[str, Any]) -> dict[Any, int]:
    """The parameters of a group, each once, with their first places in it."""
    places: dict[Any, int] = {}
    for index, param in enumerate(group["params"]):
        places.setdefault(param, index)
    return places


def named_parameters(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """All parameters in ``groups``, each with its name in messages."""
    return ((parameter_name(group, i, j), p) for i, group in enumerate(groups) for j, p in enumerate(group["params"]))


def canonical_names(names: Sequence[str]) -> list[str]:
    """``names``, each as :func:`canonical_name` returns it, or all as they are if two of them would become equal."""
    short = list(map(canonical_name, names))
    return short if len(set(short)) == len(set(names)) else list(names)


def canonical_name(name: str) -> str:
    """``name`` without the prefixes that module wrappers insert at any level."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(f".{prefix}", ".").removeprefix(prefix)
    return name


def numbered(names: Sequence[str]) -> list[str]:
    """``names``, where equal ones become different: each gets its place among them, and how many they are."""
    counts, places = Counter(names), Counter[str]()
    result = []
    for name in names:
        places[name] += 1
        result.append(f"{name} ({places[name]} of {counts[name]})" if counts[name] > 1 else name)
    return result


def without_aliases(names: Sequence[str], params: Sequence[Any]) -> tuple[list[str], list[Any], dict[str, str]]:
    """The first name of each tensor in ``params``, the tensors once each, and a dict of each further name -> the first.

    Without ``names``, the first and the last are empty, and the tensors are all of ``params``.
    """
    if not names:
        return [], list(params), {}
    kept: dict[int, tuple[str, Any]] = {}
    for name, param in zip(names, params, strict=True):
        kept.setdefault(id(param), (name, param))
    firsts = {name: None for name, _ in kept.values()}
    aliases = {name: kept[id(param)][0] for name, param in zip(names, params, strict=True) if name not in firsts}
    return [name for name, _ in kept.values()], [param for _, param in kept.values()], aliases


def repeated(names: Sequence[str], params: Sequence[Any]) -> int | None:
    """The place of a tensor in ``params`` that stands before it too, without a further name; None if there is none."""
    seen: set[Any] = set()
    for index, param in enumerate(params):
        key = (id(param), names[index] if names else None)
        if key in seen:
            return index
        seen.add(key)
    return None


def shared_name(names: Sequence[str], groups: Sequence[Mapping[str, Any]], aliases: Collection[str]) -> str | None:
    """A name in ``names`` that stands there twice, or in ``groups`` or ``aliases`` too; None if there is none."""
    taken = {name for group in groups for name in group.get("param_names", ())} | set(aliases)
    for name in names:
        if name in taken:
            return name
        taken.add(name)
    return None
