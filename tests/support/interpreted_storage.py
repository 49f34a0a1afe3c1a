"""Weights and state in few bytes by Triton's kernels, beside the eager lowering.

A weight and its remainder hold float32 numbers of all exponents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from stored_cases import CASES, MINIMUM, Case
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.rule import storage

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def interpreted() -> dict[str, Any]:
    """Return what differs from the eager lowering in any bit, by case, and which promises are broken, by dtype."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of what is infinite
    broken = {
        f"{mode} {name}": broken_promises(mode, dtype) for mode in storage.REMAINDER_BITS for name, dtype in HALVES.items()
    }
    with mock.patch.object(storage, "MINIMUM", MINIMUM):
        unlike = {name: differences(case) for name, case in CASES.items()}
    return {"differences": unlike, "broken promises": broken}


def root(x: Tensor, exact: Callable[[Tensor], Tensor] = torch.sqrt) -> Tensor:
    """The nearest number to the root. Torch's root of float32 is the next one for a number in five, on a CPU."""
    return exact(x.double()).to(x.dtype)


def differences(case: Case) -> dict[str, int]:
    """How many numbers of each tensor differ; what is not a number is alike."""
    with mock.patch.object(torch, "sqrt", root):
        ours, expected = (case.run(lowering) for lowering in ("multi_tensor", "eager"))
    counts = {name: int((~alike(tensor, expected[name])).sum()) for name, tensor in ours.items()}
    return {name: count for name, count in counts.items() if count}


def alike(tensor: Tensor, other: Tensor) -> Tensor:
    """Where numbers are equal; what is not a number is alike."""
    return (tensor == other) | ((tensor != tensor) & (other != other))


def every_exponent() -> Tensor:
    """Float32 numbers of all exponents and both signs, among them such as are halfway between others."""
    generator = torch.Generator().manual_seed(0)
    halfway = torch.tensor([0, 1, 0x7F, 0x80, 0x81, 0x180, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF])
    mantissas = torch.cat([halfway, torch.randint(1 << 23, (18,), generator=generator)])
    bits = (torch.arange(512)[:, None] << 23) | mantissas
    return bits.to(torch.int32).flatten().view(torch.float32)


def broken_promises(mode: str, dtype: torch.dtype) -> dict[str, int]:
    """How many numbers break a promise, by what it says; a step writes them into weights, another one moves nothing."""
    numbers = every_exponent()
    param = nn.Parameter(torch.zeros(len(numbers), dtype=dtype))
    param.grad_dtype = torch.float32
    optimizer = co.SGD([param], lr=1.0, weights=mode, lowering="multi_tensor")
    written = []
    for grad in (-numbers, torch.zeros_like(numbers)):
        param.grad = grad
        optimizer.step()
        written.append((param.detach().clone(), optimizer.state[param]["remainder"].clone()))
    (narrow, rest), again = written
    whole = storage.joined(narrow.float(), {"remainder": rest.float()}, mode, str(dtype).removeprefix("torch."))
    to_whole = (whole.view(torch.int32) - numbers.view(torch.int32)).abs()
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    lower = {torch.bfloat16: 16, torch.float16: 13}[dtype]  # bits of a float32 behind those of the weight
    held = min(lower, storage.REMAINDER_BITS[mode])
    unit = 1 << (lower - held)  # what both hold together, in units of a float32's last bit
    normal = (numbers.abs() >= smallest) & (numbers.abs() <= largest)
    subnormal = numbers.abs() < smallest
    to_weight = (narrow.float().view(torch.int32) - numbers.view(torch.int32)).abs()
    promises = {
        "all bits that both hold": ~normal | (to_whole < unit),
        "the nearest weight": ~normal | (to_weight < (1 << (lower - 1)) + unit),
        "a subnormal within a unit": ~subnormal | ((whole - numbers).abs() <= smallest * 2.0 ** (lower - held - 23)),
        "infinite stays so": ~numbers.isinf() | (narrow == numbers),
        "no number stays none": ~numbers.isnan() | narrow.isnan(),
        "what does not move stays": alike(narrow, again[0]) & (~narrow.isfinite() | (rest == again[1])),
    }
    return {promise: int((~kept).sum()) for promise, kept in promises.items() if not kept.all()}
