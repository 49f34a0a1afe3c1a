"""The lowering through torch.compile and Inductor: C++ on a CPU, Triton on a GPU.

One kernel per :class:`KernelKey` serves every tensor and every optimizer of the process. Its first dimension may have any
size, so neither the number of tensors nor their shapes compile anything. Small tensors are packed: they are copied through
the rows of a few shared buffers, and one call updates them all. Large tensors are updated where they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.arranged import (
    IN_PLACE,
    LAYOUTS,
    PACKED,
    UPDATE,
    Graph,
    Kernel,
    Part,
    columns,
    reads_index,
)
from compiled_optim.lowering.torch_ops.rule_step import rule_means, rule_step
from compiled_optim.lowering.torch_ops.torch_lowering import TorchLowering
from compiled_optim.memory.kept_graph import obtain_graph
from compiled_optim.memory.layout import real_numel
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.kernel_key import KernelKey, kernel_key
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.bits import GROUP
from compiled_optim.torch_compiler import CompiledGraph

PACKED_LIMIT = 16384  # elements below which copying a tensor costs less than a call of its own

_INDICES = (1 << 31) - (1 << 16)
"""How many elements code for an accelerator tells apart that was made for few: the last block's indices have 32 bits too."""

OPTIONS = {"cpp.dynamic_threads": True}  # follow torch.set_num_threads
_kernels: dict[KernelKey, Kernel | str] = {}  # or why there is none
_serial = itertools.count()


def obtain_kernel(log: CompilationLog, key: KernelKey, names: Sequence[str]) -> Kernel:
    """The process's kernel of ``key``, for the parameters ``names`` of the optimizer that keeps ``log``."""
    return log.obtain_or_fall_back(_kernels, key, names, _make, _uncompiled)


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
    """Runs the step of one plan with Inductor's kernels, or without where these cannot count a tensor's elements."""

    name = "inductor"

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping)
        self._log = log
        positions: dict[tuple[KernelKey, bool], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.param.numel() > 0:
                fits = fits_indices(plan.device, real_numel(member.param))
                key = kernel_key(plan, member, grad_dtype, self._arrangement(member.param) if fits else IN_PLACE)
                positions.setdefault((key, fits), []).append(i)
        self._parts = {self._part(plan, where, s): fits for (s, fits), where in positions.items()}

    def _arrangement(self, param: Tensor) -> str:
        # A last group that is not whole needs memory behind it, which the rows of packed tensors have.
        is_packed = param.numel() < PACKED_LIMIT or (self.plan.grouped_buffers and param.numel() % GROUP)
        return PACKED if is_packed else IN_PLACE

    def _part(self, plan: Plan, positions: Sequence[int], key: KernelKey) -> Part:
        return LAYOUTS[key.arrangement](plan, positions, key)

    def _kernel(self, key: KernelKey, names: Sequence[str]) -> Kernel:
        return obtain_kernel(self._log, key, names)

    def compile(self) -> None:
        for part, fits in self._parts.items():
            if part.kernel is None:
                names = [self.plan.members[i].name for i in part.positions]
                if fits:
                    part.kernel = self._kernel(part.key, names)
                else:
                    say_too_large(self._log, names[0])
                    part.kernel = _uncompiled(part.key)

    @property
    def is_compiled(self) -> bool:
        return all(part.kernel is not None for part in self._parts)

    def launch(self) -> None:
        coefficients, _ = self._advance()
        for part in self._parts:
            part.step(self._grads, coefficients)

    def _sum_means(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        for part in self._parts:
            part.sum_means(stage, self._grads, coefficients, sums)


def _make(key: KernelKey) -> Kernel | str:
    graphs: dict[int, Graph] = {}
    for stage, function in _functions(key).items():
        example = functools.partial(LAYOUTS[key.arrangement].example, key, stage)
        graph = obtain_graph(function, example, key.device, OPTIONS)
        if isinstance(graph, str):
            return graph
        graphs[stage] = functools.partial(_run, graph, len(example("meta")[0][0]))
    return graphs


def _run(graph: CompiledGraph, example: int, size: int, tensors: list[Tensor]) -> Any:
    return graph.run({example: size}, tensors)


def _uncompiled(key: KernelKey) -> Kernel:
    return {stage: functools.partial(_call, function) for stage, function in _functions(key).items()}


def _call(function: Callable[..., Any], size: int, tensors: list[Tensor]) -> Any:
    return function(*tensors)


def _functions(key: KernelKey) -> dict[int, Callable[..., Any]]:
    """The functions to compile by stage, each with a code object and a name of its own.

    Dynamo's recompile limit counts per code object, and it remembers the shapes it saw per name.
    """
    stages = key.rule.mean_stages(dict(key.statics))
    functions = {UPDATE: _update_function(key), **{s: _means_function(key, s) for s in stages}}
    for function in functions.values():
        function.__code__ = function.__code__.replace(co_name=f"{key.rule.name}_{next(_serial)}")
    return functions


def _update_function(key: KernelKey) -> Callable[..., Any]:
    update = rule_step(key.rule, dict(key.statics))
    count, end = len(key.buffer_dtypes), len(key.buffer_dtypes) + len(columns(key, UPDATE))
    index_of = LAYOUTS[key.arrangement].index if reads_index(key) else None

    def kernel(param: Tensor, grad: Tensor, *rest: Tensor) -> None:
        buffers = rest[:count]
        index = None if index_of is None else index_of(param, rest)
        new_param, new_buffers = update(param, grad, buffers, rest[count:end], index)
        param.copy_(new_param)
        for old, new in zip(buffers, new_buffers, strict=True):
            old.copy_(new)

    return kernel


def _means_function(key: KernelKey, stage: int) -> Callable[..., Any]:
    averaged = rule_means(key.rule, dict(key.statics), stage)
    sums = LAYOUTS[key.arrangement].sums
    count, end = len(key.buffer_dtypes), len(key.buffer_dtypes) + len(columns(key, stage))

    def kernel(param: Tensor, grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return tuple(sums(averaged(param, grad, rest[:count], rest[count:end]), rest))

    return kernel
