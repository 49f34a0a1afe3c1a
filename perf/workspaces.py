"""A check that graphs of runners and others do not write to each other's cuBLAS workspaces: ``python -m perf checks``.

A graph holds the addresses of the workspaces of its products. If they are freed afterwards, a replay writes into memory of
other tensors, or to an invalid address, which ends the process: each mode needs its own.
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
"""Workspaces are freed while a runner's graph is in use: with its protection, and without it, which must fail or the first
proves nothing. Or another graph is captured by hand before the runner's."""

_STEPS = 8
_FREED = 5
"""The step before which memory is freed, and filled by other tensors. By then the runner replays."""

_FILLED = (1, 2, 8, 16, 32, 33, 64)
"""Sizes in MiB of the tensors that fill the freed memory. A workspace has one of them, or is next to it."""


def measure(mode: str, device: torch.device) -> Iterator[list[Row]]:
    """Count steps that differ from those of a twin without a graph, and bytes of other tensors that were written."""
    counts: dict[tuple[str, str], list[float]] = {}
    unprotected = mock.patch.object(graph, "own_workspaces", contextlib.nullcontext)
    with unprotected if mode == "unfixed" else contextlib.nullcontext():
        yield from kept(functools.partial(_run, mode, device, counts), lambda: _rows(mode, counts))
    print(f"{mode}: {', '.join(f'{sum(values):g} {metric}' for (metric, _), values in counts.items())}")


def _rows(mode: str, counts: dict[tuple[str, str], list[float]]) -> list[Row]:
    return [
        Row("workspaces", mode, "adamw", CAPTURED, metric, unit, *(sum(values),) * 3, None, len(values))
        for (metric, unit), values in counts.items()
    ]


def failed(row: Row) -> bool:
    """Return whether steps or bytes differ despite the protection."""
    return row.benchmark == "workspaces" and row.workload == "fixed" and row.p50 > 0


def _run(mode: str, device: torch.device, counts: dict[tuple[str, str], list[float]]) -> None:
    rows = 16384 if device.type == "cuda" else 64  # so many that cuBLAS sums in several parts, which needs memory
    (model, optimizer), (twin, twins) = _make(device), _make(device)
    inputs = torch.randn(_STEPS, rows, 256, device=device, dtype=torch.bfloat16)

    def product() -> Tensor:
        return inputs[0].t() @ inputs[1]

    replay, output, expected = _captured_by_hand(product, device) if mode == "others" else (product, None, None)
    runner = co.CUDAGraphRunner(lambda x: _step(model, optimizer, x), optimizers=optimizer, modules=model)
    differ = counts.setdefault(("steps that differ", "steps"), [])
    junk: list[Tensor] = []
    for index, x in enumerate(inputs):
        if index == _FREED:
            if mode != "others":
                getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # as graphs of torch.compile do
            junk = _fill(device)
        same = torch.equal(runner(x), _step(twin, twins, x))
        differ.append(float(not (same and all(map(torch.equal, model.parameters(), twin.parameters())))))
    if output is not None:
        replay()
        counts["graphs by hand that differ", "graphs"] = [float(not torch.equal(output, expected))]
    counts["bytes of others that were written", "bytes"] = [float(sum(int((x != 0xFF).sum()) for x in junk))]


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
    """Capture ``work`` on a stream after running it there. Return the replay, its output, and the expected output."""
    if device.type != "cuda":
        return work, work(), work()
    stream, captured = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    with torch.cuda.graph(captured, stream=stream):
        output = work()
    return captured.replay, output, work()


def _fill(device: torch.device) -> list[Tensor]:
    """Fill the free memory with tensors of 0xFF, and return them."""
    sizes, unit = _FILLED * 4, 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        unit = 2**20
    return [torch.full((size * unit,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
