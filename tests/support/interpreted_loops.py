"""Triton's loops over stacks, beside the eager lowering.

How far parameters and state are from those of eager steps, relative to what the steps change, and how often our kernel of
symmetric products runs. The second step is clipped, the third one skipped, and ours is under autocast in the last
one. Symmetric products are ours from 20 rows on, where rows and columns are multiples of 8.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from matrix_averages import MatrixAverages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import compiled_optim as co
from compiled_optim.lowering.kernels import symmetric, triton_stacks
from compiled_optim.lowering.stacks import LoopStack
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import storage

TILING = symmetric.Tiling(rows=20, block=16, depth=16, stages=1, warps=4)
SHAPES = {
    "Muon": [(24, 40), (24, 40), (40, 32), (40, 33), (7, 300), (130, 5), (3, 24, 32)],
    "NorMuon": [(24, 32), (24, 32), (33, 20), (3, 300), (2, 24, 9)],
    "Adafactor": [(33, 300), (33, 300), (5000,), (3, 70, 9), (1, 9), (9, 1), (4, 1, 3)],
    "MatrixAverages": [(24, 64), (24, 64), (33, 320), (2, 2112), (3, 5, 128)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Muon": {"lr": 0.03, "weight_decay": 0.3, "momentum": 0.7, "ns_coefficients": (3.0, -4.0, 1.8)},
    "Muon polar_express": {"lr": 0.1, "ns_coefficients": "polar_express", "nesterov": False},
    "Muon matched": {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "maximize": True},
    "Muon in parts": {"lr": 0.1, "momentum": 0.7, "split": {"w[01]": (8, 8, 4, 4), "w6": 3, "w3": (20, 10, 10)}},
    "NorMuon": {"lr": 0.1, "weight_decay": 0.3},
    "NorMuon in parts": {"lr": 0.1, "weight_decay": 0.3, "split": {"w[01]": (4, 10, 10), "w2": (22, 11), "w4": 3}},
    "Adafactor": {"lr": 0.3, "beta2_decay": -0.5, "eps": (1e-3, 0.1), "d": 1.5, "weight_decay": 0.2},
    "Adafactor defaults": {},
    "Adafactor transposed": {"lr": 0.3, "d": 1.5, "weight_decay": 0.2},
    "Muon transposed": {"lr": 0.03, "weight_decay": 0.3, "momentum": 0.7},
    "Muon transposed in parts": {"lr": 0.1, "momentum": 0.7, "split": {"w[01]": (8, 8, 4, 4), "w6": 3, "w3": (20, 10, 10)}},
    "Muon sharded": {"lr": 0.03, "weight_decay": 0.3, "momentum": 0.7},
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
CASES = {
    f"{name} {dtype}": (name, DTYPES[dtype]) for name in OPTIONS for dtype in DTYPES if dtype == "float32" or name in SHAPES
}
STORED = {
    "MatrixAverages split8 int8": (torch.bfloat16, {"weights": "split8", "state_dtype": "int8"}),
    "MatrixAverages split16 int8": (torch.bfloat16, {"weights": "split16", "state_dtype": "int8"}),
    "MatrixAverages stochastic bfloat16": (torch.bfloat16, {"weights": "stochastic", "state_dtype": torch.bfloat16}),
    "MatrixAverages kahan int8": (torch.float16, {"weights": "kahan", "state_dtype": "int8"}),
    "MatrixAverages int8": (torch.float32, {"state_dtype": "int8"}),
    "MatrixAverages int8 in parts": (torch.bfloat16, {"state_dtype": "int8", "split": {"w[01]": (8, 16)}}),
}
OPTIONS |= {name: {"lr": 0.01, "beta": 0.7, **options} for name, (_, options) in STORED.items()}
CASES |= {name: (name, dtype) for name, (dtype, _) in STORED.items()}


def parameters(name: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """Random ones, of which the second does not begin at a multiple of 16 bytes, or in memory that loops read in copies."""
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES[name.split()[0]]]
    moved = torch.empty(1 + params[1].numel(), dtype=dtype)[1:].view_as(params[1]).copy_(params[1].detach())
    params[1] = nn.Parameter(moved)
    assert params[1].data_ptr() % 16
    if "transposed" in name:
        return [nn.Parameter(p.detach().mT.contiguous().mT if p.dim() > 1 else p.detach()) for p in params]
    if "sharded" in name:
        mesh = init_device_mesh("cpu", (1,))
        return [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in params]
    return params


def number(tensor: Tensor) -> Tensor:
    """All of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def snapshot(optimizer: co.CompiledOptimizer, params: list[nn.Parameter]) -> list[list[Tensor]]:
    """Copies of each parameter and its state."""
    return [[number(t.detach()).clone() for t in (p, *optimizer.state[p].values())] for p in params]


def stepped(name: str, dtype: torch.dtype, lowering: str) -> dict[str, Tensor]:
    """What four steps add to parameters, and state, in float64."""
    torch.manual_seed(0)
    kind = name.split()[0]
    params = parameters(name, dtype)
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    scales = {name: 1 / (i + 0.5) for i, (name, _) in enumerate(named)}
    stacks = {} if kind == "Adafactor" else {"stacks": ["*"]}
    made = MatrixAverages if kind == "MatrixAverages" else getattr(co, kind)
    optimizer = made(named, lowering=lowering, lr_scale=scales, **stacks, **OPTIONS[name])
    start = [number(p.detach()).double().clone() for p in params]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(dtype)
            grad = distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad
            param.grad = None if (i, step) == (1, 1) else grad
        optimizer.max_grad_norm = 0.7 if step == 1 else None
        optimizer.found_inf = torch.tensor(float(step == 2))
        before = snapshot(optimizer, params)
        with torch.autocast("cpu", torch.float16, enabled=step == 3 and lowering == "auto"):
            optimizer.step()
        for i, (old, new) in enumerate(zip(before, snapshot(optimizer, params), strict=True)):
            stays = step == 2 or (i, step) == (1, 1)
            assert all(map(torch.equal, old, new)) == stays, (name, dtype, lowering, i, step)
    if lowering == "auto":
        stacks = [stack for lowering in engine_of(optimizer).step.lowerings for stack in lowering.stacks]
        kinds = {type(stack) for stack in stacks}
        assert kinds == {LoopStack}, (name, dtype, kinds)
        assert any(stack.copies is not None for stack in stacks) == ("transposed" in name or "sharded" in name)
    state = {f"{i} {n}": number(v).double() for i, p in enumerate(params) for n, v in optimizer.state[p].items()}
    return state | {f"{i}": number(p.detach()).double() - s for i, (p, s) in enumerate(zip(params, start, strict=True))}


def interpreted(*cases: str) -> dict[str, Any]:
    """Return errors and the number of symmetric products, by case."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = {}
    multiplications: list[Any] = []

    def multiplier(*args: Any, **kwargs: Any) -> Any:
        multiply = symmetric.multiplier(*args, **kwargs)
        return lambda *given: (multiplications.append(given), multiply(*given))

    patched = mock.patch.multiple(triton_stacks, tiling_of=lambda device: TILING, multiplier=multiplier)
    with patched, mock.patch.object(storage, "MINIMUM", 64):
        for case in cases:
            multiplications.clear()
            ours, expected = (stepped(*CASES[case], lowering) for lowering in ("auto", "eager"))
            errors = {n: ((ours[n] - e).norm() / e.norm().clamp(min=1e-30)).item() for n, e in expected.items()}
            found[case] = {"errors": errors, "symmetric products": len(multiplications)}
    torch.distributed.destroy_process_group()
    return found
