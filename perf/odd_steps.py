"""Steps over odd shapes and strides, in several forms, for a tool that watches every access: ``python -m perf.odd_steps``.

A line is printed for each case that ended, so the last one shows where a tool ended the process.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch

import compiled_optim as co
from compiled_optim.rule import storage

CODED = {"weights": "split8", "state_dtype": "int8"}
PLAIN = [(3, 5), (64, 65), (1000, 3)]
MATRICES = [(64, 128), (65, 64), (130, 64)]

CASES: list[tuple[type[co.CompiledOptimizer], dict[str, Any], torch.dtype, list[tuple[int, ...]]]] = [
    (co.AdamW, {}, torch.float32, PLAIN),
    (co.Muon, {"split": {"w1": (30, 20, 15), "w2": 2}}, torch.float32, [*MATRICES, (3, 70, 9)]),
    (co.NorMuon, {"split": {"w2": (100, 30)}, **CODED}, torch.bfloat16, MATRICES),
    (co.AdamW, CODED, torch.bfloat16, MATRICES),
    (co.Muon, {"weights": "kahan"}, torch.float16, [*MATRICES, (3, 70, 9)]),
    (co.Adafactor, {}, torch.float32, [*MATRICES, (3, 70, 9), *PLAIN]),
    (co.LAMB, {}, torch.float32, [*MATRICES, (3, 70, 9), *PLAIN]),
    (co.Lion, {}, torch.float32, PLAIN),
    (co.Muon, {}, torch.float32, PLAIN),
]
"""Optimizer, options, dtype and shapes. The first cases reach most kinds of kernels."""


def main(device: str) -> None:
    """Take two steps of each case, the second without the first gradients."""
    with mock.patch.object(storage, "MINIMUM", 64):  # elements from which a tensor has codes
        for cls, options, dtype, sizes in CASES:
            params = [torch.randn(size, device=device, dtype=dtype).requires_grad_() for size in sizes]
            stacks = {"stacks": ["*"]} if issubclass(cls, co.Muon) and any(len(size) > 2 for size in sizes) else {}
            optimizer = cls([(f"w{i}", p) for i, p in enumerate(params)], lr=1e-3, **options, **stacks)
            for step in range(2):
                for param in params[step:]:
                    param.grad = torch.randn_like(param).mT.contiguous().mT
                optimizer.step()
            finite = all(bool(param.isfinite().all()) for param in params)
            print(cls.__name__, options, dtype, "finite" if finite else "NOT FINITE", flush=True)
            if not finite:
                sys.exit(1)
    print("all steps were taken")


if __name__ == "__main__":
    main(sys.argv[1])
