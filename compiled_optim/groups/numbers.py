"""The numbers of one hyperparameter of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from compiled_optim.groups.live import Live
from compiled_optim.rule.fields import Hyper


class Numbers(tuple[Live, ...]):
    """The numbers of one hyperparameter of one group.

    Attributes:
        entry: what stands in the group's dict for them, where somebody else may write others.
    """

    entry: Any = None

    def __new__(cls, numbers: Iterable[Live], hyper: Hyper) -> Numbers:
        return super().__new__(cls, numbers)

    def __init__(self, numbers: Iterable[Live], hyper: Hyper) -> None:
        self._hyper = hyper
        self._single = None if hyper.is_tuple else self[0]
        self._least, self._most = hyper.span

    @property
    def are_private(self) -> bool:
        """Whether they are what was written last, for nobody else can write others; see :attr:`Live.is_private`."""
        return all(n.is_private for n in self)

    @property
    def are_plain(self) -> bool:
        """Whether, besides, a write of numbers in range changes nothing else."""
        return self.are_private and not any(n.shapes for n in self) and all(map(self._is_in_range, self))

    def _is_in_range(self, number: Live) -> bool:
        return number.written is not None and self._least <= number.written <= self._most

    @property
    def shown(self) -> Any:
        """What users read, as far as the host knows it; tensors where it does not."""
        return self._hyper.plain([n.shown for n in self])

    def read(self, where: str) -> Any:
        """What users read: a number or a tensor, or a tuple of them."""
        return self._hyper.plain([n.read(f"{self._hyper.element(i)} of {where}") for i, n in enumerate(self)])

    def write_quickly(self, value: Any) -> bool:
        """Write ``value`` where :attr:`are_plain`, at the cost that schedulers expect; whether it is one that can be."""
        if self._single is not None:
            return type(value) is float and self._least <= value <= self._most and self._single.write_plain(value)
        if type(value) is not tuple or len(value) != len(self):
            return False
        for number in value:
            if type(number) is not float or not self._least <= number <= self._most:
                return False
        return all([live.write_plain(number) for live, number in zip(self, value, strict=True)])


def is_own(hyper: Hyper, value: Any, group: Mapping[str, Any]) -> bool:
    """Whether ``value`` under the name of ``hyper`` is the user's own: no number, where ``group`` has no use for one."""
    if hyper.when is None or group.get(hyper.when):
        return False
    if isinstance(value, Tensor):
        return value.numel() != 1
    return isinstance(value, (str, bytes)) or not hasattr(value, "__float__")
