"""Shell-style patterns of names, by which parameters are sorted into groups and get dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from compiled_optim.groups.names import canonical_name

T = TypeVar("T")

EVERYTHING = "*"


def alternatives(pattern: str) -> list[str]:
    """The patterns of which ``pattern`` is made, ``"*.bias|*norm*"`` of two; ``ValueError`` if one of them is empty."""
    parts = pattern.split("|")
    if not all(parts):
        raise ValueError(f"the pattern {pattern!r} has an empty alternative")
    return parts


def matches(pattern: str, names: Collection[str]) -> bool:
    """Whether one of ``names``, with or without the prefixes of module wrappers, matches an alternative of ``pattern``."""
    spellings = {*names, *map(canonical_name, names)}
    return any(fnmatchcase(name, part) for part in alternatives(pattern) for name in spellings)


def first_matches(
    keys: Sequence[Any],
    things: Mapping[str, T],
    is_match: Callable[[Any, T], bool],
    what: str,
    conflict: Callable[[Any, Any], bool] = lambda first, second: True,
) -> dict[str, Any]:
    """The key that each of ``things``, which are ``what`` by name, matches; nothing for one that matches none.

    The last key may be ``"*"``: it is for what no other key matches.

    Raises:
        ValueError: a key matches nothing, or two that are in ``conflict`` match the same.
    """
    found: dict[str, Any] = {}
    for index, key in enumerate(keys):
        matched = [name for name, thing in things.items() if is_match(key, thing)]
        if not matched:
            raise ValueError(f"{described(key)} matches no {what}{_listing(things)}")
        for name in matched:
            if name not in found:
                found[name] = key
            elif conflict(found[name], key) and not (key == EVERYTHING and index == len(keys) - 1):
                raise ValueError(f"{what} '{name}' matches both {described(found[name])} and {described(key)}")
    return found


def described(key: Any) -> str:
    """A key in messages: a pattern or a type of modules."""
    return f"the pattern {key!r}" if isinstance(key, str) else f"the type {getattr(key, '__name__', key)}"


def _listing(names: Collection[str]) -> str:
    """Some of ``names`` for a message."""
    shown = ", ".join([*names][:5])
    return f"; there are {shown}{', ...' if len(names) > 5 else ''}" if names else ""
