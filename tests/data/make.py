"""How the checkpoints here were made, and how further ones are: ``python tests/data/make.py NAME``.

It writes ``NAME.pt.xz`` with the cases below that no such file has yet. A file stays as it is for ever: later versions load
what this one saved. ``format_version_1.pt`` has the cases of :data:`FIRST`, and was made before the others.
"""

from __future__ import annotations

import copy
import io
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compiled_optim as co
from compiled_optim.rule.storage import MODES

HERE = Path(__file__).parent
SHAPES = {"embed.weight": (5, 2), "fc.weight": (2, 3), "fc.bias": (3,), "scale": ()}
FIRST = {
    "AdamW": (co.AdamW, {"betas": (0.8, 0.95), "eps": 1e-3, "amsgrad": True}),
    "SGD": (co.SGD, {"momentum": 0.8, "dampening": 0.1}),
}

_ADAM = {"betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.25}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ADOPT": _ADAM,
    "ASGD": {"lambd": 0.3, "alpha": 0.4, "t0": 2.5, "weight_decay": 0.25},
    "AdEMAMix": {**_ADAM, "betas": (0.6, 0.8, 0.95), "t_alpha": 4, "t_beta3": 6},
    "Adadelta": {"rho": 0.6, "eps": 0.03, "weight_decay": 0.25},
    "Adafactor": {"beta2_decay": -0.5, "weight_decay": 0.25},
    "Adagrad": {"lr_decay": 0.5, "initial_accumulator_value": 0.25},
    "Adam": {**_ADAM, "amsgrad": True},
    "AdamW": {**_ADAM, "amsgrad": True},
    "AdamWScheduleFree": {**_ADAM, "warmup_steps": 2},
    "Adamax": _ADAM,
    "Adan": {"betas": (0.6, 0.7, 0.8), "eps": 0.03},
    "LAMB": _ADAM,
    "LBFGS": {"max_iter": 2, "history_size": 3},
    "Lion": {"betas": (0.6, 0.8), "weight_decay": 0.25},
    "MARS": {**_ADAM, "gamma": 0.5},
    "Muon": {"momentum": 0.7, "ns_steps": 3},
    "MuonAdamW": {"momentum": 0.7, "ns_steps": 3, "adamw": "embed.*"},
    "NAdam": {**_ADAM, "momentum_decay": 0.5},
    "NorMuon": {"betas": (0.7, 0.8), "ns_steps": 3},
    "Prodigy": {"lr": 1.0, "d0": 0.01, **_ADAM},
    "RAdam": {"betas": (0.6, 0.95)},
    "RMSprop": {"alpha": 0.7, "eps": 0.03, "centered": True, "momentum": 0.8},
    "Ranger": {"betas": (0.6, 0.8), "eps": 0.03, "k": 2},
    "Rprop": {"etas": (0.5, 1.5), "step_sizes": (0.01, 1.0)},
    "SGD": {"momentum": 0.8, "dampening": 0.1, "weight_decay": 0.25},
    "Signum": {"momentum": 0.7, "weight_decay": 0.25},
    "SparseAdam": {"betas": (0.6, 0.8), "eps": 0.03},
    "StableAdamW": {"betas": (0.6, 0.8), "eps": 0.03},
    "mup.Adam": {**_ADAM, "weight_decay": 1e-3, "allow_non_unit_scaling_params": True},
    "mup.AdamW": {**_ADAM, "weight_decay": 1e-3, "allow_non_unit_scaling_params": True},
    "mup.SGD": {"momentum": 0.8, "allow_non_unit_scaling_params": True},
}
"""What each optimizer is made with: all its state exists, and hyperparameters are far from the defaults."""

_LOW = {"embed.weight": (8, 8), "fc.weight": (64, 64), "fc.bias": (80,)}  # all but one are too small to be compressed
_STATES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": "int8"}
_STATES["two"] = {"exp_avg": torch.bfloat16, "exp_avg_sq": "int8"}


def cases() -> Iterator[tuple[str, str, torch.dtype, dict[str, Any]]]:
    """Each case: its name, the optimizer's, the parameters' dtype, and options."""
    for name, options in OPTIMIZERS.items():
        yield name, name, torch.float64, options
    for dtype in (torch.bfloat16, torch.float16):
        for weights in MODES:
            yield f"AdamW {dtype} {weights}", "AdamW", dtype, {**_ADAM, "weights": weights}
    for called, chosen in _STATES.items():
        yield f"AdamW state {called}", "AdamW", torch.float32, {**_ADAM, "state_dtype": chosen}
    fewest = {"weights": "split8", "state_dtype": "int8"}
    yield "AdamW in the fewest bytes", "AdamW", torch.bfloat16, {**_ADAM, **fewest}
    yield "Muon in the fewest bytes", "Muon", torch.bfloat16, {**OPTIMIZERS["Muon"], **fewest}


def parameters(case: str) -> dict[str, nn.Parameter]:
    """Parameters as they begin. A matrix is all that Muon and NorMuon take, and rows all that sparse gradients name."""
    _, name, dtype, _ = next(c for c in cases() if c[0] == case)
    shapes = SHAPES if dtype == torch.float64 else _LOW
    if name in ("Muon", "NorMuon", "SparseAdam"):
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    return {name: nn.Parameter(_numbers(shape, 1, 5).to(dtype)) for name, shape in shapes.items()}


def optimizer(case: str, params: dict[str, nn.Parameter]) -> co.CompiledOptimizer:
    """The optimizer of a case with two groups; LBFGS takes one."""
    _, name, _, options = next(c for c in cases() if c[0] == case)
    cls = getattr(co.mup, name[4:]) if name.startswith("mup.") else getattr(co, name)
    listed = [*params.items()]
    first = [pair for pair in listed if pair[0] == "embed.weight"]
    second = [pair for pair in listed if pair[0] != "embed.weight"]
    groups = listed if name == "LBFGS" else [{"params": first, "lr": 0.25}, {"params": second}]
    return cls(groups, **{"lr": 0.5, "lowering": "eager", **options})


def train(made: co.CompiledOptimizer, params: dict[str, nn.Parameter], first: int, last: int) -> None:
    """The steps from ``first`` to ``last``. Gradients need no random numbers, and no function that machines round."""
    for step in range(first, last):
        for name, param in params.items():
            grad = _numbers(param.shape, step, 7 + len(name), repeats=not isinstance(made, co.Muon)).to(param.dtype)
            param.grad = grad.to_sparse(1) if isinstance(made, co.SparseAdam) else grad
        made.step(_closure(params) if isinstance(made, co.LBFGS) else None)


def _numbers(shape: Any, step: int, factor: int, repeats: bool = True) -> torch.Tensor:
    """Numbers between -1 and 1 that 16 bits hold. They repeat, so that files are small, or make a matrix of full rank."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    count = count % 128 if repeats else count
    width = shape[-1] if shape else 1
    row, column = count.div(width, rounding_mode="floor"), count % width
    return (((row + 1) * (column + factor) * (step + 2) + 3 * row).remainder(61) / 32 - 0.9375).reshape(shape)


def _closure(params: dict[str, nn.Parameter]) -> Any:
    def loss() -> torch.Tensor:
        value = sum(((p - _numbers(p.shape, 0, 3)) ** 2).sum() * (i + 1) for i, p in enumerate(params.values()))
        for param, grad in zip(params.values(), torch.autograd.grad(value, list(params.values())), strict=True):
            param.grad = grad
        return value

    return loss


def kept() -> dict[str, dict[str, Any]]:
    """The cases of all files, by name: parameters, the state dict by name, and parameters two steps later."""
    files = sorted(HERE.glob("*.pt.xz"))
    return {case: entry for file in files for case, entry in _load(file).items()}


def _load(file: Path) -> dict[str, dict[str, Any]]:
    return torch.load(io.BytesIO(lzma.decompress(file.read_bytes())), weights_only=True)


def first_gradients(step: int) -> dict[str, torch.Tensor]:
    """Gradients of ``format_version_1.pt``; ``scale`` has none at step 1."""
    made = {
        name: torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).sin().add(step).reshape(shape)
        for name, shape in SHAPES.items()
    }
    return {name: grad for name, grad in made.items() if (name, step) != ("scale", 1)}


def first_optimizer(case: str, params: dict[str, nn.Parameter]) -> co.CompiledOptimizer:
    """The optimizer of a case of ``format_version_1.pt`` with two groups."""
    cls, options = FIRST[case]
    first, second = list(params.items())[:2], list(params.items())[2:]
    return cls([{"params": first, "lr": 0.05}, {"params": second, "weight_decay": 0.25}], lr=0.1, **options)


def first_train(made: co.CompiledOptimizer, params: dict[str, nn.Parameter], first: int, last: int) -> None:
    """The steps from ``first`` to ``last`` of ``format_version_1.pt``."""
    for step in range(first, last):
        given = first_gradients(step)
        for name, param in params.items():
            param.grad = given.get(name)
        made.step()


def write(name: str) -> None:
    """Train the cases that no file has, save them, and train on. ``FileExistsError`` if there is a file of this name."""
    content, there = {}, kept()
    for case in (name for name, *_ in cases() if name not in there):
        params = parameters(case)
        made = optimizer(case, params)
        train(made, params, 0, 3)
        before = {name: param.detach().clone() for name, param in params.items()}
        saved = copy.deepcopy(co.named_state_dict(made))
        train(made, params, 3, 5)
        content[case] = {"params": before, "state_dict": saved, "after": {n: p.detach() for n, p in params.items()}}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with (HERE / f"{name}.pt.xz").open("xb") as file:
        file.write(lzma.compress(buffer.getvalue(), preset=9))


if __name__ == "__main__":
    write(sys.argv[1])
