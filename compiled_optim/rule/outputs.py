"""The outputs that the end of an update has besides the new tensors. They are no arrays, so they take little memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SUMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "grad": lambda old, new, grad: grad * grad,
    "param": lambda old, new, grad: new * new,
    "update": lambda old, new, grad: (new - old) * (new - old),
}
"""By name, the numbers that are added up over each parameter, of its old and new values before rounding, and its gradient.

The gradient is the one that the rule gets: unscaled, clipped, and negated if the group maximizes.
"""


@dataclass(frozen=True)
class Outputs:
    """A choice of outputs. Each choice has kernels of its own; without outputs kernels are as if there were none to choose.

    Attributes:
        served: the dtype in which others read the weights: one bit of each weight is set where its bits in this dtype
            change. None for no such bits. Of 16-bit weights it is their own dtype, or float32.
        sums: names in :data:`SUMS`.
    """

    served: torch.dtype | None = None
    sums: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.served is not None or bool(self.sums)

    def check(self, param: torch.dtype) -> None:
        """Raise ``ValueError`` for a dtype in which weights of the dtype ``param`` cannot be served."""
        if param.is_complex and self.served is not None:
            raise ValueError("complex numbers are served in no dtype of real ones")
        kinds = torch.float32, *((param,) if param.itemsize == 2 else (torch.bfloat16, torch.float16))
        if self.served is not None and self.served not in kinds:
            names = ", ".join(map(str, kinds))
            raise ValueError(f"weights in {param} can be served in one of {names}, got {self.served}")


NONE = Outputs()
