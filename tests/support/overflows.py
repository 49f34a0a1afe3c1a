"""Gradients so large that a square overflows, in groups of elements that the parameter's end cuts short."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
from catalog import required, ruled
from torch import Tensor, nn

from compiled_optim.rule import storage as rule_storage
from compiled_optim.rule.formats import GROUP

KINDS = {c.__name__: c for c in ruled("dense") if any(b.int8 for b in c._declaration.buffers)}
"""Every optimizer with state that can be stored in groups."""

STORAGE: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "split8": (torch.bfloat16, {"weights": "split8", "state_dtype": "int8"}),
    "stochastic": (torch.bfloat16, {"weights": "stochastic", "state_dtype": "int8"}),
}

SHAPES = [(1,), (63,), (GROUP,), (65,), (5, 13), (130,)]
"""Ends right behind the beginning of a group, right before its end, there, and in between; one in another order."""

COMPILED = [("AdamW", "int8"), ("LAMB", "int8"), ("Adan", "stochastic")]
"""What is compiled or interpreted, which takes seconds."""


def places(numel: int) -> list[int]:
    """The first element, the first of the last group, the last element."""
    return sorted({0, (numel - 1) // GROUP * GROUP, numel - 1})


def runs(kind: str, storage: str, lowering: str, steps: int = 3) -> dict[str, dict[str, Tensor]]:
    """For every shape and place of the overflow, and without any: what is stored after some steps, by name."""
    dtype, stored = STORAGE[storage]
    found = {}
    for shape in SHAPES:
        for place in (None, *places(torch.Size(shape).numel())):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            param = nn.Parameter(value.t().contiguous().t() if value.dim() > 1 else value)
            with mock.patch.object(rule_storage, "MINIMUM", 1):
                optimizer = KINDS[kind]([param], **required(KINDS[kind]), **stored, lowering=lowering)
            for step in range(steps):
                grad = torch.randn(shape, generator=torch.Generator().manual_seed(1 + step))
                if place is not None and step == 0:
                    grad.view(-1)[place] = 3e38
                param.grad = grad.to(dtype)
                optimizer.step()
            found[f"{shape} {place}"] = {"param": param.detach(), **optimizer.state[param]}
    return found


def disagreements(kind: str, storage: str, lowering: str, other: str) -> list[str]:
    """The runs and tensors of which two lowerings find other numbers finite, infinite or NaN."""
    found = runs(kind, storage, other)
    return [
        f"{case}: {name}"
        for case, expected in runs(kind, storage, lowering).items()
        for name, numbers in expected.items()
        if not torch.equal(_verdicts(found[case][name]), _verdicts(numbers))
    ]


def _verdicts(numbers: Tensor) -> Tensor:
    return numbers.isinf() + 2 * numbers.isnan()


def interpreted() -> dict[str, list[str]]:
    """Return where the eager lowering disagrees with Triton's kernels."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of what is infinite
    return {kind: disagreements(kind, storage, "multi_tensor", "eager") for kind, storage in COMPILED}
