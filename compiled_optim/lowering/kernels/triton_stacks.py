"""A rule on whole tensors as Triton: kernels over the elements of stacks, and products of matrices between them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering.kernels.program import indented
from compiled_optim.lowering.kernels.stack_source import Event, Loop, StackSource, multiply, numel, size, source_of
from compiled_optim.lowering.kernels.symmetric import ALIGNED, TEXT, Tiling, multiplier, tiling_of
from compiled_optim.lowering.kernels.triton import CALLS, current_device, dtype_name, launcher, load
from compiled_optim.lowering.kernels.triton import WORDS as ELEMENT_WORDS
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.symbols import Dialect
from compiled_optim.rule.tensor_program import Axes, TensorOp, TensorProgram

StackValues: TypeAlias = dict[str, Tensor]

_ROWS, _COLUMNS = 8, 256  # of a tile
_HEIGHT, _LANES = 64, 8 * _COLUMNS  # rows that a program updates, tile by tile; elements of a tensor with one row
_ROW = 16  # numbers of a row that a sum adds up in float32, so that threads exchange few float64 numbers
_ADDED = 2048  # partial sums that a program adds up at a time
_NUMBER = r"T\(numbers\[(\d+)\]\)"  # a constant in an expression
_FIRST = ("tensors", "grads", "index", "outcome", "coefficients", "numbers")
"""The first arguments of all kernels. ``index`` has the table column of each tensor of the stack, ``numbers`` constants."""

_WORDS = """

@triton.jit
def T(x):
    return tl.cast(x, {compute})


@triton.jit
def half(x):
    return T(tl.cast(tl.cast(x, tl.float32), tl.bfloat16))  # in two steps, as torch rounds a float64


@triton.jit
def as_index(i):
    return i.to(tl.int32)


@triton.jit
def largest(x, inside):
    each = tl.where(inside, x, 0)
    return tl.max(tl.reshape(each, [each.shape[0], each.shape[1] // GROUP, GROUP]), axis=2)


@triton.jit
def number(numbers, i):
    return T(tl.load(numbers + i))


@triton.jit
def pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    return wide(address, dtype, 16) if ALIGNED else narrow(address, dtype)


@triton.jit(do_not_specialize=["copies", "numel"])
def add(partial, out, copies, numel, high: tl.constexpr, wide: tl.constexpr):
    at, t = (tl.program_id(0) * wide + tl.arange(0, wide))[None, :], tl.program_id(1).to(tl.int64)
    total = tl.zeros([high, wide], tl.float64)
    for start in range(0, copies, high):
        copy = (start + tl.arange(0, high))[:, None]
        total += tl.load(partial + (t * copies + copy) * numel + at, mask=(copy < copies) & (at < numel), other=0.0)
    tl.store(out + t * numel + at, T(tl.sum(total, axis=0, keep_dims=True)), mask=at < numel)
"""

_LOOP = """

@triton.jit
def {name}_tile({arguments}, column, t{addresses}, ALIGNED: tl.constexpr, ROWS: tl.constexpr):
    right_of, below = tl.program_id(0) % right, tl.program_id(0) // right % down
{before}
    for step in range(0, {height} // ROWS):
{body}
{after}


@triton.jit(do_not_specialize=["count", "right", "down"])
def {name}({arguments}):
    t = tl.program_id(1).to(tl.int64)
    column = tl.load(index + t)
    grad_address = tl.load(grads + column)
    if (grad_address != 0) & (tl.load(outcome + 1) == 0):
{loads}
        if ({all}) % 16 == 0:
            {name}_tile({arguments}, column, t{addresses}, True, {rows})
        else:
            {name}_tile({arguments}, column, t{addresses}, False, {rows} // 2)
"""
"""A program updates a part of one tensor, which is cut into ``right`` parts per row and ``down`` parts per column.

Elements that are accessed one by one take registers for their addresses. Codes and many arrays take registers, too. Each of
the two halves the height of a tile.
"""


class TritonStackSource(StackSource):
    """The Triton text of the update of tensors of one shape, which is the same for many others.

    With a ``tiling``, the kernel of :mod:`.symmetric` multiplies symmetric matrices.
    """

    _division = "//"

    def __init__(self, key: KernelKey, update: TensorProgram, tiling: Tiling | None) -> None:
        super().__init__(key, update, torch.bfloat16)
        self.tiling = tiling
        words = _WORDS.format(compute=dtype_name(compute_dtype(key.dtypes[0])))
        self.text = "".join([ELEMENT_WORDS, words, TEXT, *map(self._printed, self.loops)])

    def temporaries(self, loop: Loop) -> list[str]:
        """Return the names of the values and partial sums that the kernel of ``loop`` reads and writes."""
        values = [name for name in (*loop.loads, *loop.outputs) if name not in self.update.inputs]
        return [*dict.fromkeys(values), *loop.sums]

    def _printed(self, loop: Loop) -> str:
        outer, inner = _tiled(loop.axes)
        arrays = [name for name in dict.fromkeys([*loop.loads, *loop.results]) if name in self.update.inputs]
        addresses = [f"{n}_address = tl.load(tensors + {self.row_of(n)} * count + column)" for n in arrays if n != "grad"]
        batch = [d for d, letter in enumerate(loop.axes) if letter and d not in (outer, inner)]
        before = [f"i{d} = (tl.program_id(0) // right // down).to(tl.int64)" for d in batch]
        before += [f"{n} = number(coefficients, {1 + int(n[1:])} * count + column)" for n in loop.numbers]
        before += ["factor = number(coefficients, column)"] if "grad" in arrays else []
        before += [f"at_{n} = pointer({n}_address, {dtype_name(self.dtypes[n])}, ALIGNED)" for n in arrays]
        first = f"right_of * {_COLUMNS}" if outer is not None else f"right_of * {_LANES} + step * ROWS * {_COLUMNS}"
        body = [f"first = {first}", f"lane = first + tl.arange(0, {_width(outer)})[None, :]"]
        body += [f"i{inner} = lane"] if inner is not None else []
        if outer is not None:
            before, body = before + body, []
            body.append(f"i{outer} = (below * {_HEIGHT} + step * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]")
        body.append(f"inside = {self._mask(loop.axes, loop) or 'lane < 1'}")
        for name in loop.loads:
            value = f"tl.load({self._element(name, loop)})"
            value = f"T({value})" if self.dtypes[name].is_floating_point else f"{value}.to(tl.int32)"
            body.append(f"{name} = {'factor * ' * (name == 'grad')}{value}")
        statements = [f"{op.name} = {op.expression.replace('rounded(', 'half(')}" for op in loop.ops]
        body += [re.sub(_NUMBER, r"number\1", text) for text in statements]
        before += [f"number{i} = number(numbers, {i})" for i in dict.fromkeys(re.findall(_NUMBER, "\n".join(statements)))]
        for to, new in loop.stores.items():
            target, *mask = self._element(to, loop).split(", ")
            dtype = self.dtypes[to]
            narrow = f"{new}{'.to(tl.float32)' * (dtype in (torch.bfloat16, torch.float16))}.to({dtype_name(dtype)})"
            body.append(f"tl.store({', '.join([target, narrow, *mask])})")
        after: list[str] = []
        for op in loop.sums.values():
            for lines, more in zip((before, body, after), self._sum(op, loop), strict=True):
                lines += more
        temporaries = [f"at_{name}" for name in self.temporaries(loop)]
        return _LOOP.format(
            name=loop.name,
            arguments=", ".join([*_FIRST, *temporaries, "count", "right", "down", *map(size, self.update.letters)]),
            addresses="".join(f", {name}_address" for name in arrays),
            loads=indented(addresses, "        "),
            all=" | ".join(f"{name}_address" for name in arrays) or "0",
            rows=_ROWS if len(arrays) < 4 and all(self.dtypes[n].is_floating_point for n in arrays) else _ROWS // 2,
            height=_LANES // _COLUMNS if outer is None else _HEIGHT,
            **{"before": indented(before, "    "), "body": indented(body, "        "), "after": indented(after, "    ")},
        )

    def _sum(self, op: TensorOp, loop: Loop) -> tuple[list[str], list[str], list[str]]:
        """Return a kernel's statements for a sum: before its tiles, in each tile, and after them."""
        (outer, inner), name = _tiled(loop.axes), f"sum_{op.name}"
        part, copies = "0", "1"
        for d in (d for d, letter in enumerate(loop.axes) if letter and not op.axes[d]):
            number, index = {inner: ("right", "right_of"), outer: ("down", "below")}.get(d, (size(loop.axes[d]), f"i{d}"))
            part, copies = f"({part}) * {number} + {index}", f"{copies} * {number}"
        index, mask = self._index(op.axes, loop), self._mask(op.axes, loop)
        if op.kind == "largest":
            groups = f"i{inner}_of_groups = first // {GROUP} + tl.arange(0, {_width(outer)} // {GROUP})[None, :]"
            index, mask = (text.replace(f"i{inner} // {GROUP}", f"i{inner}_of_groups") for text in (index, mask))
            to = f"at_{op.name} + t * ({numel(op.axes)}) + {index}"
            return [], [groups, f"tl.store({to}, largest({op.reads[0]}, inside), mask={mask})"], []
        target = f"at_partial_{op.name} + (t * ({copies}) + {part}) * ({numel(op.axes)}) + {index}"
        mask = f", mask={mask}" * bool(mask)
        value = f"tl.where(inside, {op.reads[0]}, 0.0)"
        if outer is None or op.axes[outer]:
            in_row = f"tl.sum(tl.reshape(sums_of_rows({value}, {_ROW}), [ROWS, {_COLUMNS // _ROW}]), axis=1, keep_dims=True)"
            each = f"{value}.to(tl.float64)" if inner is not None and op.axes[inner] else in_row
            if each != in_row or outer is not None:
                return [], [f"tl.store({target}, {each}{mask})"], []
        if inner is not None and op.axes[inner]:
            count, sums, total = str(_COLUMNS), f"sums_along({value}, 0)", f"{name}[None, :]"
        else:
            count, sums, total = f"ROWS * {_COLUMNS} // ROW", f"sums_of_rows({value}, ROW)", f"tl.sum({name}, axis=0)"
        begin = [f"{name} = tl.zeros([{count}], tl.float64)"]
        return begin, [f"{name} += {sums}"], [f"tl.store({target}, {total}{mask})"]

    def _element(self, name: str, loop: Loop) -> str:
        """Return the arguments of a load of an element: its address, and a mask if one is needed."""
        axes = self.axes_of(name)
        start = f"at_{name}" + f" + t * ({numel(axes)})" * (name not in self.update.inputs)
        mask = self._mask(axes, loop)
        return f"{start} + {self._index(axes, loop)}" + f", mask={mask}" * bool(mask)

    def _mask(self, axes: Axes, loop: Loop) -> str:
        tiled = [d for d in _tiled(loop.axes) if d is not None and axes[d]]
        return " & ".join(f"({self._index_along(d, axes, loop)} < {size(axes[d])})" for d in tiled)


def _tiled(axes: Axes) -> tuple[int | None, int | None]:
    """Return the last two dimensions with several elements, the rows and columns of tiles; None for absent ones."""
    *_, outer, inner = [None, None, *(d for d, letter in enumerate(axes) if letter)]
    return outer, inner


def _width(outer: int | None) -> str:
    """Return the expression of the width of a tile, in elements."""
    return f"ROWS * {_COLUMNS}" if outer is None else str(_COLUMNS)


def stack_source(key: KernelKey, shape: Sequence[int]) -> TritonStackSource | str:
    """Return the source for a ``shape``; see :func:`source_of`."""
    tiling = tiling_of(torch.device(key.device))
    is_fit = tiling is not None and min(shape[-2:]) >= tiling.rows and not any(n % ALIGNED for n in shape[-2:])
    dialect = Dialect("{} = {}", "T({})", "&", "|", calls=CALLS, quadratic=is_fit)
    return source_of(TritonStackSource, key, shape, dialect, tiling if is_fit else None)


class TritonStackKernels:
    """The update of stacks of one ``shape`` on a GPU. Values between kernels are allocated in each step."""

    def __init__(self, key: KernelKey, shape: Sequence[int]) -> None:
        source = stack_source(key, shape[1:])
        assert not isinstance(source, str), "another lowering runs a rule that cannot be written"
        self._source, self._count, self._module = source, shape[0], load(source.text)
        self._device = torch.device(key.device)
        self._sizes = source.update.sizes(shape[1:])
        self._sizes |= {name: self._copies(op, loop) for name, (loop, op) in source.partial.items()}
        numbers = torch.tensor([*source.update.numbers, 0.0], dtype=torch.float64, device="cpu")
        self._numbers = numbers.to(self._device)
        with current_device(self._device):
            self._parts = [part for event in source.events for part in self._of_event(event)]
        last = {name: i for i, part in enumerate(self._parts) for name in (*part.reads, *part.makes)}
        self._done = [[name for name, end in last.items() if end == i] for i in range(len(self._parts))]

    def run(self, arguments: Mapping[str, Tensor], count: int) -> None:
        """Update a stack, with tables of ``count`` columns, and :data:`_FIRST`, but for the constants, by name."""
        values = {**arguments, "numbers": self._numbers}
        for part, done in zip(self._parts, self._done, strict=True):
            for name, (shape, dtype) in part.makes.items():
                values[name] = torch.empty(shape, dtype=dtype, device=self._device)
            part.run(values, count)
            for name in done:
                del values[name]

    def _of_event(self, event: Event) -> Iterator[_Task]:
        if isinstance(event, Loop):
            yield self._loop(event)
            yield from (self._added(name) for name in event.sums if name in self._source.partial)
        else:
            run = self._symmetric(event) or (lambda values, count: multiply(event, values))
            yield _Task(event.reads, self._layouts(event.name), run)

    def _layouts(self, *names: str) -> dict[str, tuple[list[int], torch.dtype]]:
        return {n: (self._source.shape(n, self._count, self._sizes), self._source.dtypes[n]) for n in names}

    def _tiles(self, loop: Loop) -> tuple[int, int]:
        """Return the number of tiles per row, and of programs' tiles per column."""
        height, width = (None if d is None else self._sizes[loop.axes[d]] for d in _tiled(loop.axes))
        if height is None:
            return -(-(width or 1) // _LANES), 1
        assert width is not None, "rows without columns"
        return -(-width // _COLUMNS), -(-height // _HEIGHT)

    def _loop(self, loop: Loop) -> _Task:
        (right, down), source = self._tiles(loop), self._source
        temporaries = source.temporaries(loop)
        batch = math.prod(self._sizes[a] for d, a in enumerate(loop.axes) if d not in _tiled(loop.axes))
        makes = self._layouts(*loop.outputs, *loop.sums)
        types = [torch.int64, torch.int64, torch.int64, *[torch.float64] * 3, *(source.dtypes[name] for name in temporaries)]
        sizes = [self._sizes[letter] for letter in source.update.letters]
        grid = right * down * batch, self._count
        launch = launcher(getattr(self._module, loop.name), grid, types, (8, right, down, *sizes), self._device)

        def run(values: StackValues, count: int) -> None:
            launch([values[name] for name in (*_FIRST, *temporaries)], (count, right, down, *sizes))

        return _Task([name for name in temporaries if name not in makes], makes, run)

    def _copies(self, op: TensorOp, loop: Loop) -> int:
        """Return the number of partial sums for each element of a sum."""
        outer, inner = _tiled(loop.axes)
        right, down = self._tiles(loop)
        gone = (d for d, letter in enumerate(loop.axes) if letter and not op.axes[d])
        return math.prod({inner: right, outer: down}.get(d, self._sizes[loop.axes[d]]) for d in gone)

    def _added(self, partial: str) -> _Task:
        _, op = self._source.partial[partial]
        makes = self._layouts(op.name)
        shape, dtype = makes[op.name]
        numel = math.prod(shape[1:])
        wide = 1 if numel == 1 else 32
        counts = self._sizes[partial], numel, _ADDED // wide, wide
        launch = launcher(self._module.add, (-(-numel // wide), self._count), (torch.float64, dtype), counts, self._device)
        return _Task([partial], makes, lambda values, _: launch([values[partial], values[op.name]], counts))

    def _symmetric(self, op: TensorOp) -> Callable[[StackValues, int], object] | None:
        """Return the function that computes a symmetric product; None if torch does, or it is not known to be symmetric."""
        (name, *others), tiling, transposed = op.reads, self._source.tiling, op.transposed[0]
        if tiling is None or not (
            op.kind == "quadratic" or (op.half and others == [name] and transposed != op.transposed[1])
        ):
            return None
        numbers = [(kind == "k", int(i)) for kind, i in re.findall(r"(k|numbers\[)(\d+)", op.expression)]
        kind = ("each" if numbers[0][0] else "same") if numbers else ""
        shape = self._source.shape(name, self._count, self._sizes)
        multiplied = multiplier(self._module, tiling, shape, self._device, transposed=transposed, numbers=kind)

        def run(values: StackValues, count: int) -> None:
            coefficients, constants = values["coefficients"], values["numbers"]
            abc = [coefficients[1 + i] if of_rule else constants[i:] for of_rule, i in numbers]
            multiplied(values[name], values[op.name], abc or [constants] * 3, values["index"])

        return run


class _Task(NamedTuple):
    """A part of a step: ``run``, the values that it reads, and shape and dtype of those that it makes."""

    reads: Sequence[str]
    makes: Mapping[str, tuple[list[int], torch.dtype]]
    run: Callable[[StackValues, int], object]
