"""A rule as Triton: kernels that update every tensor of a plan in two launches, three where the norm is needed.

Each stage of a rule's reductions takes two more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from compiled_optim.lowering.kernels.program import Evaluation, Program
from compiled_optim.lowering.kernels.table import (
    BUFFERS,
    FIRST_NUMBER,
    GROUP_INDEX,
    MAXIMIZE,
    NUMEL,
    OWNER,
    PARAM,
    SCALARS,
    CoefficientTable,
    MeasuredTable,
    TensorTable,
)
from compiled_optim.plan.clipping import NAMES
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.bits import GROUP
from compiled_optim.rule.rule import INDEX, NUMBERS, Places, Written
from compiled_optim.rule.symbols import Dialect

WORDS = f"""\
import triton
import triton.language as tl

GROUP = tl.constexpr({GROUP})


@triton.jit
def sqrt_(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


# Within a unit in the last place, in half the instructions and without branches.
@triton.jit
def near_sqrt(x):
    tiny = x < 2.0**-126  # which the instruction would take for 0
    return tl.sqrt(tl.where(tiny, x * 2.0**24, x)) * tl.where(tiny, 2.0**-12, 1.0)


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
def floor_(x):
    return tl.floor(x)


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
def bits_(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits_(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def from_upper_(x):
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def integer_(x):
    return x.to(tl.int32)


@triton.jit
def number_(x):
    return x.to(tl.float32)


@triton.jit
def shift_right_(whole, count):
    return whole >> count


@triton.jit
def group_max_(x, inside):
    return tl.max(tl.reshape(tl.where(inside, x, 0), [inside.shape[0] // GROUP, GROUP]), axis=1)


@triton.jit
def spread_(x):
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], GROUP]), [x.shape[0] * GROUP])


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
def by_size(square_sum, if_large, otherwise, if_small):
    return tl.where(square_sum > 2.0**100, if_large, tl.where(square_sum < 2.0**-100, if_small, otherwise))


@triton.jit
def row_sums(x, row: tl.constexpr):
    return tl.sum(tl.reshape(x, [x.shape[0] // row, row]), axis=1)


# In float64, for ``row`` elements each. Most GPUs are slow in float64, so squares are in float32: large and small ones in
# units that bring them into its range.
@triton.jit
def square_sums_of_rows(x, row: tl.constexpr):
    x = x if x.dtype == tl.float64 else x.to(tl.float32)
    plain = row_sums(square(x), row)
    sums = by_size(plain, row_sums(square(x * 2.0**-66), row), plain, row_sums(square(x * 2.0**90), row))
    return sums.to(tl.float64) * by_size(plain, 2.0**132, 1.0, 2.0**-180)


@triton.jit
def narrow(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))


@triton.jit
def wide(address, dtype: tl.constexpr, multiple: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), multiple)


@triton.jit
def load_shared(pointer, start, left, size: tl.constexpr):
    group = tl.arange(0, size // GROUP)
    return tl.load(pointer + start // GROUP + group, mask=group * GROUP < left)


# Of the threads that have a group's number, the one with the group's first element stores it; a thread has ``row`` elements
# in a row. As a vector of one number for each group, the numbers would change threads, by way of shared memory.
@triton.jit
def store_shared(pointer, start, left, x, row: tl.constexpr):
    elements = spread_(x)
    rows = tl.max(tl.reshape(elements, [elements.shape[0] // row, row]), axis=1)
    at = tl.arange(0, rows.shape[0]) * row
    tl.store(pointer + start // GROUP + at // GROUP, rows, mask=(at % GROUP == 0) & (at < left))
"""


BLOCK = 1024  # elements of a chunk, updated by one program
PART = 512  # elements of a chunk that are updated at a time where they are accessed one by one, which takes registers
STRETCH = 16384  # bytes of a gradient whose squares a program adds up at a time: the memory's latency is paid once for all

_DIALECT = Dialect("{} = {}", "{}", "&", "|", calls=(("group_max", "group_max_({}, inside)"),))
# State of 8 bits is further from exact than a root that is not rounded to nearest.
_ROUGHER = dataclasses.replace(_DIALECT, calls=(*_DIALECT.calls, ("sqrt", "near_sqrt({})")))


def source(key: KernelKey) -> str:
    """The text of a module with the kernels for one key."""
    statics = dict(key.statics)
    program = Program.of(key.rule, statics, _ROUGHER if key.rule.grouped_buffers(statics) else _DIALECT)
    text = WORDS + _evaluation(program.evaluation)
    if program.update is None:
        return text
    means = "".join(_means(key, *means) for means in program.means.items())
    return text + means + (_AVERAGE if means else "") + _update(key, program.update)


def _evaluation(program: Evaluation) -> str:
    scalars = range(len(program.new_scalars))
    clipping = [f"control{i} = control_of(hypers, {i})" for i in range(len(NAMES))]
    lines = [f"scalars{i} = address(owners, {SCALARS + i}, count, t, here, tl.float64)" for i in scalars]
    for row, name in enumerate(NUMBERS, FIRST_NUMBER):
        bits = f"tl.load(owners + {row} * count + t, mask=here, other=0)"
        lines += [f"{name} = {bits}.to(tl.float64, bitcast=True)"]
    lines += ["step = tl.load(scalars0, mask=here, other=0.0) + 1"]
    lines += [f"scalar{i - 1} = tl.load(scalars{i}, mask=here, other=0.0)" for i in scalars[1:]]
    hypers = f"{len(NAMES)} + {program.hypers} * group"
    lines += [f"hyper{i} = hyper_of(hypers, {hypers} + {i}, here)" for i in range(program.hypers)]
    lines += program.lines
    lines += [f"tl.store(scalars{i}, {value}, mask=here)" for i, value in enumerate(program.new_scalars)]
    lines += [f"tl.store(out + {i + 1} * count + t, {value}, mask=here)" for i, value in enumerate(program.numbers)]
    return _EVALUATION.format(
        group=GROUP_INDEX,
        maximize=MAXIMIZE,
        gradient=_block(clipping + program.gradient, 1),
        factor=program.factor,
        norm=program.norm,
        skip=program.skip,
        coefficients=_block(lines, 1),
    )


@dataclass(frozen=True)
class _Tensor:
    """One of a parameter's tensors: its row of a table, its dtype, and the variables of its address and of an element.

    It is ``shared`` if it has a number for each group of elements.
    """

    row: str
    dtype: str
    address: str
    element: str
    shared: bool = False


def _tensors(key: KernelKey) -> list[_Tensor]:
    """Parameter, gradient and buffers."""
    statics = dict(key.statics)
    shared = key.rule.grouped_buffers(statics)
    buffers = zip(key.rule.present_buffers(statics), key.buffer_dtypes, strict=True)
    return [
        _Tensor(f"tensors + {PARAM}", key.param_dtype, "params", "param"),
        _Tensor("grads + 0", key.grad_dtype, "grad_values", "grad"),
        *(
            _Tensor(f"tensors + {BUFFERS + i}", dtype, f"buffers{i}", f"buffer{i}", name in shared)
            for i, (name, dtype) in enumerate(buffers)
        ),
    ]


@dataclass(frozen=True)
class _Path:
    """One of two ways through a chunk: from element ``start`` on, ``size`` at a time, of which ``left`` are there.

    A thread accesses ``row`` elements at a time, which are one behind the other.
    """

    start: str
    left: str
    size: str
    row: int

    def load(self, tensor: _Tensor, compute: str) -> str:
        """The statement that defines an element."""
        if tensor.shared:
            return f"{tensor.element} = load_shared({self._of_groups(tensor)}, {self.size}).to({compute})"
        kind = compute if getattr(torch, tensor.dtype).is_floating_point else "tl.int32"
        return f"{tensor.element} = tl.load({self._pointer(tensor)} + at, mask=inside).to({kind})"

    def store(self, tensor: _Tensor, value: str) -> str:
        """The statement that stores a ``value``."""
        rounded = f"rounded({value}, tl.{tensor.dtype})"
        if tensor.shared:
            return f"store_shared({self._of_groups(tensor)}, {rounded}, {self.row})"
        return f"tl.store({self._pointer(tensor)} + at, {rounded}, mask=inside)"

    def _pointer(self, tensor: _Tensor) -> str:
        if self.row == 1:
            return f"narrow({tensor.address}, tl.{tensor.dtype})"
        return f"wide({tensor.address}, tl.{tensor.dtype}, {min(16, self.row * _size(tensor.dtype))})"

    def _of_groups(self, tensor: _Tensor) -> str:
        return f"narrow({tensor.address}, tl.{tensor.dtype}), {self.start}, {self.left}"


def _paths(tensors: Sequence[_Tensor]) -> dict[str, _Path]:
    """Both, by their names in a kernel."""
    row = 16 // max(_size(t.dtype) for t in tensors if t.element != "grad" and not t.shared)
    return {"wide": _Path("start", "left", "BLOCK", row), "narrow": _Path("start + part", "left - part", "PART", 1)}


def _compute(key: KernelKey) -> str:
    return "tl.float64" if key.param_dtype == "float64" else "tl.float32"


def _numbers(key: KernelKey, count: int) -> list[str]:
    """What defines the addresses of a tensor and its owner's first ``count`` numbers."""
    lines = [f"{tensor.address} = tl.load({tensor.row} * count + t)" for tensor in _tensors(key)]
    owner = f"owner = tl.load(tensors + {OWNER} * count + t)"
    lines += [owner, f"factor = tl.load(coefficients + owner).to({_compute(key)})"]
    numbers = (f"tl.load(coefficients + {i + 1} * owner_count + owner).to({_compute(key)})" for i in range(count))
    return [*lines, *(f"k{i} = {number}" for i, number in enumerate(numbers))]


def _chunk(key: KernelKey, name: str, written: Written, stores: Callable[[str], list[str]], **around: str) -> str:
    """A kernel that does what is ``written``, and then ``stores``, for the elements of a chunk; with more ``around`` it."""
    tensors = _tensors(key)
    index = [f"{INDEX} = at.to(tl.int32)"] if written.reads_index else []

    def block(path: str, way: _Path) -> list[str]:
        loads = [way.load(tensor, _compute(key)) for tensor in tensors]
        return [*index, *loads, "grad = factor * grad", *written.lines, *stores(path)]

    blocks = {path: block(path, way) for path, way in _paths(tensors).items()}
    elementwise = [tensor for tensor in tensors if not tensor.shared]
    return _CHUNK.format(
        name=name,
        numel=NUMEL,
        addresses=" | ".join(tensor.address for tensor in elementwise),
        lanes=_lanes(*(tensor.dtype for tensor in elementwise)),
        numbers=_block(_numbers(key, len(written.numbers)), 2),
        wide=_block(blocks["wide"], 3),
        narrow=_block(blocks["narrow"], 4),
        **{"sums": "", "before": "", "after": "", **around},
    )


def _means(key: KernelKey, stage: int, written: Written) -> str:
    chosen = [f"tl.where(inside, {expression}, 0.0).to(tl.float64)" for expression in written.results.values()]
    added = {
        "wide": [f"sum{i} = tl.sum({value}, axis=0)" for i, value in enumerate(chosen)],
        "narrow": [f"lanes{i} += {value}" for i, value in enumerate(chosen)],
    }
    count = range(len(chosen))
    after = _block([f"sum{i} = tl.sum(lanes{i}, axis=0)" for i in count], 3) + "\n"
    after += _block([f"tl.store(sums + {i} * tl.num_programs(0) + chunk, sum{i})" for i in count], 2)
    before = _block([f"lanes{i} = tl.zeros([PART], tl.float64)" for i in count], 3)
    return _chunk(key, f"sums{stage}", written, added.__getitem__, sums=" sums,", before=before, after=after)


def _update(key: KernelKey, written: Written) -> str:
    tensors = _tensors(key)
    written_to = [t for t in tensors if t.element != "grad"]
    paths = _paths(tensors)

    def stores(path: str) -> list[str]:
        return [paths[path].store(t, value) for t, value in zip(written_to, written.results.values(), strict=True)]

    blocks = range(0, stretch_of(key.grad_dtype), BLOCK)
    squares = [f"grad{i} = tl.load(grad_values + {i} + at, mask=at < left - {i}, other=0.0)" for i in blocks]
    squares += [f"squares += square_sums_of_rows(grad{i}, {_lanes(key.grad_dtype)})" for i in blocks]
    square_sums = _SQUARE_SUMS.format(
        numel=NUMEL,
        grad=f"tl.{key.grad_dtype}",
        stretch=stretch_of(key.grad_dtype),
        grad_bytes=_size(key.grad_dtype),
        grad_lanes=_lanes(key.grad_dtype),
        squares=_block(squares, 3),
    )
    return square_sums + _chunk(key, "update", written, stores)


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


_EVALUATION = """

@triton.jit(do_not_specialize=["count", "sum_count", "leads"])
def evaluate(
    owners, grads, hypers, sums, outcome, out, count, sum_count, leads, TENSORS: tl.constexpr, LANES: tl.constexpr
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
    group = tl.load(owners + {group} * count + t, mask=here, other=0)
    maximize = tl.load(owners + {maximize} * count + t, mask=here, other=0)
    tl.store(out + t, tl.where(maximize != 0, -{factor}, {factor}), mask=here)
{coefficients}
"""

_CHUNK = """

@triton.jit(do_not_specialize=["count", "owner_count"])
def {name}(
    tensors, grads, chunks, outcome, coefficients,{sums} count, owner_count, BLOCK: tl.constexpr, PART: tl.constexpr
):
    chunk = tl.program_id(0)
    t = tl.load(chunks + 2 * chunk)
    if (tl.load(grads + t) != 0) & (tl.load(outcome + 1) == 0):
        start = tl.load(chunks + 2 * chunk + 1) * BLOCK
        left = tl.minimum(tl.load(tensors + {numel} * count + t) - start, BLOCK).to(tl.int32)
{numbers}
        if (({addresses}) % 16 == 0) & (left % {lanes} == 0):
            lane = tl.arange(0, BLOCK)
            inside = lane < left // {lanes} * {lanes}  # left itself, now known to be a multiple
            at = start + lane
{wide}
        else:
{before}
            for part in range(0, left, PART):
                lane = part + tl.arange(0, PART)
                inside = lane < left
                at = start + lane
{narrow}
{after}
"""

_AVERAGE = """

@triton.jit(do_not_specialize=["chunk_count", "owner_count", "first"])
def average(sums, spans, grads, outcome, coefficients, chunk_count, owner_count, first, LANES: tl.constexpr):
    span = spans + 4 * tl.program_id(0)
    t = tl.load(span)
    if (tl.load(grads + t) != 0) & (tl.load(outcome + 1) == 0):
        end = tl.load(span + 2)
        sums += tl.program_id(1) * chunk_count
        lanes = tl.zeros([LANES], tl.float64)
        for start in range(tl.load(span + 1), end, LANES):
            at = start + tl.arange(0, LANES)
            lanes += tl.load(sums + at, mask=at < end, other=0.0)
        mean = tl.sum(lanes, axis=0) / tl.load(span + 3)
        tl.store(coefficients + (first + tl.program_id(1)) * owner_count + t, mean)
"""

_SQUARE_SUMS = """

@triton.jit(do_not_specialize=["count", "stretch_count"])
def square_sums(tensors, grads, stretches, sums, count, stretch_count, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK // {grad_lanes}], tl.float64)
    share = stretch_count // tl.num_programs(0)
    longer = stretch_count % tl.num_programs(0)
    first = tl.program_id(0) * share + tl.minimum(tl.program_id(0), longer)
    for stretch in range(first, first + share + tl.where(tl.program_id(0) < longer, 1, 0)):
        t = tl.load(stretches + 2 * stretch)
        start = tl.load(stretches + 2 * stretch + 1) * {stretch}
        address = tl.load(grads + t)
        left = tl.minimum(tl.load(tensors + {numel} * count + t) - start, {stretch})
        left = tl.where(address != 0, left, 0).to(tl.int32)
        address += start * {grad_bytes}
        at = tl.arange(0, BLOCK)
        if (address % 16 == 0) & (left % {grad_lanes} == 0):
            left = left // {grad_lanes} * {grad_lanes}  # itself, now known to be a multiple
            grad_values = wide(address, {grad}, 16)
{squares}
        else:
            for part in range(0, left, BLOCK):
                grad = tl.load(narrow(address, {grad}) + part + at, mask=at < left - part, other=0.0)
                squares += square_sums_of_rows(grad, {grad_lanes})
    tl.store(sums + tl.program_id(0), tl.sum(squares, axis=0))
"""


TENSORS = 32  # tensors whose coefficients one program evaluates
WARPS = 4
REDUCING_PROGRAMS = 4096  # programs that reduce the gradients: enough to keep the memory of a large GPU busy


class TritonKernel:
    """The kernels of one key."""

    chunk = BLOCK

    def __init__(self, module: ModuleType, stretch: int, stages: Mapping[int, Places]) -> None:
        self._module = module
        self._stages = stages
        self.stretch = stretch

    def square_sum_count(self, stretches: int) -> int:
        """One partial sum per program that reduces."""
        return min(stretches, REDUCING_PROGRAMS)

    def measure(self, table: MeasuredTable) -> None:
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
                enable_fp_fusion=True,
            )

    def evaluate(self, coefficients: CoefficientTable) -> None:
        count = coefficients.owners.shape[1]
        self._module.evaluate[(-(-count // TENSORS),)](
            coefficients.owners,
            coefficients.gradients.pointers,
            coefficients.hypers,
            coefficients.all_square_sums,
            coefficients.outcome,
            coefficients.coefficients,
            count,
            len(coefficients.all_square_sums),
            int(coefficients.leads),
            TENSORS,
            BLOCK,
            enable_fp_fusion=True,
        )

    def average(self, stage: int, table: MeasuredTable, coefficients: CoefficientTable) -> None:
        self._each_chunk(f"sums{stage}", table, coefficients, table.sums)
        places = self._stages[stage].sums
        self._module.average[(len(table.spans), places.stop - places.start)](
            table.sums,
            table.spans,
            table.grads,
            coefficients.outcome,
            coefficients.coefficients,
            len(table.chunks),
            coefficients.owners.shape[1],
            1 + places.start,
            BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )

    def update(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        self._each_chunk("update", table, coefficients)

    def _each_chunk(self, name: str, table: TensorTable, coefficients: CoefficientTable, *sums: Tensor) -> None:
        if len(table.chunks):
            getattr(self._module, name)[(len(table.chunks),)](
                table.tensors,
                table.grads,
                table.chunks,
                coefficients.outcome,
                coefficients.coefficients,
                *sums,
                len(table.grads),
                coefficients.owners.shape[1],
                BLOCK,
                PART,
                num_warps=WARPS,
                enable_fp_fusion=True,
            )

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        self.evaluate(coefficients)
        self.update(table, coefficients)


def build(key: KernelKey) -> TritonKernel:
    """The kernels for one key; Triton compiles them when they first run."""
    return TritonKernel(load(source(key)), stretch_of(key.grad_dtype), key.rule.stages(dict(key.statics)))


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
