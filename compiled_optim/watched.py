"""A dict that reports every write, so that what was derived from it is rebuilt and never stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
