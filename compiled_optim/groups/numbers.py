"""The numbers of one hyperparameter of a group, and how each is read and written."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from compiled_optim.groups.live import Live
from compiled_optim.groups.reading import Reading, reading_of
from compiled_optim.memory.layout import is_lost
from compiled_optim.rule.fields import Hyper
from compiled_optim.torch_internals import quickly_outside_dynamo


class Numbers(tuple[Live, ...]):
    """The numbers of one hyperparameter of one group."""

    def __new__(cls, numbers: Iterable[Live], *place: Any) -> Numbers:
        return super().__new__(cls, numbers)

    def __init__(self, numbers: Iterable[Live], group: weakref.ref[Any], key: str, is_tuple: bool) -> None:
        self.is_tuple = is_tuple
        self._places = [_Place(group, key, i) for i in range(len(self))]

    @quickly_outside_dynamo
    def read(self) -> Any:
        """What the hyperparameter is now: a number, or a tuple of them."""
        if not self.is_tuple:
            return self.read_element(0)
        return tuple(self.read_element(i) for i in range(len(self)))

    def read_element(self, index: int) -> Reading | Tensor:
        """A number as it is now; a tensor that requires grad is itself what is read."""
        live, place = self[index], self._places[index]
        if live.tensor.requires_grad:
            return live.tensor
        number = live.number
        if number is not None:
            return reading_of(number, live.tensor, place)
        if is_lost(live.tensor):
            raise ValueError(f"{place.key} is a tensor whose storage was freed; it has no value")
        return reading_of(None, live.tensor.detach().clone(), place)


def is_own(hyper: Hyper, value: Any, group: Mapping[str, Any]) -> bool:
    """Whether ``value`` under the name of ``hyper`` is the user's own: no number, where ``group`` has no use for one."""
    if hyper.when is None or group.get(hyper.when):
        return False
    if isinstance(value, Tensor):
        return value.numel() != 1
    return isinstance(value, (str, bytes)) or not hasattr(value, "__float__")


class _Place(NamedTuple):
    """One number of a group; the group may be gone."""

    group: weakref.ref[Any]
    key: str
    element: int

    def write(self, value: float | Tensor) -> None:
        """Write to the group, if it is there and has the hyperparameter."""
        group = self.group()
        if group is not None and self.key in group:
            group.fill_element(self.key, self.element, value)
