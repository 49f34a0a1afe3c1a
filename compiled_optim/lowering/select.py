"""The choice of the lowering that runs the step of a plan, and sums over all lowerings."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from compiled_optim.lowering import stack_loops
from compiled_optim.lowering.coefficients import TableCoefficients, TorchCoefficients
from compiled_optim.lowering.eager import EagerLowering
from compiled_optim.lowering.list_program import TORCH, NumberProgram, number_program
from compiled_optim.lowering.lists import ListLowering
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.lowering.multi_tensor import MultiTensorLowering
from compiled_optim.lowering.rows import GatheredRowsLowering, RowTableLowering
from compiled_optim.lowering.stacks import StackLowering
from compiled_optim.memory import cache, torch_internals
from compiled_optim.memory.layout import add_over_shards, scalar_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.output_memory import OutputMemory
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.symbols import PLAIN

LoweringName: TypeAlias = Literal["auto", "multi_tensor", "inductor", "eager"]  # the values of the option `lowering`
LOWERINGS: tuple[LoweringName, ...] = get_args(LoweringName)
_refused: dict[tuple[str, Rule], cache.CompilerError] = {}  # by device type and rule, why kernels do not compile


def refuse(plan: Plan, error: cache.CompilerError) -> None:
    """Lower plans like ``plan`` to eager from now on: its kernels do not compile."""
    _refused[plan.device.type, plan.rule] = error.with_traceback(None)


def lower(
    plan: Plan, wanted: str, clipping: Clipping, log: CompilationLog, outputs: OutputMemory, differentiable: bool
) -> Lowering:
    """Return the lowering of ``plan``. ``wanted`` is one of :data:`LOWERINGS`. Autograd records a ``differentiable`` step.

    The plan gets ``outputs`` if its updates can have them.

    Raises:
        ValueError: ``wanted`` does not support the plan's device.
    """
    name = _elementwise(plan, "eager" if differentiable else wanted, log)
    if name != "multi_tensor":
        of_torch, compiled = TorchCoefficients(plan, clipping), name != "eager"
        if plan.rule.gradients == "sparse":
            return GatheredRowsLowering(plan, of_torch, log, compiled=compiled)
        if plan.rule.granularity != "element":
            return StackLowering(plan, of_torch, log, compiled=compiled)
        if compiled:
            return ListLowering(plan, of_torch, log)
        return EagerLowering(plan, of_torch, log, differentiable=differentiable)
    if plan.rule.gradients == "sparse":
        if all(m.param.is_contiguous() for m in plan.members):
            return RowTableLowering(plan, TableCoefficients(plan, clipping, log), log)
        return GatheredRowsLowering(plan, TorchCoefficients(plan, clipping), log)
    of_table = TableCoefficients(plan, clipping, log)
    if plan.rule.granularity == "element":
        plan.outputs = outputs
        return MultiTensorLowering(plan, of_table, log)
    loops = stack_loops.LOOPS.get(plan.device.type)
    refusal = "" if loops is None else stack_loops.refusal(plan, loops)
    if refusal:
        advice = "that may take a minute for each shape; lowering='inductor' avoids this warning"
        log.fall_back(f"Inductor compiles stacks, since {refusal}", advice)
    return StackLowering(plan, of_table, log, loops=loops if refusal is None else None)


def _elementwise(plan: Plan, wanted: str, log: CompilationLog) -> str:
    """Return the name of the lowering that ``plan`` would have if its rule were elementwise and its gradients dense."""
    on_cpu = plan.device.type == "cpu"
    if wanted == "eager" or plan.is_meta or torch_internals.is_fake(plan.members[0].param):  # no numbers to compute
        return "eager"
    if plan.wrapped:
        name, kind = plan.members[0].name, type(plan.members[0].param).__name__
        log.fall_back(
            f"'{name}' is updated with plain torch operations: a {kind} has no memory of its own",
            "lowering='eager' avoids this warning",
        )
        return "eager"
    if on_cpu and not cache.compiler():
        advice = "install g++ or clang++, or name one in the environment variable CXX"
        log.fall_back("steps run eager: no C++ compiler was found", advice)
        return "eager"
    if refusal := _refused.get((plan.device.type, plan.rule)):
        log.fall_back(f"{plan.rule.name} runs eager: {refusal}", refusal.advice)
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


class SquareSums:
    """Partial sums in a fixed order, so that the norm of equal gradients is equal bit for bit.

    Each device has one float64 vector: the partial sums of its plans, and one number for every other device.
    """

    def __init__(self, lowerings: Sequence[Lowering]) -> None:
        self._sums: list[tuple[Lowering, Tensor]] = []  # each with its partial sums
        self._of_device: dict[torch.device, tuple[Tensor, Tensor]] = {}  # sums of its plans, numbers of the other devices
        devices = list(dict.fromkeys(lowering.plan.device for lowering in lowerings))
        for device in devices:
            here = [lowering for lowering in lowerings if lowering.plan.device == device]
            # At least one, which holds the sum over all processes, even where this process has no elements.
            counts = [max(lowering.square_sum_count, int(lowering.plan.sharded)) for lowering in here]
            others = len(devices) - 1
            sums = torch.zeros(sum(counts) + others, dtype=scalar_dtype(device), device=device)
            *of_plans, foreign = torch.split(sums, [*counts, others])
            self._of_device[device] = sums[: sum(counts)], foreign
            self._sums += zip(here, of_plans, strict=True)
            for lowering, square_sums in zip(here, of_plans, strict=True):
                lowering.connect(square_sums, sums)

    def measure(self) -> None:
        """Measure the prepared gradients of all plans."""
        for lowering, sums in self._sums:
            if lowering.plan.is_meta:  # no numbers to add
                continue
            lowering.measure()
            if lowering.plan.sharded:
                total = sums[: lowering.square_sum_count].sum()  # without the total of an earlier step where the count is 0
                add_over_shards(total, lowering.plan.params[0])
                sums.zero_()
                sums[0] = total  # of all processes
        if len(self._of_device) > 1:
            local_sums = {device: local.sum() for device, (local, _) in self._of_device.items()}
            for device, (_, foreign) in self._of_device.items():
                others = (s for d, s in local_sums.items() if d != device)
                for entry, other in zip(foreign.unbind(), others, strict=True):
                    entry.copy_(other, non_blocking=True)


class Totals:
    """The launch of the lowerings of one rule stage by stage, with their sums added up over all plans.

    The state of each parameter has the shared scalars, so that they are saved, loaded and moved like others. A new
    parameter takes over those of the parameter that took the most steps.

    Raises:
        ValueError: groups differ in choices that decide which totals the rule has.
    """

    def __init__(self, lowerings: Sequence[Lowering], clipping: Clipping) -> None:
        self._lowerings = list(lowerings)
        self._clipping = clipping
        self._plans = [lowering.plan for lowering in lowerings]
        self._rule, self._device = self._plans[0].rule, self._plans[0].device
        names = [[w.totals for w in self._rule.written(plan.statics, PLAIN) if w.totals] for plan in self._plans]
        if any(other != names[0] for other in names):
            choices = ", ".join(s.name for s in self._rule.statics)
            raise ValueError(f"{self._rule.name} sums over all parameters, so its groups must agree in {choices}")
        self._stages = len(names[0])
        written = self._rule.adapt and self._rule.written_adapt(self._plans[0].statics, names[0][0], TORCH)
        self._program = number_program(written) if written else None
        shared = enumerate(self._rule.scalar_names)
        self._shared = {name: row for row, name in shared if name in self._rule.shared_scalars}
        if self._shared:
            columns = torch.cat([block.to(self._device) for plan in self._plans for block in plan.scalar_blocks], 1)
            leading = columns.index_select(1, columns[0].argmax().view(1))[:, 0]
            self._share({name: leading[row] for name, row in self._shared.items()})

    def launch(self) -> None:
        """Update every parameter that has a prepared gradient."""
        with torch.no_grad():
            launches = [lowering.launch_in_stages() for lowering in self._lowerings]
            sums = [next(launch) for launch in launches]
            for stage in range(self._stages):
                total = torch.stack([s.to(self._device, non_blocking=True) for s in sums]).sum(0)
                numbers = total if stage or self._program is None else self._adapted(self._program, total)
                on_devices = [numbers.to(plan.device, non_blocking=True) for plan in self._plans]
                sums = []
                for launch, numbers in zip(launches, on_devices, strict=True):
                    with contextlib.suppress(StopIteration):  # after the last stage
                        sums.append(launch.send(numbers))

    def _adapted(self, program: NumberProgram, total: Tensor) -> Tensor:
        """Return ``total`` followed by the results of ``adapt`` that ``update`` reads. Assign the shared scalars."""
        plan, block = self._plans[0], self._plans[0].scalar_blocks[0]
        shared = {name: block[row, 0] for name, row in self._shared.items()}
        elements = [t.to(plan.device, total.dtype) for h in plan.hypers for t in plan.groups[0].read_only(h.name)]
        kinds = {"total": total.unbind(), "hyper": elements, "shared": [shared[n] for n in self._rule.shared_scalars]}
        values = {f"{kind}{i}": value for kind, ordered in kinds.items() for i, value in enumerate(ordered)}
        adapted = program(values, total).items()
        results = {name: torch.as_tensor(value, dtype=total.dtype, device=plan.device) for name, value in adapted}
        further = [value for name, value in results.items() if name not in shared]
        changed = {name: results[name] for name in shared if name in results}
        if not self._clipping.idle:
            is_taken = self._clipping.outcome(plan.device)[1] == 0
            changed = {name: torch.where(is_taken, new, shared[name]) for name, new in changed.items()}
        self._share(changed)
        return torch.cat([total, torch.stack(further)]) if further else total

    def _share(self, values: Mapping[str, Tensor]) -> None:
        """Write ``values`` of shared scalars to all parameters."""
        for name, value in values.items():
            for plan in self._plans:
                for block in plan.scalar_blocks:
                    block[self._shared[name]].copy_(value, non_blocking=True)
