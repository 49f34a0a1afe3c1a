"""The step of a plan as a function of tensors, whose operations a compiler sees and fuses with those around it.

Nothing of it runs on the host when the compiled code does: whatever the step reads and writes is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from compiled_optim.conversion import filled
from compiled_optim.lowering.torch_ops.coefficients import CoefficientStage, Given, note_outcome
from compiled_optim.lowering.torch_ops.lists import Values, programs
from compiled_optim.memory.layout import compute_dtype, scalar_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.bits import GROUP
from compiled_optim.rule.rule import INDEX, Rule
from compiled_optim.torch_internals import compiles_means_with_lists


def obstacle(plan: Plan) -> str:
    """Why a step of ``plan`` cannot be inlined; empty if it can."""
    rule, name = plan.rule, plan.members[0].name
    ends_early = plan.grouped_buffers and any(m.param.numel() % GROUP for m in plan.members)
    has_means = bool(rule.mean_stages(plan.statics))
    reasons = {
        f"a parameter like '{name}' ends inside of a group of elements, and Inductor loses what is there": ends_early,
        f"{rule.name} does not work element by element": rule.granularity != "element" or rule.gradients != "dense",
        f"'{name}' has no memory of its own": plan.wrapped,
        f"'{name}' shares memory with another parameter": plan.shares_memory,
        f"'{name}' has complex numbers, which Inductor does not compile": plan.members[0].param.is_complex(),
        f"{rule.name} takes means over all parts of '{name}'": plan.sharded and has_means,
        f"{rule.name} takes means, with which Inductor fails before torch 2.12": (
            has_means and InlinedPlan.fuses_lists(plan.device) and not compiles_means_with_lists()
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class InlinedPlan:
    """The step of one plan, in which :func:`obstacle` finds nothing."""

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self.plan = plan
        self._stage = CoefficientStage(plan, clipping)
        self._fuses_lists = self.fuses_lists(plan.device)
        self._programs = programs(plan.rule, tuple(plan.statics.items()), self._fuses_lists)
        buffers = [m.entries[name] for name in plan.buffers for m in plan.members]
        self.tensors = [plan.scalars, self._stage.constants, self._stage.group_index, *buffers]
        """What :meth:`run` reads and writes besides parameters, gradients, hyperparameters and clipping."""
        self.hypers = [(i, h.name) for i in sorted({m.group for m in plan.members}) for h in plan.hypers]
        """Which hyperparameters it reads: the indices of their groups, and their names."""

    @staticmethod
    def fuses_lists(device: torch.device) -> bool:
        """Whether Inductor fuses operations over lists on ``device``."""
        return device.type != "cpu"

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


class Lists:
    """One update of some tensors by a rule, under static choices.

    Args:
        targets: the parameters, and then the tensors of each buffer.
        skips: numbers that are not 0 where everything stays as it is; None where nothing does.
    """

    def __init__(
        self, rule: Rule, statics: Mapping[str, Any], targets: Sequence[list[Tensor]], skips: Sequence[Tensor] | None
    ) -> None:
        self._buffers = rule.present_buffers(statics)
        self._targets = dict(zip(("param", *self._buffers), targets, strict=True))
        self._skips = skips
        self._dtypes = [compute_dtype(p.dtype) for p in targets[0]]
        self._whole = rule.whole_buffers(statics)
        self._grouped = rule.grouped_buffers(statics)
        self._reads_index = rule.reads_index(statics)
        # Where the rule takes groups of elements: the dimensions of each parameter, by falling strides.
        self._orders = [_order(p) for p in targets[0]] if self._grouped else None

    def update(
        self, stages: Sequence[Any], grads: Sequence[Any], scales: Sequence[Any] | None, numbers: Sequence[Any]
    ) -> None:
        """Run the programs of the rule's means, and then that of its update.

        ``scales`` are factors of the gradients, ``numbers`` the rule's coefficients, each with a list over the tensors.
        """
        values = self.values(grads, scales, numbers)
        for stage in stages[:-1]:
            count = sum(name.startswith("k") for name in values)
            for expressions in stage.run(values).values():
                values[f"k{count}"] = self._means(expressions, values["param"])
                count += 1
        exact = {name for name in self._targets if self._keeps_all_bits(name)}
        stages[-1].run(values, self._store, exact)

    def values(self, grads: Sequence[Any], scales: Sequence[Any] | None, numbers: Sequence[Any]) -> Values:
        """What a program takes; the arguments are those of :meth:`update`."""
        values: Values = {"param": self._seen("param"), "grad": self._seen("grad", grads)}
        if scales is not None:
            values["grad"] = [scale * grad for scale, grad in zip(scales, values["grad"], strict=True)]
        values |= {f"buffer{i}": self._seen(name) for i, name in enumerate(self._buffers)}
        values |= {f"k{i}": list(column) for i, column in enumerate(numbers)}
        if self._reads_index:
            values[INDEX] = list(map(self._index, values["param"], self._targets["param"]))
        return values

    def _index(self, seen: Tensor, target: Tensor) -> Tensor:
        """Which element of ``target``, in the order of memory, each element of what the rule sees of it is."""
        index = torch.arange(seen.numel(), dtype=torch.int32, device=target.device)
        return index if self._orders is not None else _out_of_order(index, target, _order(target))

    def _kinds(self, name: str) -> list[torch.dtype]:
        """The dtypes in which the rule sees the tensors called ``name``."""
        return [torch.int32] * len(self._dtypes) if name in self._whole else self._dtypes

    def _keeps_all_bits(self, name: str) -> bool:
        return [target.dtype for target in self._targets[name]] == self._kinds(name)

    def _seen(self, name: str, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The targets called ``name``, or ``tensors`` in their place, as the rule sees them."""
        tensors = self._targets[name] if tensors is None else tensors
        if name in self._grouped:
            tensors = [t.reshape(-1) for t in tensors]
        elif self._orders is not None:
            tensors = [t.permute(order).reshape(-1) for t, order in zip(tensors, self._orders, strict=True)]
            tensors = [filled(t) for t in tensors] if self._grouped else tensors
        return [t.to(kind) for t, kind in zip(tensors, self._kinds(name), strict=True)]

    def _store(self, name: str, new: Sequence[Tensor]) -> list[Tensor]:
        """Store ``new`` values where nothing is skipped; what is there then, as the rule sees it."""
        targets = self._targets[name]
        if self._orders is not None and name not in self._grouped:
            new = list(map(_out_of_order, new, targets, self._orders))
        new = [n.to(t.dtype).view_as(t) for n, t in zip(new, targets, strict=True)]
        if self._skips is not None:
            new = [torch.where(skip == 0, n, t) for skip, n, t in zip(self._skips, new, targets, strict=True)]
        torch._foreach_copy_(targets, new)
        return self._seen(name)

    def _means(self, expressions: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """The mean of each expression over its parameter, which a rule sees like ``like``, without what fills up a group."""
        means = []
        for expression, seen, target, dtype in zip(expressions, like, self._targets["param"], self._dtypes, strict=True):
            own = expression.expand_as(seen).reshape(-1)[: target.numel()]
            means.append((own.sum(dtype=scalar_dtype(target.device)) / target.numel()).to(dtype))
        return means


def _order(param: Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(param.dim()), key=lambda dim: -param.stride()[dim]))


def _out_of_order(vector: Tensor, like: Tensor, order: Sequence[int]) -> Tensor:
    """A tensor of the shape of ``like`` whose elements, by dimensions in this ``order``, are those of ``vector``."""
    ordered = vector[: like.numel()].view([like.shape[dim] for dim in order])
    return ordered.permute([order.index(dim) for dim in range(len(order))])


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
