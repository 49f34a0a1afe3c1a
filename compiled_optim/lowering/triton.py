"""A rule as Triton: kernels that update every tensor of a plan in two launches, three where the norm is needed.

``square_sums`` reduces the gradients, each program a fixed share of their stretches. ``evaluate`` computes the rule's
coefficients, in float64, with one lane per tensor. ``update`` updates one chunk of a tensor per program. All read addresses
from tables in device memory, so they are compiled once per signature whatever the tensors are.

Elements are accessed 16 bytes at a time where the addresses and the number of elements are multiples of that, otherwise one
by one. A program finds out which when it runs.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from types import ModuleType

import torch

from compiled_optim.lowering.kernel_table import KernelTable, TableRows
from compiled_optim.lowering.symbols import Program
from compiled_optim.rule.symbols import Dialect
from compiled_optim.signature import Signature

BLOCK = 1024  # elements of a chunk, updated by one program
PART = 512  # elements of a chunk that are updated at a time where they are accessed one by one, which takes registers
STRETCH = 16384  # bytes of a gradient whose squares a program adds up at a time: the memory's latency is paid once for all
TENSORS = 32  # tensors whose coefficients one program evaluates
WARPS = 4
REDUCING_PROGRAMS = 4096  # programs that reduce the gradients: enough to keep the memory of a large GPU busy

_DIALECT = Dialect("{} = {}", "{}", "&", "|")
_STORAGE = {"float32": "tl.float32", "float64": "tl.float64", "bfloat16": "tl.bfloat16", "float16": "tl.float16"}


def source(signature: Signature) -> str:
    """The text of a module with the kernels ``evaluate`` and ``update`` for one signature."""
    rule, statics = signature.rule, dict(signature.statics)
    program = Program.of(rule, statics, _DIALECT)
    rows = TableRows(rule, statics)
    dtypes = (signature.param_dtype, signature.grad_dtype, *signature.buffer_dtypes)
    storage = [_STORAGE[d] for d in dtypes]
    compute = "tl.float64" if signature.param_dtype == "float64" else "tl.float32"
    scalars = range(1 + len(rule.scalars))
    controls = [f"control{i} = control_of(hypers, {i})" for i in range(rows.controls)]
    evaluate = [f"scalars{i} = address(tensors, {rows.scalars + i}, count, t, here, tl.float64)" for i in scalars]
    evaluate += ["step = tl.load(scalars0, mask=here, other=0.0) + 1"]
    evaluate += [f"scalar{i} = tl.load(scalars{i + 1}, mask=here, other=0.0)" for i in range(len(rule.scalars))]
    evaluate += [
        f"hyper{i} = hyper_of(hypers, {rows.controls + i} + {rows.hypers} * group, here)" for i in range(rows.hypers)
    ]
    evaluate += program.coefficients
    evaluate += [f"tl.store(scalars{i}, {value}, mask=here)" for i, value in enumerate(program.new_scalars)]
    evaluate += [f"tl.store(out + {i + 1} * count + t, {value}, mask=here)" for i, value in enumerate(program.numbers)]
    names = ("params", "grad_values", *(f"buffers{i}" for i in range(len(storage) - 2)))
    places = ("tensors + 0", "grads + 0", *(f"tensors + {rows.buffers + i}" for i in range(len(storage) - 2)))
    numbers = [f"{n} = tl.load({place} * count + t)" for n, place in zip(names, places, strict=True)]
    numbers += [f"factor = tl.load(coefficients + t).to({compute})"]
    numbers += [f"k{i} = tl.load(coefficients + {i + 1} * count + t).to({compute})" for i in range(len(program.numbers))]
    results = [program.new_param, *program.new_buffers]
    targets = [n for n in names if n != "grad_values"]
    kinds = [d for n, d in zip(names, storage, strict=True) if n != "grad_values"]

    def body(pointer: str) -> list[str]:
        values = ("param", "grad", *(f"buffer{i}" for i in range(len(storage) - 2)))
        lines = [
            f"{v} = tl.load({pointer}({n}, {d}) + at, mask=inside).to({compute})"
            for v, n, d in zip(values, names, storage, strict=True)
        ]
        lines += ["grad = factor * grad", *program.update]
        return lines + [
            f"tl.store({pointer}({n}, {d}) + at, rounded({value}, {d}), mask=inside)"
            for n, value, d in zip(targets, results, kinds, strict=True)
        ]

    blocks = range(0, stretch_of(signature.grad_dtype), BLOCK)
    squares = [f"grad{i} = tl.load(grad_values + {i} + at, mask=at < left - {i}, other=0.0)" for i in blocks]
    squares += [f"squares += square(grad{i}.to({compute}))" for i in blocks]
    return _TEMPLATE.format(
        group_row=rows.group,
        maximize_row=rows.maximize,
        numel_row=rows.numel,
        grad=storage[1],
        compute=compute,
        gradient=_block(controls + program.gradient, 1),
        factor=program.factor,
        norm=program.norm,
        skip=program.skip,
        evaluate=_block(evaluate, 1),
        stretch=stretch_of(signature.grad_dtype),
        grad_bytes=_size(signature.grad_dtype),
        grad_lanes=_lanes(signature.grad_dtype),
        squares=_block(squares, 3),
        numbers=_block(numbers, 2),
        addresses=" | ".join(names),
        lanes=_lanes(*dtypes),
        wide=_block(body("wide"), 3),
        narrow=_block(body("narrow"), 4),
    )


def stretch_of(grad_dtype: str) -> int:
    """How many elements of a gradient a program reduces at a time."""
    return STRETCH // _size(grad_dtype)


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _lanes(*dtypes: str) -> int:
    """The fewest elements that fill a whole number of 16 bytes in each of ``dtypes``."""
    return 16 // min(map(_size, dtypes))


def _block(lines: list[str], level: int) -> str:
    return "\n".join("    " * level + line for line in lines)


_TEMPLATE = """\
import triton
import triton.language as tl


@triton.jit
def sqrt_(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def maximum_(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absolute_(x):
    return tl.abs(x)


@triton.jit
def sign_(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)


@triton.jit
def power_(x, y):
    base = x + 0.0 * y
    return tl.where(y == 0, 1.0, tl.exp(y * tl.log(base)))


@triton.jit
def where_(condition, x, y):
    return tl.where(condition, x, y)


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


@triton.jit
def rounded(x, dtype: tl.constexpr):
    return x.to(dtype)


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
def narrow(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))


@triton.jit
def wide(address, dtype: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["count", "stretch_count"])
def square_sums(tensors, grads, stretches, sums, count, stretch_count, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], {compute})
    share = stretch_count // tl.num_programs(0)
    longer = stretch_count % tl.num_programs(0)
    first = tl.program_id(0) * share + tl.minimum(tl.program_id(0), longer)
    for stretch in range(first, first + share + tl.where(tl.program_id(0) < longer, 1, 0)):
        t = tl.load(stretches + 2 * stretch)
        start = tl.load(stretches + 2 * stretch + 1) * {stretch}
        address = tl.load(grads + t)
        left = tl.minimum(tl.load(tensors + {numel_row} * count + t) - start, {stretch})
        left = tl.where(address != 0, left, 0).to(tl.int32)
        address += start * {grad_bytes}
        at = tl.arange(0, BLOCK)
        if (address % 16 == 0) & (left % {grad_lanes} == 0):
            left = left // {grad_lanes} * {grad_lanes}  # itself, now known to be a multiple
            grad_values = wide(address, {grad})
{squares}
        else:
            for part in range(0, left, BLOCK):
                grad = tl.load(narrow(address, {grad}) + part + at, mask=at < left - part, other=0.0)
                squares += square(grad.to({compute}))
    tl.store(sums + tl.program_id(0), tl.sum(squares.to(tl.float64), axis=0))


@triton.jit(do_not_specialize=["count", "sum_count", "leads"])
def evaluate(
    tensors, grads, hypers, sums, outcome, out, count, sum_count, leads, TENSORS: tl.constexpr, LANES: tl.constexpr
):
    lanes = tl.zeros([LANES], tl.float64)
    for start in range(0, sum_count, LANES):
        at = start + tl.arange(0, LANES)
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
    group = tl.load(tensors + {group_row} * count + t, mask=here, other=0)
    maximize = tl.load(tensors + {maximize_row} * count + t, mask=here, other=0)
    tl.store(out + t, tl.where(maximize != 0, -{factor}, {factor}), mask=here)
{evaluate}


@triton.jit(do_not_specialize=["count"])
def update(tensors, grads, chunks, outcome, coefficients, count, BLOCK: tl.constexpr, PART: tl.constexpr):
    chunk = tl.program_id(0)
    t = tl.load(chunks + 2 * chunk)
    if (tl.load(grads + t) != 0) & (tl.load(outcome + 1) == 0):
        start = tl.load(chunks + 2 * chunk + 1) * BLOCK
        left = tl.minimum(tl.load(tensors + {numel_row} * count + t) - start, BLOCK).to(tl.int32)
{numbers}
        if (({addresses}) % 16 == 0) & (left % {lanes} == 0):
            lane = tl.arange(0, BLOCK)
            inside = lane < left // {lanes} * {lanes}  # left itself, now known to be a multiple
            at = start + lane
{wide}
        else:
            for part in range(0, left, PART):
                lane = part + tl.arange(0, PART)
                inside = lane < left
                at = start + lane
{narrow}
"""


class TritonKernel:
    """The kernels of one signature."""

    chunk = BLOCK

    def __init__(self, module: ModuleType, stretch: int) -> None:
        self._module = module
        self.stretch = stretch

    def square_sum_count(self, stretches: int) -> int:
        """One partial sum per program that reduces."""
        return min(stretches, REDUCING_PROGRAMS)

    def measure(self, table: KernelTable) -> None:
        """Write the partial sums of the squares of the gradients, in one launch."""
        if len(table.square_sums):
            self._module.square_sums[(len(table.square_sums),)](
                table.tensors,
                table.grads,
                table.stretches,
                table.square_sums,
                len(table.grads),
                len(table.stretches),
                BLOCK,
                num_warps=WARPS,
            )

    def __call__(self, table: KernelTable) -> None:
        """Update the tensors of ``table`` in two launches."""
        count = len(table.grads)
        self._module.evaluate[(-(-count // TENSORS),)](
            table.tensors,
            table.grads,
            table.hypers,
            table.all_square_sums,
            table.outcome,
            table.coefficients,
            count,
            len(table.all_square_sums),
            int(table.leads),
            TENSORS,
            BLOCK,
        )
        if len(table.chunks):
            self._module.update[(len(table.chunks),)](
                table.tensors,
                table.grads,
                table.chunks,
                table.outcome,
                table.coefficients,
                count,
                BLOCK,
                PART,
                num_warps=WARPS,
            )


def build(signature: Signature) -> TritonKernel:
    """The kernels for one signature; Triton compiles them when they first run."""
    return TritonKernel(load(source(signature)), stretch_of(signature.grad_dtype))


def load(text: str) -> ModuleType:
    """The module of ``text``. No file holds it: Triton reads the source of its functions where tracebacks do."""
    name = f"compiled_optim_kernel_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if name not in sys.modules:
        place = f"<{name}>"
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
        module = ModuleType(name)
        sys.modules[name] = module
        exec(compile(text, place, "exec"), vars(module))
    return sys.modules[name]
