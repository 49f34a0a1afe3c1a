"""The lowering through torch.compile and Inductor, C++ on a CPU and Triton on a GPU: a launch updates a list of tensors.

A list has a fixed number of tensors of any sizes, updated where they are. So one kernel per :class:`KernelKey` serves every
list of the process: neither the number of tensors, nor their shapes, nor which of them have gradients compile anything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops import lists
from compiled_optim.lowering.torch_ops.coefficients import CoefficientGraph
from compiled_optim.lowering.torch_ops.lists import Lists, programs
from compiled_optim.lowering.torch_ops.torch_lowering import Recent, TorchLowering, Vectors
from compiled_optim.memory.layout import compute_dtype, real_numel, scalar_dtype
from compiled_optim.memory.torch_compiler import CompiledGraph, obtain_graph
from compiled_optim.memory.torch_internals import let_compilers_trace
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog, KernelKey, kernel_key
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.bits import GROUP

Kernel: TypeAlias = Mapping[int, Callable[[Sequence[int], list[Tensor]], Any]]
"""The code of one key, of the tensors' sizes and the tensors: the rule's reductions by stage, and the update."""

UPDATE = -1  # what stands for a stage where a kernel updates

COUNT, COUNT_UNFUSED = 16, 4
"""Tensors in a list, where Inductor makes one kernel of a list and where it makes a loop for each of its tensors."""

LISTS, LISTS_OF_ROWS = "lists", "lists of rows"  # arrangements of tensors
_ALIGNED = 16  # elements in a row, where no group says otherwise, of which code knows that they are whole vectors

_INDICES = (1 << 31) - (1 << 16)
"""How many elements code for an accelerator tells apart that was made for few: the last block's indices have 32 bits too."""

OPTIONS = {"cpp.dynamic_threads": True}  # follow torch.set_num_threads
_LIST_OPTIONS = {"combo_kernel_max_num_args": 1 << 20}  # a list is one kernel, whatever it reads
_kernels: dict[KernelKey, Kernel | str] = {}  # or why there is none
_serial = itertools.count()


def obtain_kernel(log: CompilationLog, key: KernelKey, names: Sequence[str]) -> Kernel:
    """The process's kernel of ``key``, for the parameters ``names`` of the optimizer that keeps ``log``."""
    return log.obtain_or_fall_back(_kernels, key, names, _make, uncompiled)


def fits_indices(device: torch.device, elements: int) -> bool:
    """Whether Inductor's code for ``device`` can count so many elements."""
    return device.type == "cpu" or elements <= _INDICES


def say_too_large(log: CompilationLog, name: str) -> None:
    """Record that the parameter ``name`` runs uncompiled because of its size."""
    log.fall_back(
        f"'{name}' is updated with plain torch operations: it has {_INDICES} elements or more",
        "a step takes longer, and more memory; split the parameter",
    )


class InductorLowering(TorchLowering):
    """Runs the step of one plan with Inductor's kernels, or without where these cannot count a tensor's elements.

    On accelerators, where each operation is a launch, a graph evaluates the coefficients.
    """

    name = "inductor"

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping)
        self._log = log
        if lists.fuses_lists(plan.device):
            self._stage = CoefficientGraph(plan, clipping, log)
        positions: dict[tuple[KernelKey, bool], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.param.numel() > 0:
                numel = real_numel(member.param)
                in_rows = plan.grouped_buffers or (lists.fuses_lists(plan.device) and numel % _ALIGNED == 0)
                key = kernel_key(plan, member, grad_dtype, LISTS_OF_ROWS if in_rows else LISTS)
                positions.setdefault((key, fits_indices(plan.device, numel)), []).append(i)
        self._parts = [Part(plan, where, key, fits=fits) for (key, fits), where in positions.items()]

    def compile(self) -> None:
        self._stage.compile()
        for part in self._parts:
            if part.kernel is None:
                names = [self.plan.members[i].name for i in part.positions]
                if not part.fits:
                    say_too_large(self._log, names[0])
                kernel = obtain_kernel(self._log, part.key, names) if part.fits else uncompiled(part.key)
                part.kernel = ListKernel(part.key, kernel)

    @property
    def is_compiled(self) -> bool:
        return self._stage.is_compiled and all(part.kernel is not None for part in self._parts)

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        coefficients = yield from self._advance_and_reduce()
        for part in self._parts:
            part.step(self._grads, coefficients)

    def _sum_expressions(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        for part in self._parts:
            part.sum_expressions(stage, self._grads, coefficients, sums)


class Part:
    """Tensors of a plan, at ``positions``, that share a kernel, as vectors in memory order or as rows that are whole."""

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey, *, fits: bool) -> None:
        # Tensors of similar sizes share a list, whatever their order.
        self.positions = tuple(sorted(positions, key=lambda i: -plan.members[i].param.numel()))
        self.key = key
        self.fits = fits
        self.kernel: ListKernel | None = None
        self._count = _count(key)
        self._vectors = [Vectors(plan, plan.members[i]) for i in self.positions]
        self._numels = [real_numel(plan.members[i].param) for i in self.positions]
        self._columns: Recent[tuple[int, ...], Tensor] = Recent(256)

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        assert self.kernel is not None
        for here, tensors, rows in self._lists(grads, coefficients):
            self.kernel.run(UPDATE, tensors, rows)
            for k, own in zip(here, tensors, strict=True):
                del own[1]  # the gradient
                self._vectors[k].store(own)

    def sum_expressions(self, stage: int, grads: Sequence[Tensor | None], coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors of the plan), what a stage of reductions is over each tensor."""
        assert self.kernel is not None
        for here, tensors, rows in self._lists(grads, coefficients):
            found = self.kernel.run(stage, tensors, rows)
            for place, k in enumerate(here):  # torch adds up many numbers on many processors, whatever their number
                own = [e.view(-1)[: self._numels[k]].sum(dtype=sums.dtype) for e in found[place :: self._count]]
                sums[:, self.positions[k]] = torch.stack(own)

    def _lists(
        self, grads: Sequence[Tensor | None], coefficients: Tensor
    ) -> Iterator[tuple[Sequence[int], list[list[Tensor]], Tensor]]:
        """The tensors that have a gradient, list by list: which of them, what a kernel takes of each, coefficients."""
        present = tuple(k for k, i in enumerate(self.positions) if grads[i] is not None)
        if not present:
            return
        rows = coefficients.t().index_select(0, self._columns.get(present, self._columns_of))
        for start in range(0, len(present), self._count):
            here = present[start : start + self._count]
            yield here, [self._read(k, grads) for k in here], rows[start : start + self._count]

    def _read(self, k: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        grad = grads[self.positions[k]]
        assert grad is not None
        return self._vectors[k].read(grad)

    def _columns_of(self, present: tuple[int, ...]) -> Tensor:
        """The positions of those ``present``, and then some position, up to a whole number of lists."""
        positions = [self.positions[k] for k in present]
        return torch.tensor(positions + positions[:1] * (-len(positions) % self._count), device=self._vectors[0].device)


class ListKernel:
    """A kernel with what stands in for the tensors that a list lacks."""

    def __init__(self, key: KernelKey, kernel: Kernel) -> None:
        self._kernel = kernel
        self._rows = [row for row, _ in _kinds(key)]
        self._stand_ins = [torch.zeros(1, *row, dtype=dtype, device=key.device) for row, dtype in _kinds(key)]
        self.count = _count(key)

    def run(self, stage: int, tensors: Sequence[Sequence[Tensor]], rows: Tensor) -> Sequence[Tensor]:
        """Run a stage on the vectors of at most ``count`` tensors, with ``rows`` of coefficients, (count, coefficients)."""
        shaped = [[t.view(-1, *row) for t, row in zip(own, self._rows, strict=True)] for own in tensors]
        shaped += [self._stand_ins] * (self.count - len(shaped))
        sizes = [len(own[0]) for own in shaped]
        found: Sequence[Tensor] = self._kernel[stage](sizes, [*itertools.chain(*zip(*shaped, strict=True)), rows])
        return found


def _count(key: KernelKey) -> int:
    return COUNT if lists.fuses_lists(torch.device(key.device)) else COUNT_UNFUSED


@functools.cache
def _kinds(key: KernelKey) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape of a row and the dtype of the parameter, the gradient and each buffer."""
    statics = dict(key.statics)
    grouped = key.rule.grouped_buffers(statics)
    columns = 0 if key.arrangement == LISTS else GROUP if grouped else _ALIGNED
    row: tuple[int, ...] = (columns,) if columns else ()
    rows = [row, row, *((columns // GROUP,) if b in grouped else row for b in key.rule.present_buffers(statics))]
    return list(zip(rows, key.dtypes, strict=True))


def _make(key: KernelKey) -> Kernel | str:
    graphs: dict[int, Callable[..., Any]] = {}
    options = _LIST_OPTIONS if lists.fuses_lists(torch.device(key.device)) else OPTIONS
    sizes = [1024 + 16 * i for i in range(_count(key))]
    for stage, run in uncompiled(key).items():
        kernel, traced = _compilable(key, run)
        example = functools.partial(_example, key, stage, sizes, traced)
        graph = obtain_graph(kernel, example, key.device, options, from_one=True)
        if isinstance(graph, str):
            return graph
        graphs[stage] = functools.partial(_run, graph, sizes)
    return graphs


def _example(
    key: KernelKey, stage: int, sizes: Sequence[int], traced: Callable[..., Any], device: str
) -> tuple[list[Tensor], list[list[int]]]:
    """Tensors to compile a stage with, and the dimensions of each that vary: the first, or none.

    The compiler is told here how to trace, since that imports it: code that is kept needs none.
    """
    if device != "meta":
        let_compilers_trace(traced)
    tensors = [torch.zeros(size, *row, dtype=dtype, device=device) for row, dtype in _kinds(key) for size in sizes]
    numbers = 2 + len(key.rule.number_names(dict(key.statics))[stage])
    columns = torch.zeros(len(sizes), numbers, dtype=scalar_dtype(torch.device(device)), device=device)
    return [*tensors, columns], [[0]] * len(tensors) + [[]]


def _run(graph: CompiledGraph, example: Sequence[int], sizes: Sequence[int], tensors: list[Tensor]) -> Any:
    return graph.run(dict(zip(example, sizes, strict=True)), tensors)


def _compilable(key: KernelKey, run: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function of tensors with a code object and a name of its own, and what it calls, which Dynamo is not to trace.

    Dynamo's recompile limit counts per code object, and it remembers the shapes it saw per name.
    """

    def traced(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run((), tensors)
        return results

    def kernel(*tensors: Tensor) -> tuple[Tensor, ...]:
        return traced(list(tensors))

    kernel.__code__ = kernel.__code__.replace(co_name=f"{key.rule.name}_list_{next(_serial)}")
    return kernel, traced


def uncompiled(key: KernelKey) -> Kernel:
    """The functions of sizes and tensors by stage, uncompiled."""
    stages = key.rule.stages(dict(key.statics))
    return {UPDATE: functools.partial(_update, key), **{s: functools.partial(_expressions, key, s) for s in stages}}


def _update(key: KernelKey, sizes: Sequence[int], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    given, program, grads, scales, numbers = _given(key, UPDATE, tensors)
    given.update([program], grads, scales, numbers)
    return ()


def _expressions(key: KernelKey, stage: int, sizes: Sequence[int], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """For each expression of a stage of the rule's reductions, what it is over each tensor."""
    given, program, grads, scales, numbers = _given(key, stage, tensors)
    values = given.values(grads, scales, numbers)
    found = program.run(values).values()
    full = [[e.expand_as(p) for e, p in zip(es, values["param"], strict=True)] for es in found]
    return tuple(e for es in full for e in torch._foreach_mul(es, 1.0))


def _given(key: KernelKey, stage: int, tensors: list[Tensor]) -> tuple[Any, ...]:
    count, statics = _count(key), dict(key.statics)
    *by_kind, columns = (tensors[i : i + count] for i in range(0, len(tensors), count))
    params, grads, *buffers = by_kind
    dtype = compute_dtype(params[0].dtype)
    scales, skips, *numbers = [list(c.to(dtype).unbind()) for c in columns[0].unbind(1)]
    program = programs(key.rule, tuple(statics.items()), lists.fuses_lists(torch.device(key.device)))[stage]
    return Lists(key.rule, statics, [params, *buffers], skips), program, grads, scales, numbers
