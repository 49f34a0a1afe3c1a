"""Fifty steps of every optimizer as digests of their results, to tell whether a change of the code changed a bit.

``tools/bits`` runs this file with the package of two revisions, so it uses the public interface only.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co

STEPS = 50
LOWERINGS = ("multi_tensor", "inductor", "eager")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
STORED: tuple[dict[str, Any], ...] = (
    {"weights": "kahan", "state_dtype": torch.bfloat16},
    {"weights": "split8", "state_dtype": "int8"},
    {"weights": "stochastic"},
)
FAR: dict[str, Any] = {
    "lr": 0.013,
    "betas": (0.8, 0.95),
    "eps": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.7,
    "dampening": 0.2,
    "alpha": 0.6,
    "rho": 0.7,
    "lr_decay": 0.3,
    "momentum_decay": 0.3,
    "amsgrad": True,
    "centered": True,
    "decoupled_weight_decay": True,
}
"""Values far from defaults, for optimizers with an argument of that name and kind."""


def far(cls: type[co.CompiledOptimizer]) -> dict[str, Any]:
    """Return arguments of an optimizer that are far from their defaults."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
    return {name: value for name, value in FAR.items() if _same_kind(defaults.get(name), value)}


def _same_kind(default: Any, value: Any) -> bool:
    if default is inspect.Parameter.empty:
        return True
    return type(default) is type(value) and (not isinstance(value, tuple) or len(default) == len(value))


def runs(cls: type[co.CompiledOptimizer]) -> Iterator[tuple[dict[str, Any], str, torch.dtype]]:
    """Yield arguments, lowering and dtype of each run of an optimizer."""
    arguments = far(cls)
    for lowering in LOWERINGS:
        yield {"lr": FAR["lr"]}, lowering, torch.float32
        yield {**arguments, "maximize": True, "max_grad_norm": 2.0}, lowering, torch.float32
        for dtype in DTYPES:
            yield arguments, lowering, dtype
        if lowering != "inductor" and "weights" in inspect.signature(cls).parameters:  # Inductor takes long to compile them
            yield from (({**arguments, **stored}, lowering, torch.bfloat16) for stored in STORED)


def digest(cls: type[co.CompiledOptimizer], options: dict[str, Any], lowering: str, dtype: torch.dtype) -> str:
    """Return a hash of all parameters and their state after steps in which each gradient is absent every fourth time.

    If the optimizer refuses the options, return its message.
    """
    torch.manual_seed(0)
    only_matrices = cls is co.SparseAdam or cls._granularity == "matrix"
    shapes = [(33, 17), (129, 64), (5, 3)] if only_matrices else [(33, 17), (8193,), (), (4, 3, 2, 2), (41000,)]
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    named = [(f"p{i}", param) for i, param in enumerate(params)]  # one optimizer tells parameters apart by their names
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.007}]
    try:
        optimizer = cls(groups, lowering=lowering, **options)
    except ValueError as refusal:  # such as 8 bits for state that is no average
        return str(refusal)
    for step in range(STEPS):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape).to(dtype)
            if cls is co.SparseAdam:
                grad = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), grad[:3], param.shape, check_invariants=True)
            param.grad = None if (i + step) % 4 == 0 else grad
        optimizer.step()
    return _hash([*params, *(value for p in params for _, value in sorted(optimizer.state[p].items()))])


def digest_of_closures(options: dict[str, Any]) -> str:
    """Return a hash of the parameters after steps of L-BFGS on a quadratic function."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((7, 3), (5,))]
    targets = [torch.randn_like(p) for p in params]
    optimizer = co.LBFGS(params, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        squares = [(p - t).square().flatten() for p, t in zip(params, targets, strict=True)]
        loss = torch.stack([square @ torch.arange(1.0, len(square) + 1) for square in squares]).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    return _hash(params)


def _hash(tensors: list[Tensor]) -> str:
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:16]


def digests(names: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield name and digest of every run of the named optimizers, or of all."""
    for name in names or sorted(co.__all__):
        cls = getattr(co, name)
        if not isinstance(cls, type) or not issubclass(cls, co.CompiledOptimizer) or cls is co.CompiledOptimizer:
            continue
        if cls is co.LBFGS:
            for options in ({}, {"line_search_fn": "strong_wolfe"}, {"fixed_iterations": True}):
                yield f"LBFGS {options}", digest_of_closures(options)
            continue
        for options, lowering, dtype in runs(cls):
            yield f"{name} {options} {lowering} {dtype}", digest(cls, options, lowering, dtype)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in digests(sys.argv[1:]):
        print(json.dumps(line), flush=True)
