"""Guards against recompilation, and the report of what was compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compiled_optim.events import Compilation, RecompileError, forbidding_recompilation
from compiled_optim.optimizer import CompiledOptimizer


@contextlib.contextmanager
def no_recompiles() -> Iterator[None]:
    """Forbid recompilation, of optimizer steps and of every other function under ``torch.compile``, inside a ``with`` block.

    What is compiled for the first time is compiled.

    Raises:
        RecompileError: naming what changed, with old and new value. The optimizer has not taken the step.
    """
    with forbidding_recompilation(), torch.compiler.set_stance("fail_on_recompile"):
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
        lowering: how its steps run: ``inductor``, ``eager``, or both.
        steps: how many steps it has taken.
        kernels: the signatures of the kernels its step calls.
        compilations: the kernels that were compiled for it, in order; those found already compiled are not among them.
        fallbacks: why anything runs uncompiled.
    """

    optimizer: str
    lowering: str
    steps: int
    kernels: tuple[str, ...]
    compilations: tuple[Compilation, ...]
    fallbacks: tuple[str, ...]

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
            f"({self.seconds:.1f} s), {self.recompiles} recompiles"
        ]
        lines += [f"  kernel {kernel}" for kernel in self.kernels]
        lines += [f"  recompiled: {c.cause}" for c in self.compilations if c.cause]
        lines += [f"  fallback: {reason}" for reason in self.fallbacks]
        return "\n".join(lines)


def compile_report(optimizer: CompiledOptimizer) -> CompileReport:
    """The report for ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
    """
    if not isinstance(optimizer, CompiledOptimizer):
        raise TypeError(f"compile_report takes an optimizer of compiled_optim, got {type(optimizer).__name__}")
    events = optimizer.events
    return CompileReport(
        type(optimizer).__name__,
        " and ".join(sorted({unit.name for unit in optimizer.units})),
        events.steps,
        tuple(dict.fromkeys(str(s) for s in events.signatures.values())),
        tuple(events.compilations),
        tuple(events.fallbacks),
    )
