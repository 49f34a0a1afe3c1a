"""What is stepped: parameters of some shapes on a GPU that need not be there, and an optimizer of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import compiled_optim
from perf import workloads
from perf.competitors import arguments

NUMEL = 4096  # elements of each of several equal tensors: whole chunks
MIXED = [(64, 64), (4096,), (768,), (768, 768)]
GPT2 = "gpt2-124m"

_ENTRIES = 5  # of a sparse gradient
_WITHOUT_HOST = {"lbfgs": {"fixed_iterations": True, "max_iter": 1}}  # for what else it does, a host has to decide


@dataclass(frozen=True)
class Workload:
    """What is stepped.

    Attributes:
        optimizer: lower-case name.
        tensors: their number.
        groups: parameter groups they are spread over.
        dtype: of parameters, gradients and state.
        numel: elements of each of several equal tensors.
        options: further arguments of this package's optimizer.
        shapes: ``equal``; ``mixed``, four shapes in turn; or ``gpt2``, the first tensors of GPT-2 small, which has 148.
    """

    optimizer: str
    tensors: int
    groups: int = 1
    dtype: torch.dtype = torch.float32
    numel: int = NUMEL
    options: tuple[tuple[str, Any], ...] = ()
    shapes: str = "equal"

    def split(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """``params`` as groups."""
        return [{"params": list(params[i :: self.groups])} for i in range(self.groups)]

    @property
    def sizes(self) -> workloads.Shapes:
        """The shapes of the parameters. Equal ones are vectors for elementwise optimizers, square matrices for others."""
        side = math.isqrt(self.numel)
        equal = (self.numel,) if self.optimizer in elementwise() else (side, side)
        kinds = {"equal": [equal], "mixed": MIXED, "gpt2": workloads.shapes(GPT2)}
        return list(islice(cycle(kinds[self.shapes]), self.tensors))

    @property
    def elements(self) -> int:
        """Real numbers in all parameters."""
        return sum(map(math.prod, self.sizes))


def optimizers() -> dict[str, type[compiled_optim.CompiledOptimizer]]:
    """The package's optimizers by lower-case name."""
    exported = (getattr(compiled_optim, name) for name in compiled_optim.__all__)
    classes = [c for c in exported if isinstance(c, type) and issubclass(c, compiled_optim.CompiledOptimizer)]
    return {c.__name__.lower(): c for c in classes if c is not compiled_optim.CompiledOptimizer}


def elementwise() -> list[str]:
    """The names of those that are an elementwise rule over dense gradients; the others have the lowering ``auto`` only."""
    ruled = {name: c for name, c in optimizers().items() if hasattr(c, "_rule") and c._gradients == "dense"}
    return [name for name, c in ruled.items() if c._granularity == "element"]


def _parameters(workload: Workload, device: str) -> list[Tensor]:
    params = [torch.empty(size, dtype=workload.dtype, device=device) for size in workload.sizes]
    cls = optimizers()[workload.optimizer]
    for param in params:
        param.grad = gradient(param, cls)
    return params


def gradient(param: Tensor, optimizer: type[Optimizer]) -> Tensor:
    """What an optimizer of this class finds as the gradient of ``param``."""
    if getattr(optimizer, "_gradients", "dense") == "dense":
        return torch.empty_like(param)
    indices = torch.empty(1, _ENTRIES, dtype=torch.int64, device=param.device)
    values = torch.empty(_ENTRIES, *param.shape[1:], dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)


def ours(workload: Workload, device: str, lowering: str) -> compiled_optim.CompiledOptimizer:
    """This package's optimizer with a ``lowering``."""
    made = [p.requires_grad_() for p in _parameters(workload, device)]
    cls = optimizers()[workload.optimizer]
    options = {**arguments(cls), **_WITHOUT_HOST.get(workload.optimizer, {})}
    options |= {**dict(workload.options), "lowering": lowering}
    return cls(workload.split(made), **options)


def stock(workload: Workload) -> Optimizer:
    """torch.optim's optimizer, foreach, with state and learning rate on the device; a first step made the state."""
    cls = getattr(torch.optim, optimizers()[workload.optimizer].__name__, None)
    if cls is None:
        raise ValueError(f"torch.optim has no {workload.optimizer}")
    if workload.options:
        raise ValueError(f"torch.optim's step has no {', '.join(name for name, _ in workload.options)}")
    options: dict[str, Any] = {name: True for name in ("foreach", "capturable") if name in inspect.signature(cls).parameters}
    made = [p.requires_grad_() for p in _parameters(workload, "cuda")]
    optimizer: Optimizer = cls(workload.split(made), **options, **arguments(cls))
    optimizer.step()
    if "capturable" in options:
        for group in optimizer.param_groups:
            group["lr"] = torch.empty((), device="cuda")
    return optimizer
