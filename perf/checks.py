"""Checks that need a GPU: huge tensors, long captured runs, faults of memory; the host's time, and kernels."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import compiled_optim as co
from perf.budget import INTERRUPTED
from perf.competitors import CAPTURED, FUSED, OURS, SHARDED, Competitor, competitor, reason
from perf.interrupts import let_in
from perf.measure import Entrant, dtype_name, enter, make_gradients, make_params
from perf.results import Row, left_out, percentiles
from perf.turns import kept, synchronize
from perf.workloads import elements, shapes

ODD = "odd shapes"
HUGE = 2**31 + 5000
WINDOW = 4096
CODES = 2**-6
"""The largest difference of a weight after two steps with codes: groups begin at other elements, thresholds differ."""


def _row(
    benchmark: str, workload: str, name: str, metric: str, unit: str, values: list[float], optimizer: str = "adamw"
) -> Row:
    return Row(benchmark, workload, optimizer, name, metric, unit, *percentiles(values), None, len(values))


def failed(row: Row) -> bool:
    """Return whether a check failed: a bit differs, or with int8 more than codes may differ."""
    return row.benchmark == "checks" and row.n > 0 and row.p50 > (CODES if "int8" in row.workload else 0)


def huge(device: torch.device, count: int) -> Iterator[list[Row]]:
    """Measure how a step of ``count`` elements differs from small ones, at both ends and in the middle, by precision."""
    windows = [slice(0, WINDOW), slice(count // 2, count // 2 + WINDOW), slice(count - WINDOW, count)]
    windows += [slice(2**31 - WINDOW // 2, 2**31 + WINDOW // 2)] if count > 2**31 else []
    forms = {"float32": {}, "bfloat16": {}, "split8, int8": {"weights": "split8", "state_dtype": "int8"}}
    for form, options in forms.items():
        with let_in():
            far = _difference(device, count, windows, torch.float32 if form == "float32" else torch.bfloat16, options)
        yield [_row("checks", f"{count} elements, {form}", OURS, "largest difference to small tensors", "abs", [far])]


def _difference(
    device: torch.device, count: int, windows: Sequence[slice], dtype: torch.dtype, options: Mapping[str, Any]
) -> float:
    whole = torch.empty(count, device=device, dtype=dtype).normal_().requires_grad_()
    grads = torch.empty(count, device=device, dtype=dtype).normal_()
    few = [whole.detach()[w].clone().requires_grad_() for w in windows]
    big, small = (co.AdamW(params, lr=1e-3, **options) for params in ([whole], few))
    for _ in range(2):
        whole.grad = grads
        for param, window in zip(few, windows, strict=True):
            param.grad = grads[window].clone()
        big.step()
        small.step()
    return max(float((whole.detach()[w] - p.detach()).abs().max()) for w, p in zip(windows, few, strict=True))


def long_run(device: torch.device, steps: int) -> Iterator[list[Row]]:
    """Measure how training with a captured step differs from uncaptured, with schedule, clipping and infinite batches."""
    with let_in():
        ends = [_weights_after(device, steps, captured) for captured in (False, True)]
    far = float((ends[0] - ends[1]).abs().max())
    yield [_row("checks", f"{steps} steps", CAPTURED, "largest difference to uncaptured", "abs", [far])]


def _weights_after(device: torch.device, steps: int, captured: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(device)
    optimizer = co.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, skip_nonfinite=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1)

    def step(x: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), x[:, :8].argmax(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Callable[[Tensor], Tensor] = co.CUDAGraphRunner(step, optimizers=optimizer) if captured else step
    generator = torch.Generator(device).manual_seed(1)
    for index in range(steps):
        x = torch.empty(32, 64, device=device).normal_(generator=generator)
        run(x * math.inf if index % 1000 == 999 else x)
        schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sanitized(device: torch.device, tool: str = "compute-sanitizer") -> Iterator[list[Row]]:
    """Run :mod:`perf.odd_steps` under compute-sanitizer, or without it if it is not installed."""
    command = [sys.executable, "-m", "perf.odd_steps", str(device)]
    if shutil.which(tool) is None:
        yield left_out("checks", ODD, "adamw", {tool: f"{tool} is not installed"})
        tool = "no tool"
    else:
        command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *command]
    try:
        with let_in(), subprocess.Popen(command, cwd=Path(__file__).parents[1]) as process:  # it prints directly
            try:
                status = process.wait()
            finally:
                process.kill()
    except KeyboardInterrupt:
        yield left_out("checks", ODD, "adamw", {tool: INTERRUPTED})
        raise
    yield [_row("checks", ODD, tool, "exit status", "", [status])]


HOST = (OURS, CAPTURED, FUSED, SHARDED, f"{FUSED}[DTensor]")


def measure_host(workload: str, device: torch.device, *, rounds: int) -> Iterator[list[Row]]:
    """Measure microseconds until the call of a step returns, on an idle device, for :data:`HOST`."""
    grads = make_gradients(shapes(workload), device, 1)
    for name in HOST:
        samples: list[float] = []
        try:
            with let_in():
                entrant = enter(competitor("adamw", name), make_params(shapes(workload), device), grads)
        except Exception as error:  # torch raises, too, if it cannot start a process group
            traceback.print_exc()
            yield left_out("host", workload, "adamw", {name: reason(error)})
            continue
        take = functools.partial(_time_calls, entrant, grads, device, rounds, samples)
        rows = functools.partial(_row, "host", workload, name, "host time of a step", "us", samples)
        yield from kept(take, lambda rows=rows, samples=samples: [rows()] if samples else [])


def _time_calls(entrant: Entrant, grads: Sequence[Tensor], device: torch.device, rounds: int, samples: list[float]) -> None:
    for index in range(-6, rounds):
        entrant.take(grads, "fresh")
        synchronize(device)
        started = time.perf_counter()
        entrant.optimizer.step()
        if index >= 0:
            samples.append(1e6 * (time.perf_counter() - started))


def measure_kernels(
    workload: str, optimizer: str, competitors: Sequence[str], device: torch.device, *, rounds: int
) -> Iterator[list[Row]]:
    """Measure microseconds of the kernels of a step by torch.profiler; of AdamW also GB/s of the bytes that it must move."""
    grads = make_gradients(shapes(workload), device, 1)
    for name in (OURS, *competitors):
        try:
            with let_in():
                events = _profiled(competitor(optimizer, name), workload, device, grads, rounds)
        except Exception as error:  # packages may raise any error
            traceback.print_exc()
            yield left_out("kernels", workload, optimizer, {name: reason(error)})
            continue
        most = sorted((e for e in events if e[1] > 0), key=lambda e: -e[1])[:8]
        rows = [_row("kernels", workload, name, f"{key[:60]}, {n:g} launches", "us", [t], optimizer) for key, t, n in most]
        if most and optimizer == "adamw":
            bandwidth = 28 * elements(workload) / sum(t for _, t, _ in events) / 1e3
            rows.append(_row("kernels", workload, name, f"all kernels, {dtype_name(torch.float32)}", "GB/s", [bandwidth]))
        yield rows


def _profiled(
    entered: Competitor, workload: str, device: torch.device, grads: Sequence[Tensor], rounds: int
) -> list[tuple[str, float, float]]:
    """Return the name of each kernel of a step, its microseconds, and its number of launches."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    entrant = enter(entered, make_params(shapes(workload), device), grads)
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(rounds):
            entrant.take(grads, "same")
            entrant.optimizer.step()
        synchronize(device)
    return [(e.key, _self_time(e, device) / rounds, e.count / rounds) for e in profile.key_averages()]


def _self_time(event: object, device: torch.device) -> float:
    kind = "device" if device.type == "cuda" else "cpu"
    return float(getattr(event, f"self_{kind}_time_total"))
