"""Two optimizers of torch.optim that one of this package combines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from perf.competitors import named


class MuonAdamW(Optimizer):
    """Torch's Muon for hidden matrices and its fused AdamW for the rest, which step one after the other."""

    def __init__(self, params: Sequence[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        hidden = [param for name, param in named(params) if name.startswith("hidden")]
        others = [param for name, param in named(params) if not name.startswith("hidden")]
        self._both: list[Optimizer] = [torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")]
        if others:
            self._both.append(torch.optim.AdamW(others, lr=lr, fused=True))

    def step(self) -> None:  # type: ignore[override]
        """Step both."""
        for optimizer in self._both:
            optimizer.step()
