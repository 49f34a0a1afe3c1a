"""What the optimizer asks of the lowering of one plan, whatever runs its steps.

A step is :meth:`~Lowering.compile`, :meth:`~Lowering.prepare`, :meth:`~Lowering.measure` where the norm of all gradients is
needed, :meth:`~Lowering.launch`, and :meth:`~Lowering.finish`. Only what ``measure`` and ``launch`` do is the device's work,
which a CUDA graph can repeat.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from torch import Tensor

from compiled_optim.lowering.address_rows import HyperRow
from compiled_optim.plan import Plan


class Lowering(Protocol):
    """Runs the step of one plan."""

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

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``; the sum of ``whole`` is the sum over all gradients."""

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Take ``grads``, one entry for each of the plan's parameters, or the parameters' own; follow what was assigned."""

    def measure(self) -> None:
        """Write the partial sums of the squares of the prepared gradients."""

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""

    def finish(self) -> None:
        """Let go of the gradients."""


class Capturable:
    """A lowering whose launch a CUDA graph can hold: its kernels read tables that are refreshed outside of the graph."""

    _hypers: HyperRow

    def launch_key(self) -> tuple[object, ...]:
        """What a graph that holds a launch depends on besides the memory of the tables; it stands for this object."""
        return (self,)

    def uploading_later(self, steps: int) -> contextlib.AbstractContextManager[None]:
        """Let a capture inside a ``with`` block, of up to ``steps`` steps, leave what it uploads to the end of the block.

        By default it uploads nothing.
        """
        return contextlib.nullcontext()

    def refresh(self) -> None:
        """Hand hyperparameters that were assigned over to kernels that run without being prepared."""
        self._hypers.follow()

    def copied(self) -> list[int]:
        """The addresses of the hyperparameters and controls that preparing copies, since kernels cannot read them."""
        return self._hypers.copied()

    def hold(self) -> None:
        """Bring the prepared gradients to where a launch, if it is captured now or was before, reads them.

        By default nothing: a table says where they are.
        """
