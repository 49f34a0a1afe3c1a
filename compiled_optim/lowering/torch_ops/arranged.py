"""How tensors are brought to Inductor's kernels: packed, where they are small, or in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.recent import Recent
from compiled_optim.memory.layout import MemoryOrder, compute_dtype, flat, real_numel
from compiled_optim.plan.kernel_key import KernelKey
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.bits import GROUP

Graph: TypeAlias = Callable[[Any, list[Tensor]], Any]
"""Compiled code: it takes the size of the first dimension, of lists those of each list, and the tensors."""

Kernel: TypeAlias = Mapping[int, Graph]
"""The code of one key: by stage the rule's means, whose results are elementwise or sums of rows, and the update."""

UPDATE = -1  # what stands for a stage where a kernel updates

PACKED, IN_PLACE = "packed", "in place"  # arrangements of tensors

ROW = 128  # elements in a row of packed tensors: one tensor's coefficients hold for a whole row


class Part(Protocol):
    """Some tensors of a plan, ``positions``, which share a kernel from compiling on."""

    positions: tuple[int, ...]
    key: KernelKey
    kernel: Kernel | None

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""

    def sum_means(self, stage: int, grads: Sequence[Tensor | None], coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors of the plan), what a stage of the rule's means is over each tensor."""


class Packed:
    """Tensors copied through (rows, ROW) buffers, in which each owns whole rows, in its memory order.

    One spare row at the end keeps the number of rows above one, where Inductor's code for any size begins.
    """

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        self.positions = tuple(positions)
        self.key = key
        self.kernel: Kernel | None = None
        members = [plan.members[i] for i in positions]
        self._params = [m.param.detach() for m in members]
        self._strides = [MemoryOrder(p).target.stride() for p in self._params]
        self._rows = [-(-real_numel(p) // ROW) for p in self._params]
        count = sum(self._rows) + 1
        owners = torch.tensor([*positions, positions[-1]], device="cpu")
        repeats = torch.tensor([*self._rows, 1], device="cpu")
        self._owner = owners.repeat_interleave(repeats, output_size=count).to(plan.device)
        left = [n for p in self._params for n in range(real_numel(p), 0, -ROW)]
        self._left = torch.tensor([*left, 0], device=plan.device).unsqueeze(1)
        first = [[*(n for p in self._params for n in range(0, real_numel(p), ROW)), 0]] if reads_index(key) else []
        self._first = [torch.tensor(f, dtype=torch.int32, device=plan.device).unsqueeze(1) for f in first]
        self._param, self._grad = (
            torch.zeros(count, ROW, dtype=getattr(torch, d), device=plan.device) for d in (key.param_dtype, key.grad_dtype)
        )
        self._buffers = [
            torch.zeros(count, *row, dtype=getattr(torch, d), device=plan.device)
            for row, d in zip(_row_shapes(key)[1:], key.buffer_dtypes, strict=True)
        ]
        self._param_views = self._views(self._param)
        self._grad_views = self._views(self._grad)
        self._entries = [[m.entries[name] for m in members] for name in plan.buffers]
        self._entry_views = []
        for name, packed, entries in zip(plan.buffers, self._buffers, self._entries, strict=True):
            pieces = self._pieces(packed) if name in plan.grouped_buffers else self._views(packed)
            self._entry_views.append(
                [p[: e.numel()].view_as(e) if p.dim() == 1 else p for p, e in zip(pieces, entries, strict=True)]
            )
        self._dtype = compute_dtype(self._param.dtype)
        self._subsets: Recent[tuple[int, ...], Tensor] = Recent(256)
        self._places: Recent[tuple[int, ...], tuple[Tensor, Tensor]] = Recent(256)

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        assert self.kernel is not None
        if not (here := self._here(grads)):
            return
        tensors, rows = self._packed(here, grads)
        owner = self._owner if rows is None else self._owner[rows]
        columns = coefficients.to(self._dtype).index_select(1, owner).unsqueeze(2).unbind()
        first = self._first if rows is None else [t[rows] for t in self._first]
        self.kernel[UPDATE](len(owner), [*tensors, *columns, *first])
        if rows is not None:
            for full, part in zip((self._param, *self._buffers), (tensors[0], *tensors[2:]), strict=True):
                full.index_copy_(0, rows, part)
        torch._foreach_copy_(self._of(here, self._params), self._of(here, self._param_views))
        for entries, views in zip(self._entries, self._entry_views, strict=True):
            torch._foreach_copy_(self._of(here, entries), self._of(here, views))

    def sum_means(self, stage: int, grads: Sequence[Tensor | None], coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors of the plan), what a stage of the rule's means is over each tensor."""
        assert self.kernel is not None
        if not (here := self._here(grads)):
            return
        tensors, rows = self._packed(here, grads)
        owner, left = (t if rows is None else t[rows] for t in (self._owner, self._left))
        columns = coefficients.to(self._dtype).index_select(1, owner).unsqueeze(2).unbind()
        of_rows = torch.stack(self.kernel[stage](len(owner), [*tensors, *columns, left]))
        places, positions = self._places.get(here, self._places_of)
        sums[:, positions] = of_rows.to(sums.dtype)[:, places].sum(2)

    @staticmethod
    def example(key: KernelKey, stage: int, device: str) -> tuple[list[Tensor], list[list[int]]]:
        """Tensors to compile a stage with, and the dimensions of each that vary: the first, or none."""
        rows = zip(_row_shapes(key, 2), key.dtypes, strict=True)
        tensors = [torch.zeros(64, *row, dtype=dtype, device=device) for row, dtype in rows]
        dtype = compute_dtype(tensors[0].dtype)
        tensors += [torch.ones(64, 1, dtype=dtype, device=device) for _ in columns(key, stage)]
        if stage != UPDATE or reads_index(key):
            of_rows = torch.int32 if stage == UPDATE else torch.int64
            tensors.append(torch.ones(64, 1, dtype=of_rows, device=device))
        return tensors, [[0]] * len(tensors)

    @staticmethod
    def index(param: Tensor, rest: Sequence[Tensor]) -> Tensor:
        """Which element of its tensor each is."""
        return rest[-1] + torch.arange(ROW, device=param.device).to(torch.int32)

    @staticmethod
    def sums(expressions: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
        """The sums of rows, up to where their tensors end."""
        inside = torch.arange(ROW, device=rest[-1].device) < rest[-1]
        return [torch.where(inside, expression, 0.0).sum(1) for expression in expressions]

    def _here(self, grads: Sequence[Tensor | None]) -> tuple[int, ...]:
        return tuple(k for k, i in enumerate(self.positions) if grads[i] is not None)

    def _of(self, here: tuple[int, ...], items: list[Tensor]) -> list[Tensor]:
        return items if len(here) == len(self.positions) else [items[k] for k in here]

    def _packed(self, here: tuple[int, ...], grads: Sequence[Tensor | None]) -> tuple[list[Tensor], Tensor | None]:
        """The rows of parameters, gradients and buffers of those ``here``, and which rows they are; None for all."""
        torch._foreach_copy_(self._of(here, self._param_views), self._of(here, self._params))
        for views, entries in zip(self._entry_views, self._entries, strict=True):
            torch._foreach_copy_(self._of(here, views), self._of(here, entries))
        new = [grad for i in self.positions if (grad := grads[i]) is not None]
        torch._foreach_copy_(self._of(here, self._grad_views), new)
        tensors = [self._param, self._grad, *self._buffers]
        if len(here) == len(self.positions):
            return tensors, None
        rows = self._subsets.get(here, self._rows_of)
        return [t.index_select(0, rows) for t in tensors], rows

    def _places_of(self, here: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """For each tensor ``here`` its rows among theirs, filled up with the spare row, whose sum is 0; its position."""
        ends = [0, *itertools.accumulate(self._rows[k] for k in here)]
        most = max(self._rows[k] for k in here)
        places = [[*range(start, end), *[ends[-1]] * (most - end + start)] for start, end in itertools.pairwise(ends)]
        positions = [self.positions[k] for k in here]
        return torch.tensor(places, device=self._owner.device), torch.tensor(positions, device=self._owner.device)

    def _rows_of(self, here: tuple[int, ...]) -> Tensor:
        starts = [0, *itertools.accumulate(self._rows)]
        rows = [r for k in here for r in range(starts[k], starts[k + 1])]
        return torch.tensor([*rows, starts[-1]], device=self._owner.device)

    def _pieces(self, packed: Tensor) -> list[Tensor]:
        """The rows of each tensor, one behind the other."""
        return [rows.flatten() for rows in torch.split(packed[:-1], self._rows)]

    def _views(self, packed: Tensor) -> list[Tensor]:
        pieces = zip(self._params, self._pieces(packed), strict=True)
        elements = [torch.view_as_complex(piece.view(-1, 2)) if p.is_complex() else piece for p, piece in pieces]
        triples = zip(self._params, self._strides, elements, strict=True)
        return [piece[: p.numel()].as_strided(p.shape, stride) for p, stride, piece in triples]


class InPlace:
    """Tensors updated one by one where they are, as views in memory order: 1-D, or with a row for each group."""

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        self.positions = tuple(positions)
        self.key = key
        self.kernel: Kernel | None = None
        members = [plan.members[i] for i in positions]
        self._index = torch.tensor(positions, device=plan.device)
        self._layouts = [MemoryOrder(m.param) for m in members]
        for member, layout in zip(members, self._layouts, strict=True):
            for name in plan.buffers:
                grouped = name in plan.grouped_buffers
                member.put(name, layout.arranged_state(member.entries[name], grouped=grouped))
        self._rows = _row_shapes(key)
        written = [
            (lay.target, *(m.entries[n] for n in plan.buffers)) for m, lay in zip(members, self._layouts, strict=True)
        ]
        self._written = [[_in_rows(t, row) for t, row in zip(tensors, self._rows, strict=True)] for tensors in written]
        self._dtype = compute_dtype(getattr(torch, key.param_dtype))
        count = len(columns(key, UPDATE))
        self._coefficients = torch.empty(count, len(positions), dtype=self._dtype, device=plan.device)
        self._columns = [list(column.unbind()) for column in self._coefficients.unbind(1)]

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        assert self.kernel is not None
        torch.index_select(coefficients.to(self._dtype), 1, self._index, out=self._coefficients)
        for _, layout, tensors in self._present(grads, self._columns):
            self.kernel[UPDATE](len(tensors[0]), tensors)
            layout.store()

    def sum_means(self, stage: int, grads: Sequence[Tensor | None], coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors of the plan), what a stage of the rule's means is over each tensor."""
        assert self.kernel is not None
        columns = coefficients.to(self._dtype).index_select(1, self._index).unbind(1)
        for position, _, tensors in self._present(grads, map(Tensor.unbind, columns)):
            expressions = self.kernel[stage](len(tensors[0]), tensors)
            sums[:, position] = torch.stack([e.sum(dtype=sums.dtype) for e in expressions])

    def _present(
        self, grads: Sequence[Tensor | None], columns: Iterable[Sequence[Tensor]]
    ) -> Iterator[tuple[int, MemoryOrder, list[Tensor]]]:
        """The tensors that have a gradient: their positions, their order in memory, and what a kernel takes."""
        for position, layout, (target, *buffers), column in zip(
            self.positions, self._layouts, self._written, columns, strict=True
        ):
            if (grad := grads[position]) is not None:
                layout.load()
                yield position, layout, [target, _in_rows(layout.arranged(grad), self._rows[0]), *buffers, *column]

    @staticmethod
    def example(key: KernelKey, stage: int, device: str) -> tuple[list[Tensor], list[list[int]]]:
        """As :meth:`Packed.example`."""
        rows = zip(_row_shapes(key, 2), key.dtypes, strict=True)
        tensors = [torch.zeros(64 * ROW, *row, dtype=dtype, device=device) for row, dtype in rows]
        dtype = compute_dtype(tensors[0].dtype)
        scalars = [torch.ones((), dtype=dtype, device=device) for _ in columns(key, stage)]
        return tensors + scalars, [[0]] * len(tensors) + [[]] * len(scalars)

    @staticmethod
    def index(param: Tensor, rest: Sequence[Tensor]) -> Tensor:
        """As :meth:`Packed.index`."""
        return torch.arange(param.numel(), device=param.device).to(torch.int32).view(param.shape)

    @staticmethod
    def sums(expressions: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
        """The expressions themselves: torch adds up many numbers on many processors, whatever sizes were compiled with."""
        return [expression.clone() for expression in expressions]


LAYOUTS: dict[str, type[Packed | InPlace]] = {PACKED: Packed, IN_PLACE: InPlace}


def _row_shapes(key: KernelKey, first: int = 1) -> list[tuple[int, ...]]:
    """The shapes of a row of the parameter, ``first`` times, and of each buffer. In place a row is a group or an element."""
    grouped = key.rule.grouped_buffers(dict(key.statics))
    columns = ROW if key.arrangement == PACKED else GROUP if grouped else 0
    row: tuple[int, ...] = (columns,) if columns else ()
    buffers = key.rule.present_buffers(dict(key.statics))
    return [row] * first + [(columns // GROUP,) if name in grouped else row for name in buffers]


def _in_rows(tensor: Tensor, row: tuple[int, ...]) -> Tensor:
    """A view of a dense tensor in memory order, as rows of that shape."""
    return flat(tensor).view(-1, *row)


def reads_index(key: KernelKey) -> bool:
    """Whether the update depends on which element it sees."""
    return key.rule.reads_index(dict(key.statics))


def columns(key: KernelKey, stage: int) -> tuple[str, ...]:
    """The names of the coefficients that a stage takes, one after the other."""
    return ("factor", "skip", *key.rule.number_names(dict(key.statics))[stage])
