"""What the optimizer asks of the lowering of one plan, whatever runs its steps.

A step is :meth:`~Lowering.compile`, :meth:`~Lowering.prepare`, :meth:`~Lowering.measure` where the norm of all gradients is
needed, :meth:`~Lowering.launch`, and :meth:`~Lowering.finish`. The device's work is in ``measure`` and ``launch`` alone, and
a CUDA graph can repeat it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Protocol

from torch import Tensor

from compiled_optim.lowering.kernels.table import CoefficientTable, HyperPointers
from compiled_optim.plan.plan import Plan


class Lowering(Protocol):
    """Runs the step of one plan.

    It is made of the plan, of what holds for the whole step, and of where compilations and fallbacks are recorded.
    """

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def plan(self) -> Plan:
        """The tensors."""

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""

    def compile(self) -> None:
        """Make what does not exist yet: kernels, and the tables they read.

        Raises:
            RecompileError: that is forbidden here. Nothing is changed then.
            CompilerError: a kernel does not compile on this machine. Another lowering has to run the plan.
        """

    @property
    def square_sum_count(self) -> int:
        """How many partial sums :meth:`measure` writes."""

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        """Let :meth:`measure` write to ``square_sums``, a part of ``all_square_sums``: those of all gradients."""

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Note what was assigned and ``grads``, one entry for each of the plan's parameters; None for their own."""

    def measure(self) -> None:
        """Write the partial sums of the squares of the prepared gradients."""

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        """As :meth:`launch`, of a rule that has totals.

        At each stage that has some it yields their sums over the plan, (totals,), and is sent the sums over everything and
        what the rule's ``adapt`` makes of them.
        """

    def finish(self) -> None:
        """Let go of the gradients."""


class Capturable:
    """A lowering whose launch a CUDA graph can hold: its kernels read tables that are brought up to date outside of it."""

    _hypers: HyperPointers
    _table: CoefficientTable
    """From :meth:`~Lowering.compile` on."""

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        self._square_sum = square_sums
        self._table.all_square_sums = all_square_sums

    def launch_key(self) -> tuple[object, ...]:
        """What a graph that holds a launch depends on. This object stands for the memory of its tables."""
        return (self,)

    def uploading_later(self, steps: int) -> contextlib.AbstractContextManager[None]:
        """Let a capture inside a ``with`` block, of up to ``steps`` steps, leave what it uploads to the end of the block."""
        return self._table.gradients.uploading_later(steps)

    def upload_hyperparameters(self) -> None:
        """Make hyperparameters that were assigned known to kernels that run without being prepared."""
        self._hypers.refresh()

    @property
    def is_preallocated(self) -> bool:
        """Whether :meth:`preallocate` has nothing to do, as far as that can be seen without looking at hyperparameters."""
        return self._table.gradients.reserved > 0

    def preallocate(self) -> None:
        """Make what a launch, which may be captured, uses and what outlives it, after it was compiled."""
        self._hypers.refresh()
        self._table.gradients.reserve(1)

    def copied(self) -> list[int]:
        """The addresses of the hyperparameters and clipping that preparing copies, since kernels cannot read them."""
        return self._hypers.copied()

    def copy_gradients_for_graph(self) -> None:
        """Copy the prepared gradients to where a captured launch reads them, if no table says where they are."""
