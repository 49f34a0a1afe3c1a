"""Timings inside one process: steps of several optimizers side by side, and the host's share of a step."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from unittest import mock

import torch
from torch import Tensor

from compiled_optim import CompiledOptimizer, CUDAGraphRunner
from compiled_optim.capture.graph import GRAPHS
from compiled_optim.lowering.kernels.table import CoefficientTable, KernelTensors, TensorTable
from compiled_optim.lowering.multi_tensor import MultiTensorLowering
from compiled_optim.optimizer import engine_of
from perf import turns
from perf.budget import Deadline
from perf.competitors import OURS, Competitor, competitor
from perf.results import Row, left_out, percentiles
from perf.turns import Call, Samples, Table, kept, measured
from perf.workloads import Shapes, shapes

Gradients: TypeAlias = Literal["fresh", "same"]

FIRST_STEPS = 3
"""Steps of each competitor alone, since some compile in more than one, or need the device to itself."""


@dataclass(frozen=True)
class Entrant:
    """A competitor with its own parameters."""

    competitor: Competitor
    params: list[Tensor]
    optimizer: Any
    same: dict[int, Tensor] = field(default_factory=dict)  # gradients that stay, wrapped, by id

    def take(self, grads: Sequence[Tensor], gradients: Gradients) -> None:
        """Set its parameters' gradients. Some optimizers drop them in a step, some write to them."""
        for param, grad in zip(self.params, grads, strict=True):
            spoiled, wrap = self.competitor.spoils_gradients, self.competitor.wrap
            if spoiled or gradients == "fresh":
                param.grad = wrap(grad.clone() if spoiled else grad.view_as(grad))
            else:
                if id(grad) not in self.same:
                    self.same[id(grad)] = wrap(grad)
                param.grad = self.same[id(grad)]


def make_params(sizes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return parameters of these shapes, with the same values in each call."""
    return [p.requires_grad_() for p in _normal(sizes, device, dtype, 0.02, seed=0)]


def make_gradients(sizes: Shapes, device: torch.device, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return gradients of these shapes."""
    return _normal(sizes, device, dtype, 0.01, seed)


def enter(competitor: Competitor, params: list[Tensor], grads: Sequence[Tensor]) -> Entrant:
    """Let a competitor take its first steps.

    Raises:
        RuntimeError: they changed nothing, or the parameters are not finite.
    """
    wrapped = [competitor.wrap(param) for param in params]
    entrant = Entrant(competitor, wrapped, competitor.make(wrapped))
    before = params[0].detach().clone()
    for _ in range(FIRST_STEPS):
        entrant.take(grads, "fresh")
        entrant.optimizer.step()
    if before.equal(params[0]):
        raise RuntimeError("its steps changed nothing")
    if not all(bool(param.isfinite().all()) for param in params):
        raise RuntimeError("its steps made parameters that are not finite")
    return entrant


def measure_step(
    workload: str,
    optimizer: str,
    competitors: Sequence[Competitor],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 5,
    gradients: Sequence[Gradients] = ("fresh", "same"),
    reasons: Mapping[str, str] = types.MappingProxyType({}),
    deadline: Deadline | None = None,
) -> Iterator[list[Row]]:
    """Measure step times, and ratios of this package's default to each competitor: see :func:`perf.turns.measured`.

    With ``"fresh"`` gradients every step gets new tensor objects at other addresses than the step before, as after
    ``zero_grad()``. A competitor that does not run has a row with the reason, and so have those of ``reasons``.
    """
    absent: dict[str, str] = {}
    yield left_out("step", workload, optimizer, reasons)
    for kind in gradients:
        ways = step_ways(shapes(workload), competitors, device, kind)
        options: dict[str, Any] = {"rounds": rounds, "warmup": warmup, "deadline": deadline, "reasons": absent}
        yield from measured(step_table(workload, optimizer, kind), ways, device, **options)


def step_table(workload: str, optimizer: str, gradients: Gradients) -> Table:
    """Return a table of rows ``step, <gradients> gradients``, and ``paired ratio, ...`` of ratios within each round."""
    metric = f"step, {gradients} gradients"
    return Table("step", workload, metric, optimizer, paired=f"paired ratio, {gradients} gradients")


def step_ways(
    sizes: Shapes, competitors: Sequence[Competitor], device: torch.device, gradients: Gradients
) -> dict[str, Callable[[], Call]]:
    """Return the steps of competitors, for :func:`perf.turns.measured`.

    All optimizers of parameters of one dtype share the gradients' memory. Setting gradients is not timed.
    """
    from torch._inductor import config

    config.compile_threads = 1  # workers would import torch beside the first seconds of the benchmark
    seeds = (1, 2) if gradients == "fresh" else (1,)
    pools = {d: [make_gradients(sizes, device, seed, d) for seed in seeds] for d in {c.dtype for c in competitors}}

    def make(made: Competitor) -> Call:
        pool = pools[made.dtype]
        entrant = enter(made, make_params(sizes, device, made.dtype), pool[0])
        return Call(entrant.optimizer.step, lambda index: entrant.take(pool[index % len(seeds)], gradients))

    return {c.name: functools.partial(make, c) for c in competitors}


def measure_overhead(workload: str, optimizer: str, *, rounds: int) -> Iterator[list[Row]]:
    """Measure the Python part of a step of the default CPU lowering, in us per parameter, with fresh gradients.

    ``step without kernel`` is a whole step in which the kernel's call does nothing; ``steady-state check`` is the part of it
    that looks for changes and new addresses and updates the tables, all that comes before a captured step's replay.
    ``runner without replay`` is a runner's whole step with a graph whose replay does nothing.
    """
    device = torch.device("cpu")
    sizes = shapes(workload)
    params = make_params(sizes, device)
    pools = [make_gradients(sizes, device, seed) for seed in (1, 2)]
    instance = competitor(optimizer, OURS).make(params)
    assert isinstance(instance, CompiledOptimizer)
    for param, grad in zip(params, pools[0], strict=True):
        param.grad = grad
    instance.step()
    _remove_kernels(instance)
    with mock.patch.dict(GRAPHS, {"cpu": _NoGraph}):
        runner = CUDAGraphRunner(instance, warmup=1)
    for _ in range(3):
        runner.step()
    assert engine_of(instance).log.replays == 2

    def check() -> None:
        engine_of(instance).prepare().finish()

    calls = {"steady-state check": check, "step without kernel": instance.step, "runner without replay": runner.step}
    samples: Samples = {metric: [] for metric in calls}

    @turns.no_garbage_collection()
    def take() -> None:
        for index in range(rounds):
            for metric, call in calls.items():
                for param, grad in zip(params, pools[index % 2], strict=True):
                    param.grad = grad.view_as(grad)
                samples[metric].append(1e6 * turns.timed(call, device) / len(params))

    def rows() -> list[Row]:
        return [
            Row("overhead", workload, optimizer, OURS, metric, "us/parameter", *percentiles(values), None, len(values))
            for metric, values in samples.items()
            if values
        ]

    yield from kept(take, rows)


def measure_bandwidth(
    workload: str,
    optimizer: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    rounds: int,
    warmup: int = 3,
) -> Iterator[list[Row]]:
    """Measure GB/s of a step, without clipping and with it, and of a plain copy beside it.

    Each number is counted as read and written once; a step that clips reads the gradients twice. ``clipping`` is the
    difference between the two steps in milliseconds. Parameters, gradients and state are of ``dtype``.
    """
    params = make_params(shapes(workload), device, dtype)
    for param, grad in zip(params, make_gradients(shapes(workload), device, 1, dtype), strict=True):
        param.grad = grad
    instance = competitor(optimizer, OURS).make(params)
    assert isinstance(instance, CompiledOptimizer)
    buffers = [v for s in instance.state.values() for v in s.values() if v.dim()]
    gradients = sum(_bytes(p) for p in params)
    moved = {"step": 3 * gradients + sum(2 * _bytes(b) for b in buffers)}
    moved["clipped step"] = moved["step"] + gradients
    source = torch.ones(min(2**28, moved["step"] // 8), device=device)
    target = torch.empty_like(source)
    moved["copy"] = 2 * _bytes(source)
    seconds: Samples = {metric: [] for metric in moved}

    def take() -> None:
        for step, bound in (("step", None), ("clipped step", 1.0)):
            instance.max_grad_norm = bound
            for index in range(-warmup, rounds):
                for metric, call in ((step, instance.step), ("copy", lambda: target.copy_(source))):
                    elapsed = turns.timed(call, device)
                    if index >= 0:
                        seconds[metric].append(elapsed)

    def rows() -> list[Row]:
        metrics = [(metric, "GB/s", [moved[metric] / s / 1e9 for s in seconds[metric]]) for metric in moved]
        both = zip(seconds["step"], seconds["clipped step"], strict=False)  # an interrupt may leave fewer clipped ones
        metrics.append(("clipping", "ms", [1e3 * (clipped - plain) for plain, clipped in both]))
        return [
            Row(
                "bandwidth",
                workload,
                optimizer,
                "copy" if metric == "copy" else OURS,
                f"{metric}, {dtype_name(dtype)}",
                unit,
                *percentiles(values),
                None,
                len(values),
            )
            for metric, unit, values in metrics
            if values
        ]

    yield from kept(take, rows)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name, as in ``torch.<name>``."""
    return str(dtype).removeprefix("torch.")


def _normal(sizes: Shapes, device: torch.device, dtype: torch.dtype, deviation: float, seed: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.empty(s, device=device, dtype=dtype).normal_(0, deviation, generator=generator) for s in sizes]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _NoKernel:
    """Stands for a kernel whose run takes no time."""

    block = reduce_block = 1
    most_sums = 0

    def measure(self, table: KernelTensors) -> None:
        """Do nothing."""

    def evaluate(self, coefficients: CoefficientTable) -> None:
        """Do nothing."""

    def update(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        """Do nothing."""

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        """Do nothing."""


class _NoGraph:
    """Stands for a graph whose replay takes no time."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        pass

    def warm_up(self, work: Callable[[], Any]) -> Any:
        """Do ``work``."""
        return work()

    def capture(self, work: Callable[[], Any]) -> Any:
        """Do ``work``."""
        return work()

    def replay(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def _remove_kernels(optimizer: CompiledOptimizer) -> None:
    for lowering in engine_of(optimizer).step.lowerings:
        if not isinstance(lowering, MultiTensorLowering):
            raise RuntimeError("the overhead benchmark needs the C++ lowering; no compiler was found")
        for table in lowering.tables:
            table.kernel = _NoKernel()
