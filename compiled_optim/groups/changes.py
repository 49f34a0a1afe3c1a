"""Dicts and lists that report writes, and the record of changes to which they report."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import WeakSet

K = TypeVar("K")
V = TypeVar("V")


_writes = itertools.count()


class Changes:
    """A record of changes. Dicts and lists that report writes, and their optimizer, share one such object."""

    stale = "nothing was built before"  # why all that is derived from groups and state must be rebuilt; empty if it need not
    is_guarded = False  # whether only compiled code reads ``stale`` before it runs
    is_refused = False  # whether a group may hold a number that steps refuse
    is_state_handed_out = False  # whether other code may hold state tensors, and move their memory
    are_numbers_read = False  # whether other code than a called step reads numbers on the device
    is_warned_of_rate = False  # whether the user was warned of a negative learning rate
    lists = ""  # a text that changes with each write to a list of parameters or groups

    def __init__(self) -> None:
        self.numbers: WeakSet[Any] = WeakSet()  # of all groups, and of former ones that are still referenced
        self.unsent: dict[tuple[Any, int], float] = {}  # by these and an index: what the next step sends to a device

    def outdate(self, reason: str) -> None:
        """Let all that is derived from groups and state be rebuilt, for a reason in words."""
        self.stale = self.stale or reason

    def outdate_compiled(self, reason: str) -> None:
        """Do :meth:`outdate` if compiled code may hold the step, which no Python of this package precedes."""
        if self.is_guarded:
            self.outdate(reason)

    @contextmanager
    def reported(self, reason: str, *, is_list: bool = False) -> Iterator[None]:
        """Do :meth:`outdate` for a ``with`` block: before it, in case of an interrupt, and after it, for other threads."""
        self.outdate(reason)
        try:
            yield
        finally:
            self.outdate(reason)
            if is_list:
                self.lists = str(next(_writes))

    def refuse(self) -> None:
        """Let the next step look for numbers that it cannot use, and raise."""
        self.is_refused = True
        self.outdate_compiled("a number out of range was written, or eval() was called")

    def warn_of_rate(self, problem: str) -> None:
        """Warn of a negative learning rate, once."""
        if not self.is_warned_of_rate:
            self.is_warned_of_rate = True
            warnings.warn(f"{problem}; steps take 0 in its place", UserWarning, stacklevel=2)


def _reporting(method: Any) -> Callable[..., Any]:
    """Wrap ``method``, which writes, to report writes to watched keys."""

    @functools.wraps(method)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._reported(*args[:1]):
            return method(self, *args, **kwargs)

    return write


class WatchedDict(dict[K, V], Generic[K, V]):
    """A dict that reports each write that goes through its public methods; copies and pickles are plain dicts.

    Args:
        values: the first content, by position as for a dict: some libraries make a copy with ``type(mapping)(items)``.
        changes: takes the reports; None for a dict that is in no optimizer yet.
        names: the keys that steps read in a parameter's state; None for all. Other keys are free for users.
    """

    def __init__(
        self,
        values: Mapping[K, V] | Iterable[tuple[K, V]] = (),
        *,
        changes: Changes | None = None,
        names: Container[str] | None = None,
    ) -> None:
        super().__init__(values)
        self._changes, self._names = Changes() if changes is None else changes, names

    def _is_watched(self, *key: Any) -> bool:
        """Return whether to report a write under ``key``, or one without a key."""
        return self._names is None or not key or key[0] in self._names

    def _reported(self, *key: Any) -> AbstractContextManager[None]:
        return self._changes.reported(self._written(*key)) if self._is_watched(*key) else nullcontext()

    def _written(self, *key: Any) -> str:
        """Return in words that ``key`` was written, or all keys."""
        return "groups or state were written"

    def set_quietly(self, key: K, value: V) -> None:
        """Write without reporting, for writes of the package that require no rebuild."""
        super().__setitem__(key, value)

    update_quietly, drop_quietly = dict.update, dict.__delitem__  # without reporting; no interrupt splits them

    def update(self, /, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():  # raises before the first write
            self[key] = value

    def setdefault(self, key: K, default: Any = None) -> V:
        if key not in self:
            self[key] = default
        return self[key]

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
        changes.lists = str(next(_writes))

    def _reported(self, *index: Any) -> AbstractContextManager[None]:
        return self._changes.reported("a list of groups or parameters was written", is_list=True)

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
