"""Suggests the correct spelling of an unknown name."""

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
    """The name in ``known`` that ``word`` resembles or is another word for; None if none is, or ``word`` is known."""
    if word in known:
        return None
    names = {name: name for name in known} | {other: name for other, name in _OTHER_WORDS.items() if name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.81)
    return names[found[0]] if found else None


@functools.lru_cache
def misspelled(word: str, known: tuple[str, ...]) -> str | None:
    """As :func:`meant`, but None where ``word`` adds something to a known name, as ``lr_scale`` and ``min_lr`` do."""
    lower = word.lower()
    adds = lower not in _OTHER_WORDS and any(name in lower and name != lower and len(name) > 1 for name in known)
    return None if adds else meant(word, known)


def hint(word: str, known: Collection[str]) -> str:
    """``"; did you mean lr?"``, or nothing."""
    return f"; did you mean {found}?" if (found := meant(word, known)) else ""


def mistyped(names: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each of ``names`` that is a ``known`` one but for the spelling of one word or the signs between words, and that one.

    Other numbers, and words of another first letter such as ``encoder`` and ``decoder``, make another name.
    """
    others: dict[Any, list[tuple[str, str]]] = {}
    for wanted, (other, rest) in ((name, each) for name in known for each in _words(name)):
        others.setdefault(rest, []).append((other, wanted))
    for name, (word, rest) in ((each, part) for each in names for part in _words(each)):
        for other, wanted in others.get(rest, ()):
            is_close = word.isalpha() and word[0] == other[0] and difflib.get_close_matches(word, [other], 1, 0.81)
            if word == other or is_close:
                yield name, wanted


def _words(name: str) -> list[tuple[str, Any]]:
    """Each word and number in ``name``, with those before it and after it."""
    words = tuple(re.findall(r"[^\W\d_]+|\d+", name.lower()))
    return [(word, (words[:i], words[i + 1 :])) for i, word in enumerate(words)]


def warn_of_entry(key: str, known: tuple[str, ...], group: str) -> None:
    """Warn that ``key``, which a group got, is a misspelling of a ``known`` one. Any other is the user's own."""
    if isinstance(key, str) and (wanted := misspelled(key, known)):
        warnings.warn(f"nothing reads {group}['{key}']; did you mean '{wanted}'?", UserWarning, stacklevel=3)
