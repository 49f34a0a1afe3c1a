"""Tensors that are out of the ordinary, as cases for the multi-tensor kernels: dtypes, addresses, memory orders, sizes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from catalog import relative_error

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

STEPS = 3


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed), device="cpu")


def _off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element behind the beginning of an allocation, so that no address is a multiple of 16."""
    return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in every third element of an allocation."""
    spread = tensor.new_zeros((*tensor.shape, 3))
    spread[..., 1] = tensor
    return spread[..., 1]


ARRANGEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unaligned": _off_by_one,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": _strided,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
}
SHAPES = [(5, 3), (0, 4), (1030,), (2, 3, 5, 4), (), (2048,)]
_HALF, _SINGLE, _DOUBLE = torch.float16, torch.float32, torch.float64
DTYPES = {
    f"{param}-{grad}-{state}".replace("torch.", ""): (param, grad, state)
    for param, grad, state in [
        (_HALF, _SINGLE, _SINGLE),
        (_SINGLE, _HALF, _SINGLE),
        (_SINGLE, _SINGLE, _HALF),
        (_HALF, _HALF, _SINGLE),
        (_DOUBLE, _SINGLE, _HALF),
        (_HALF, _DOUBLE, _DOUBLE),
    ]
}


def errors(lowering: str) -> dict[str, float]:
    """By case: the largest relative difference of ``lowering`` from the eager one after a few steps."""
    found = {}
    for name, arrange in ARRANGEMENTS.items():
        for dtype in (torch.float32, torch.complex64):
            found[f"{name} {dtype}"] = _difference(lowering, (dtype,) * 3, arrange)
    for name, dtypes in DTYPES.items():
        found[name] = _difference(lowering, dtypes, lambda t: t)
    return found


def _difference(lowering: str, dtypes: tuple[torch.dtype, ...], arrange: Callable[[torch.Tensor], torch.Tensor]) -> float:
    results = []
    for kind in (lowering, "eager"):
        params = [torch.nn.Parameter(arrange(_values(s, dtypes[0], i))) for i, s in enumerate(SHAPES)]
        optimizer = co.AdamW(params, lr=0.07, betas=(0.6, 0.8), eps=0.03, weight_decay=0.4, lowering=kind)
        for param in params:
            _set_state(optimizer, param, dtypes[2])
        for step in range(STEPS):
            for i, param in enumerate(params):
                param.grad_dtype = dtypes[1]
                param.grad = arrange(_values(SHAPES[i], dtypes[1], 100 * step + i))
            optimizer.step()
        state = [v for s in optimizer.state.values() for v in s.values()]
        assert all(s["exp_avg"].dtype == dtypes[2] for s in optimizer.state.values())
        results.append([*params, *state])
    ours, expected = results
    return relative_error(ours, expected)


def _set_state(optimizer: CompiledOptimizer, param: Any, dtype: torch.dtype) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[param][name] = optimizer.state[param][name].to(dtype)


def results(lowering: str, dtype: torch.dtype, unaligned: Callable[[int, int], bool]) -> list[torch.Tensor]:
    """Parameters and state after clipped steps, where the tensors for which ``unaligned`` (step, index) says so are.

    Step -1 stands for the parameters and their state.
    """

    def arranged(step: int, i: int) -> torch.Tensor:
        values = _values(SHAPES[i], dtype, 100 * step + i)
        return _off_by_one(values) if unaligned(step, i) else values

    params = [torch.nn.Parameter(arranged(-1, i)) for i in range(len(SHAPES))]
    optimizer = co.AdamW(params, lr=0.07, betas=(0.6, 0.8), weight_decay=0.4, max_grad_norm=0.7, lowering=lowering)
    for step in range(STEPS):
        for i, param in enumerate(params):
            param.grad = arranged(step, i)
        optimizer.step()
    return [*params, *(v for s in optimizer.state.values() for v in s.values())]


def _huge(elements: int) -> torch.Tensor:
    """Zeros in a file that has no blocks where nothing is written: the system need not have memory for all of them."""
    with tempfile.NamedTemporaryFile() as file:
        return torch.from_file(file.name, shared=True, size=elements, dtype=torch.float16)


def end_of_huge(blocks: int) -> tuple[list[float], list[float]]:
    """Step only the last blocks of a tensor of more than 2**31 elements; its last values, and the expected ones.

    The blocks must reach back to element 2**31 or a little less; 100 values before it are 1 and have gradient 0.
    """
    from compiled_optim.lowering.kernels.table import KernelTensors

    beyond, before = 1500, 100
    param = torch.nn.Parameter(_huge(2**31 + beyond))
    param.grad = _huge(2**31 + beyond)
    optimizer = co.SGD([param], lr=0.5)
    values, slopes = torch.arange(beyond) % 7, torch.arange(beyond) % 5
    with torch.no_grad():
        param[-beyond:], param.grad[-beyond:] = values, slopes
        param[-beyond - before : -beyond], param.grad[-beyond - before : -beyond] = 1, 0
    make = KernelTensors.__init__

    def shortened(table: KernelTensors, *args: Any, **kwargs: Any) -> None:
        make(table, *args, **kwargs)
        table.blocks = table.blocks[-blocks:].clone()
        table.elements = beyond

    KernelTensors.__init__ = shortened
    try:
        optimizer.step()
    finally:
        KernelTensors.__init__ = make
    expected = torch.cat([torch.ones(before), values - 0.5 * slopes])
    return param.detach()[-beyond - before :].tolist(), expected.tolist()
