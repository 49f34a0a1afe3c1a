"""The lowering through Inductor, the compiler of torch.compile: C++ on a CPU and Triton on a GPU.

A step that is called updates each list of tensors with one launch. A list has a fixed number of tensors of any sizes, which
are updated in place. So one kernel per :class:`KernelKey` serves every list of the process: neither the number of tensors,
nor their shapes, nor the set of gradients cause a recompile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering import list_program
from compiled_optim.lowering.coefficients import TorchCoefficients, evaluated
from compiled_optim.lowering.list_program import Lists, in_lists, programs, sum_of
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.memory.layout import compute_dtype, flat, real_numel, scalar_dtype
from compiled_optim.memory.torch_compiler import ListFunction, compiled
from compiled_optim.plan.clipping import NAMES
from compiled_optim.plan.compilations import LISTS, LISTS_OF_ROWS, CompilationLog, KernelKey, coefficient_key, kernel_key
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.formats import GROUP
from compiled_optim.state import filled

StageCode: TypeAlias = Mapping[int, ListFunction]
"""The code of one key: for each stage of the rule's reductions, and for the update."""

UPDATE = -1  # the stage of a kernel that updates, or evaluates coefficients

COUNT, COUNT_UNFUSED = 16, 4
"""The tensors in a list if Inductor makes one kernel of a list, and if it makes a loop for each of its tensors."""

_ALIGNED = 16  # the row length of ungrouped tensors: fixed, so that Inductor can vectorize
_TENSORS, _GROUPS = 7, 3  # sizes to compile coefficients with

_INDICES = (1 << 31) - (1 << 16)
"""The most elements for the 32-bit indices of Inductor's code for accelerators; those of the last block must fit, too."""

OPTIONS = {"cpp.dynamic_threads": True}  # follow torch.set_num_threads
_LIST_OPTIONS = {"combo_kernel_max_num_args": 1 << 20}  # a list is one kernel, however much it reads
_kernels: dict[KernelKey, StageCode | str] = {}  # or the reason if none compiles


def fits_indices(device: torch.device, elements: int) -> bool:
    """Return True if Inductor's code for ``device`` can index so many elements."""
    return device.type == "cpu" or elements <= _INDICES


def say_too_large(log: CompilationLog, name: str) -> None:
    """Record that the parameter ``name`` runs uncompiled because of its size."""
    log.fall_back(
        f"'{name}' is updated with plain torch operations: it has {_INDICES} elements or more",
        "a step takes longer, and more memory; split the parameter",
    )


class Vectors:
    """A member's parameter, gradient and buffers as vectors of real numbers, in the order of the parameter's memory.

    They share the tensors' memory, with two exceptions. A parameter whose memory has gaps is copied. If the rule has numbers
    for groups of elements and the last group is incomplete, they are copies, padded to the end of the group.
    """

    def __init__(self, plan: Plan, member: Member) -> None:
        self._order = plan.memory_order(member)
        entries = [flat(member.entries[name]) for name in plan.buffers]
        self._memory = [flat(self._order.target), *entries]
        grouped = plan.grouped_buffers
        self._fills = [bool(grouped) and name not in grouped for name in ("param", *plan.buffers)]

    def read(self, grad: Any) -> list[Tensor]:
        """Return the vectors of parameter, ``grad`` and buffers."""
        self._order.load()
        param, *buffers = (filled(t) if fills else t for t, fills in zip(self._memory, self._fills, strict=True))
        vector = flat(self._order.arranged(grad))
        return [param, filled(vector) if self._fills[0] else vector, *buffers]

    def store(self, new: Sequence[Tensor]) -> None:
        """Write the new parameter and buffers to the tensors that were read."""
        for memory, vector in zip(self._memory, new, strict=True):
            if vector is not memory:
                memory.copy_(vector[: len(memory)])
        self._order.store()


class ListLowering(Lowering):
    """The step of one plan with Inductor's kernels, or uncompiled where these cannot index a tensor's elements.

    On accelerators, where each operation is a launch, a kernel evaluates the coefficients of all tensors. If the lowering is
    not ``compiled``, it runs the operations that kernels are compiled from.
    """

    name = "inductor"
    coefficients: TorchCoefficients
    _vectors = Vectors

    def __init__(self, plan: Plan, coefficients: TorchCoefficients, log: CompilationLog, *, compiled: bool = True) -> None:
        super().__init__(plan, coefficients, log)
        self.name = "inductor" if compiled else "eager"
        positions: dict[tuple[KernelKey, bool], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.param.numel() > 0:
                positions.setdefault(self._kind(member, grad_dtype), []).append(i)
        self._parts = []
        for (key, fits), where in positions.items():
            part = KernelLists(plan, where, key, self._vectors)
            if compiled and not fits:
                say_too_large(log, plan.members[part.positions[0]].name)
            part.kernel = None if compiled and fits else uncompiled(key)
            self._parts.append(part)
        self._compiles_coefficients = compiled and list_program.fuses_lists(plan.device)

    def _kind(self, member: Member, grad_dtype: torch.dtype) -> tuple[KernelKey, bool]:
        """Return the key of the kernel that updates ``member``, and True if that can index its elements."""
        plan, numel = self.plan, real_numel(member.param)
        in_rows = plan.grouped_buffers or (list_program.fuses_lists(plan.device) and numel % _ALIGNED == 0)
        key = kernel_key(plan, member, grad_dtype, LISTS_OF_ROWS if in_rows else LISTS)
        return key, fits_indices(plan.device, numel)

    def compile(self) -> None:
        if self._compiles_coefficients and self.coefficients.code is None:
            self.coefficients.code = self._obtain(_evaluation_key(self.plan), range(len(self.plan.members)))[UPDATE]
        for part in self._parts:
            if part.kernel is None:
                part.kernel = self._obtain(part.key, part.positions)

    def _obtain(self, key: KernelKey, positions: Sequence[int]) -> StageCode:
        names = [self.plan.members[i].name for i in positions]
        return self._log.obtain_or_fall_back(_kernels, key, names, _make, uncompiled)

    def _reduce(self, stage: int) -> Tensor:
        sums = self.coefficients.sums(self._stages[stage])
        for part in self._parts:
            part.reduce(stage, self._grads, self.coefficients.rows, sums)
        return sums

    def _update(self) -> None:
        for part in self._parts:
            part.update(self._grads, self.coefficients.rows)


class KernelLists:
    """Tensors of a plan, at ``positions``, that share a kernel, which updates the ``vectors`` of each."""

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey, vectors: type[Vectors]) -> None:
        # Tensors of similar sizes share a list, in any order.
        self.positions = tuple(sorted(positions, key=lambda i: -plan.members[i].param.numel()))
        self.key = key
        self.kernel: StageCode | None = None
        self._count = _count(key)
        self._numels = [real_numel(plan.members[i].param) for i in self.positions]
        self._vectors = [vectors(plan, plan.members[i]) for i in self.positions]
        columns_of = functools.partial(_columns_of, self.positions, self._count, key.device)
        self._columns_of = functools.lru_cache(256)(columns_of)
        # Padding of the last list.
        self._stand_ins = [torch.zeros(1, *row, dtype=dtype, device=key.device) for row, dtype in _kinds(key)]

    def update(self, grads: Sequence[Any], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        for here, tensors, _ in self._run(UPDATE, grads, coefficients):
            for k, (param, _, *buffers) in zip(here, tensors, strict=True):
                self._vectors[k].store([param, *buffers])

    def reduce(self, stage: int, grads: Sequence[Any], coefficients: Tensor, sums: Tensor) -> None:
        """Write a stage's sums over each tensor to ``sums``, (expressions, tensors of the plan)."""
        for here, _, results in self._run(stage, grads, coefficients):
            for j, k in enumerate(here):  # in torch, which sums in parallel at any count
                of_tensor = [sum_of(e, self._numels[k], sums.dtype) for e in results[j :: self._count]]
                sums[:, self.positions[k]] = torch.stack(of_tensor)

    def _run(
        self, stage: int, grads: Sequence[Any], coefficients: Tensor
    ) -> Iterator[tuple[Sequence[int], list[list[Tensor]], Sequence[Tensor]]]:
        """Run a stage on each list. Yield the indices of its tensors, the kernel's arguments for each, and its results."""
        assert self.kernel is not None
        present = tuple(k for k, i in enumerate(self.positions) if grads[i] is not None and grads[i].numel())
        if not present:
            return
        rows = coefficients.t().index_select(0, self._columns_of(present))
        for start in range(0, len(present), self._count):
            here = present[start : start + self._count]
            tensors = [self._vectors[k].read(grads[self.positions[k]]) for k in here]
            shaped = [[t.view(-1, *s.shape[1:]) for t, s in zip(each, self._stand_ins, strict=True)] for each in tensors]
            shaped += [self._stand_ins] * (self._count - len(here))
            arguments = [*itertools.chain(*zip(*shaped, strict=True)), rows[start : start + self._count]]
            yield here, tensors, self.kernel[stage](arguments)


def _columns_of(positions: Sequence[int], count: int, device: str, present: Sequence[int]) -> Tensor:
    """Return the ``positions`` of gradients (``present``), padded with one of them to a multiple of ``count``."""
    columns = [positions[k] for k in present]
    return torch.tensor(columns + columns[:1] * (-len(columns) % count), device=device)


def _evaluation_key(plan: Plan) -> KernelKey:
    """Return the key of the kernel that evaluates coefficients, for any number of tensors and groups."""
    # This code is the same for hyperparameters that are 0.
    statics = tuple((k, v) for k, v in plan.statics.items() if k not in plan.rule.structural_hypers)
    return dataclasses.replace(coefficient_key(plan), statics=statics, device=str(plan.device))


def _count(key: KernelKey) -> int:
    return COUNT if list_program.fuses_lists(torch.device(key.device)) else COUNT_UNFUSED


@functools.cache
def _kinds(key: KernelKey) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape of a row and the dtype of the parameter, the gradient and each buffer."""
    statics = dict(key.statics)
    grouped = key.rule.grouped_buffers(statics)
    columns = 0 if key.arrangement == LISTS else GROUP if grouped else _ALIGNED
    row: tuple[int, ...] = (columns,) if columns else ()
    rows = [row, row, *((columns // GROUP,) if b in grouped else row for b in key.rule.present_buffers(statics))]
    return list(zip(rows, key.dtypes, strict=True))


def _make(key: KernelKey) -> StageCode | str:
    codes: dict[int, ListFunction] = {}
    options = _LIST_OPTIONS if list_program.fuses_lists(torch.device(key.device)) else OPTIONS
    sizes = [1024 + 16 * i for i in range(_count(key))] if key.updates else [_TENSORS, _GROUPS]
    for stage, function in uncompiled(key).items():
        code = compiled(function, *_examples(key, stage, sizes), key.device, options)
        if isinstance(code, str):
            return code
        codes[stage] = code
    return codes


def _examples(key: KernelKey, stage: int, sizes: Sequence[int]) -> tuple[list[Tensor], list[list[int]]]:
    """Return meta tensors to compile a stage with, and the dimensions of each that vary."""
    statics, wide = dict(key.statics), scalar_dtype(torch.device(key.device))
    if key.updates:
        kinds = [((size, *row), dtype) for row, dtype in _kinds(key) for size in sizes]
        numbers = 2 + len(key.rule.number_names(statics)[stage])
        return _on_meta([*kinds, ((len(sizes), numbers), wide)]), [[0]] * len(kinds) + [[]]
    hypers = sum(h.length for h in key.rule.present_hypers(statics))
    rows = ((1 + len(key.rule.scalars), _TENSORS), (_GROUPS, hypers), (1 + len(key.rule.inputs(statics)), _TENSORS))
    kinds = [*((shape, wide) for shape in rows), ((_TENSORS,), torch.int64), ((_TENSORS,), torch.bool)]
    kinds += [((), wide) for _ in ("total", *NAMES)]
    return _on_meta(kinds), [[1], [0], [1], [0], [0]] + [[]] * (1 + len(NAMES))


def _on_meta(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]


def uncompiled(key: KernelKey) -> StageCode:
    """Return the functions of tensors by stage, uncompiled."""
    if not key.updates:
        return {UPDATE: functools.partial(_evaluate, key)}
    return {stage: functools.partial(_run_lists, key, stage) for stage in (UPDATE, *key.rule.stages(dict(key.statics)))}


def _run_lists(key: KernelKey, stage: int, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Update the tensors, or return the elements of each expression of a stage of reductions."""
    params, grads, *buffers, (columns,) = in_lists(tensors, _count(key))
    dtype = compute_dtype(params[0].dtype)
    scales, skips, *numbers = [list(c.to(dtype).unbind()) for c in columns.unbind(1)]
    of_rule = programs(key.rule, key.statics, list_program.fuses_lists(torch.device(key.device)))
    update = Lists(of_rule, [params, *buffers], skips)
    values = update.values(grads, scales, numbers)
    if stage == UPDATE:
        update.update(values)
        return ()
    return tuple(e for es in update.expressions(stage, values) for e in torch._foreach_mul(es, 1.0))


def _evaluate(key: KernelKey, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Update the scalars. Return the coefficients and the outcome."""
    scalars, table, constants, group_index, present, total, *clipping = tensors
    statics, hypers = dict(key.statics), table[group_index].unbind(1)
    rows, new, outcome = evaluated(key.rule, statics, scalars, constants, group_index, hypers, clipping, total, present)
    coefficients = torch.stack(rows)
    scalars.copy_(new)
    assert outcome is not None
    return coefficients, outcome
