"""The optimizers once more, as their papers and torch.optim's documentation have them: slowly, in float64.

A module per optimizer, named as its class in lower case, with two functions of one tensor: ``start`` makes its state, and
``step`` changes state and parameter in place. ``h`` holds the hyperparameters and choices by name, ``t`` counts the tensor's
steps from 1 on. The module of an optimizer that torch.optim lacks also has ``FAR``: arguments to try it with, far from its
defaults, since with those a formula that misplaces a decay passes unnoticed. A module that has ``KEEPS`` passes its steps
through ``h.keep(step, grad)``, which is what a cautious optimizer leaves of them. One whose decay cannot be told from its
step afterwards multiplies it by ``h.decays(step, param)``: 1 where elements decay, else 0. One that names ``SHARED`` entries
of the state has ``share``: it is called before the steps, with all that take one, the first group, and ``h.shared``, a dict.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiled_optim.optimizer import CompiledOptimizer


def naive_module(optimizer: type[CompiledOptimizer]) -> ModuleType:
    """The module of an optimizer's reference."""
    name = optimizer.__name__.lower()
    try:
        return importlib.import_module(f"reference.{name}")
    except ModuleNotFoundError:
        raise LookupError(
            f"torch.optim has no {optimizer.__name__}: add tests/reference/{name}.py, with start, step and FAR as in lion.py"
        ) from None


def naive(optimizer: type[CompiledOptimizer]) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer's reference, as torch.optim's are made."""
    return functools.partial(Naive, naive_module(optimizer), {**_defaults(optimizer), "maximize": False})


def _defaults(optimizer: type[CompiledOptimizer]) -> dict[str, Any]:
    fields = (*optimizer._declaration.hypers, *optimizer._declaration.statics)
    own = (f for f in fields if f.name in optimizer._declared)
    return {f.name: f.default for f in own if f.default is not inspect.Parameter.empty}


class Naive(torch.optim.Optimizer):
    """The functions of a module in the form of torch.optim's optimizers; a complex number is two real ones."""

    def __init__(self, module: ModuleType, defaults: dict[str, Any], params: Iterable[Any], **given: Any) -> None:
        self.module = module
        self.shared: dict[str, float] = {}
        super().__init__(params, {**defaults, **given})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        given: list[tuple[Tensor, Tensor, dict[str, Tensor], Any]] = []
        for group in self.param_groups:
            h = SimpleNamespace(**{**group, "maximize": group.get("maximize", False)}, shared=self.shared)
            h.keep = _cautious_part if group.get("cautious") else lambda step, grad: step
            h.decays = (lambda step, x: 1.0 * (step * x >= 0)) if group.get("cautious_weight_decay") else lambda step, x: 1.0
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=torch.zeros(()), **self.module.start(param.detach(), h))
                state["step"] += 1
                given.append((_real(param.detach()), _real(param.grad), {n: _real(v) for n, v in state.items()}, h))
        names = getattr(self.module, "SHARED", ())
        for state in self.state.values():  # a checkpoint's
            self.shared.update({name: state[name].item() for name in names if name in state})
        if names:
            self.module.share(given, SimpleNamespace(**self.param_groups[0]), self.shared)
        for real, grad, buffers, h in given:
            self.module.step(real, grad, buffers, int(buffers["step"]), h)
        for state in self.state.values():
            state.update({name: torch.tensor(self.shared[name], dtype=torch.float64) for name in names})


def _cautious_part(step: Tensor, grad: Tensor) -> Tensor:
    """What is left of a step where only elements that go down their gradient move (arXiv:2411.16085, as C-AdamW)."""
    goes_down = step * grad > 0
    return goes_down * step / max(goes_down.sum().item() / max(goes_down.numel(), 1), 1e-3)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
