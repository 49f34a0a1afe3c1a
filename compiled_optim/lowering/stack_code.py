"""The update of a rule that is not elementwise, as code for whole stacks of equal tensors.

Inductor compiles a rule that reduces for stacks of any size, so neither the number of tensors nor their shapes cause
a recompile. It compiles a rule on matrices once for each of their shapes, for any number of matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.lists import OPTIONS, fits_indices, say_too_large
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.memory.torch_compiler import ListFunction, compiled
from compiled_optim.plan.compilations import CompilationLog, KernelKey, kernel_key
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import INDEX, number_type

BLOCK = 256  # numbers that a program adds up in the second stage
_ALONE = 1 << 13  # the most numbers that one program adds up if the compiler knows their count


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that replace Inductor's own, by operator."""
    return {torch.ops.aten.mean.dim: _mean, torch.ops.aten.linalg_vector_norm.default: _norm}


def _mean(x: Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not keepdim or dtype is not None:
        return NotImplemented
    return _sum(x, dims) / math.prod(x.shape[d] for d in dims)


def _norm(
    x: Tensor, order: float, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if order != 2 or dims is None or not keepdim or dtype is not None:
        return NotImplemented
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _sum(wide * wide, dims).sqrt().to(x.dtype)


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sum over adjacent dimensions, which become dimensions of size 1."""
    left = sorted(d % x.dim() for d in dims)
    shape = [1 if d in left else size for d, size in enumerate(x.shape)]
    if left[-1] == x.dim() - 1 > 1:
        x = x.sum(-1, keepdim=True)
        del left[-1]
    if left:
        x = _sum_in_blocks(x.flatten(left[0], left[-1]), left[0])
    return x.reshape(shape)


def _sum_in_blocks(x: Tensor, dim: int) -> Tensor:
    """Return the sum over one dimension of any size.

    Padding would copy everything, so the last block reads the last number again and counts it as 0.
    """
    size = x.shape[dim]
    if isinstance(size, int) and size <= _ALONE:
        return x.sum(dim)
    index = torch.arange((size + BLOCK - 1) // BLOCK * BLOCK, device=x.device)
    exists = (index < size).view([-1 if d == dim else 1 for d in range(x.dim())])
    padded = torch.where(exists, x.index_select(dim, index.clamp(max=size - 1)), 0.0)
    blocks = padded.view(*x.shape[:dim], -1, BLOCK, *x.shape[dim + 1 :])
    return blocks.sum(dim + 1).sum(dim)


_COUNT = 5
_EXAMPLES = {"vectors": (_COUNT, 7), "matrices": (_COUNT, 3, 11, 7)}
"""Sizes to compile with, for any sizes. All differ, since Inductor assumes that equal sizes stay equal."""

_LARGE_EXAMPLES = {"vectors": (_COUNT, 8191), "matrices": (_COUNT, 3, 1031, 769)}
"""The same for accelerators, where Inductor chooses its blocks by these sizes."""

_SEQUENTIAL = {"cpu"}  # devices on which one thread may process a whole tensor

# With it, reductions over different dimensions of any size fail on a GPU: "CantSplit" (torch 2.13).
_OPTIONS = {"loop_ordering_after_fusion": False, "assert_indirect_indexing": False}

_BYTES = 1 << 27
"""The most bytes in a stack of several tensors, of their widest dtype. A step needs 6 to 8 times as many besides."""

_CPU_ELEMENTS = 1 << 17
"""The most elements in a stack of several tensors on a CPU: copies and results stay in the cache, and malloc keeps them."""

_STACKS = "stacks of "  # the prefix of arrangements that Inductor compiles
_kernels: dict[KernelKey, ListFunction | str] = {}  # or the reason if none compiles


def key_of(plan: Plan, member: Member, grad_dtype: torch.dtype) -> KernelKey:
    """Return the key of the code that updates ``member``."""
    shape = member.owner.shape
    kind = " x ".join(map(str, shape)) if plan.rule.granularity == "matrix" else "matrices"
    return kernel_key(plan, member, grad_dtype, _STACKS + (kind if len(shape) > 1 else "vectors"))


def most_elements(key: KernelKey) -> int:
    """Return the most elements in a stack of several tensors of ``key``."""
    in_cache = key.device == "cpu" and key.rule.granularity == "tensor"
    return _CPU_ELEMENTS if in_cache else _BYTES // max(dtype.itemsize for dtype in key.dtypes)


def obtain(key: KernelKey, numel: int, names: Sequence[str], log: CompilationLog, *, compiled: bool) -> ListFunction:
    """Return the code of ``key`` for the parameters ``names``: plain torch operations unless ``compiled``.

    Inductor cannot index the elements of stacks of a too large ``numel``, which run uncompiled too.
    """
    if compiled and fits_indices(torch.device(key.device), numel):
        return log.obtain_or_fall_back(_kernels, key, names, _make, _uncompiled)
    if compiled:
        say_too_large(log, names[0])
    return _uncompiled(key)


def _examples(key: KernelKey) -> tuple[list[Tensor], list[list[int]]]:
    """Return meta tensors to compile a kernel of ``key`` with, and for each its dimensions of any size."""
    rule, statics = key.rule, dict(key.statics)
    kind = key.arrangement.removeprefix(_STACKS)
    examples = _EXAMPLES if key.device in _SEQUENTIAL else _LARGE_EXAMPLES
    count, *shape = examples[kind] if kind in examples else (_COUNT, *map(int, kind.split(" x ")))
    fields = [b for b in rule.buffers if b.name in rule.present_buffers(statics)]
    per_group = [*shape[:-1], shape[-1] // GROUP]
    of_buffers = [per_group if f.grouped else f.shape(torch.Size(shape)) if f.shape else shape for f in fields]
    kinds = list(zip([shape, shape, *of_buffers], key.dtypes, strict=True))
    column = [1] * len(shape), compute_dtype(key.dtypes[0])
    kinds += [column] * (len(rule.coefficient_names(statics)) + 2)
    tensors = [torch.empty(count, *sizes, dtype=dtype, device="meta") for sizes, dtype in kinds]
    of_any_size = slice(0, 1 if rule.granularity == "matrix" else None)
    return tensors, [[d for d in range(t.dim())[of_any_size] if t.shape[d] > 1] for t in tensors]


def _make(key: KernelKey) -> ListFunction | str:
    sequential = key.device in _SEQUENTIAL
    examples, varying = _examples(key)
    staged = None if sequential else decompositions()
    code = compiled(_uncompiled(key), examples, varying, key.device, OPTIONS | _OPTIONS, staged)
    if not isinstance(code, str) and not sequential:
        kinds = [(t.shape[1:], t.dtype) for t in examples]
        ones = {kind: torch.ones(1, *kind[0], dtype=kind[1], device=key.device) for kind in set(kinds)}
        code([ones[kind] for kind in kinds])  # loads and tunes now, since a capture cannot
    return code


def _uncompiled(key: KernelKey) -> ListFunction:
    """Return the update as a function of torch tensors, uncompiled.

    It takes parameter, gradient, buffers and coefficients, and computes in float64 for float64, in float32 for lower dtypes.
    A tensor is unchanged where the second coefficient is not 0. The results are new tensors: Inductor 2.13 fails on CPUs if
    a reduction's input is also written.
    """
    rule, statics = key.rule, dict(key.statics)
    names = ("param", *rule.present_buffers(statics))
    constants = {**dict.fromkeys(b.name for b in rule.buffers), **statics}
    numbers_of = number_type(rule.coefficient_names(statics))

    def stack(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        param, grad, *others = tensors
        dtype = compute_dtype(param.dtype)
        old = dict(zip(names, (param, *others), strict=False))
        factor, skip, *numbers = others[len(names) - 1 :]
        values = {**constants, "param": param.to(dtype), "grad": factor * grad.to(dtype), "c": numbers_of(*numbers)}
        if rule.reads_index(statics):
            shape = param.shape[1:]
            values[INDEX] = torch.arange(shape.numel(), dtype=torch.int32, device=param.device).view(1, *shape)
        new = rule.updated(values | {name: old[name].to(dtype) for name in names[1:]})
        updates = skip == 0
        return tuple(torch.where(updates, new[name].to(tensor.dtype), tensor) for name, tensor in old.items())

    return stack
