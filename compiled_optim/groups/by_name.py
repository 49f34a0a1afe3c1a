"""Numbers by name, as a group keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor


class ByName(dict[str, float]):
    """A copy of a dict of numbers that nobody can edit: another choice is another dict.

    It equals the dict that it was made of. Numbers in tensors of one element become Python numbers: later writes into those
    do not count either. ``copy`` and ``|`` make plain dicts, which can be edited and assigned.
    """

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        super().__init__({k: n.item() if isinstance(n, Tensor) and n.numel() == 1 else n for k, n in numbers.items()})

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("numbers by name are not edited where they are; assign another dict to the group")

    __setitem__ = __delitem__ = __ior__ = setdefault = update = pop = popitem = clear = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ByName, (dict(self),)


def kept(chosen: Any) -> Any:
    """What is kept of a group's choice: a copy of a dict, anything else as it is."""
    return ByName(chosen) if isinstance(chosen, Mapping) and not isinstance(chosen, ByName) else chosen
