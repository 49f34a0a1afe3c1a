"""Test cases made from the registry: every optimizer, every hyperparameter far from its default."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from reference import naive, naive_module
from reference.cautious import cautious
from reference.decay import decoupled

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule.fields import Hyper

LOWERINGS = ["multi_tensor", "inductor", "eager"]

LARGE = (150, 130)
"""The shape that is larger than a chunk of the C++ kernels."""


COMBINED = [co.MuonAdamW]
"""Optimizers with rules of others."""


def registry() -> list[type[CompiledOptimizer]]:
    """Every optimizer the package exports with a rule of its own, or without one."""
    exported = (getattr(co, name) for name in co.__all__ if name not in co._LAZY)
    classes = [c for c in exported if isinstance(c, type) and issubclass(c, CompiledOptimizer)]
    return [c for c in classes if c not in (CompiledOptimizer, *COMBINED)]


def ruled(gradients: str | None = None) -> list[type[CompiledOptimizer]]:
    """Every optimizer that is an elementwise rule, from ``gradients`` of that kind."""
    rules = [c for c in registry() if hasattr(c, "_rule") and c._granularity == "element"]
    return [c for c in rules if gradients in (None, c._gradients)]


def stacked() -> list[type[CompiledOptimizer]]:
    """Every optimizer that is a rule on whole tensors."""
    return [c for c in registry() if hasattr(c, "_rule") and c._granularity != "element"]


@dataclass(frozen=True)
class Case:
    """One configuration of one optimizer."""

    optimizer: type[CompiledOptimizer]
    arguments: tuple[tuple[str, Any], ...]

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.arguments)

    @property
    def reference(self) -> Callable[..., torch.optim.Optimizer]:
        """torch.optim's optimizer of the same name, or the naive one that stands for it; cautious or decoupled as it is."""
        plain = naive(self.optimizer) if self.arguments in _BEYOND_TORCH else reference_of(self.optimizer)
        return self.changed(plain)

    @property
    def naive(self) -> Callable[..., torch.optim.Optimizer]:
        """The naive optimizer, whether torch.optim has one or not; cautious or decoupled as :attr:`reference`."""
        return self.changed(naive(self.optimizer))

    def changed(self, plain: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        """What makes optimizers as ``plain`` does, cautious or decoupled as the configuration is."""
        if "max_lr" in self.kwargs:
            return decoupled(plain, self.optimizer.__name__)
        return cautious(plain) if self.kwargs.get("cautious") and not _keeps(self.optimizer) else plain

    @property
    def takes_complex(self) -> bool:
        """Rows are real: an optimizer of sparse gradients refuses complex parameters."""
        return self.optimizer._gradients == "dense"

    def parameters(self, dtype: torch.dtype, large: tuple[int, int] = LARGE) -> list[torch.nn.Parameter]:
        """Parameters that can have the gradients which the optimizer takes."""
        made = parameters(dtype, large=large)
        return [p for p in made if self.optimizer._gradients == "dense" or (p.dim() and p.is_contiguous())]

    def give_gradients(
        self, params: list[torch.nn.Parameter], twins: list[torch.nn.Parameter], seed: int, absent: int = 0
    ) -> None:
        """As :func:`give_gradients`, dense or sparse as the optimizer takes them."""
        give_gradients(params, twins, seed, absent)
        if self.optimizer._gradients == "sparse":
            for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
                if param.grad is not None:
                    param.grad = sparse_rows(param.grad, seed + i)
                    twin.grad = param.grad.to(twin.dtype, copy=True)

    def __str__(self) -> str:
        return "-".join([self.optimizer.__name__, *(f"{k}={v}" for k, v in self.arguments)])


_ADAM = {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4}
_RMSPROP = {"lr": 0.07, "alpha": 0.7, "eps": 0.03, "weight_decay": 0.4}
_ASGD = {"lr": 0.07, "lambd": 0.3, "alpha": 0.4, "t0": 2.5, "weight_decay": 0.4}

# Values far from the defaults: with the defaults, a formula that misplaces eps or a decay passes unnoticed.
_FAR: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [
        {},
        {"lr": 0.3, "rho": 0.6, "eps": 0.03, "weight_decay": 0.4},
        {"lr": 0.3, "rho": 0.95, "eps": 0.03, "weight_decay": 0.9, "maximize": True},
        {"lr": 0.3, "rho": 0.0, "eps": 0.3},
    ],
    "Adagrad": [
        {},
        {"lr": 0.07, "lr_decay": 0.5, "weight_decay": 0.4, "eps": 0.03},
        {"lr": 0.07, "lr_decay": 0.5, "weight_decay": 0.4, "initial_accumulator_value": 0.3, "eps": 0.1},
        {"lr": 0.07, "initial_accumulator_value": 2.0, "eps": 0.03, "maximize": True},
    ],
    "Adam": [
        {},
        _ADAM,
        {**_ADAM, "amsgrad": True},
        {**_ADAM, "betas": (0.0, 0.5), "decoupled_weight_decay": True, "maximize": True},
        {**_ADAM, "betas": (0.6, 0.0), "decoupled_weight_decay": True, "amsgrad": True},
    ],
    "Adamax": [
        {},
        _ADAM,
        {**_ADAM, "betas": (0.0, 0.5), "maximize": True},
        {**_ADAM, "betas": (0.6, 0.0), "eps": 0.3},
    ],
    "ASGD": [
        {},
        _ASGD,
        {**_ASGD, "t0": -2.0, "maximize": True},
        {**_ASGD, "lambd": 0.0, "alpha": 1.3, "t0": 100.0},
    ],
    "NAdam": [
        {},
        {**_ADAM, "momentum_decay": 0.5},
        {**_ADAM, "momentum_decay": 0.0, "decoupled_weight_decay": True, "maximize": True},
        {**_ADAM, "betas": (0.0, 0.5), "momentum_decay": 3.0},
    ],
    "RAdam": [
        {},
        {**_ADAM, "betas": (0.6, 0.95)},
        {**_ADAM, "decoupled_weight_decay": True, "maximize": True},
        {"lr": 0.07},  # rectified from the sixth step on
        {**_ADAM, "betas": (0.0, 0.6)},  # never rectified: the longest average has length 4
    ],
    "RMSprop": [
        {},
        _RMSPROP,
        {**_RMSPROP, "centered": True},
        {**_RMSPROP, "momentum": 0.8, "maximize": True},
        {**_RMSPROP, "centered": True, "momentum": 0.8},
    ],
    "Rprop": [
        {},
        {"lr": 0.3, "etas": (0.3, 1.7), "step_sizes": (0.1, 0.6)},
        {"lr": 0.3, "etas": (0.9, 1.1), "step_sizes": (0.5, 2.0), "maximize": True},
    ],
    "SparseAdam": [
        {},
        {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03},
        {"lr": 0.07, "betas": (0.0, 0.5), "eps": 0.3, "maximize": True},
        # Not 0: torch's exp_avg_sq += 1 * (grad**2 - exp_avg_sq) cancels where a gradient becomes small.
        {"lr": 0.3, "betas": (0.6, 0.1), "eps": 0.1},
    ],
    "AdamW": [
        {},
        {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4},
        {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4, "amsgrad": True},
        {"lr": 0.07, "betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 0.0, "maximize": True},
        {"lr": 0.07, "betas": (0.6, 0.0), "eps": 0.1},
    ],
    "SGD": [
        {},
        {"lr": 0.07, "weight_decay": 0.4},
        {"lr": 0.07, "momentum": 0.8},
        {"lr": 0.07, "momentum": 0.8, "dampening": 0.6, "weight_decay": 0.4},
        {"lr": 0.07, "momentum": 0.8, "weight_decay": 0.4, "nesterov": True},
        {"lr": 0.07, "momentum": 0.8, "dampening": -0.3, "weight_decay": 0.4, "maximize": True},
    ],
}


def reference_of(optimizer: type[CompiledOptimizer]) -> Callable[..., torch.optim.Optimizer]:
    """What makes torch.optim's optimizer of the same name; of a rule that torch.optim lacks, the naive one."""
    theirs: type[torch.optim.Optimizer] | None = getattr(torch.optim, optimizer.__name__, None)
    return theirs or naive(optimizer)


def _keeps(optimizer: type[CompiledOptimizer]) -> bool:
    """Whether the reference itself can be cautious."""
    return not hasattr(torch.optim, optimizer.__name__) and hasattr(naive_module(optimizer), "KEEPS")


def required(optimizer: type[CompiledOptimizer]) -> dict[str, float]:
    """Values for the arguments that have no default."""
    return {f.name: 1e-3 for f in optimizer._declaration.hypers if f.default is inspect.Parameter.empty}


def configurations(optimizer: type[CompiledOptimizer]) -> list[Case]:
    """All configurations of a rule: from here, or from the module of its reference.

    The second one is there three times more where the rule can have it so: cautiously, with decay apart from all else, and
    with decay of some elements by the square of the rate.
    """
    known = {**_FAR, **_STACKED}
    far = known.get(optimizer.__name__) or naive_module(optimizer).FAR
    if "cautious" in optimizer._all_fields:
        far = [*far, {**far[1], "cautious": True}]
    if "decouple_lr" in optimizer._all_fields:
        choices = {name: True for name in ("decouple_wd", "decouple_lr") if name in optimizer._all_fields}
        choices |= {"decouple_wd": False} if optimizer.__name__ == "Ranger" else {}
        chosen = ["decouple_wd", "corrected_weight_decay"]
        if optimizer._granularity != "matrix":  # whose products in bfloat16 leave the signs of small elements open
            chosen.append("cautious_weight_decay")
        some = {name: True for name in chosen if name in optimizer._all_fields}
        far = [*far, *({**far[1], **apart, "max_lr": 0.2} for apart in (choices, some))]
    return [Case(optimizer, tuple(kwargs.items())) for kwargs in far]


def cases(gradients: str | None = None) -> list[Case]:
    """All configurations of all elementwise rules, or of those that take ``gradients``."""
    return [case for c in ruled(gradients) for case in configurations(c)]


def shifted(optimizer: CompiledOptimizer, hyper: Hyper, share: float) -> tuple[float, ...]:
    """The values that a hyperparameter had at first, each moved within its range by that share."""
    default = optimizer.defaults.get(hyper.name)
    values = default if hyper.is_tuple else (default,)
    given = tuple(0.5 if v is None or v != v else v for v in values)
    return tuple(v / (1 - share) if hyper.ge == 1 else v * (1 - share) for v in given)


_MUON_BEYOND_TORCH: list[dict[str, Any]] = [
    {"lr": 0.07, "momentum": 0.6, "ns_coefficients": "polar_express", "ns_steps": 6, "adjust_lr_fn": "unit_rms_norm"},
    {"lr": 0.3, "ns_coefficients": ((3.0, -4.0, 1.8), (2.5, -2.2, 0.8), (2.0, -1.5, 0.5)), "adjust_lr_fn": "spectral"},
]
_BEYOND_TORCH = [tuple(kwargs.items()) for kwargs in _MUON_BEYOND_TORCH]
"""What an optimizer that torch.optim has can do besides, with the naive one as its reference."""

_STACKED: dict[str, list[dict[str, Any]]] = {
    "Adafactor": [
        {},
        {"lr": 0.3, "beta2_decay": -0.5, "eps": (0.02, 0.3), "d": 1.2, "weight_decay": 0.4},
        {"lr": 2.0, "beta2_decay": -0.1, "eps": (None, 0.01), "d": 3.0, "maximize": True},
        {"lr": 0.07, "beta2_decay": 0.0, "eps": (0.9, 0.0), "weight_decay": 2.0},
    ],
    "Muon": [
        {},
        {"lr": 0.07, "weight_decay": 0.9, "momentum": 0.5, "nesterov": False},
        {"lr": 0.3, "momentum": 0.7, "ns_coefficients": (3.0, -4.0, 1.8), "eps": 0.5, "ns_steps": 3},
        {"lr": 0.02, "momentum": 0.0, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.02, "adjust_lr_fn": "original", "ns_steps": 1, "weight_decay": 0.0},
        *_MUON_BEYOND_TORCH,
    ],
}


def stacked_cases() -> list[Case]:
    """All configurations of all rules on whole tensors."""
    return [case for c in stacked() for case in configurations(c)]


@contextlib.contextmanager
def wide_scalars() -> Iterator[None]:
    """Let torch.optim make its own scalars in float64; it makes them in the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SHAPES = [(3, 5), (7,), (), (0, 3), (1,), LARGE, (4, 3, 2, 2)]


def parameters(dtype: torch.dtype, seed: int = 0, large: tuple[int, int] = LARGE) -> list[torch.nn.Parameter]:
    """Parameters of many shapes: 0-dim, empty, small, ``large``, and one in channels-last order."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [large if shape == LARGE else shape for shape in SHAPES]
    tensors = [torch.randn(shape, dtype=dtype, generator=generator, device="cpu") for shape in shapes]
    tensors[-1] = tensors[-1].contiguous(memory_format=torch.channels_last)
    return [torch.nn.Parameter(t) for t in tensors]


def high_precision(dtype: torch.dtype) -> torch.dtype:
    """The 64-bit dtype in which a reference for ``dtype`` runs."""
    return torch.complex128 if dtype.is_complex else torch.float64


def copies(params: list[torch.nn.Parameter], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """The same values in another dtype."""
    return [torch.nn.Parameter(p.detach().to(dtype, copy=True)) for p in params]


def give_gradients(params: list[torch.nn.Parameter], twins: list[torch.nn.Parameter], seed: int, absent: int = 0) -> None:
    """The same new random gradients for both lists; every ``absent``-th tensor gets none, another one each time."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
        grad = torch.randn(param.shape, dtype=param.dtype, generator=generator, device="cpu")
        if absent and (i + seed) % absent == 0:
            param.grad = twin.grad = None
        else:
            param.grad, twin.grad = grad, grad.to(twin.dtype, copy=True)


def sparse_rows(grad: torch.Tensor, seed: int) -> torch.Tensor:
    """A sparse gradient of half the rows of ``grad``: each twice, once, or in a coalesced tensor, by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(grad), generator=generator, device="cpu")[: (len(grad) + 1) // 2]
    index = torch.cat([rows, rows.flip(0)]) if seed % 3 == 0 else rows
    made = torch.sparse_coo_tensor(index[None], grad[index], grad.shape, check_invariants=True)
    return made.coalesce() if seed % 3 == 1 else made


def relative_error(params: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """The largest norm of a tensor's difference over the norm of its reference.

    Values are of order one; a tensor that came near 0 is measured against 0.1 per element.
    """
    norm = torch.linalg.vector_norm
    errors = [
        (norm(p.detach().to(r.dtype) - r.detach()) / norm(r.detach()).clamp(min=0.1 * r.numel() ** 0.5)).item()
        for p, r in zip(params, reference, strict=True)
        if p.numel()
    ]
    return max(errors)
