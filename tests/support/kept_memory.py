"""Which of the tensors that are made meanwhile stay, and the most memory that they have at once."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from simulated_graph import own_operator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Notes the memory of all tensors that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (operator := own_operator(func)) is not None:
            with self:
                return operator(*args)
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in known:
                self._add(made.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def kept(self, besides: Iterable[Any] = ()) -> int:
        """How much of it is still there, ``besides`` the memory of these tensors."""
        gc.collect()
        known = {x.untyped_storage()._cdata for x in besides if isinstance(x, torch.Tensor)}
        return sum(not storage.expired() for at, storage in self._storages.items() if at not in known)


class MostAlive(Made):
    """Counts the most bytes that such tensors have at once, besides what is mapped from a file. Linux only."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._sizes: dict[int, int] = {}

    def _add(self, storage: torch.UntypedStorage) -> None:
        super()._add(storage)
        self._sizes[storage._cdata] = 0 if _is_mapped(storage) else storage.nbytes()
        self.bytes = max(self.bytes, sum(self._sizes[at] for at, made in self._storages.items() if not made.expired()))


def _is_mapped(storage: torch.UntypedStorage) -> bool:
    """Return whether its memory is a file's: the system's table of mappings has no inode for other memory."""
    mappings = re.findall(r"^(\w+)-(\w+) \S+ \S+ \S+ (\d+)", Path("/proc/self/maps").read_text(), re.MULTILINE)
    at = storage.data_ptr()
    return any(int(start, 16) <= at < int(end, 16) and inode != "0" for start, end, inode in mappings)
