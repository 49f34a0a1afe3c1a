"""A dict and a list that report every write, so that what was derived from them is rebuilt and never stale."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Changes:
    """Whether there were changes. Dicts and lists that report, and the optimizer that asks, share one such object."""

    pending = True  # until all that was derived from groups and state is made anew
    is_guarded = False  # whether compiled code asks, and nobody else does before it runs
    is_refused = False  # whether a group may hold a number that no step can use
    is_state_handed_out = False  # whether somebody may hold state tensors, and give them other memory
    are_numbers_read = False  # whether somebody but a called step reads numbers on the device

    def __init__(self) -> None:
        self.unsent: dict[int, Any] = {}  # numbers that wait to be sent to a device

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report a write in a ``with`` block: before it, in case of an interrupt, and after it, for other threads."""
        self.pending = True
        try:
            yield
        finally:
            self.pending = True

    def refuse(self) -> None:
        """Let the next step look for numbers that it cannot use."""
        self.is_refused = True
        self.pending |= self.is_guarded


def _reporting(method: Any) -> Callable[..., Any]:
    """``method``, a method that writes, made to report writes to watched keys."""

    @functools.wraps(method)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._changes.reported() if self._is_watched(*args[:1]) else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    return write


class WatchedDict(dict[K, V], Generic[K, V]):
    """A dict that reports each write that goes through its public methods; copies and pickles are plain dicts.

    Args:
        values: the first content, by position as for a dict: some libraries make a copy with ``type(mapping)(items)``.
        changes: where to report; None for a dict that is in no optimizer yet.
    """

    def __init__(self, values: Mapping[K, V] | Iterable[tuple[K, V]] = (), *, changes: Changes | None = None) -> None:
        super().__init__(values)
        self._changes = Changes() if changes is None else changes

    def _is_watched(self, *key: Any) -> bool:
        """Whether to report a write under ``key``, or one that names none; for subclasses."""
        return True

    def set_quietly(self, key: K, value: V) -> None:
        """Write without reporting, which the package does where nothing is to be derived anew."""
        super().__setitem__(key, value)

    update_quietly, drop_quietly = dict.update, dict.__delitem__  # without reporting, all or nothing

    def setdefault(self, key: K, default: Any = None) -> V:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def pop(self, key: K, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[K, V]:
        if not self:
            raise KeyError("popitem(): dictionary is empty")
        return (key := next(reversed(self))), self.pop(key)

    __setitem__, __delitem__, clear = map(_reporting, (dict.__setitem__, dict.__delitem__, dict.clear))

    def copy(self) -> dict[K, V]:
        return dict(self)

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class WatchedList(list[V], Generic[V]):
    """A list that reports each write; copies, deep copies and pickles are plain lists."""

    def __init__(self, changes: Changes, values: Iterable[V]) -> None:
        super().__init__(values)
        self._changes = changes

    def _is_watched(self, *index: Any) -> bool:
        return True

    append, extend, insert, remove, pop, clear, sort, reverse = map(
        _reporting, (list.append, list.extend, list.insert, list.remove, list.pop, list.clear, list.sort, list.reverse)
    )
    __setitem__, __delitem__, __iadd__, __imul__ = map(
        _reporting, (list.__setitem__, list.__delitem__, list.__iadd__, list.__imul__)
    )

    def __copy__(self) -> list[V]:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)
