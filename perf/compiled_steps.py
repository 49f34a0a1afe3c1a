"""Steps in functions that the user compiles, beside torch.optim's."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import compiled_optim as co
from perf.competitors import OURS
from perf.measure import in_turn, make_gradients, make_params
from perf.results import Row, percentiles
from perf.workloads import shapes
from tools.demo.digits import CLASSES, VisionTransformer, parameter_groups

BATCH = 64
INLINED = f"{OURS}[inductor]"
STOCK = "torch foreach"
NAMES = (OURS, INLINED, STOCK)
"""The step as one operator, as operations of the compiled function, and torch.optim's."""

_LR = 1e-4


def measure_training_step(device: torch.device, *, rounds: int, warmup: int = 10) -> list[Row]:
    """A whole training step of the demo's model, compiled as one graph: forward, backward, step and ``zero_grad``.

    On a GPU also with ``mode="reduce-overhead"``, the compiler's own CUDA graphs. On a CPU times are those of processors.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(BATCH, 1, 8, 8, generator=generator).to(device)
    digits = torch.randint(CLASSES, (BATCH,), generator=generator).to(device)
    rows = []
    for mode in _modes(device):
        calls = {}
        for name in NAMES:
            torch.manual_seed(0)
            model = VisionTransformer().to(device)
            optimizer = _make(name, parameter_groups(model), device)
            train = _compiled(_training_step(model, optimizer), mode, name)
            calls[name] = functools.partial(train, pixels, digits)
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            samples = in_turn(calls, device, rounds=rounds, warmup=warmup)
        rows += list(_rows("training_step", "demo", f"training step, {mode}", samples))
    return rows


def measure_compiled_step(workload: str, device: torch.device, *, rounds: int, warmup: int = 5) -> list[Row]:
    """The step alone, compiled, with gradients that stay where they are."""
    sizes = shapes(workload)
    grads = make_gradients(sizes, device, seed=1)
    rows = []
    for mode in _modes(device):
        calls = {}
        for name in NAMES:
            params = make_params(sizes, device)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer = _make(name, params, device)
            calls[name] = _compiled(lambda stepped=optimizer: stepped.step(), mode, name)
        samples = in_turn(calls, device, rounds=rounds, warmup=warmup)
        rows += list(_rows("compiled_step", workload, f"step, {mode}", samples))
    return rows


def _modes(device: torch.device) -> Sequence[str]:
    return ("default", "reduce-overhead") if device.type == "cuda" else ("default",)


def _make(name: str, params: Sequence[Any], device: torch.device) -> Optimizer:
    if name == STOCK:
        lr = torch.tensor(_LR, device=device)  # as a number it would be compiled into the step
        return torch.optim.AdamW(params, lr=lr, foreach=True, capturable=True)
    return co.AdamW(params, lr=_LR, lowering="inductor" if name == INLINED else "multi_tensor")


def _training_step(model: nn.Module, optimizer: Optimizer) -> Callable[..., Tensor]:
    def step(pixels: Tensor, digits: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(pixels), digits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _compiled(function: Callable[..., Any], mode: str, name: str) -> Callable[..., Any]:
    """``function`` compiled; whole, except around torch.optim's step, which breaks a graph.

    Its code is its own, or each call would check the guards of all others that have that code.
    """
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(own, fullgraph=name != STOCK, mode=mode)


def _rows(benchmark: str, workload: str, metric: str, samples: dict[str, list[float]]) -> Iterator[Row]:
    own = samples[OURS]
    for name, seconds in samples.items():
        p20, p50, p80 = percentiles([1e3 * s for s in seconds])
        ratio = 1e3 * percentiles(own)[1] / p50
        yield Row(benchmark, workload, "adamw", name, metric, "ms", p20, p50, p80, ratio, len(seconds))
    for name, seconds in samples.items():
        if name != OURS:
            ratios = percentiles([ours / theirs for ours, theirs in zip(own, seconds, strict=True)])
            yield Row(benchmark, workload, "adamw", name, f"paired ratio, {metric}", "ratio", *ratios, None, len(seconds))
