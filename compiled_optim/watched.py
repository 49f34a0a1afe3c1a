"""A dict and a list that report every write, so that what was derived from them is rebuilt and never stale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class WatchedDict(dict[K, V], Generic[K, V]):
    """A dict that calls ``changed()`` after each write that goes through its public methods.

    Copies, deep copies and pickles are plain dicts: a copy has nobody to report to.
    """

    def __init__(self, changed: Callable[[], None], values: Mapping[K, V] | None = None) -> None:
        super().__init__(values or {})
        self._changed = changed

    def report(self) -> None:
        """Report a change that was written quietly."""
        self._changed()

    def set_quietly(self, key: K, value: V) -> None:
        """Write without reporting: for the engine's own writes."""
        super().__setitem__(key, value)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self._changed()

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self._changed()

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

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        self._changed()
        return value

    def popitem(self) -> tuple[K, V]:
        item = super().popitem()
        self._changed()
        return item

    def clear(self) -> None:
        super().clear()
        self._changed()

    def copy(self) -> dict[K, V]:
        return dict(self)

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def _reporting(name: str) -> Callable[..., Any]:
    """The method of list that is called ``name``, followed by a report."""
    method = getattr(list, name)

    @functools.wraps(method)
    def write(self: WatchedList[Any], *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self._changed()
        return result

    return write


class WatchedList(list[V], Generic[V]):
    """A list that calls ``changed()`` after each write; copies, deep copies and pickles are plain lists."""

    def __init__(self, changed: Callable[[], None], values: Iterable[V]) -> None:
        super().__init__(values)
        self._changed = changed

    append, extend, insert, remove, pop, clear, sort, reverse = map(
        _reporting, ("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse")
    )
    __setitem__, __delitem__, __iadd__, __imul__ = map(_reporting, ("__setitem__", "__delitem__", "__iadd__", "__imul__"))

    def __copy__(self) -> list[V]:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)
