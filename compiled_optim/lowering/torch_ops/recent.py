"""A small cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The ``size`` values that were asked for last, by key.

    ``functools.lru_cache`` around a method keeps the method's object alive, and the object the cache.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of ``key``, made if it is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
        else:
            self._values[key] = make(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        return self._values[key]
