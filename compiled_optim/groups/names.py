"""The names of parameters: in messages, and as keys of checkpoints."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def parameter_name(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """The name of a parameter in messages, or its position where it has no name."""
    names = group.get("param_names")
    return names[index] if names else f"param_groups[{group_index}]['params'][{index}]"


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Let an error that tells a parameter by its position say how to get names."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if len(error.args) == 1 and re.search(r"param_groups\[\d+\]\['params'\]\[\d+\]", str(error)):
            error.args = (f"{error}; made from model.named_parameters(), the optimizer would tell names",)
        raise


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


def without_aliases(names: Sequence[str], params: Sequence[Any]) -> tuple[list[str], list[Any], dict[str, str]]:
    """The first name of each tensor in ``params``, the tensors once each, and a dict of each further name -> the first.

    Without ``names``, the first and the last are empty, and the tensors are all of ``params``.
    """
    if not names:
        return [], list(params), {}
    first_names: dict[int, str] = {}
    firsts = [first_names.setdefault(id(param), name) for name, param in zip(names, params, strict=True)]
    kept = [i for i, first in enumerate(firsts) if first == names[i]]
    aliases = {name: first for name, first in zip(names, firsts, strict=True) if name != first}
    return [names[i] for i in kept], [params[i] for i in kept], aliases


def check_names(names: Sequence[Any], groups: Sequence[Mapping[str, Any]], aliases: Collection[str]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``names`` are different strings, new to ``groups`` and ``aliases``."""
    taken = {name for group in groups for name in group.get("param_names", ())} | set(aliases)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter must be a string, got {name!r}")
        if name in taken:
            raise ValueError(f"two parameters are named '{name}'; give the names of each model a prefix of its own")
        taken.add(name)
