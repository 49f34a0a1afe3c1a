"""The optimizers that optimi has too, against optimi's plain loops, every argument far from its default.

Not compared, since optimi is wrong there: Adan's ``adam_wd`` has no effect in it, and decay in bfloat16 is lost. The naive
references have these. optimi's Adam, RAdam and SGD have other forms of ``eps`` and decay than torch's, which ours follow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import compiled_optim as co

optimi = pytest.importorskip("optimi")

SHAPES = [(5, 7), (3,), (), (150, 130)]
ADAM = {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [  # the name; what both, we, and optimi get
    ("Adan", {**ADAM, "betas": (0.6, 0.7, 0.8), "weight_decay": 0.4}, {}, {}),
    ("Adan", {**ADAM, "betas": (0.0, 0.95, 0.3), "weight_decay": 0.0}, {}, {}),
    ("StableAdamW", {**ADAM, "weight_decay": 0.4}, {}, {}),
    ("StableAdamW", {**ADAM, "betas": (0.9, 0.0), "eps": 0.7, "weight_decay": 2.0}, {}, {}),
    ("Ranger", {**ADAM, "betas": (0.6, 0.95), "weight_decay": 0.4, "k": 4, "alpha": 0.3}, {}, {}),
    ("Ranger", {**ADAM, "betas": (0.6, 0.95), "weight_decay": 0.4, "k": 1, "alpha": 0.9, "decouple_wd": False}, {}, {}),
    ("Lion", {"lr": 0.07, "betas": (0.6, 0.8), "weight_decay": 0.4}, {}, {}),
    ("AdamW", {**ADAM, "weight_decay": 0.4}, {}, {}),
    ("Adam", {**ADAM, "weight_decay": 0.4}, {}, {}),
    ("Adam", {**ADAM, "weight_decay": 0.4}, {"decoupled_weight_decay": True}, {"decouple_wd": True}),
    ("SGD", {"lr": 0.07, "momentum": 0.8, "weight_decay": 0.4}, {}, {}),
    ("SGD", {"lr": 0.07, "momentum": 0.8}, {"dampening": 0.8}, {"dampening": True, "torch_init": True}),
]


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "both", "own", "theirs"), CASES)
def test_equals_optimi(
    name: str, both: dict[str, Any], own: dict[str, Any], theirs: dict[str, Any], dtype: torch.dtype, lowering: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in SHAPES]
    twins = [Parameter(p.detach().double()) for p in ours]
    optimizer = getattr(co, name)(ours, **both, **own, lowering=lowering)
    reference = getattr(optimi, name)(twins, **both, **theirs, foreach=False, triton=False)
    for step in range(13):
        for side in (optimizer, reference):
            side.param_groups[0]["lr"] = 0.07 / (1 + step % 5)
        for param, twin in zip(ours, twins, strict=True):
            param.grad = torch.randn(param.shape, dtype=dtype, generator=generator) * (1 + 3 * (step == 5))
            twin.grad = param.grad.double()
        optimizer.step()
        reference.step()
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for param, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(param.double(), twin, rtol=tolerance, atol=tolerance)
