"""What may not be assigned to an optimizer that updates parameters inside of backward."""

from __future__ import annotations

from typing import Any

from compiled_optim.plan.clipping import NAMES


class Guarded:
    """Refuses assignments of clipping, skipping and a gradient scaler's tensors with gradient release."""

    def __setattr__(self, name: str, value: Any) -> None:
        engine = vars(self).get("_engine")
        if name in NAMES and engine is not None and engine.release is not None:
            engine.release.refuse(name, value)
        super().__setattr__(name, value)
