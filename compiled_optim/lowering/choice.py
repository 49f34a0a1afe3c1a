"""The choice of the lowering that runs the step of a plan, and the interface of all lowerings.

A step is :meth:`~Lowering.compile`, :meth:`~Lowering.prepare`, :meth:`~Lowering.measure` where the norm of all gradients is
needed, :meth:`~Lowering.launch`, and :meth:`~Lowering.finish`. The device's work is in ``measure`` and ``launch`` alone, and
a CUDA graph can repeat it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Protocol

from torch import Tensor

from compiled_optim.lowering import looped
from compiled_optim.lowering.multi_tensor import MultiTensorLowering
from compiled_optim.lowering.sparse import GatheredRowsLowering, RowTableLowering
from compiled_optim.lowering.stacked import StackedLowering, StackTableLowering
from compiled_optim.lowering.torch_ops.eager import EagerLowering
from compiled_optim.lowering.torch_ops.inductor import InductorLowering
from compiled_optim.memory import cache, torch_internals
from compiled_optim.memory.torch_internals import Captures
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import Rule

LOWERINGS = ("auto", "multi_tensor", "inductor", "eager")  # what users can ask for
LOOPED = {"cpu"}  # the devices on which rules on whole tensors are loops in C++
_refused: dict[tuple[str, Rule], str] = {}  # by device type and rule, why its kernels do not compile in this process


class Lowering(Protocol):
    """Runs the step of one plan.

    It is made of the plan, of the step's clipping, and of the log of compilations and fallbacks.
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

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        """Take what was assigned, and ``grads``, an entry per parameter; None for their own ``grad``.

        Graphs of the devices ``captures`` are being captured.
        """

    def resumes(self, grads: list[Tensor | None] | None, *, state: bool, keep_alive: bool) -> bool:
        """As :meth:`Plan.read` and :meth:`prepare`, if all but addresses of gradients is as it was; whether it is."""

    def measure(self) -> None:
        """Write the partial sums of the squares of the prepared gradients."""

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        """As :meth:`launch`, of a rule that has totals.

        At each stage with totals, it yields the sums over the plan, a tensor of shape (totals,). It is sent the sums over
        all plans, devices and processes, followed by the results of the rule's ``adapt``.
        """

    def finish(self) -> None:
        """Let go of the gradients."""


def refuse(plan: Plan, reason: str) -> None:
    """Lower plans like ``plan`` to eager from now on: its kernels do not compile."""
    _refused[plan.device.type, plan.rule] = reason


def lower(plan: Plan, wanted: str, clipping: Clipping, log: CompilationLog, differentiable: bool) -> Lowering:
    """The lowering of ``plan``, as ``wanted``: one of :data:`LOWERINGS`. Autograd records a ``differentiable`` step.

    Raises:
        ValueError: ``wanted`` does not serve the plan's device.
    """
    name = _elementwise(plan, "eager" if differentiable else wanted, log)
    if plan.rule.gradients == "sparse":
        if name == "multi_tensor" and all(m.param.is_contiguous() for m in plan.members):
            return RowTableLowering(plan, clipping, log)
        return GatheredRowsLowering(plan, clipping, log, compiled=name != "eager")
    if plan.rule.granularity != "element":
        if name == "multi_tensor":
            loops = plan.device.type in LOOPED and looped.serves(plan)
            return (looped.LoopLowering if loops else StackTableLowering)(plan, clipping, log)
        return StackedLowering(plan, clipping, log, compiled=name != "eager")
    if name == "eager":
        return EagerLowering(plan, clipping, differentiable=differentiable)
    if name == "multi_tensor":
        return MultiTensorLowering(plan, clipping, log)
    return InductorLowering(plan, clipping, log)


def _elementwise(plan: Plan, wanted: str, log: CompilationLog) -> str:
    """The name of the lowering that an elementwise rule with dense gradients would have."""
    on_cpu = plan.device.type == "cpu"
    if wanted == "eager" or plan.is_meta or torch_internals.is_fake(plan.members[0].param):  # there is nothing to compute
        return "eager"
    if plan.wrapped:
        name, kind = plan.members[0].name, type(plan.members[0].param).__name__
        log.fall_back(
            f"'{name}' is updated with plain torch operations: a {kind} has no memory of its own",
            "with lowering='eager' this is not said",
        )
        return "eager"
    missing = "no C++ compiler was found" if on_cpu and not cache.compiler() else ""
    if refusal := missing or _refused.get((plan.device.type, plan.rule), ""):
        log.fall_back(
            f"{plan.rule.name} runs eager: {refusal}", "install g++ or clang++, or name one in the environment variable CXX"
        )
        return "eager"
    served = plan.device.type == "cuda" or (on_cpu and sys.platform == "linux")
    if served and wanted != "inductor":
        return "multi_tensor"
    if wanted == "multi_tensor":
        raise ValueError(
            "lowering='multi_tensor' serves CUDA tensors, and CPU tensors on Linux; "
            f"'{plan.members[0].name}' is on {plan.device}"
        )
    return "inductor"
