"""The lowering of accelerators through torch.compile and Inductor: a launch updates a list of tensors where they are.

A list has a fixed number of tensors of any sizes, so that one kernel per :class:`KernelKey` serves every list of the
process: neither the number of tensors, nor their shapes, nor which of them have gradients compile anything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.arranged import PACKED, UPDATE, Kernel, Part
from compiled_optim.lowering.torch_ops.coefficient_graph import CoefficientGraph
from compiled_optim.lowering.torch_ops.inductor import InductorLowering
from compiled_optim.lowering.torch_ops.inlined import Lists
from compiled_optim.lowering.torch_ops.lists import programs
from compiled_optim.lowering.torch_ops.recent import Recent
from compiled_optim.memory.layout import MemoryOrder, compute_dtype, flat, real_numel, scalar_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.kernel_key import KernelKey
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.bits import GROUP
from compiled_optim.torch_compiler import CompiledGraph, compile_graph, without_memory
from compiled_optim.torch_internals import let_compilers_trace

COUNT = 16  # tensors in a list; those that are missing at its end are stood in for

_LISTS, _LISTS_OF_ROWS = "lists", "lists of rows"
_ALIGNED = 16  # elements in a row, where no group says otherwise, of which code knows that they are whole vectors

_OPTIONS = {"combo_kernel_max_num_args": 1 << 20}  # a list is one kernel, however many tensors and coefficients it reads
_kernels: dict[KernelKey, Kernel | str] = {}  # or why there is none
_serial = itertools.count()


class ListLowering(InductorLowering):
    """Runs the step of one plan on an accelerator: a small graph evaluates the coefficients, then each list is a launch."""

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping, log)
        self._stage = self._graph = CoefficientGraph(plan, clipping, log)

    @property
    def is_compiled(self) -> bool:
        return self._graph.is_compiled and super().is_compiled

    def compile(self) -> None:
        self._graph.compile()
        super().compile()

    def _arrangement(self, param: Tensor) -> str:
        if self.plan.grouped_buffers:
            return PACKED if param.numel() % GROUP else _LISTS_OF_ROWS
        return _LISTS if real_numel(param) % _ALIGNED else _LISTS_OF_ROWS

    def _part(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> Part:
        return Listed(plan, positions, key) if _is_listed(key) else super()._part(plan, positions, key)

    def _kernel(self, key: KernelKey, names: Sequence[str]) -> Kernel:
        if not _is_listed(key):
            return super()._kernel(key, names)
        return self._log.obtain_or_fall_back(_kernels, key, names, _make, _functions)


class Listed:
    """Tensors updated where they are, in lists of ``COUNT``, as views in memory order: 1-D, or rows that are whole."""

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> None:
        # Tensors of similar sizes share a list, whatever their order.
        self.positions = tuple(sorted(positions, key=lambda i: -plan.members[i].param.numel()))
        self.key = key
        self.kernel: Kernel | None = None
        members = [plan.members[i] for i in self.positions]
        self._layouts = [MemoryOrder(m.param) for m in members]
        for member, layout in zip(members, self._layouts, strict=True):
            for name in plan.buffers:
                grouped = name in plan.grouped_buffers
                member.put(name, layout.arranged_state(member.entries[name], grouped=grouped))
        self._rows = _row_shapes(key)
        written = [
            (lay.target, *(m.entries[n] for n in plan.buffers)) for m, lay in zip(members, self._layouts, strict=True)
        ]
        self._written = [[flat(t).view(-1, *row) for t, row in zip(ts, self._rows, strict=True)] for ts in written]
        self._sizes = [len(tensors[0]) for tensors in self._written]
        self._stand_ins = [torch.zeros(1, *row, dtype=d, device=plan.device) for row, d in _kinds(key)]
        self._columns: Recent[tuple[int, ...], Tensor] = Recent(256)

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        assert self.kernel is not None
        for here, tensors in self._lists(grads, coefficients):
            self.kernel[UPDATE](self._sizes_of(here), tensors)
            for k in here:
                self._layouts[k].store()

    def sum_means(self, stage: int, grads: Sequence[Tensor | None], coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors of the plan), what a stage of the rule's means is over each tensor."""
        assert self.kernel is not None
        for here, tensors in self._lists(grads, coefficients):
            found = self.kernel[stage](self._sizes_of(here), tensors)
            for place, k in enumerate(here):  # torch adds up many numbers on many processors, whatever their number
                sums[:, self.positions[k]] = torch.stack([e.sum(dtype=sums.dtype) for e in found[place::COUNT]])

    def _sizes_of(self, here: Sequence[int]) -> list[int]:
        return [*(self._sizes[k] for k in here), *[1] * (COUNT - len(here))]

    def _lists(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> Iterator[tuple[Sequence[int], list[Tensor]]]:
        """The tensors that have a gradient, list by list: which of them, and what a kernel takes."""
        present = tuple(k for k, i in enumerate(self.positions) if grads[i] is not None)
        if not present:
            return
        rows = coefficients.t().index_select(0, self._columns.get(present, self._columns_of))
        for start in range(0, len(present), COUNT):
            here = present[start : start + COUNT]
            tensors = [self._tensors(k, grads) for k in here]
            tensors += [self._stand_ins] * (COUNT - len(here))
            yield here, [*itertools.chain(*zip(*tensors, strict=True)), rows[start : start + COUNT]]

    def _tensors(self, k: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        grad, layout = grads[self.positions[k]], self._layouts[k]
        assert grad is not None
        layout.load()
        target, *buffers = self._written[k]
        return [target, flat(layout.arranged(grad)).view(-1, *self._rows[0]), *buffers]

    def _columns_of(self, present: tuple[int, ...]) -> Tensor:
        """The positions of those ``present``, and then some position, up to a whole number of lists."""
        positions = [self.positions[k] for k in present]
        return torch.tensor(positions + positions[:1] * (-len(positions) % COUNT), device=self._stand_ins[0].device)


def _is_listed(key: KernelKey) -> bool:
    return key.arrangement in (_LISTS, _LISTS_OF_ROWS)


def _row_shapes(key: KernelKey) -> list[tuple[int, ...]]:
    """The shapes of a row of the parameter and of each buffer."""
    grouped = key.rule.grouped_buffers(dict(key.statics))
    columns = 0 if key.arrangement == _LISTS else GROUP if grouped else _ALIGNED
    row: tuple[int, ...] = (columns,) if columns else ()
    return [row, *((columns // GROUP,) if b in grouped else row for b in key.rule.present_buffers(dict(key.statics)))]


def _kinds(key: KernelKey) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape of a row and the dtype of the parameter, the gradient and each buffer."""
    row, *rest = _row_shapes(key)
    return list(zip((row, row, *rest), key.dtypes, strict=True))


def _make(key: KernelKey) -> Kernel | str:
    graphs: dict[int, Callable[..., Any]] = {}
    sizes = [1024 + 16 * i for i in range(COUNT)]
    for stage, run in _functions(key).items():
        with without_memory():
            tensors = [
                torch.zeros(size, *row, dtype=dtype, device=key.device) for row, dtype in _kinds(key) for size in sizes
            ]
            numbers = 2 + len(key.rule.number_names(dict(key.statics))[stage])
            tensors.append(torch.zeros(COUNT, numbers, dtype=scalar_dtype(torch.device(key.device)), device=key.device))
            dynamic = [[0]] * (len(tensors) - 1) + [[]]
            graph = compile_graph(_compilable(key, run), tensors, dynamic, _OPTIONS, from_one=True)
        if isinstance(graph, str):
            return graph
        graphs[stage] = functools.partial(_run, graph, sizes)
    return graphs


def _run(graph: CompiledGraph, example: Sequence[int], sizes: Sequence[int], tensors: list[Tensor]) -> Any:
    return graph.run(dict(zip(example, sizes, strict=True)), tensors)


def _compilable(key: KernelKey, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors with a code object and a name of its own, of which Dynamo does not trace what it calls.

    Dynamo's recompile limit counts per code object, and it remembers the shapes it saw per name.
    """

    def traced(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run((), tensors)
        return results

    def kernel(*tensors: Tensor) -> tuple[Tensor, ...]:
        return traced(list(tensors))

    let_compilers_trace(traced)
    kernel.__code__ = kernel.__code__.replace(co_name=f"{key.rule.name}_list_{next(_serial)}")
    return kernel


def _functions(key: KernelKey) -> Kernel:
    """The functions of sizes and tensors by stage, uncompiled."""
    stages = key.rule.mean_stages(dict(key.statics))
    return {UPDATE: functools.partial(_update, key), **{s: functools.partial(_expressions, key, s) for s in stages}}


def _update(key: KernelKey, sizes: Sequence[int], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    lists, program, grads, scales, numbers = _given(key, UPDATE, tensors)
    lists.update([program], grads, scales, numbers)
    return ()


def _expressions(key: KernelKey, stage: int, sizes: Sequence[int], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """For each expression of a stage of the rule's means, what it is over each tensor."""
    lists, program, grads, scales, numbers = _given(key, stage, tensors)
    values = lists.values(grads, scales, numbers)
    found = program.run(values).values()
    whole = [[e.expand_as(p) for e, p in zip(es, values["param"], strict=True)] for es in found]
    return tuple(e for es in whole for e in torch._foreach_mul(es, 1.0))


def _given(key: KernelKey, stage: int, tensors: list[Tensor]) -> tuple[Any, ...]:
    *by_kind, columns = (tensors[i : i + COUNT] for i in range(0, len(tensors), COUNT))
    params, grads, *buffers = by_kind
    dtype = compute_dtype(params[0].dtype)
    scales, skips, *numbers = [list(c.to(dtype).unbind()) for c in columns[0].unbind(1)]
    statics = dict(key.statics)
    program = programs(key.rule, tuple(statics.items()), True)[stage]
    return Lists(key.rule, statics, [params, *buffers], skips), program, grads, scales, numbers
