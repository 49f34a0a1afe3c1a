"""Rules with means find in them what their update finds, whatever transforms made of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co

LR, BETAS, EPS, DECAY, MAX_LR, SCALE = 0.07, (0.6, 0.8), 0.03, 0.4, 0.2, 0.5
CHOICES = [
    {name: True for name, chosen in zip(("decouple_wd", "decouple_lr", "cautious"), made, strict=True) if chosen}
    for made in itertools.product((False, True), repeat=3)
]


def _naive(param: Tensor, grads: list[Tensor], choices: dict[str, Any], scale: float) -> Tensor:
    lr, (beta1, beta2), (m, v) = LR * scale, BETAS, (torch.zeros_like(param), torch.zeros_like(param))
    decay = DECAY / (MAX_LR * scale) if "decouple_lr" in choices else DECAY
    is_decoupled = "decouple_wd" in choices or "decouple_lr" in choices
    for t, grad in enumerate(grads, 1):
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        param = param * (1 - lr * decay) if is_decoupled else param
        direction = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + EPS) + (0 if is_decoupled else decay) * param
        step = lr * param.norm() / direction.norm() * direction
        if "cautious" in choices:
            moves = (step * grad > 0).to(step.dtype)
            step = step * moves / moves.mean()
        param = param - step
    return param


class Lamb(co.LAMB, decays="gradient"):
    """Which says that a transform may take the decay out of its direction."""


def _lamb(pairs: list[tuple[str, nn.Parameter]], **kwargs: Any) -> Lamb:
    return Lamb(pairs, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **kwargs)


@pytest.mark.parametrize("lowering", ["eager", "multi_tensor"])
@pytest.mark.parametrize("choices", CHOICES, ids=lambda c: "-".join(c) or "plain")
def test_means_go_through_every_transform(choices: dict[str, Any], lowering: str) -> None:
    torch.manual_seed(0)
    starts = [torch.randn(6, 7, dtype=torch.float64) for _ in "ab"]
    grads = [[torch.randn(6, 7, dtype=torch.float64) for _ in range(5)] for _ in starts]
    params = [nn.Parameter(start.clone()) for start in starts]
    bound = {"max_lr": MAX_LR} if "decouple_lr" in choices else {}
    optimizer = _lamb([("a", params[0]), ("b", params[1])], lowering=lowering, lr_scale={"b": SCALE}, **choices, **bound)
    for now in zip(*grads, strict=True):
        for param, grad in zip(params, now, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    for param, start, own, scale in zip(params, starts, grads, (1.0, SCALE), strict=True):
        torch.testing.assert_close(param.detach(), _naive(start, own, choices, scale), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("lowering", ["eager", "multi_tensor", "inductor"])
@pytest.mark.parametrize("weights", ["master", "split16"])
@pytest.mark.parametrize("choices", [{}, {"decouple_wd": True, "cautious": True}], ids=["plain", "chosen"])
def test_means_are_of_all_the_bits_of_a_weight(choices: dict[str, Any], weights: str, lowering: str) -> None:
    """They are those of parameters in float32."""
    torch.manual_seed(0)
    start = torch.randn(64, 80).bfloat16()
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    stored = _lamb([("w", narrow)], lowering=lowering, weights=weights, state_dtype=torch.float32, **choices)
    full = _lamb([("w", wide)], lowering=lowering, **choices)
    for _ in range(4):
        narrow.grad = torch.randn(64, 80).bfloat16()
        wide.grad = narrow.grad.float()
        stored.step()
        full.step()
    module = nn.Module()
    module.w = narrow
    torch.testing.assert_close(co.full_precision_state_dict(module, stored)["w"], wide.detach(), rtol=2e-6, atol=1e-6)
