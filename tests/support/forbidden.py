"""Operations that make the host wait, found without a device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Forbidden(TorchDispatchMode):
    """Fails where an operation reads the device, or gives a tensor whose shape depends on numbers."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "coalesce",
        "unique",
        "item",
        "is_nonzero",
        "equal",
        "masked_select",
        "to_dense",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name != "is_coalesced" and any(word in name for word in self.NAMES):
            raise AssertionError(f"{func} waits for the device")
        self.seen.append(name)
        return func(*args, **(kwargs or {}))
