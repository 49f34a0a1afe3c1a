"""Which of the tensors that are made meanwhile stay."""

from __future__ import annotations

import gc
from collections.abc import Iterable
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
                self._storages[made.untyped_storage()._cdata] = StorageWeakRef(made.untyped_storage())
        return result

    def kept(self, besides: Iterable[Any] = ()) -> int:
        """How much of it is still there, ``besides`` the memory of these tensors."""
        gc.collect()
        known = {x.untyped_storage()._cdata for x in besides if isinstance(x, torch.Tensor)}
        return sum(not storage.expired() for at, storage in self._storages.items() if at not in known)
