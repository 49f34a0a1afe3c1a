"""Guards against recompilation, and the report of what was compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compiled_optim.memory.cache import cache_directory
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.plan.compilations import Compilation, RecompileError, forbidding_recompilation


@contextlib.contextmanager
def no_recompiles(budget: int = 0) -> Iterator[None]:
    """Forbid recompilation and re-capture inside a ``with`` block.

    It covers optimizer steps, the graphs of ``co.CUDAGraphRunner`` and, without a budget, every other function under
    ``torch.compile``. What is compiled or captured for the first time is allowed.

    Args:
        budget: how many recompilations and re-captures are allowed all the same, those of all optimizers together.

    Raises:
        RecompileError: naming what changed, with old and new value. The optimizer has not taken the step.
        ValueError: ``budget`` is negative.
    """
    if budget < 0:
        raise ValueError(f"budget must be >= 0, got {budget}")
    stance = "fail_on_recompile" if budget == 0 else "default"
    with forbidding_recompilation(budget), torch.compiler.set_stance(stance):
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RecompileError) or "Detected recompile" not in str(error):
                raise
            raise RecompileError(str(error)) from error


@dataclass(frozen=True)
class CompileReport:
    """What was compiled for an optimizer.

    Attributes:
        optimizer: the class name.
        lowering: how its steps run: ``multi_tensor``, ``inductor``, ``stacked``, ``eager``, or several of them.
        steps: how many steps it has taken.
        kernels: the keys of the kernels its step calls.
        compilations: the kernels that were compiled for it, in order; those found already compiled are not among them.
        fallbacks: why anything runs uncompiled.
        captures: why each graph of a ``co.CUDAGraphRunner`` was captured; empty for a first one.
        replays: how often such graphs were replayed.
        table_refreshes: how often addresses in a kernel's table were written, which compiles nothing.
        cache: the directory that keeps compiled C++ for other processes, or for this one where no other can be trusted.
    """

    optimizer: str
    lowering: str
    steps: int
    kernels: tuple[str, ...]
    compilations: tuple[Compilation, ...]
    fallbacks: tuple[str, ...]
    captures: tuple[str, ...]
    replays: int
    table_refreshes: int
    cache: str

    @property
    def recaptures(self) -> int:
        """How many graphs were captured in place of one that was stale."""
        return sum(map(bool, self.captures))

    @property
    def compiles(self) -> int:
        """How many kernels were compiled for the optimizer, at any time."""
        return len(self.compilations)

    @property
    def recompiles(self) -> int:
        """How many of them were compiled after the first step."""
        return sum(bool(c.cause) for c in self.compilations)

    @property
    def seconds(self) -> float:
        """The time spent compiling."""
        return sum(c.seconds for c in self.compilations)

    def __str__(self) -> str:
        lines = [
            f"{self.optimizer}: {self.lowering} lowering, {self.steps} steps, {self.compiles} compiles "
            f"({self.seconds:.1f} s), {self.recompiles} recompiles, {self.table_refreshes} table refreshes"
        ]
        if self.captures:
            lines.append(f"  {len(self.captures)} captures, {self.recaptures} re-captures, {self.replays} replays")
        lines += [f"  kernel {kernel}" for kernel in self.kernels]
        lines += [f"  recompiled: {c.cause}" for c in self.compilations if c.cause]
        lines += [f"  captured again: {cause}" for cause in self.captures if cause]
        lines += [f"  fallback: {reason}" for reason in self.fallbacks]
        if self.kernels:
            lines.append(f"  compiled C++ is kept in {self.cache}")
        return "\n".join(lines)


def compile_report(optimizer: CompiledOptimizer) -> CompileReport:
    """The report for ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
    """
    if not isinstance(optimizer, CompiledOptimizer):
        raise TypeError(f"compile_report takes an optimizer of compiled_optim, got {type(optimizer).__name__}")
    engine = engine_of(optimizer)
    log = engine.holdings.log
    return CompileReport(
        type(optimizer).__name__,
        "eager" if engine.step is None else engine.step.name,
        engine.steps,
        tuple(dict.fromkeys(str(s) for s in log.keys.values())),
        tuple(log.compilations),
        tuple(log.fallbacks),
        tuple(log.captures),
        log.replays,
        log.table_refreshes,
        str(cache_directory()),
    )
