"""Whether a runner's graph and those of others leave each other's workspaces of cuBLAS alone: ``python -m perf checks``.

A graph holds the addresses of the workspaces that its products had in the capture. Whoever frees them afterwards lets a
replay write into memory of somebody else, or where there is none, which ends the process: each mode needs its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.capture import graph
from perf.competitors import CAPTURED
from perf.results import Row
from perf.turns import kept

MODES = ("fixed", "unfixed", "others")
"""Workspaces are freed while a runner's graph is in use: as it is, and without what protects it, which must go wrong or
the first proves nothing; and a graph that somebody else captured by hand before the runner captured its own."""

_STEPS = 8
_FREED = 5
"""The step before which memory is freed, and filled by somebody else: by then the runner replays."""

_FILLED = (1, 2, 8, 16, 32, 33, 64)
"""Sizes in MiB of what fills the freed memory; a workspace has one of them, or is next to it."""


def measure(mode: str, device: torch.device) -> Iterator[list[Row]]:
    """How many steps differed from those of a twin without a graph, and how many bytes of others were written."""
    found: dict[tuple[str, str], list[float]] = {}
    unprotected = mock.patch.object(graph, "own_workspaces", contextlib.nullcontext)
    with unprotected if mode == "unfixed" else contextlib.nullcontext():
        yield from kept(functools.partial(_run, mode, device, found), lambda: _rows(mode, found))
    print(f"{mode}: {', '.join(f'{sum(values):g} {metric}' for (metric, _), values in found.items())}")


def _rows(mode: str, found: dict[tuple[str, str], list[float]]) -> list[Row]:
    return [
        Row("workspaces", mode, "adamw", CAPTURED, metric, unit, *(sum(values),) * 3, None, len(values))
        for (metric, unit), values in found.items()
    ]


def failed(row: Row) -> bool:
    """Whether something went wrong that should not."""
    return row.benchmark == "workspaces" and row.workload == "fixed" and row.p50 > 0


def _run(mode: str, device: torch.device, found: dict[tuple[str, str], list[float]]) -> None:
    rows = 16384 if device.type == "cuda" else 64  # so long that cuBLAS sums up in several parts, for which it needs memory
    (model, optimizer), (twin, twins) = _make(device), _make(device)
    inputs = torch.randn(_STEPS, rows, 256, device=device, dtype=torch.bfloat16)

    def product() -> Tensor:
        return inputs[0].t() @ inputs[1]

    replay, made, wanted = _captured_by_hand(product, device) if mode == "others" else (product, None, None)
    runner = co.CUDAGraphRunner(lambda x: _step(model, optimizer, x), optimizers=optimizer, modules=model)
    differ = found.setdefault(("steps that differ", "steps"), [])
    junk: list[Tensor] = []
    for index, x in enumerate(inputs):
        if index == _FREED:
            if mode != "others":
                getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # as graphs of torch.compile do
            junk = _fill(device)
        same = torch.equal(runner(x), _step(twin, twins, x))
        differ.append(float(not (same and all(map(torch.equal, model.parameters(), twin.parameters())))))
    if made is not None:
        replay()
        found["graphs by hand that differ", "graphs"] = [float(not torch.equal(made, wanted))]
    found["bytes of others that were written", "bytes"] = [float(sum(int((x != 0xFF).sum()) for x in junk))]


def _make(device: torch.device) -> tuple[nn.Module, co.AdamW]:
    torch.manual_seed(1)
    layers = [nn.Linear(256, 256, bias=False, device=device, dtype=torch.bfloat16) for _ in range(4)]
    return nn.Sequential(*layers), co.AdamW([layer.weight for layer in layers], lr=1e-3)


def _step(model: nn.Module, optimizer: co.AdamW, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _captured_by_hand(work: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], object], Tensor, Tensor]:
    """A replay of ``work`` captured on the stream on which it ran before, what it writes, and what that should be."""
    if device.type != "cuda":
        return work, work(), work()
    stream, captured = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    with torch.cuda.graph(captured, stream=stream):
        made = work()
    return captured.replay, made, work()


def _fill(device: torch.device) -> list[Tensor]:
    """Tensors full of 0xFF in the memory that was free."""
    sizes, unit = _FILLED * 4, 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        unit = 2**20
    return [torch.full((size * unit,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
