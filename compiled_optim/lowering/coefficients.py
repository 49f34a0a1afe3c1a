"""The coefficients of a step: a few numbers for each tensor, from hyperparameters, step counts and the norm.

Torch operations evaluate them, which autograd can record, or a kernel that reads tables, which a CUDA graph can hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import cpp, triton
from compiled_optim.lowering.kernels.table import CoefficientTable, HyperPointers, Kernel, TensorTable, upload
from compiled_optim.lowering.kernels.triton import current_device
from compiled_optim.lowering.list_program import TORCH, NumberProgram, number_program
from compiled_optim.memory.layout import add_over_shards, scalar
from compiled_optim.memory.torch_compiler import ListFunction
from compiled_optim.plan.clipping import Clipping, scaled
from compiled_optim.plan.compilations import CompilationLog, KernelKey
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import NUMBERS, Indices, Rule

BACKENDS: dict[str, Callable[[KernelKey], Kernel]] = {"cpu": cpp.CppKernel, "cuda": triton.TritonKernel}
"""The constructors of kernels, by device type."""

_kernels: dict[KernelKey, Kernel] = {}


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

    ``scalars`` are :attr:`Plan.scalars` before the step; ``constants`` and ``group_index`` as in :class:`TorchCoefficients`;
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
    values: dict[str, Any] = dict(zip(rule.inputs(statics), numbers, strict=True)) | dict.fromkeys(neutral, 1.0)
    values |= {"step": step, **{f"hyper{i}": hyper for i, hyper in enumerate(hypers)}}
    values |= {f"scalar{i}": scalar for i, scalar in enumerate(scalars[1:].unbind())}
    rows = {
        name: torch.as_tensor(value, dtype=step.dtype, device=step.device).expand_as(step)
        for name, value in _program(rule, tuple(statics.items()))(values, step).items()
    }
    new = torch.stack([step, *(rows[s.name] for s in rule.scalars)])
    new = new if present is None else torch.where(present, new, scalars)
    return [factor, skip, *(rows[name] for name in rule.coefficient_names(statics))], new, outcome


@functools.cache
def _program(rule: Rule, statics: tuple[tuple[str, Any], ...]) -> NumberProgram:
    return number_program(rule.written_coefficients(dict(statics), TORCH))


def note_outcome(outcome: Tensor, measured: Tensor, *, counts: bool) -> None:
    """Write the ``measured`` norm and skip to ``outcome``, a :meth:`Clipping.outcome`; add up skips if ``counts``."""
    skipped = outcome[2:] + measured[1:] if counts else outcome[2:]
    outcome.copy_(torch.cat([measured, skipped]))


class TorchCoefficients:
    """The coefficients of one plan's tensors in torch operations, in float64 where the device has it.

    Attributes:
        constants: the signs of the gradients, then the :attr:`Plan.numbers`, with one entry per tensor.
        group_index: the index of each tensor's group in the plan.
        neutral: the names of those numbers that are 1 for all tensors.
        code: Inductor's code of the same; None without.
        rows: (2 + coefficients, tensors), of the current step: the rows of :func:`evaluated`, then results of reductions.
    """

    rows: Tensor

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self.plan, self._clipping = plan, clipping
        self.neutral = [name for name in NUMBERS if {*plan.numbers[name]} == {1.0}]
        rows = [[-1.0 if maximizes else 1.0 for maximizes in plan.maximizes], *plan.numbers.values()]
        self.constants = torch.tensor(rows, dtype=plan.scalars.dtype, device="cpu").to(plan.device)
        self.group_index = torch.tensor(plan.group_index, device="cpu").to(plan.device)
        self.code: ListFunction | None = None
        self._all_square_sums: Tensor | None = None
        recorded = plan.recorded_scalars
        # The version of the scalars after the last step, and the scalars with their autograd graph.
        self._recorded: tuple[int, Tensor] | None = None if recorded is None else (plan.scalars._version, recorded)
        device = plan.device  # a cache that refers to this object would keep it alive; a new mask waits for the device
        self._mask_of = functools.lru_cache(256)(lambda marks: torch.tensor(marks, device=device))

    def connect(self, all_square_sums: Tensor) -> None:
        """Take the norm from ``all_square_sums``, the partial sums of the squares of all gradients."""
        self._all_square_sums = all_square_sums

    def prepare(self, capturing: bool) -> None:
        """Do nothing: each step reads the tensors that hyperparameters are then."""

    def evaluate(self, grads: Sequence[Any]) -> None:
        """Count a step of every parameter with a gradient, and write :attr:`rows` and the outcome of the step."""
        plan, clipping = self.plan, self._clipping
        present = tuple(grad is not None for grad in grads)
        self._mask = None if all(present) else self._mask_of(present)
        tensors = [t for group in plan.groups for h in plan.hypers for t in group.read_only(h.name)]
        hypers = [t.to(plan.device, plan.scalars.dtype) for t in tensors]
        total = None if clipping.idle or self._all_square_sums is None else self._all_square_sums.sum()
        self.rows, outcome = (self._evaluated if self.code is None else self._by_code)(hypers, total)
        if outcome is not None and not clipping.idle:
            note_outcome(clipping.outcome(plan.device), outcome.detach(), counts=plan.is_first)

    def _evaluated(self, hypers: list[Tensor], total: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Update the plan's scalars; ``total`` is the sum of all squares. Return the rows and the outcome."""
        scalars, version = self.plan.scalars, self.plan.scalars._version
        if self._recorded is not None and self._recorded[0] == version:  # unchanged since
            before = self._recorded[1]
        else:
            before = scalars.clone() if torch.is_grad_enabled() else scalars
        clip_args = () if self._clipping.idle else self._clipping.tensors(self.plan.device)
        of_plan = self.plan.rule, self.plan.statics, before, self.constants, self.group_index
        rows, new, outcome = evaluated(*of_plan, hypers, clip_args, total, self._mask, self.neutral)
        stacked = torch.stack(rows)  # before the scalars change: a coefficient may be a view of one
        scalars.copy_(new.detach())
        self._recorded = (scalars._version, new) if new.requires_grad else None
        return stacked, outcome

    def _by_code(self, hypers: list[Tensor], total: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert self.code is not None
        plan = self.plan
        mask = self._all if self._mask is None else self._mask
        numbers = [t.to(plan.device, plan.scalars.dtype) for t in self._clipping.tensors(plan.device)]
        table, total = torch.stack(hypers).view(len(plan.groups), -1), self._zero if total is None else total
        rows, outcome = self.code([plan.scalars, table, self.constants, self.group_index, mask, total, *numbers])
        return rows, outcome

    def sums(self, slices: Indices) -> Tensor:
        """Return zeros for the sums of one stage over each tensor, (expressions, tensors)."""
        return self.rows.new_zeros(slices.sums.stop - slices.sums.start, self.rows.shape[1])

    def add_means(self, slices: Indices, sums: Tensor | None) -> Tensor | None:
        """Add the means of one stage to :attr:`rows`; ``sums`` are (expressions, tensors), those of totals last.

        Return the totals over the plan, None if the stage has none.
        """
        assert sums is not None
        if self.plan.sharded:
            assert not sums.requires_grad, "autograd does not see what other processes add"
            add_over_shards(sums, self.plan.params[0])
        means = slices.totals.start - slices.sums.start
        self.rows = torch.cat([self.rows, sums[:means] / self._counts])
        if slices.totals.start == slices.totals.stop:
            return None
        return (sums[means:] if self._mask is None else torch.where(self._mask, sums[means:], 0.0)).sum(1)

    def add_totals(self, slices: Indices, totals: Tensor) -> None:
        """Add ``totals``, over all plans, and the results of ``adapt`` to :attr:`rows`."""
        self.rows = torch.cat([self.rows, totals.unsqueeze(1).expand(-1, self.rows.shape[1])])

    def finish(self) -> None:
        """Release :attr:`rows`, and what autograd keeps for them."""
        vars(self).pop("rows", None)

    def columns(self) -> Tensor:
        """Return :attr:`rows`, whose second one is not 0 for tensors to leave unchanged."""
        if self._mask is not None:
            self.rows[1].masked_fill_(~self._mask, 1.0)
        return self.rows

    @functools.cached_property
    def _all(self) -> Tensor:
        return torch.ones(len(self.plan.members), dtype=torch.bool, device=self.plan.device)

    @functools.cached_property
    def _zero(self) -> Tensor:
        return scalar(0.0, self.plan.device)

    @functools.cached_property
    def _counts(self) -> Tensor:
        return torch.tensor(self.plan.counts, dtype=self.plan.scalars.dtype, device=self.plan.device)


class TableCoefficients:
    """The coefficients of one plan's tensors by a kernel, whose table is updated outside of graphs.

    Attributes:
        hypers: the addresses of hyperparameters.
        kernel: the kernel that evaluates; :meth:`compile` assigns it.
        table: the coefficients of all parameters of the plan; :meth:`compile` assigns it.
        on_device: a context in which the plan's device is current.
    """

    kernel: Kernel
    table: CoefficientTable

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        self.plan, self._clipping, self._log = plan, clipping, log
        self.hypers = HyperPointers(plan, clipping, log)
        self.on_device = current_device(plan.device)

    def obtain(self, key: KernelKey, positions: Iterable[int]) -> Kernel:
        """Return the process's kernel of ``key``, for the parameters at ``positions``."""
        kernel = self._log.obtain(_kernels, key, [self.plan.members[i].name for i in positions], BACKENDS[key.device])
        if kernel.drawback:
            self._log.fall_back(f"{self.plan.rule.name} launches kernels slowly: {kernel.drawback}", "a step takes longer")
        return kernel

    def compile(self, kernel: Kernel) -> None:
        """Let ``kernel`` evaluate the coefficients, and make the table that it reads and writes."""
        self.kernel = kernel
        self.table = CoefficientTable(self.plan, self._clipping, self.hypers, self._log)
        if self.plan.rule.stages(self.plan.statics):  # kernels divide by these
            self._counts = upload(self.plan.counts, self.plan.device).double()

    def connect(self, all_square_sums: Tensor) -> None:
        """Take the norm from ``all_square_sums``, the partial sums of the squares of all gradients."""
        self.table.connect(all_square_sums)

    def preallocate(self) -> None:
        """Allocate, after :meth:`compile`, all memory that a captured launch keeps using."""
        self.hypers.refresh()
        self.table.gradients.reserve(1)

    def prepare(self, capturing: bool) -> None:
        """Write the addresses of hyperparameters that were assigned."""
        self.hypers.prepare(capturing)

    def evaluate(self, grads: Sequence[Any] = ()) -> None:
        """Count a step of every parameter whose gradient is in the table, and write coefficients and outcome."""
        with self.on_device:
            self.kernel.evaluate(self.table)

    def step(self, tables: Sequence[TensorTable]) -> None:
        """Do :meth:`evaluate`, and update the tensors of all ``tables``."""
        with self.on_device:
            tables[0].kernel.step(tables[0], self.table)
            for table in tables[1:]:
                table.kernel.update(table, self.table)

    def add_means(self, slices: Indices, sums: Tensor | None) -> Tensor | None:
        """Add up, over shards, the means of one stage, which kernels wrote. Return its totals over the plan, or None."""
        assert sums is None
        numbers = self.table.coefficients[1:]
        if self.plan.sharded:
            add_over_shards(numbers[slices.sums], self.plan.params[0])
        if slices.totals.start == slices.totals.stop:
            return None
        return torch.where(self.table.grads != 0, numbers[slices.totals] * self._counts, 0.0).sum(1)

    def add_totals(self, slices: Indices, totals: Tensor) -> None:
        """Write ``totals``, over all plans, and the results of ``adapt``."""
        self.table.coefficients[1:][slices.received] = totals.unsqueeze(1)

    def finish(self) -> None:
        """Keep the table, whose memory the next step uses again."""

    def columns(self) -> Tensor:
        """Return (2 + coefficients, tensors): the factor of the gradient, 0 for tensors to update, the coefficients."""
        numbers = self.table.coefficients
        absent = torch.where(self.table.grads == 0, 1.0, self.table.outcome[1])
        return torch.cat([numbers[:1], absent.unsqueeze(0), numbers[1:]])
