"""Steps in functions that the user compiles, beside torch.optim's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

import compiled_optim as co
from perf.budget import Deadline
from perf.competitors import OURS, PEERS, Competitor, entered, with_own_code
from perf.measure import FIRST_STEPS, make_gradients, make_params
from perf.results import Row, left_out
from perf.turns import Call, Table, clock_of_processors, measured
from perf.workloads import shapes
from tools.demo.digits import CLASSES, VisionTransformer, parameter_groups

BATCH = 64
INLINED = f"{OURS}[inductor]"
STOCK = "torch foreach"
NAMES = (OURS, STOCK, INLINED)
"""The step as one operator, torch.optim's, and the step as operations of the compiled function."""

_LR = 1e-4


def measure_training_step(
    device: torch.device, *, rounds: int, names: Sequence[str] = (), warmup: int = 10, deadline: Deadline | None = None
) -> Iterator[list[Row]]:
    """Measure a whole training step of the demo's model: forward, backward, step and ``zero_grad``.

    This package's steps and those of torch.optim that users compile are in the compiled function, this package's in one
    graph. Other optimizers step behind it, as their users call them. On a GPU also with ``mode="reduce-overhead"``, the
    compiler's own CUDA graphs. On a CPU times are those of processors.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(BATCH, 1, 8, 8, generator=generator).to(device)
    digits = torch.randint(CLASSES, (BATCH,), generator=generator).to(device)
    entrants, reasons = entered("adamw", names, traced=True)
    yield left_out("training_step", "demo", "adamw", reasons)

    def make(made: Competitor, mode: str) -> Call:
        train = functools.partial(_trainer(made, device, mode), pixels, digits)
        losses = [float(train()) for _ in range(FIRST_STEPS)]
        if not losses[-1] < losses[0]:
            raise RuntimeError(f"it does not train: losses {losses}")
        return Call(train)

    deadline = deadline or Deadline()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for mode in _modes(device):
            table = Table("training_step", "demo", f"whole training step, {mode}")
            ways = {made.name: functools.partial(make, made, mode) for made in entrants}
            yield from _measured(table, ways, device, rounds, warmup, deadline)


def _measured(
    table: Table, ways: Mapping[str, Callable[[], Call]], device: torch.device, rounds: int, warmup: int, deadline: Deadline
) -> Iterator[list[Row]]:
    options: dict[str, Any] = {"rounds": rounds, "warmup": warmup, "clock": clock_of_processors(device)}
    return measured(table, ways, device, deadline=deadline, **options)


def _trainer(made: Competitor, device: torch.device, mode: str) -> Callable[..., Tensor]:
    """Return a training step of a new model."""
    torch.manual_seed(0)
    model = VisionTransformer().to(device, made.dtype)
    optimizer = made.make(parameter_groups(model))
    is_ours, is_compiled = PEERS[made.name].module == OURS, PEERS[made.name].compiled

    def backward(pixels: Tensor, digits: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(pixels.to(made.dtype)), digits)
        loss.backward()
        return loss.detach()

    def step(pixels: Tensor, digits: Tensor) -> Tensor:
        loss = backward(pixels, digits)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if is_ours or is_compiled:
        return _compiled(step, mode, fullgraph=is_ours)
    backward = _compiled(backward, mode, fullgraph=True)
    return step


def measure_compiled_step(
    workload: str,
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 5,
    modes: Sequence[str] = (),
    deadline: Deadline | None = None,
) -> Iterator[list[Row]]:
    """Measure the step alone, compiled, with gradients whose addresses stay."""
    sizes = shapes(workload)
    grads = make_gradients(sizes, device, seed=1)

    def make(name: str, mode: str) -> Call:
        params = make_params(sizes, device)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer = _make(name, params, device)
        step = _compiled(lambda: optimizer.step(), mode, fullgraph=name != STOCK)
        for _ in range(FIRST_STEPS):
            step()
        return Call(step)

    deadline = deadline or Deadline()
    for mode in modes or _modes(device):
        ways = {name: functools.partial(make, name, mode) for name in NAMES}
        table = Table("compiled_step", workload, f"step, {mode}")
        yield from _measured(table, ways, device, rounds, warmup, deadline)


def _modes(device: torch.device) -> Sequence[str]:
    return ("default", "reduce-overhead") if device.type == "cuda" else ("default",)


def _make(name: str, params: Sequence[Any], device: torch.device) -> Optimizer:
    if name == STOCK:
        lr = torch.tensor(_LR, device=device)  # as a number it would be compiled into the step
        return torch.optim.AdamW(params, lr=lr, foreach=True, capturable=True)
    return co.AdamW(params, lr=_LR, lowering="inductor" if name == INLINED else "multi_tensor")


def _compiled(function: Callable[..., Any], mode: str, *, fullgraph: bool) -> Callable[..., Any]:
    return torch.compile(with_own_code(function), fullgraph=fullgraph, mode=mode)
