"""The search for the name that a user misspelled."""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

_OTHER_WORDS = {"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas"}
_OTHER_WORDS |= dict.fromkeys(("clip_grad_norm", "max_norm"), "max_grad_norm")


def meant(word: str, known: Collection[str]) -> str | None:
    """Return the name in ``known`` that ``word`` resembles or is a synonym of; None if none, or if ``word`` is known."""
    if word in known:
        return None
    names = {name: name for name in known} | {other: name for other, name in _OTHER_WORDS.items() if name in known}
    matches = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.81)
    return names[matches[0]] if matches else None


@functools.lru_cache
def misspelled(word: str, known: tuple[str, ...]) -> str | None:
    """Return :func:`meant`, but None where ``word`` extends a known name, as ``lr_scale`` and ``min_lr`` do."""
    lower = word.lower()
    adds = lower not in _OTHER_WORDS and any(name in lower and name != lower and len(name) > 1 for name in known)
    return None if adds else meant(word, known)


def hint(word: str, known: Collection[str]) -> str:
    """Return ``"; did you mean lr?"``, or an empty string."""
    return f"; did you mean {name}?" if (name := meant(word, known)) else ""


def mistyped(names: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each of ``names`` that differs from a ``known`` one in one word's spelling or in separators, and that one.

    Other numbers, and words of another first letter such as ``encoder`` and ``decoder``, make another name.
    """
    by_remainder: dict[Any, list[tuple[str, str]]] = {}
    for wanted, (other, remainder) in ((name, each) for name in known for each in _words(name)):
        by_remainder.setdefault(remainder, []).append((other, wanted))
    for name, (word, remainder) in ((each, part) for each in names for part in _words(each)):
        for other, wanted in by_remainder.get(remainder, ()):
            is_close = word.isalpha() and word[0] == other[0] and difflib.get_close_matches(word, [other], 1, 0.81)
            if word == other or is_close:
                yield name, wanted


def _words(name: str) -> list[tuple[str, Any]]:
    """Return each word and number in ``name``, with those before it and after it."""
    words = tuple(re.findall(r"[^\W\d_]+|\d+", name.lower()))
    return [(word, (words[:i], words[i + 1 :])) for i, word in enumerate(words)]


def warn_of_entry(key: str, known: tuple[str, ...], group: str) -> None:
    """Warn that ``key``, which a group got, is a misspelling of a ``known`` one. Any other is the user's own."""
    if isinstance(key, str) and (wanted := misspelled(key, known)):
        warnings.warn(f"nothing reads {group}['{key}']; did you mean '{wanted}'?", UserWarning, stacklevel=3)
