"""A step as operations of the graph that is being traced, which a compiler fuses with those around them.

Nothing of it runs on the host when the compiled code does: whatever the step reads and writes is an argument. Dynamo reads
these tensors from the optimizer whenever compiled code is called, and hands them over. It does not trace the step itself but
calls it on stand-ins, as does whoever compiles the graph; so the step is written like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import is_

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops import lists
from compiled_optim.lowering.torch_ops.coefficients import CoefficientStage, Given, note_outcome
from compiled_optim.lowering.torch_ops.lists import Lists, programs
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.memory.torch_internals import compiles_means_with_lists
from compiled_optim.plan.clipping import CHOSEN, Clipping, square_sum
from compiled_optim.plan.plan import Plan
from compiled_optim.plan.schedule import Schedules
from compiled_optim.rule.bits import GROUP


def obstacle(plans: Sequence[Plan], clipping: Clipping) -> str:
    """Why the step of ``plans`` cannot be inlined; empty if it can."""
    reasons = {
        "there are no parameters": not plans,
        "parameters are on several devices": len({plan.device for plan in plans}) > 1,
        "the norm of gradients is taken over several processes": clipping.measures_norm and any(p.sharded for p in plans),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    return reason or next(filter(None, map(_obstacle, plans)), "")


def _obstacle(plan: Plan) -> str:
    """:func:`obstacle` of one plan."""
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


class InlinedStep:
    """The step of all plans as a function of tensors, where :func:`obstacle` finds nothing.

    Attributes:
        tensors: those that it reads and writes besides parameters, gradients, hyperparameters and clipping.
        hypers: which hyperparameters it reads or writes: the indices of their groups, and their names.
        clipping: the numbers called :data:`~compiled_optim.plan.clipping.NAMES`, as vectors of one element; those of a
            gradient scaler are neutral, since each step that one calls has tensors of its own.
        clips: whether users assigned one of them, so that steps without a scaler use them too.
    """

    def __init__(
        self, plans: Sequence[Plan], positions: Sequence[Sequence[int]], clipping: Clipping, schedules: Schedules
    ) -> None:
        self._plans = [_InlinedPlan(plan, clipping) for plan in plans]
        self._positions = positions
        self._schedules = schedules
        self.clips = clipping.measures_norm
        self._chosen = clipping.chosen
        used = [where for plan in self._plans for where in plan.hypers]
        self.hypers = list(dict.fromkeys([*used, *schedules.scheduled]))
        self.clipping = [t.view(1) for t in clipping.tensors(plans[0].device, CHOSEN)]
        self._outcome = clipping.outcome(plans[0].device)
        self.tensors = [self._outcome, *(t for plan in self._plans for t in plan.tensors)]

    def follows(self, clipping: Clipping) -> bool:
        """Whether what was assigned is in the tensors that were assigned when this was made."""
        return all(map(is_, clipping.chosen, self._chosen))

    def run(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        tensors: Sequence[Tensor],
        hypers: Sequence[Sequence[Tensor]],
        clipping: Sequence[Tensor],
    ) -> None:
        """Update those of ``params`` that have a gradient.

        There is a parameter and an entry of ``grads`` for each of the optimizer's parameters. The others stand for the
        attributes of these names; of a hyperparameter there are one or more numbers. ``clipping`` is empty where gradients
        are used as they are.
        """
        outcome, *rest = tensors
        values = dict(zip(self.hypers, hypers, strict=True))
        given = []
        for plan in self._plans:
            given.append(rest[: len(plan.tensors)])
            rest = rest[len(plan.tensors) :]
        self._schedules.write([plan.counts(own) for plan, own in zip(self._plans, given, strict=True)], values)
        total = square_sum(grads, outcome.device) if self.clips else None
        for plan, own, places in zip(self._plans, given, self._positions, strict=True):
            own_params, own_grads = [params[i] for i in places], [grads[i] for i in places]
            plan.run(own_params, own_grads, own, values, clipping, outcome, total)


class _InlinedPlan:
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
