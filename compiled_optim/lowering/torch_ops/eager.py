"""The base class of all lowerings, the one for torch operations, and the lowering to plain torch operations."""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.lists import Lists, Values, programs
from compiled_optim.memory.layout import add_over_shards, as_real, compute_dtype
from compiled_optim.memory.torch_internals import Captures
from compiled_optim.plan.clipping import Clipping, scaled, square_sum
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import NUMBERS, Rule


def evaluated(
    rule: Rule,
    statics: Mapping[str, Any],
    scalars: Tensor,
    constants: Tensor,
    group_index: Tensor,
    hypers: Sequence[Tensor],
    clipping: Sequence[Tensor],
    square_sum: Tensor | None,
    present: Tensor | None,
    neutral: Collection[str] = (),
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Count a step for the tensors where ``present`` is true (all if None), and write nothing.

    ``scalars`` are :attr:`Plan.scalars` before the step; ``constants`` and ``group_index`` as in :class:`TorchLowering`;
    ``hypers`` the elements of the present hyperparameters, of several groups one after the other, or vectors with an entry
    per tensor. ``clipping`` are the numbers called :data:`~compiled_optim.plan.clipping.NAMES`, empty if gradients are
    not clipped. ``square_sum`` is of all gradients, None if no norm is needed. ``neutral`` names numbers that are 1 for all
    tensors, by which nothing is multiplied.

    Returns:
        The rows of coefficients, with one entry per tensor: the factor of the gradient, 1 if the step is skipped, else 0,
        and the attributes of ``c`` in the rule's update; entries of absent tensors are undefined. The scalars after the
        step. The norm of all gradients, and 1 if the step is skipped; None without clipping.
    """
    if len(hypers) > (count := sum(h.length for h in rule.present_hypers(statics))):
        hypers = torch.stack(list(hypers)).view(-1, count)[group_index].unbind(1)
    signs, *numbers = constants.unbind()
    factor, outcome, skip = signs, None, torch.zeros_like(signs)
    if clipping:
        clipping = [t.to(scalars.device, scalars.dtype) for t in clipping]
        total = torch.zeros_like(clipping[0]) if square_sum is None else square_sum
        clip, norm, skipped = scaled(total, *clipping)
        skipped = torch.as_tensor(skipped, dtype=scalars.dtype, device=scalars.device)
        outcome = torch.stack([norm, skipped])
        is_taken = (skipped == 0).expand_as(factor)
        present = is_taken if present is None else present & is_taken
        factor, skip = factor * clip, skipped.expand_as(factor)
    step = scalars[0] + 1
    values: dict[str, Any] = dict(zip(NUMBERS, numbers, strict=True)) | dict.fromkeys(neutral, 1.0)
    values |= {"step": step, **statics, **rule.by_name(statics, hypers)}
    values |= {s.name: scalar for s, scalar in zip(rule.scalars, scalars[1:].unbind(), strict=True)}
    rows = {
        name: torch.as_tensor(value, dtype=step.dtype, device=step.device).expand_as(step)
        for name, value in rule.evaluated(values).items()
    }
    new = torch.stack([step, *(rows[s.name] for s in rule.scalars)])
    new = new if present is None else torch.where(present, new, scalars)
    return [factor, skip, *(rows[name] for name in rule.coefficient_names(statics))], new, outcome


def note_outcome(outcome: Tensor, measured: Tensor, *, counts: bool) -> None:
    """Write the ``measured`` norm and skip to ``outcome``, a :meth:`Clipping.outcome`; add up skips if ``counts``."""
    skipped = outcome[2:] + measured[1:] if counts else outcome[2:]
    outcome.copy_(torch.cat([measured, skipped]))


class Lowering:
    """A way to run the step of one plan. It writes compilations and fallbacks to the log.

    A step is :meth:`compile`, :meth:`prepare`, :meth:`measure` where the norm of all gradients is needed, :meth:`launch`,
    and :meth:`finish`. Only ``measure`` and ``launch`` use the device, and a CUDA graph can repeat them.

    Attributes:
        name: the name in reports.
        square_sum_count: the number of partial sums that :meth:`measure` writes; known after :meth:`compile`.
    """

    name: str
    square_sum_count = 1

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        self.plan, self._clipping, self._log = plan, clipping, log
        self._grads: Sequence[Any] = ()  # None for absent ones
        self._all_square_sums: Tensor | None = None

    def compile(self) -> None:
        """Create the kernels that do not exist yet, and the tables that they read.

        Raises:
            RecompileError: compilation is forbidden here. Nothing is changed then.
            CompilerError: a kernel does not compile on this machine. Another lowering has to run the plan.
        """

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        """Let :meth:`measure` write to ``square_sums``, a part of the ``all_square_sums`` of all gradients."""
        self._square_sum, self._all_square_sums = square_sums, all_square_sums

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        """Take assigned hyperparameters, and ``grads``, with an entry per parameter; None for each parameter's ``grad``.

        ``captures`` are the devices on which a graph is being captured.
        """
        self._grads = self.plan.gradients(grads)

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
        raise NotImplementedError("totals are of dense gradients, and of elementwise rules")

    def finish(self) -> None:
        """Release the gradients."""
        self.plan.finish()
        self._grads = ()


class TorchLowering(Lowering):
    """The step of one plan: the coefficients first, in torch operations, then the update of a subclass.

    Coefficients are evaluated for all tensors at once, in float64 where the device has it.

    Attributes:
        constants: the signs of the gradients, then the :attr:`Plan.numbers`, with one entry per tensor.
        group_index: the index of each tensor's group in the plan.
        neutral: the names of those numbers that are 1 for all tensors.
    """

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping, log)
        self._stages = plan.rule.stages(plan.statics)
        self.neutral = [name for name, row in plan.numbers.items() if {*row} == {1.0}]
        rows = [[-1.0 if maximizes else 1.0 for maximizes in plan.maximizes], *plan.numbers.values()]
        self.constants = torch.tensor(rows, dtype=plan.scalars.dtype, device="cpu").to(plan.device)
        self.group_index = torch.tensor(plan.group_index, device="cpu").to(plan.device)
        recorded = plan.recorded_scalars
        # The version of the scalars after the last step, and the scalars with their autograd graph.
        self._recorded: tuple[int, Tensor] | None = None if recorded is None else (plan.scalars._version, recorded)
        device = plan.device  # a cache that refers to this object would keep it alive; a new mask waits for the device
        self._mask_of = functools.lru_cache(256)(lambda marks: torch.tensor(marks, device=device))

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        coefficients, mask = self._advance()
        for stage, (sums_of, totals, _) in self._stages.items():
            sums = coefficients.new_zeros(sums_of.stop - sums_of.start, len(self.plan.members))
            self._reduce(stage, coefficients, sums)
            if self.plan.sharded:
                assert not sums.requires_grad, "autograd does not see what other processes add"
                add_over_shards(sums, self.plan.params[0])
            means = sums[: totals.start - sums_of.start] / self._counts
            coefficients = torch.cat([coefficients, means])
            if totals.start < totals.stop:
                local = sums[totals.start - sums_of.start :]
                total = yield (local if mask is None else torch.where(mask, local, 0.0)).sum(1)
                coefficients = torch.cat([coefficients, total.unsqueeze(1).expand(-1, sums.shape[1])])
        self._update(coefficients)

    def _advance(self) -> tuple[Tensor, Tensor | None]:
        """Count a step of every parameter with a gradient.

        Return the coefficients, a (2 + coefficients, tensors) matrix of the rows of :func:`evaluated`, and a mask of the
        parameters that have a gradient (None if all).
        """
        plan, clipping = self.plan, self._clipping
        present = tuple(grad is not None for grad in self._grads)
        mask = None if all(present) else self._mask_of(present)
        tensors = [t for group in plan.groups for h in plan.hypers for t in group.read_only(h.name)]
        hypers = [t.to(plan.device, plan.scalars.dtype) for t in tensors]
        total = None if clipping.idle or self._all_square_sums is None else self._all_square_sums.sum()
        coefficients, outcome = self._evaluated(hypers, total, mask)
        if outcome is not None and not clipping.idle:
            note_outcome(clipping.outcome(plan.device), outcome.detach(), counts=plan.is_first)
        return coefficients, mask

    def _evaluated(self, hypers: list[Tensor], total: Tensor | None, present: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Update the plan's scalars; ``total`` is the sum of all squares. Return the coefficients and the outcome."""
        scalars, version = self.plan.scalars, self.plan.scalars._version
        if self._recorded is not None and self._recorded[0] == version:  # unchanged since
            before = self._recorded[1]
        else:
            before = scalars.clone() if torch.is_grad_enabled() else scalars
        clip_args = () if self._clipping.idle else self._clipping.tensors(self.plan.device)
        of_plan = self.plan.rule, self.plan.statics, before, self.constants, self.group_index
        rows, new, outcome = evaluated(*of_plan, hypers, clip_args, total, present, self.neutral)
        coefficients = torch.stack(rows)  # before the scalars change: a coefficient may be a view of one
        scalars.copy_(new.detach())
        self._recorded = (scalars._version, new) if new.requires_grad else None
        return coefficients, outcome

    def _reduce(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        """Write a stage's sums over each prepared tensor to ``sums``, (expressions, tensors)."""
        raise NotImplementedError(f"the reductions of {self.plan.rule.name}")

    def _update(self, coefficients: Tensor) -> None:
        """Update every prepared tensor by its column of ``coefficients``, which ends with the results of reductions."""
        raise NotImplementedError(f"the update of {self.plan.rule.name}")

    @functools.cached_property
    def _counts(self) -> Tensor:
        return torch.tensor(self.plan.counts, dtype=self.plan.scalars.dtype, device=self.plan.device)


class EagerLowering(TorchLowering):
    """The step of one plan tensor by tensor, uncompiled: for debugging, and for gradients through the step.

    With ``differentiable`` the step is recorded by autograd: the new parameter, which replaces the old one in place, and the
    new state depend on the old ones, on the gradient and on every hyperparameter tensor that requires grad. The state
    tensors are replaced, so that autograd's recorded ones are unchanged.
    """

    name = "eager"

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog, *, differentiable: bool = False) -> None:
        super().__init__(plan, clipping, log)
        self._programs = programs(plan.rule, tuple(plan.statics.items()), False)
        self._differentiable = differentiable

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        with torch.set_grad_enabled(self._differentiable):
            yield from super().launch_in_stages()

    def _reduce(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        if not self.plan.is_meta:  # meta tensors have no numbers to sum
            for i, lists, values in self._lists(coefficients):
                sums[:, i] = torch.stack([total for (total,) in lists.sums(stage, values)])

    def _update(self, coefficients: Tensor) -> None:
        for i, lists, values in self._lists(coefficients):
            member = self.plan.members[i]
            for name, (new,) in lists.updated(values).items():
                old = member.param if name == "param" else member.entries[name]
                new = torch.view_as_complex(new) if old.is_complex() else new
                member.put(name, new) if self._differentiable and old is not member.param else old.copy_(new)

    def _lists(self, coefficients: Tensor) -> Iterator[tuple[int, Lists, Values]]:
        """Yield the position, the lists of one tensor and the values of each parameter that has a prepared gradient."""
        for i, (grad, column) in enumerate(zip(self._grads, coefficients.unbind(1), strict=True)):
            if grad is None:
                continue
            member = self.plan.members[i]
            old = member.param.clone() if self._differentiable else member.param
            if self.plan.wrapped:
                old = old * 1  # a plain tensor where the class lacks operations that the step takes
            scale, skip, *numbers = column.to(compute_dtype(old.dtype)).unbind()
            targets = [old, *(member.entries[name] for name in self.plan.buffers)]
            lists = Lists(self._programs, [[as_real(t)] for t in targets], [skip])
            yield i, lists, lists.values([as_real(grad.resolve_conj())], [scale], [[n] for n in numbers])
