"""The step of a plan as a function of tensors, whose operations a compiler sees and fuses with those around it.

Nothing of it runs on the host when the compiled code does: whatever the step reads and writes is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops import lists
from compiled_optim.lowering.torch_ops.coefficients import CoefficientStage, Given, note_outcome
from compiled_optim.lowering.torch_ops.lists import Lists, programs
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.bits import GROUP
from compiled_optim.torch_internals import compiles_means_with_lists


def obstacle(plan: Plan) -> str:
    """Why a step of ``plan`` cannot be inlined; empty if it can."""
    rule, name = plan.rule, plan.members[0].name
    ends_early = plan.grouped_buffers and any(m.param.numel() % GROUP for m in plan.members)
    reduced = rule.stages(plan.statics).values()
    reasons = {
        f"a parameter like '{name}' ends inside of a group of elements, and Inductor loses what is there": ends_early,
        f"{rule.name} does not work element by element": rule.granularity != "element" or rule.gradients != "dense",
        f"'{name}' has no memory of its own": plan.wrapped,
        f"'{name}' shares memory with another parameter": plan.shares_memory,
        f"'{name}' has complex numbers, which Inductor does not compile": plan.members[0].param.is_complex(),
        f"{rule.name} takes sums over all parameters": rule.has_totals(plan.statics),
        f"{rule.name} takes means over all parts of '{name}'": plan.sharded and bool(reduced),
        f"{rule.name} takes means, with which Inductor fails before torch 2.12": (
            bool(reduced) and lists.fuses_lists(plan.device) and not compiles_means_with_lists()
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class InlinedPlan:
    """The step of one plan, in which :func:`obstacle` finds nothing."""

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self.plan = plan
        self._stage = CoefficientStage(plan, clipping)
        self._fuses_lists = lists.fuses_lists(plan.device)
        self._programs = programs(plan.rule, tuple(plan.statics.items()), self._fuses_lists)
        buffers = [m.entries[name] for name in plan.buffers for m in plan.members]
        self.tensors = [plan.scalars, self._stage.constants, self._stage.group_index, *buffers]
        """What :meth:`run` reads and writes besides parameters, gradients, hyperparameters and clipping."""
        self.hypers = [(i, h.name) for i in sorted({m.group for m in plan.members}) for h in plan.hypers]
        """Which hyperparameters it reads: the indices of their groups, and their names."""

    @staticmethod
    def counts(tensors: Sequence[Tensor]) -> Tensor:
        """The step counts, of what stands for :attr:`tensors`."""
        return tensors[0][0]

    def run(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        tensors: Sequence[Tensor],
        hypers: Mapping[tuple[int, str], Sequence[Tensor]],
        clipping: Sequence[Tensor],
        outcome: Tensor,
        square_sum: Tensor | None,
    ) -> None:
        """Update those of ``params`` that have a gradient.

        ``tensors`` stand for :attr:`tensors`, and ``hypers`` for :attr:`hypers`. ``clipping`` and ``square_sum`` are as for
        :meth:`CoefficientStage.evaluate`. ``outcome`` is where a step with clipping notes what came of it.
        """
        scalars, constants, group_index, *rest = tensors
        numbers = [number for where in self.hypers for number in hypers[where]]
        buffers = [rest[i : i + len(params)] for i in range(0, len(rest), len(params))]
        given = Given(scalars.clone(), numbers, clipping, constants, group_index)  # a coefficient may be a view of it
        found = self._stage.evaluate(given, square_sum, _marks(grads, scalars.device))
        scalars.copy_(found.scalars)
        if found.outcome is not None:
            note_outcome(outcome, found.outcome, counts=self.plan.leads)
        here = [i for i, grad in enumerate(grads) if grad is not None and grad.numel()]
        if not here:
            return
        rows = self._columns(found.rows if clipping else found.rows[2:], params)
        columns = [[row[i] for i in here] for row in rows]
        signs = [-1.0 if self.plan.maximizes[i] else 1.0 for i in here]
        scales, skips = columns[:2] if clipping else (signs if -1.0 in signs else None, None)
        lists = Lists(
            self.plan.rule, self.plan.statics, [[tensors[i] for i in here] for tensors in (params, *buffers)], skips
        )
        lists.update(self._programs, [grads[i] for i in here], scales, columns[2:] if clipping else columns)

    def _columns(self, rows: Sequence[Tensor], params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Each of ``rows`` as 0-dim tensors, in the dtypes in which ``params`` are updated."""
        dtypes = [compute_dtype(p.dtype) for p in params]
        made = {dtype: self._unbound([row.to(dtype) for row in rows]) for dtype in {*dtypes}}
        return [[made[dtype][k][i] for i, dtype in enumerate(dtypes)] for k in range(len(rows))]

    def _unbound(self, rows: list[Tensor]) -> list[Sequence[Tensor]]:
        """The elements of ``rows``, which Inductor computes once, and not in every kernel that reads them."""
        if not (self._fuses_lists and rows[0].dtype == torch.float32):
            return [row.unbind() for row in _realized(rows).unbind()]
        # Inductor lets a kernel of lists read so many tensors and numbers together; two numbers in one are half as many.
        whole = [row.view(torch.int32).to(torch.int64) for row in (*rows, *rows[-1:])]
        pairs = _realized([(low & 0xFFFFFFFF) | (high << 32) for low, high in zip(whole[:-1:2], whole[1::2], strict=True)])
        halves = [half.to(torch.int32).view(torch.float32).unbind() for half in (pairs, pairs >> 32)]
        return [row.unbind() for pair in zip(*halves, strict=True) for row in pair][: len(rows)]


def _realized(rows: list[Tensor]) -> Tensor:
    """``rows`` as a matrix in memory, from which Inductor reads."""
    matrix = torch.stack(rows)
    return matrix.as_strided(matrix.shape, matrix.stride())


def _marks(grads: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Which gradients are there, made on the device; None if all are."""
    runs = [(there, len(list(run))) for there, run in groupby(grad is not None for grad in grads)]
    if runs == [(True, len(grads))]:
        return None
    return torch.cat([torch.full((count,), there, device=device) for there, count in runs])
