"""The base class of all lowerings: a launch in stages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.coefficients import TableCoefficients, TorchCoefficients
from compiled_optim.lowering.kernels.table import KernelTensors
from compiled_optim.memory.torch_internals import Captures
from compiled_optim.plan.clipping import square_sum
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.plan import Plan


class Lowering:
    """A plan made runnable: ``coefficients`` evaluates a few numbers per tensor, a subclass updates all elements by them.

    A step is :meth:`compile`, :meth:`prepare`, :meth:`measure` where the norm of all gradients is needed, :meth:`launch`,
    and :meth:`finish`. Only ``measure`` and ``launch`` use the device. A CUDA graph can repeat them if the coefficients are
    of a table. Compilations and fallbacks are written to ``log``.

    Attributes:
        name: the name in reports.
        square_sum_count: the number of partial sums that :meth:`measure` writes; known after :meth:`compile`.
        tables: the tensors whose gradients kernels measure; known after :meth:`compile`.
        reads_addresses: True if kernels read gradients only at the addresses in the coefficients' table.
    """

    name: str
    square_sum_count = 1
    tables: Sequence[KernelTensors] = ()
    reads_addresses = False

    def __init__(self, plan: Plan, coefficients: TorchCoefficients | TableCoefficients, log: CompilationLog) -> None:
        self.plan, self.coefficients, self._log = plan, coefficients, log
        self._stages = plan.rule.stages(plan.statics)
        self._grads: Sequence[Any] = ()  # None for absent ones

    def compile(self) -> None:
        """Create the kernels that do not exist yet, and the tables that they read.

        Raises:
            RecompileError: compilation is forbidden here. Nothing is changed then.
            CompilerError: a kernel does not compile on this machine. Another lowering has to run the plan.
        """

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        """Let :meth:`measure` write to ``square_sums``, a part of the ``all_square_sums`` of all gradients."""
        counts = [table.square_sum_count for table in self.tables]
        *of_tables, self._square_sum = torch.split(square_sums, [*counts, len(square_sums) - sum(counts)])
        for table, sums in zip(self.tables, of_tables, strict=True):
            table.connect(sums)
        self.coefficients.connect(all_square_sums)

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        """Take assigned hyperparameters, and ``grads``, with an entry per parameter; None for each parameter's ``grad``.

        ``captures`` are the devices on which a graph is being captured.
        """
        self._grads = self.plan.gradients(grads)
        self.coefficients.prepare(self.plan.device in captures)

    def measure(self) -> None:
        """Write the partial sums of the squares of the prepared gradients."""
        self._square_sum.fill_(square_sum(self._grads, self.plan.device))

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""
        for _ in self.launch_in_stages():
            raise AssertionError("totals are over all plans")

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        """Do :meth:`launch` of a rule that has totals.

        At each stage with totals, yield the sums over the plan, a tensor of shape (totals,). Receive the sums over all
        plans, devices and processes, followed by the results of the rule's ``adapt``.
        """
        self.coefficients.evaluate(self._grads)
        for stage, slices in self._stages.items():
            totals = self.coefficients.add_means(slices, self._reduce(stage))
            if totals is not None:
                self.coefficients.add_totals(slices, (yield totals))
        self._update()
        self.coefficients.finish()

    def _reduce(self, stage: int) -> Tensor | None:
        """Return a stage's sums over each prepared tensor, (expressions, tensors); None if kernels write their means."""
        raise NotImplementedError(f"the reductions of {self.plan.rule.name}")

    def _update(self) -> None:
        """Update every prepared tensor by its coefficients, which end with the results of reductions."""
        raise NotImplementedError(f"the update of {self.plan.rule.name}")

    def finish(self) -> None:
        """Release the gradients."""
        self.plan.finish()
        self._grads = ()

    def launch_key(self) -> dict[str, object]:
        """Return the facts, by name, besides its step on which a graph that holds a launch depends; see :meth:`Step.key`."""
        return {}

    def copy_gradients_for_graph(self) -> None:
        """Copy the prepared gradients to the memory that a captured launch reads, unless a table has their addresses."""
