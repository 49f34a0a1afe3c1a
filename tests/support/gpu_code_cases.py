"""Optimizers whose code for a GPU runs in Triton's interpreter, by name: each rule under each choice, and each storage.

The process that compiles the code and the one that interprets it both import this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from catalog import cases
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.lowering import list_program, lists
from compiled_optim.memory.torch_compiler import ListFunction
from compiled_optim.rule import Number, buffer, hyper

MINIMUM = 64
"""Elements from which parameters are stored as ``weights`` and ``state_dtype`` say, in these tests."""


class Rotating(co.CompiledOptimizer):
    """A rule whose every result is made of the old values of all others."""

    lr: Number = hyper(ge=0)
    first, second = buffer(), buffer()

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr, share=0.5 + lr)

    @staticmethod
    def update(param, grad, c, first, second):
        new_first = c.share * second + grad
        new_second = c.share * param - new_first
        step = c.lr * (first + second * grad)
        return dict(step=step, first=new_first + 0.1 * first, second=new_second + 0.1 * first * second)


class Late(co.CompiledOptimizer):
    """A rule that reads every old value after every new one was computed."""

    lr: Number = hyper(ge=0)
    first, second = buffer(), buffer()

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr)

    @staticmethod
    def update(param, grad, c, first, second):
        new_first, new_second, moved = 0.9 * first + grad, 0.8 * second + grad * grad, param - c.lr * grad
        olds = 0.3 * first + 0.2 * second + 0.1 * param
        return dict(param=moved, step=c.lr * olds, first=new_first, second=new_second)


@contextlib.contextmanager
def in_lists_of_two(compiled: Callable[..., ListFunction]) -> Iterator[None]:
    """Let optimizers that are made and called inside have lists of two tensors, and nothing that was compiled before."""
    with (
        mock.patch.object(list_program, "fuses_lists", return_value=True),
        mock.patch.object(lists, "COUNT", 2),
        mock.patch.object(lists, "_kernels", {}),
        mock.patch.object(lists, "compiled", compiled),
    ):
        yield


@dataclass(frozen=True)
class GPUCase:
    """An optimizer with its options."""

    optimizer: type[co.CompiledOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    odd: bool = field(default=True, kw_only=True)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of the parameters: none ends inside of a group of elements where state has groups.

        One without whole rows, of which a case need not be ``odd``, has a kernel of its own.
        """
        return [(2, 64), (192,), (7,) if self.is_full and self.odd else (128,)]

    @property
    def is_full(self) -> bool:
        """Whether nothing is stored in fewer bits than the rule computes with."""
        return self.dtype == torch.float32 and "state_dtype" not in self.options

    def make(self, lowering: str, device: str = "cpu") -> tuple[list[nn.Parameter], co.CompiledOptimizer]:
        """Parameters in two groups, and their optimizer."""
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, device=device, dtype=self.dtype)) for shape in self.shapes]
        groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1]), ("c", params[2])], "lr": 0.03}]
        return params, self.optimizer(groups, lowering=lowering, **{"lr": 0.07, **self.options})

    def gradients(self) -> Iterator[list[Tensor]]:
        """Those of four steps. An optimizer that skips steps has an infinite one in the second."""
        generator = torch.Generator().manual_seed(1)
        for step in range(4):
            grads = [torch.randn(shape, generator=generator, device="cpu").to(self.dtype) for shape in self.shapes]
            if step == 1 and "skip_nonfinite" in self.options:
                grads[1][7] = float("inf")
            yield grads


def _choices(optimizer: type[co.CompiledOptimizer], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What of ``kwargs`` shapes code: static choices, and whether a hyperparameter that decides on a buffer is 0."""
    statics = {f.name: kwargs.get(f.name, f.default) for f in optimizer._declaration.statics}
    zeros = {name: not kwargs.get(name) for name in optimizer._declaration.structural_hypers}
    return tuple(sorted((statics | zeros | {"maximize": False}).items()))


def _of_catalogue() -> dict[str, GPUCase]:
    """A case for each rule under each of its choices, with hyperparameters far from their defaults."""
    found: dict[tuple[Any, ...], GPUCase] = {}
    for case in cases("dense"):
        if case.kwargs:
            # How a tensor is viewed does not depend on a rule's choices: its first ones alone meet one without whole rows.
            key = case.optimizer, _choices(case.optimizer, case.kwargs)
            odd = (key in found and found[key].odd) or all(optimizer is not case.optimizer for optimizer, _ in found)
            found[key] = GPUCase(case.optimizer, case.kwargs, odd=odd)
    return {f"{c.optimizer.__name__} {i}": c for i, c in enumerate(found.values())}


_FAR = {"betas": (0.6, 0.8), "weight_decay": 0.4}
_HALF = {"state_dtype": torch.bfloat16}  # averages are rounded by numbers of the step, in operations on bits
_BITS = {"weights": "split8", "state_dtype": "int8"}
CASES = _of_catalogue() | {
    "means": GPUCase(co.LAMB, {**_FAR, "cautious": True}),
    "rotating": GPUCase(Rotating),
    "late": GPUCase(Late),
    "rotating clipped": GPUCase(Rotating, {"max_grad_norm": 0.5, "skip_nonfinite": True}),
    "Lion skipped": GPUCase(co.Lion, {**_FAR, "max_grad_norm": 0.5, "skip_nonfinite": True, "maximize": True}),
    "rotating stored": GPUCase(Rotating, {"weights": "kahan", "state_dtype": torch.float32}, torch.bfloat16),
    "AdamW kahan": GPUCase(co.AdamW, {**_FAR, **_HALF, "weights": "kahan"}, torch.bfloat16),
    "Lion stochastic": GPUCase(co.Lion, {**_FAR, **_HALF, "weights": "stochastic", "rounding_seed": 3}, torch.bfloat16),
    "Ranger split16": GPUCase(co.Ranger, {**_FAR, "state_dtype": torch.float32, "weights": "split16"}, torch.float16),
    "SGD split8 int8": GPUCase(co.SGD, {**_BITS, "momentum": 0.8, "weight_decay": 0.4}, torch.bfloat16),
    "Lion split8 int8": GPUCase(co.Lion, {**_FAR, **_BITS, "cautious": True}, torch.bfloat16),
    "AdamW master": GPUCase(co.AdamW, {**_FAR, **_HALF, "weights": "master", "amsgrad": True}, torch.bfloat16),
    "AdamW int8": GPUCase(co.AdamW, {**_FAR, "state_dtype": "int8"}),
}
