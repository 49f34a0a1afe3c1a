"""Optimizers that store weights and state in few bytes, on tensors out of the ordinary: for comparing two lowerings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import compiled_optim as co

MINIMUM = 1024
"""Elements below which a parameter counts as small here, so that a slow lowering has little to do."""

MODES = (None, "kahan", "stochastic", "split8", "split16", "master")
INFINITE, NOT_A_NUMBER = float("inf"), float("nan")


@dataclass(frozen=True)
class Case:
    """One optimizer with its options. With ``hard`` gradients some are infinite or no number."""

    optimizer: type[co.CompiledOptimizer]
    options: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    hard: bool = field(default=False, kw_only=True)

    def run(self, lowering: str, device: str = "cpu", *, compiled: bool = False, whole: bool = False) -> dict[str, Tensor]:
        """Parameters and state after four steps: one is clipped and lacks a gradient, one is skipped.

        Steps may be ``compiled`` as far as Dynamo does, so that code is made of the step's own operations. All parameters
        have ``whole`` groups of elements, or some do not.

        Parameters are in two groups. One has rows of whole groups of elements, one ends inside of such a group and of 16
        bytes, one is at an address that is no multiple of 16, and a small one has full state. A gradient is at such an
        address too, once.
        """
        params = {name: nn.Parameter(values) for name, values in _tensors(self.dtype, 0, device, whole).items()}
        first, *others = params.items()
        groups = [{"params": [first]}, {"params": others, "lr": 0.03, "weight_decay": 0.3}]
        optimizer = self.optimizer(groups, lr=0.1, lowering=lowering, **self.options)
        run = torch.compile(optimizer.step, backend="eager", fullgraph=True) if compiled else optimizer.step
        for step in range(4):
            for i, (name, grad) in enumerate(_tensors(self.dtype, 1 + step, device, whole).items()):
                grad = _clipped(grad) if step == 1 else grad
                params[name].grad = None if (step, i) == (1, 1) else _shifted(grad) if (step, i) == (3, 0) else grad
            optimizer.max_grad_norm = 0.7 if step == 1 else None
            rows = params["rows"].grad
            optimizer.skip_nonfinite = step == 2
            if step == 2 or (self.hard and step == 0):
                rows.view(-1)[:300:100] = rows.new_tensor([INFINITE, -INFINITE, NOT_A_NUMBER])
            run()
        if compiled:
            assert co.compile_report(optimizer).compiled_step == "its own operations"
        assert optimizer.skipped_steps.item() == 1
        found = {f"{name} param": param.detach() for name, param in params.items()}
        return found | {f"{n} {entry}": v for n, param in params.items() for entry, v in optimizer.state[param].items()}


def _tensors(dtype: torch.dtype, seed: int, device: str, whole: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {**_SHAPES, "ragged": (1088,), "unaligned": (1088,)} if whole else _SHAPES
    made = {name: torch.randn(*shape, generator=generator, device="cpu").to(device, dtype) for name, shape in shapes.items()}
    return made | {"unaligned": _shifted(made["unaligned"])}


_SHAPES = {"rows": (18, 64), "ragged": (1063,), "unaligned": (1040,), "small": (256,)}


def _clipped(grad: Tensor) -> Tensor:
    """A gradient like ``grad`` whose norm no rounding changes: 1024 numbers are 1 or -1, the others 0."""
    count = min(1024, grad.numel())
    return torch.cat([grad.flatten()[:count].sign(), grad.new_zeros(grad.numel() - count)]).view_as(grad)


def _shifted(tensor: Tensor) -> Tensor:
    """The same at an address that is no multiple of 16."""
    memory = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return memory.copy_(tensor)


_ADAMW = {"weight_decay": 0.2}
CASES = {
    f"AdamW {mode} {state}": Case(co.AdamW, {**_ADAMW, "weights": mode, "state_dtype": state})
    for mode in MODES
    for state in (None, "int8")
    if mode or state
}
_SMALLEST = {"weights": "split8", "state_dtype": "int8"}
CASES |= {
    "AdamW amsgrad": Case(co.AdamW, {**_ADAMW, **_SMALLEST, "amsgrad": True, "maximize": True}),
    "AdamW cautious": Case(co.AdamW, {**_ADAMW, **_SMALLEST, "cautious": True}),
    "AdamW decays some": Case(
        co.AdamW, {**_ADAMW, **_SMALLEST, "cautious_weight_decay": True, "corrected_weight_decay": True, "max_lr": 0.2}
    ),
    "AdamW float16 split8": Case(co.AdamW, {**_ADAMW, **_SMALLEST}, torch.float16),
    "AdamW float16 split16": Case(co.AdamW, {**_ADAMW, "weights": "split16"}, torch.float16),
    "AdamW float16 stochastic": Case(co.AdamW, {**_ADAMW, "weights": "stochastic", "rounding_seed": 7}, torch.float16),
    "AdamW float32": Case(co.AdamW, {**_ADAMW, "state_dtype": "int8"}, torch.float32),
    "AdamW hard": Case(co.AdamW, {**_ADAMW, **_SMALLEST}, hard=True),
    "AdamW mixed": Case(co.AdamW, {"weights": "kahan", "state_dtype": {"exp_avg": torch.float32, "exp_avg_sq": "int8"}}),
    "Lion": Case(co.Lion, {**_SMALLEST}),
    "SGD": Case(co.SGD, {**_SMALLEST, "momentum": 0.9, "decouple_wd": True}),
    "SGD hard": Case(co.SGD, {"weights": "kahan"}, hard=True),
    "StableAdamW": Case(co.StableAdamW, {**_SMALLEST}),
}
