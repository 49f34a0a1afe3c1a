"""A rule as Triton: kernels that update every tensor of a plan in two launches, three where the norm is needed.

Each stage of a rule's reductions takes two more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import linecache
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.lowering.kernels.program import Array, Program, evaluation, indented
from compiled_optim.lowering.kernels.table import COLUMN, NUMEL, TENSORS, Ints, Kernel, Launch
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import INDEX, Written
from compiled_optim.rule.symbols import Dialect

BLOCK = 1024  # elements of a block, updated by one program
NARROW = 512  # elements that are updated at a time where they are accessed one by one, which takes registers
REDUCE_BYTES = (
    16384  # bytes of a gradient for which a program adds up squares or a rule's sums: the latency of memory is paid once
)
ROW = 4  # numbers of one thread that sums add up in float32: most GPUs are slow in float64
WARPS = 4
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": True}  # the bits of a step depend on how multiply-adds are contracted
_OWN_OPTIONS = {"evaluate": {"num_warps": 1}}  # for 32 tensors; more warps would repeat their float64 operations
REDUCING_PROGRAMS = 4096  # programs that reduce the gradients: enough to keep the memory of a large GPU busy

_EXPRESSIONS = {
    "sqrt_(x)": "tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)",
    "maximum_(x, y)": "tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)",
    "minimum_(x, y)": "tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)",
    "absolute_(x)": "tl.abs(x)",
    "sign_(x)": "tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)",
    "floor_(x)": "tl.floor(x)",
    "where_(condition, x, y)": "tl.where(condition, x, y)",
    "bits_(x)": "x.to(tl.float32).to(tl.int32, bitcast=True)",
    "from_bits_(x)": "x.to(tl.float32, bitcast=True)",
    "from_upper_(x)": "(x & -65536).to(tl.float32, bitcast=True)",
    "to_bfloat16_(x)": "x.to(tl.bfloat16).to(tl.float32)",
    "integer_(x)": "x.to(tl.int32)",
    "number_(x)": "x.to(tl.float32)",
    "shift_right_(whole, count)": "whole >> count",
    "group_max_(x, inside)": "tl.max(tl.reshape(tl.where(inside, x, 0), [inside.shape[0] // GROUP, GROUP]), axis=1)",
    "broadcast_(x)": "tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], GROUP]), [x.shape[0] * GROUP])",
    "rounded(x, dtype: tl.constexpr)": "x.to(dtype)",
    "upper(x)": "(x >> 16).to(tl.int16)",
    "bits_of(x, seen: tl.constexpr, whole: tl.constexpr)": "x.to(seen).to(whole, bitcast=True)",
    "narrow(address, dtype: tl.constexpr)": "address.to(tl.pointer_type(dtype))",
    "wide(address, dtype: tl.constexpr, size: tl.constexpr)": "tl.multiple_of(address.to(tl.pointer_type(dtype)), size)",
}
"""The expressions that one-line functions return, by their signatures."""

WORDS = (
    f"""\
import triton
import triton.language as tl

BLOCK, NARROW, TENSORS, GROUP, ROW = map(tl.constexpr, ({BLOCK}, {NARROW}, {TENSORS}, {GROUP}, {ROW}))
"""
    + "".join(f"\n\n@triton.jit\ndef {head}:\n    return {body}\n" for head, body in _EXPRESSIONS.items())
    + """

@triton.jit
def power_(x, y):
    base = x + 0.0 * y
    return tl.where(y == 0, 1.0, tl.exp(y * tl.log(base)))


@triton.jit
def product_(x, y):
    weighted = x * y
    return tl.where(weighted == weighted, weighted, 0.0)


@triton.jit
def bias_correction_(beta, step):
    x = step * tl.log(beta)
    power = tl.exp(x)
    small = (1 - power) * x / tl.log(power)  # the rounding errors of both differences cancel
    return tl.where(power == 1, -x, tl.where(power < 0.5, 1 - power, small))


# Within a unit in the last place, in half the instructions and without branches.
@triton.jit
def near_sqrt(x):
    tiny = x < 2.0**-126  # which the instruction would take for 0
    return tl.sqrt(tl.where(tiny, x * 2.0**24, x)) * tl.where(tiny, 2.0**-12, 1.0)


@triton.jit
def address(tensors, row, count, t, here, dtype: tl.constexpr):
    return tl.load(tensors + row * count + t, mask=here, other=0).to(tl.pointer_type(dtype))


@triton.jit
def control_of(hypers, index):
    return tl.load(tl.load(hypers + index).to(tl.pointer_type(tl.float64)))


@triton.jit
def hyper_of(hypers, index, here):
    return tl.load(tl.load(hypers + index, mask=here, other=0).to(tl.pointer_type(tl.float64)), mask=here, other=0.5)


@triton.jit
def square(x):
    return x * x


@triton.jit
def by_size(square_sum, if_large, otherwise, if_small):
    return tl.where(square_sum > 2.0**100, if_large, tl.where(square_sum < 2.0**-100, if_small, otherwise))


@triton.jit
def row_sums(x, row: tl.constexpr):
    return tl.sum(tl.reshape(x, [x.shape[0] // row, row]), axis=1)


# In float64, of at most 256 numbers each, which are added up in float32: in a larger unit where it would overflow.
@triton.jit
def sums_along(x, axis: tl.constexpr):
    plain = tl.sum(x, axis=axis)
    is_finite = tl.abs(plain) < 2.0**127
    if x.dtype == tl.float64:
        return plain
    sums = tl.where(is_finite, plain, tl.sum(x * 2.0**-8, axis=axis))
    return sums.to(tl.float64) * tl.where(is_finite, tl.cast(1.0, tl.float64), 2.0**8)


@triton.jit
def sums_of_rows(x, row: tl.constexpr):
    return sums_along(tl.reshape(x, [x.numel // row, row]), 1)


# In float64, for ``row`` elements each. Squares are in float32: large and small ones in units of its range.
@triton.jit
def square_sums_of_rows(x, row: tl.constexpr):
    x = x if x.dtype == tl.float64 else x.to(tl.float32)
    plain = row_sums(square(x), row)
    sums = by_size(plain, row_sums(square(x * 2.0**-66), row), plain, row_sums(square(x * 2.0**90), row))
    return sums.to(tl.float64) * by_size(plain, 2.0**132, 1.0, 2.0**-180)


@triton.jit
def load_shared(pointer, start, left, size: tl.constexpr):
    group = tl.arange(0, size // GROUP)
    return tl.load(pointer + start // GROUP + group, mask=group * GROUP < left)


# Of the threads that have a group's number, the one with the group's first element stores it; a thread has ``row`` elements
# in a row. As a vector of one number for each group, the numbers would change threads, by way of shared memory.
@triton.jit
def store_shared(pointer, start, left, x, row: tl.constexpr):
    elements = broadcast_(x)
    rows = tl.max(tl.reshape(elements, [elements.shape[0] // row, row]), axis=1)
    at = tl.arange(0, rows.shape[0]) * row
    tl.store(pointer + start // GROUP + at // GROUP, rows, mask=(at % GROUP == 0) & (at < left))


# Set the bits of elements that changed in their words, of 32 each. A thread has ``row`` elements in a row; as in
# `store_shared`, the one with the first element of a word stores it.
@triton.jit
def mark(words, start, left, changed, row: tl.constexpr):
    size: tl.constexpr = changed.shape[0]
    flags = tl.reshape(changed.to(tl.int32) << tl.arange(0, size) % 32, [size // 32, 32])
    elements = tl.reshape(tl.broadcast_to(tl.sum(flags, axis=1)[:, None], [size // 32, 32]), [size])
    rows = tl.max(tl.reshape(elements, [size // row, row]), axis=1)
    at = tl.arange(0, size // row) * row
    first = (at % 32 == 0) & (at < left)
    words += start // 32 + at // 32
    tl.store(words, tl.load(words, mask=first, other=0) | rows, mask=first)
"""
)

_INDENT = "    "
CALLS = ("exp", "tl.exp({})"), ("log", "tl.log({})")
_CALLS = *CALLS, ("group_max", "group_max_({}, inside)")
_DIALECT = Dialect("{} = {}", "{}", "&", "|", calls=_CALLS, spelled_out=frozenset())
_TYPED = {torch.float32: {"bias_correction"}, torch.float64: {"bias_correction", "maximum", "minimum", "where"}}
"""By dtype of computations, the words that would give plain numbers another dtype, or not take them."""
# With state of 8 bits, the error of a root that is not rounded to nearest does not matter.
_ROUGHER = dataclasses.replace(_DIALECT, calls=(*_DIALECT.calls, ("sqrt", "near_sqrt({})")))
_ACCESSES = {
    "control": "control_of(hypers, {})",
    "row": "tl.load(inputs + {} * count + t, mask=here, other=0).to(tl.float64, bitcast=True)",
    "address": "scalars{} = address(inputs, {}, count, t, here, tl.float64)",
    "scalar": "tl.load(scalars{}, mask=here, other=0.0)",
    "hyper": "hyper_of(hypers, hyper + {}, here)",
    "store_scalar": "tl.store(scalars{}, {}, mask=here)",
    "store_coefficient": "tl.store(out + {} * count + t, {}, mask=here)",
}


def source(key: KernelKey) -> str:
    """Return the text of a module with the kernels for one key."""
    dialect = _ROUGHER if key.rule.grouped_buffers(dict(key.statics)) else _DIALECT
    text = WORDS + _EVALUATION.format(**evaluation(key, _typed(dialect, torch.float64), _ACCESSES, _INDENT))
    if key.rule.granularity != "element":
        return text + _square_sums(key.dtypes[1])
    program = Program(key, _typed(dialect, compute_dtype(key.dtypes[0])))
    size = REDUCE_BYTES // key.dtypes[1].itemsize
    means = "".join(_means(program, *means, size) for means in program.means.items())
    return text + means + (_AVERAGE if means or program.sums else "") + _square_sums(key.dtypes[1]) + _update(program)


def _typed(dialect: Dialect, dtype: torch.dtype) -> Dialect:
    """Return ``dialect`` for computations in ``dtype``."""
    return dataclasses.replace(
        dialect, typed=f"tl.full([], {{}}, {dtype_name(dtype)})", typed_words=frozenset(_TYPED[dtype])
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return Triton's name of ``dtype``."""
    return str(dtype).replace("torch", "tl")


class _Path(NamedTuple):
    """One of two ways through a block: from element ``start``, ``size`` elements at a time, as long as some are ``left``.

    A thread accesses ``row`` consecutive elements at a time.
    """

    start: str
    left: str
    size: str
    row: int

    def load(self, array: Array, compute: torch.dtype) -> str:
        """Return the statement that loads an element of ``array``."""
        if array.grouped:
            return f"{array.element} = load_shared({self._of_groups(array)}, {self.size}).to({dtype_name(compute)})"
        kind = torch.int32 if array.is_int else compute
        return f"{array.element} = {self.stored(array)}.to({dtype_name(kind)})"

    def stored(self, array: Array) -> str:
        """Return the expression of an element of ``array``, which has no group."""
        return f"tl.load({self._pointer(array)} + at, mask=inside)"

    def store(self, array: Array, value: str, bits: str | None) -> str:
        """Return the statement that stores ``value``, or the upper half of ``bits``, which need no rounding."""
        rounded = f"rounded({value}, {dtype_name(array.dtype)})"
        if bits is not None:
            array, rounded = dataclasses.replace(array, dtype=torch.int16), f"upper({bits})"
        if array.grouped:
            return f"store_shared({self._of_groups(array)}, {rounded}, {self.row})"
        return f"tl.store({self._pointer(array)} + at, {rounded}, mask=inside)"

    def mark(self, array: Array, value: str, bits: str | None, served: torch.dtype) -> str:
        """Return the statement that notes if the new ``value`` differs from the ``stored`` one in its bits as ``served``."""
        new = (
            f"rounded({value}, {dtype_name(array.dtype)})"
            if bits is None
            else f"upper({bits}).to(tl.bfloat16, bitcast=True)"
        )
        seen = served if array.dtype.itemsize > 2 else array.dtype
        as_seen = f"{dtype_name(seen)}, tl.int{8 * seen.itemsize}"
        changed = f"(bits_of(stored, {as_seen}) != bits_of({new}, {as_seen})) & inside"
        return f"mark(narrow(words, tl.int32), {self.start}, {self.left}, {changed}, {self.row})"

    def _pointer(self, array: Array) -> str:
        if self.row == 1:
            return f"narrow({array.address}, {dtype_name(array.dtype)})"
        return f"wide({array.address}, {dtype_name(array.dtype)}, {min(16, self.row * array.dtype.itemsize)})"

    def _of_groups(self, array: Array) -> str:
        return f"narrow({array.address}, {dtype_name(array.dtype)}), {self.start}, {self.left}"


def _each_block(
    program: Program,
    name: str,
    written: Written,
    size: str,
    results: Callable[[_Path], Sequence[list[str]]],
    *,
    marks: bool = False,
    sums: int = 0,
) -> str:
    """Return a kernel that runs the statements ``written`` for the elements of each block of ``size`` elements.

    ``results`` gives, for each path, the statements before the loop, at the end of each iteration, and after the loop. With
    ``marks`` these have the address of ``words`` and the ``stored`` element of the parameter; they leave ``sums`` numbers.
    """
    elementwise = [a for a in program.arrays if not a.grouped]
    part = ("start + offset", "left - offset")
    wide_row = 16 // max(a.dtype.itemsize for a in elementwise if a.row is not None)
    wide = _Path(*(("start", "left") if size == "BLOCK" else part), "BLOCK", wide_row)
    lanes = 16 // min(array.dtype.itemsize for array in elementwise)  # elements that fill 16 bytes or more in every array

    def along(path: _Path, left: str) -> str:
        before, each, after = results(path)
        index = [f"{INDEX} = at.to(tl.int32)"] if written.reads_index else []
        loads = [path.load(array, program.compute) for array in program.arrays]
        if marks:
            loads[:1] = f"stored = {path.stored(program.arrays[0])}", f"param = stored.to({dtype_name(program.compute)})"
        turns = [f"for offset in range(0, left, {path.size}):"] * (path.start != "start")
        positions = [
            f"lane = {'offset + ' * len(turns)}tl.arange(0, {path.size})",
            f"inside = lane < {left}",
            "at = start + lane",
        ]
        lines = [*positions, *index, *loads, "grad = factor * grad", *written.lines, *each]
        return indented([*before, *turns, *(_INDENT * len(turns) + line for line in lines), *after], _INDENT * 3)

    rows = ["grads + 0" if a.row is None else f"tensors + {a.row}" for a in program.arrays]
    before = [f"{a.address} = tl.load({row} * count + t)" for a, row in zip(program.arrays, rows, strict=True)]
    before += [f"words = tl.load(tensors + {program.words} * count + t)"] * marks
    before.append(f"column = coefficients + tl.load(tensors + {COLUMN} * count + t)")
    numbers = ["factor", *(f"k{i}" for i in range(len(written.numbers)))]
    load = f"{{}} = tl.load(column + {{}} * columns).to({dtype_name(program.compute)})"
    before += map(load.format, numbers, itertools.count())
    return _EACH_BLOCK.format(
        name=name,
        numel=NUMEL,
        addresses=" | ".join(array.address for array in elementwise),
        lanes=lanes,
        numbers=indented(before, _INDENT * 2),
        size=size,
        wide=along(wide, f"left // {lanes} * {lanes}  # left itself, now known to be a multiple"),
        narrow=along(_Path(*part, "NARROW", 1), "left"),
        sums=", sums" if sums else "",
        after=indented([f"tl.store(sums + {i} * tl.num_programs(0) + block, sum{i})" for i in range(sums)], _INDENT * 2),
    )


def _means(program: Program, stage: int, written: Written, size: int) -> str:
    values = [*written.results.values()]
    return _each_block(program, f"sums{stage}", written, str(size), lambda path: _added(path, values), sums=len(values))


def _added(path: _Path, values: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the statements that add up ``values``: before the loop, at the end of each iteration, and after the loop."""
    masked = dict(enumerate(f"tl.where(inside, {value}, 0.0)" for value in values))
    lanes = f"{path.size.lower()}_sums"
    return (
        [f"{lanes}{i} = tl.zeros([{path.size} // ROW], tl.float64)" for i in masked],
        [f"{lanes}{i} += sums_of_rows({value}, ROW)" for i, value in masked.items()],
        [f"sum{i} = tl.sum({lanes}{i}, axis=0)" for i in masked],
    )


def _square_sums(grad: torch.dtype) -> str:
    lanes, reduce_block = 16 // grad.itemsize, REDUCE_BYTES // grad.itemsize
    starts = range(0, reduce_block, BLOCK)
    squares = [f"grad{i} = tl.load(grad_values + {i} + at, mask=at < left - {i}, other=0.0)" for i in starts]
    squares += [f"squares += square_sums_of_rows(grad{i}, {lanes})" for i in starts]
    return _SQUARE_SUMS.format(
        numel=NUMEL,
        grad=dtype_name(grad),
        reduce_block=reduce_block,
        grad_bytes=grad.itemsize,
        grad_lanes=lanes,
        squares=indented(squares, _INDENT * 3),
    )


def _update(program: Program) -> str:
    new, served, values = program.new_elements(), program.served, [*program.sums.values()]

    def results(path: _Path) -> tuple[list[str], list[str], list[str]]:
        before, added, after = _added(path, values)
        marks = [] if served is None else [path.mark(*new[0], served)]
        return before, [*marks, *(path.store(*a) for a in new), *added], after

    marks, sums = served is not None, len(values)
    return _each_block(program, "update", program.update, "BLOCK", results, marks=marks, sums=sums)


_EVALUATION = """

@triton.jit(do_not_specialize=["count", "sum_count", "leads"])
def evaluate(inputs, grads, hypers, sums, outcome, out, count, sum_count, leads):
    lanes = tl.zeros([BLOCK], tl.float64)
    for start in range(0, sum_count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        lanes += tl.load(sums + at, mask=at < sum_count, other=0.0)
    square_sum = tl.sum(lanes, axis=0)
{gradient}
    if tl.program_id(0) == 0:
        tl.store(outcome, {norm})
        tl.store(outcome + 1, {skip})
        tl.store(outcome + 2, tl.load(outcome + 2) + leads * {skip})
    t = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    inside = t < tl.where({skip} == 0, count, 0)
    here = inside & (tl.load(grads + t, mask=inside, other=0) != 0)
    hyper = {controls} + {hypers} * tl.load(inputs + {group} * count + t, mask=here, other=0)
    maximize = tl.load(inputs + {maximize} * count + t, mask=here, other=0)
    tl.store(out + t, tl.where(maximize != 0, -{factor}, {factor}), mask=here)
{coefficients}
"""

_EACH_BLOCK = """

@triton.jit(do_not_specialize=["count", "columns"])
def {name}(tensors, grads, blocks, outcome, coefficients{sums}, count, columns):
    block = tl.program_id(0)
    t = tl.load(blocks + 2 * block)
    if (tl.load(grads + t) != 0) & (tl.load(outcome + 1) == 0):
        start = tl.load(blocks + 2 * block + 1) * {size}
        left = tl.minimum(tl.load(tensors + {numel} * count + t) - start, {size}).to(tl.int32)
{numbers}
        if (({addresses}) % 16 == 0) & (left % {lanes} == 0):
{wide}
        else:
{narrow}
{after}
"""

_AVERAGE = """

@triton.jit(do_not_specialize=["block_count", "columns", "first"])
def average(sums, ranges, grads, outcome, coefficients, block_count, columns, first):
    tensor = ranges + 4 * tl.program_id(0)
    t = tl.load(tensor)
    if (tl.load(grads + t) != 0) & (tl.load(outcome + 1) == 0):
        end = tl.load(tensor + 2)
        sums += tl.program_id(1) * block_count
        lanes = tl.zeros([BLOCK], tl.float64)
        for start in range(tl.load(tensor + 1), end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            lanes += tl.load(sums + at, mask=at < end, other=0.0)
        mean = tl.sum(lanes, axis=0) / tl.load(tensor + 3)
        tl.store(coefficients + (first + tl.program_id(1)) * columns + t, mean)
"""

_SQUARE_SUMS = """

@triton.jit(do_not_specialize=["count", "block_count"])
def square_sums(tensors, grads, blocks, sums, count, block_count):
    squares = tl.zeros([BLOCK // {grad_lanes}], tl.float64)
    share = block_count // tl.num_programs(0)
    longer = block_count % tl.num_programs(0)
    first = tl.program_id(0) * share + tl.minimum(tl.program_id(0), longer)
    for block in range(first, first + share + tl.where(tl.program_id(0) < longer, 1, 0)):
        t = tl.load(blocks + 2 * block)
        start = tl.load(blocks + 2 * block + 1) * {reduce_block}
        address = tl.load(grads + t)
        left = tl.minimum(tl.load(tensors + {numel} * count + t) - start, {reduce_block})
        left = tl.where(address != 0, left, 0).to(tl.int32)
        address += start * {grad_bytes}
        at = tl.arange(0, BLOCK)
        if (address % 16 == 0) & (left % {grad_lanes} == 0):
            left = left // {grad_lanes} * {grad_lanes}  # itself, now known to be a multiple
            grad_values = wide(address, {grad}, 16)
{squares}
        else:
            for offset in range(0, left, BLOCK):
                grad = tl.load(narrow(address, {grad}) + offset + at, mask=at < left - offset, other=0.0)
                squares += square_sums_of_rows(grad, {grad_lanes})
    tl.store(sums + tl.program_id(0), tl.sum(squares, axis=0))
"""


class TritonKernel(Kernel):
    """The kernels of one key, which Triton compiles when they first run."""

    block = BLOCK
    most_sums = REDUCING_PROGRAMS  # one per program

    def __init__(self, key: KernelKey) -> None:
        super().__init__(key)
        self._module = load(source(key))
        self.reduce_block = REDUCE_BYTES // key.dtypes[1].itemsize
        self.drawback = obstacle()

    def _prepared(self, name: str, programs: Ints, elements: int, tensors: Sequence[Tensor], counts: Ints) -> Launch:
        if not all(programs):
            return lambda: None
        return prepared(getattr(self._module, name), programs, tensors, counts, **_OWN_OPTIONS.get(name, {}))


def load(text: str) -> ModuleType:
    """Return the module of ``text``. It has no file: its source is in ``linecache``, where Triton looks for it."""
    name = f"compiled_optim_kernel_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if name not in sys.modules:
        filename = f"<{name}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        module = ModuleType(name)
        sys.modules[name] = module
        exec(compile(text, filename, "exec"), vars(module))
    return sys.modules[name]


def current_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``device`` is current. Triton launches there, not on the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launcher(
    function: Any,
    grid: Ints,
    types: Sequence[Tensor | torch.dtype],
    counts: Sequence[Any],
    device: torch.device,
    addresses: Sequence[int] | None = None,
    **options: int,
) -> Callable[[Sequence[Tensor], Sequence[Any]], object]:
    """Return a launcher of ``function``, from ``triton.jit``, with tensors and counts, on the then current stream.

    ``device`` is the current device, now and in every launch. The tensors are like ``types``; where that is a dtype, their
    addresses are multiples of 16. The counts, and the other arguments after the tensors, are equal to ``counts`` in every
    launch, unless the function is not specialized on them. The tensors stay at ``addresses``, if these are passed.

    Triton's own launcher inspects each argument in every launch, since it recompiles if the alignment of an address or the
    type of a number changes. These do not change here: Triton compiles once, and its compiled kernel is launched directly.
    While hooks such as a profiler's are installed, launches go through Triton's own launcher, which calls them.
    """
    import triton
    from triton import knobs
    from triton.runtime import driver

    options = OPTIONS | options

    def launch_by_triton(tensors: Sequence[Tensor], counts: Sequence[Any]) -> object:
        return function[grid](*tensors, *counts, **options)

    if not isinstance(function, triton.JITFunction) or obstacle():  # Triton's interpreter compiles nothing
        return launch_by_triton
    from triton.compiler import CompiledKernel

    kernel = function.warmup(*types, *counts, grid=grid, **options)
    if not isinstance(kernel, CompiledKernel):  # a hook of Triton prevents compilation
        return launch_by_triton

    run, x, y, z = kernel.run, *grid, *[1] * (3 - len(grid))
    constants, index = (kernel.function, kernel.packed_metadata, None, None, None), device.index or 0

    def launch(tensors: Sequence[Tensor], counts: Sequence[Any]) -> object:
        runtime = knobs.runtime
        hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
        if any(getattr(hook, "calls", hook) for hook in hooks):  # a chain of hooks may be empty
            return launch_by_triton(tensors, counts)
        stream = driver.active.get_current_stream(index)
        return run(x, y, z, stream, *constants, *(addresses or map(Tensor.data_ptr, tensors)), *counts)

    return launch


def prepared(function: Any, grid: Ints, tensors: Sequence[Tensor], counts: Ints, **options: int) -> Launch:
    """Return a :func:`launcher` with its tensors and counts bound."""
    addresses = list(map(Tensor.data_ptr, tensors))
    launch = launcher(function, grid, tensors, counts, tensors[0].device, addresses=addresses, **options)
    return lambda: launch(tensors, counts)


@functools.cache
def obstacle() -> str:
    """Return why a compiled kernel cannot be launched as :func:`launcher` does; empty if it can, as in 3.6 and 3.7."""
    import triton

    calls: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(
        _init_handles=lambda: None, launch_metadata=lambda *_: "metadata", run=lambda *a: calls.append(a)
    )
    kernel.function, kernel.packed_metadata = "function", "packed"
    with contextlib.suppress(Exception):  # other versions may lack some of these
        from triton import knobs
        from triton.compiler import CompiledKernel

        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        CompiledKernel.__getitem__(kernel, (1, 2, 3))("argument", stream=4)
        if calls == [(1, 2, 3, 4, "function", "packed", "metadata", *hooks, "argument")]:
            return ""
    return f"Triton {triton.__version__} launches compiled kernels in a way of its own"
