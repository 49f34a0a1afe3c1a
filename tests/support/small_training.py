"""The small thing that every training stack trains here, and how two trainings of it are compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co

OPTIONS = {"lr": 0.03, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.2}

# The packages that write a checkpoint and that read it.
PAIRS = [(co, co), (torch.optim, co), (co, torch.optim)]
PAIR_IDS = ["ours", "torch-to-ours", "ours-to-torch"]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where one of ``packages``, of the extra ``trainers``, is not installed, and imports none of them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Eight inputs and one output, with the same weights every time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1)).to(dtype)


def batches(count: int = 6, size: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same inputs every time."""
    return list(torch.randn(count, size, 8, generator=torch.Generator().manual_seed(2)).to(dtype))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """How far the model is from a function of its inputs."""
    return (model(x) - x.sin().sum(-1, keepdim=True)).square().mean()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_trained_alike(train: Callable[[Any], Any], rtol: float = 1e-10, atol: float = 1e-12) -> Any:
    """``train`` gives equal numbers with the optimizers of ``compiled_optim`` and with those of ``torch.optim``.

    Args:
        train: takes either package, trains from the start, and returns nested containers of numbers and tensors.
        rtol, atol: how equal; the default is some steps' worth of rounding in float64.

    Returns:
        What ``train`` returned for ``compiled_optim``.
    """
    ours, theirs = train(co), train(torch.optim)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    return ours
