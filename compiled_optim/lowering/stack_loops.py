"""Loops over the elements of equal tensors, for rules on whole tensors; torch multiplies matrices between them.

The loops are C++ on a CPU and Triton on a GPU. They read the tensors' addresses from a table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from compiled_optim.lowering.kernels import cpp_stacks, triton_stacks
from compiled_optim.lowering.kernels.stack_source import StackSource
from compiled_optim.lowering.lists import fits_indices
from compiled_optim.memory.cache import library
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.compilations import CompilationLog, KernelKey, kernel_key
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.transforms import equal_parts

_ELEMENTS = {"tensor": 1 << 22, "matrix": 1 << 20}
"""The most elements in a stack of several tensors on a CPU: sums then need little memory, products fit in caches."""

_BYTES = 1 << 27  # the most bytes of parameters in a stack of several tensors on a GPU
MOST_TENSORS = 65535  # in a stack: the rows of a CUDA grid

LoopKernels: TypeAlias = cpp_stacks.CppStackKernels | triton_stacks.TritonStackKernels
"""The loops and products that update the tensors of one shape."""

_kernels: dict[KernelKey, Callable[[Sequence[int]], LoopKernels]] = {}  # functions of a stack's shape
_examples: dict[str, tuple[int, ...]] = {}  # the first shape with some code, by that code


class Loops(NamedTuple):
    """Loops in one language.

    Attributes:
        source_of: returns the text for tensors of a shape, or why there is none.
        kernels_of: returns a function from the shape of stacks of a key to their kernels.
        most_elements: returns the most elements in a stack of several tensors of a key.
    """

    source_of: Callable[[KernelKey, Sequence[int]], StackSource | str]
    kernels_of: Callable[[KernelKey], Callable[[Sequence[int]], LoopKernels]]
    most_elements: Callable[[KernelKey], int]


def _in_cpp(key: KernelKey) -> Callable[[Sequence[int]], LoopKernels]:
    load = functools.cache(library)  # shared by shapes, loaded before any step
    return functools.partial(cpp_stacks.CppStackKernels, key, load=load)


def _in_triton(key: KernelKey) -> Callable[[Sequence[int]], LoopKernels]:
    return functools.partial(triton_stacks.TritonStackKernels, key)


LOOPS = {
    "cpu": Loops(cpp_stacks.stack_source, _in_cpp, lambda key: _ELEMENTS[key.rule.granularity]),
    "cuda": Loops(triton_stacks.stack_source, _in_triton, lambda key: _BYTES // compute_dtype(key.dtypes[0]).itemsize),
}
"""By device type."""


def refusal(plan: Plan, loops: Loops) -> str | None:
    """Return why ``loops`` and products cannot run the rule on the plan's tensors.

    None if they can; empty if the reason is not in the rule.
    """
    pairs = zip(plan.members, plan.grad_dtypes, strict=True)
    keys = dict.fromkeys((kernel_key(plan, m, dtype, ""), m.owner.shape) for m, dtype in pairs if m.owner.numel())
    if not all(fits_indices(plan.device, shape.numel()) for _, shape in keys):
        return ""
    refusals = (_refusal(plan, loops, key, shape) for key, shape in keys)
    return next((why for why in refusals if why is not None), None)


def _refusal(plan: Plan, loops: Loops, key: KernelKey, shape: torch.Size) -> str | None:
    if plan.rule.granularity == "matrix" and len(shape) < 2:  # flattened after the optimizer was constructed
        return ""
    key, fields, parts = _of_parts(key), {b.name: b for b in plan.rule.buffers}, row_parts(plan.rule, plan.statics, shape)
    if len(parts) > 1 and (len(shape) > 2 or plan.rule.reads_index(plan.statics)):
        return ""  # the matrices of a part are not contiguous, or its elements have indices in the whole tensor
    for part in parts:
        source, *others = (loops.source_of(each, part.shape) for each in dict.fromkeys((key, key.with_all_buffers())))
        if whys := [each for each in (source, *others) if isinstance(each, str)]:
            return whys[0]
        assert not isinstance(source, str)
        sizes, whole = source.update.sizes(part.shape), torch.Size(part.shape) if len(parts) > 1 else shape
        shapes = [plan.rule.shape_of(fields[name], whole, plan.statics) for name in plan.buffers]
        axes = [source.update.inputs[f"buffer{i}"] for i in range(len(shapes))]
        if [math.prod(s) for s in shapes] != [math.prod(sizes[letter] for letter in letters if letter) for letters in axes]:
            return f"{plan.rule.name} has state of another shape than the parameter's"
    return None


class Part(NamedTuple):
    """Rows of a tensor that loops update as one: a vector, a matrix, or a batch of matrices.

    ``first`` is the index of the first row, ``shape`` the shape that loops see.
    """

    first: int
    shape: tuple[int, ...]


def row_parts(rule: Rule, statics: Mapping[str, Any], shape: torch.Size) -> list[Part]:
    """Return the parts of a parameter; consecutive equal ones are a batch."""
    if rule.granularity != "matrix":
        sizes = [shape[axis] for axis in rule.axes_of(shape, statics)]
        return [Part(0, (shape.numel(),) if len(sizes) < 2 else (math.prod(sizes[:-2]), *sizes[-2:]))]
    *batch, rows, columns = shape
    parts = [(first, count * math.prod(batch), size) for first, count, size in equal_parts(statics.get("split") or [rows])]
    return [Part(first, (count, size, columns) if batch or count > 1 else (size, columns)) for first, count, size in parts]


def _of_parts(key: KernelKey) -> KernelKey:
    """Return the key without ``split``, for which the rule updates each part as a whole."""
    if key.rule.granularity != "matrix":
        return key
    return dataclasses.replace(key, statics=tuple(choice for choice in key.statics if choice[0] != "split"))


def obtain(loops: Loops, key: KernelKey, part: Part, count: int, names: Sequence[str], log: CompilationLog) -> LoopKernels:
    """Return the kernels of ``part`` of ``count`` tensors of ``key``, called ``names``. Equal code is compiled once."""
    shape = (count, *part.shape)
    return log.obtain(_kernels, _key_of(key, part, loops), names, functools.partial(_by_shape, loops, shape))(shape)


def _by_shape(loops: Loops, shape: Sequence[int], key: KernelKey) -> Callable[[Sequence[int]], LoopKernels]:
    """Return a cached function from the shape of stacks of ``key`` to their kernels; compile those of ``shape`` now."""
    of_shape = functools.cache(loops.kernels_of(key))
    of_shape(shape)
    return of_shape


def _key_of(key: KernelKey, part: Part, loops: Loops) -> KernelKey:
    """Return the key of the kernels that update ``part`` of tensors of ``key``."""
    key = _of_parts(key)
    source = loops.source_of(key, part.shape)
    assert not isinstance(source, str), "loops cannot run all of the plan"
    # Triton specializes its code on these, too.
    kinds = "" if key.device == "cpu" else str([(size == 1, size % 16 == 0) for size in part.shape])
    example = _examples.setdefault(source.text + kinds, part.shape)
    return dataclasses.replace(key, arrangement=f"loops over stacks like {' x '.join(map(str, example))}")
