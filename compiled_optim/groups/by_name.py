"""Numbers by name, as a group keeps them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from compiled_optim.groups.names import canonical_name


class ByName(dict[str, float]):
    """A copy of a dict of numbers that nobody can edit: another choice is another dict.

    It equals the dict that it was made of. Numbers in tensors of one element become Python numbers: later writes into those
    do not count either. ``copy`` and ``|`` make plain dicts, which can be edited and assigned.
    """

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        super().__init__({k: n.item() if isinstance(n, Tensor) and n.numel() == 1 else n for k, n in numbers.items()})

    def key_of(self, name: str) -> str:
        """Under what ``name`` stands here: as it is, or else with other prefixes of module wrappers; itself if it does not.

        Raises:
            ValueError: it stands here with several other prefixes, and with different numbers.
        """
        if name in self or not (keys := self._by_short_name.get(canonical_name(name))):
            return name
        if len({self[key] for key in keys}) > 1:
            raise ValueError(f"there are different numbers for '{name}', under {' and '.join(map(repr, keys))}")
        return keys[0]

    @functools.cached_property
    def _by_short_name(self) -> dict[str, list[str]]:
        """The keys that are names, by what they are without the prefixes of module wrappers."""
        found: dict[str, list[str]] = {}
        for key in self:
            if isinstance(key, str):
                found.setdefault(canonical_name(key), []).append(key)
        return found

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("numbers by name are not edited where they are; assign another dict to the group")

    __setitem__ = __delitem__ = __ior__ = setdefault = update = pop = popitem = clear = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ByName, (dict(self),)


def kept(chosen: Any) -> Any:
    """What is kept of a group's choice: a copy of a dict, anything else as it is."""
    return ByName(chosen) if isinstance(chosen, Mapping) and not isinstance(chosen, ByName) else chosen
