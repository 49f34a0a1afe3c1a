"""A rule on whole tensors as Triton: kernels over the elements of stacks, and products of matrices between them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import table as rows
from compiled_optim.lowering.kernels.program import indented
from compiled_optim.lowering.kernels.schedule import Event, Loop, Schedule
from compiled_optim.lowering.kernels.symmetric import ALIGNED, TEXT, Tiling, multiplier, tiling_of
from compiled_optim.lowering.kernels.triton import WORDS as ELEMENT_WORDS
from compiled_optim.lowering.kernels.triton import current_device, dtype_name, launcher, load
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.stacks import Axes, Step, written
from compiled_optim.rule.symbols import Dialect, NotWritable

Values: TypeAlias = dict[str, Tensor]

_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16}
_ROWS, _COLUMNS, _STEPS = 8, 256, 8  # of a tile; a program takes several, one below the other
_LANES = 2048  # elements of a tile that has one row
_ADDED = 2048  # partial sums that a program adds up at a time
_NUMBER = r"T\(numbers\[(\d+)\]\)"  # how an expression names a constant
_GIVEN = ("tensors", "grads", "index", "outcome", "coefficients", "numbers")
"""What kernels of all rules take first. ``index`` has the column of each tensor of the stack in tables; then constants."""

_WORDS = """

@triton.jit
def T(x):
    return tl.cast(x, {compute})


@triton.jit
def half(x):
    return T(tl.cast(tl.cast(x, tl.float32), tl.bfloat16))  # in two steps, as torch rounds a float64


@triton.jit
def place(i):
    return i.to(tl.int32)


@triton.jit
def largest(x, inside):
    each = tl.where(inside, x, 0)
    return tl.max(tl.reshape(each, [each.shape[0], each.shape[1] // GROUP, GROUP]), axis=2)


@triton.jit
def number(numbers, place):
    return T(tl.load(numbers + place))


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
def {name}_tile({given}, column, t{addresses}, ALIGNED: tl.constexpr):
    right_of, below = tl.program_id(0) % right, tl.program_id(0) // right % down
    lane = right_of * {columns} + tl.arange(0, {columns})[None, :]
{before}
    for step in range(0, {steps}):
{body}
{after}


@triton.jit(do_not_specialize=["count", "right", "down"])
def {name}({given}):
    t = tl.program_id(1).to(tl.int64)
    column = tl.load(index + t)
    grad_address = tl.load(grads + column)
    if (grad_address != 0) & (tl.load(outcome + 1) == 0):
{found}
        if ({all}) % 16 == 0:
            {name}_tile({given}, column, t{addresses}, True)
        else:
            {name}_tile({given}, column, t{addresses}, False)
"""
"""A program updates some tiles of one tensor, in which ``right`` of them are side by side, and ``down`` below each other."""


class StackSource:
    """The Triton text of the update of tensors of one ``shape``, which is the same for many others."""

    def __init__(self, key: KernelKey, shape: Sequence[int], tiling: Tiling | None) -> None:
        compute = compute_dtype(key.dtypes[0])
        is_fit = tiling is not None and min(shape[-2:]) >= tiling.rows and not any(size % ALIGNED for size in shape[-2:])
        self.tiling = tiling if is_fit else None
        dialect = Dialect("{} = {}", "T({})", "&", "|", quadratic=is_fit)
        self.update = written(key.rule, dict(key.statics), shape, compute, dialect)
        self.schedule = Schedule(self.update)
        self.dtypes = dict(zip(self.update.inputs, key.dtypes, strict=True))
        kinds = [(s.name, torch.bfloat16 if s.half else torch.int32 if s.is_int else compute) for s in self.update.steps]
        self.dtypes |= dict(kinds)
        self.letters = self.update.letters
        self.names = {id(e): f"loop{i}" for i, e in enumerate(e for e in self.schedule.events if isinstance(e, Loop))}
        texts = [self._loop(e) for e in self.schedule.events if isinstance(e, Loop)]
        self.text = ELEMENT_WORDS + _WORDS.format(compute=dtype_name(compute)) + TEXT + "".join(texts)

    def own(self, loop: Loop) -> list[str]:
        """The values and partial sums that the kernel of ``loop`` takes."""
        values = [name for name in (*loop.loads, *loop.kept) if name in self.dtypes and name not in self.update.inputs]
        return [*dict.fromkeys(values), *map(self.written_to, loop.sums)]

    @staticmethod
    def written_to(step: Step) -> str:
        """What a loop writes for a sum: partial ones, or all that there is."""
        return f"partial_{step.name}" if step.kind == "sum" else step.name

    def _loop(self, loop: Loop) -> str:
        outer, inner = _tiled(loop.axes)
        arrays = [name for name in dict.fromkeys([*loop.loads, *loop.results]) if name in self.update.inputs]
        at = {"param": rows.PARAM, **{f"buffer{i}": rows.BUFFERS + i for i in range(len(self.update.inputs))}}
        found = [f"{n}_address = tl.load(tensors + {at[n]} * count + column)" for n in arrays if n != "grad"]
        batch = [d for d, letter in enumerate(loop.axes) if letter and d not in (outer, inner)]
        before = [f"i{d} = (tl.program_id(0) // right // down).to(tl.int64)" for d in batch]
        before += [f"i{inner} = lane"] if inner is not None else []
        before += [f"{n} = number(coefficients, {1 + int(n[1:])} * count + column)" for n in loop.loads if n[0] == "k"]
        before += ["factor = number(coefficients, column)"] if "grad" in arrays else []
        before += [f"at_{n} = pointer({n}_address, {dtype_name(self.dtypes[n])}, ALIGNED)" for n in arrays]
        body = []
        if outer is not None:
            row = f"(below * {_STEPS} + step) * {_ROWS} + tl.arange(0, {_ROWS})"
            body.append(f"i{outer} = ({row}).to(tl.int64)[:, None]")
        body.append(f"inside = {self._mask(loop.axes, loop.axes) or 'lane < 1'}")
        for name in (n for n in loop.loads if n in self.dtypes):
            value = f"tl.load({self._element(name, loop)})"
            value = f"T({value})" if self.dtypes[name].is_floating_point else f"{value}.to(tl.int32)"
            body.append(f"{name} = {'factor * ' * (name == 'grad')}{value}")
        steps = [f"{step.name} = {step.expression.replace('rounded(', 'half(')}" for step in loop.steps]
        body += [re.sub(_NUMBER, r"number\1", text) for text in steps]
        before += [f"number{i} = number(numbers, {i})" for i in dict.fromkeys(re.findall(_NUMBER, "\n".join(steps)))]
        stores = {**{name: name for name in loop.kept}, **loop.results}
        for to, new in stores.items():
            place, *mask = self._element(to, loop).split(", ")
            dtype = self.dtypes[to]
            narrow = f"{new}{'.to(tl.float32)' * (dtype in (torch.bfloat16, torch.float16))}.to({dtype_name(dtype)})"
            body.append(f"tl.store({', '.join([place, narrow, *mask])})")
        after: list[str] = []
        for step in loop.sums:
            for lines, more in zip((before, body, after), self._sum(step, loop), strict=True):
                lines += more
        return _LOOP.format(
            name=self.names[id(loop)],
            given=", ".join(
                [*_GIVEN, *(f"at_{name}" for name in self.own(loop)), "count", "right", "down", *map(_size, self.letters)]
            ),
            addresses="".join(f", {name}_address" for name in arrays),
            found=indented(found, "        "),
            all=" | ".join(f"{name}_address" for name in arrays) or "0",
            columns=_LANES if outer is None else _COLUMNS,
            steps=1 if outer is None else _STEPS,
            **{"before": indented(before, "    "), "body": indented(body, "        "), "after": indented(after, "    ")},
        )

    def _sum(self, step: Step, loop: Loop) -> tuple[list[str], list[str], list[str]]:
        """What a kernel does for a sum before its tiles, in each, and after them."""
        (outer, inner), name = _tiled(loop.axes), f"sum_{step.name}"
        part, copies = "0", "1"
        for d in (d for d, letter in enumerate(loop.axes) if letter and not step.axes[d]):
            number, place = {inner: ("right", "right_of"), outer: ("down", "below")}.get(d, (_size(loop.axes[d]), f"i{d}"))
            part, copies = f"({part}) * {number} + {place}", f"{copies} * {number}"
        numel = " * ".join(["1", *map(_size, filter(None, step.axes))])
        if step.kind == "largest":
            width = (_LANES if outer is None else _COLUMNS) // GROUP
            groups = f"i{inner}_of_groups = right_of * {width} + tl.arange(0, {width})[None, :]"
            index, mask = (
                text.replace(f"i{inner} // {GROUP}", f"i{inner}_of_groups")
                for text in (self._index(step.axes, loop.axes), self._mask(step.axes, loop.axes))
            )
            to = f"at_{step.name} + t * ({numel}) + {index}"
            return [groups], [f"tl.store({to}, largest({step.reads[0]}, inside), mask={mask})"], []
        place = f"at_partial_{step.name} + (t * ({copies}) + {part}) * ({numel}) + {self._index(step.axes, loop.axes)}"
        mask = "".join(f", mask={mask}" for mask in filter(None, [self._mask(step.axes, loop.axes)]))
        value = f"tl.where(inside, {step.reads[0]}, 0.0).to(tl.float64)"
        if outer is not None and step.axes[outer]:
            value = value if inner is not None and step.axes[inner] else f"tl.sum({value}, axis=1, keep_dims=True)"
            return [], [f"tl.store({place}, {value}{mask})"], []
        begin = [f"{name} = tl.zeros([1, {_LANES if outer is None else _COLUMNS}], tl.float64)"]
        total = name if inner is not None and step.axes[inner] else f"tl.sum(tl.sum({name}, axis=1), axis=0)"
        return begin, [f"{name} += tl.sum({value}, axis=0, keep_dims=True)"], [f"tl.store({place}, {total}{mask})"]

    def _element(self, name: str, loop: Loop) -> str:
        """The place of an element, and where there is one, as arguments of a load."""
        axes = self.schedule.axes_of(name)
        start = f"at_{name}"
        if name not in self.update.inputs:
            start += f" + t * ({' * '.join(['1', *map(_size, filter(None, axes))])})"
        mask = self._mask(axes, loop.axes)
        return f"{start} + {self._index(axes, loop.axes)}" + f", mask={mask}" * bool(mask)

    def _index(self, axes: Axes, loop: Axes) -> str:
        index = "0"
        for d, letter in enumerate(axes):
            index = (f"({index}) * {_size(letter)} + " * (index != "0") + _place(d, axes, loop)) if letter else index
        return index

    def _mask(self, axes: Axes, loop: Axes) -> str:
        tiled = [d for d in _tiled(loop) if d is not None and axes[d]]
        return " & ".join(f"({_place(d, axes, loop)} < {_size(axes[d])})" for d in tiled)


def _place(d: int, axes: Axes, loop: Axes) -> str:
    """The place along an axis, in a loop over elements that may be of groups along it."""
    return f"i{d}" if axes[d] == loop[d] else f"i{d} // {GROUP}"


def _tiled(axes: Axes) -> tuple[int | None, int | None]:
    """The last two axes along which there are several elements: rows and columns of tiles."""
    *_, outer, inner = [None, None, *(d for d, letter in enumerate(axes) if letter)]
    return outer, inner


def _size(letter: str) -> str:
    return f"size_{letter}" if letter else "1"


def stack_source(key: KernelKey, shape: Sequence[int]) -> StackSource | None:
    """The source for a ``shape``, which is written once; None if the rule does what only a compiler for all of torch can."""
    if not {*key.dtypes} <= _DTYPES:
        return None
    return _source(dataclasses.replace(key, arrangement=""), tuple(shape), tiling_of(torch.device(key.device)))


@functools.cache
def _source(key: KernelKey, shape: tuple[int, ...], tiling: Tiling | None) -> StackSource | None:
    try:
        return StackSource(key, shape, tiling)
    except NotWritable:
        return None


class StackKernels:
    """The update of stacks of one ``shape`` on a GPU. What its kernels hand on is allocated in each step."""

    def __init__(self, key: KernelKey, shape: Sequence[int]) -> None:
        source = stack_source(key, shape[1:])
        assert source is not None, "another lowering runs a rule that cannot be written"
        self._source, self._count, self._module = source, shape[0], load(source.text)
        self._device = torch.device(key.device)
        self._sizes = source.update.sizes(shape[1:])
        numbers = torch.tensor([*source.update.numbers, 0.0], dtype=torch.float64, device="cpu")
        self._numbers = numbers.to(self._device)
        with current_device(self._device):
            self._parts = [part for event in source.schedule.events for part in self._of_event(event)]
        own = {step.name for step in source.update.steps}
        last = {n: i for i, part in enumerate(self._parts) for n in part.reads + part.makes if n.split("_")[-1] in own}
        self._done = [[name for name, place in last.items() if place == i] for i in range(len(self._parts))]

    def run(self, given: Mapping[str, Tensor], count: int) -> None:
        """Update a stack, with tables of ``count`` columns: :data:`_GIVEN`, but for the constants, by name."""
        values = {**given, "numbers": self._numbers}
        for part, done in zip(self._parts, self._done, strict=True):
            part.run(values, count)
            for name in done:
                del values[name]

    def _of_event(self, event: Event) -> Iterator[_Part]:
        if isinstance(event, Loop):
            yield self._loop(event)
            yield from (self._added(step, event) for step in event.sums if step.kind == "sum")
        elif event.kind == "turn":
            yield _Part(event.reads, (event.name,), functools.partial(_turn, event))
        else:
            yield _Part(event.reads, (event.name,), self._symmetric(event) or functools.partial(_multiply, event))

    def _shape(self, name: str) -> list[int]:
        return [self._count, *(self._sizes[letter] for letter in self._source.schedule.axes_of(name) if letter)]

    def _tiles(self, loop: Loop) -> tuple[int, int]:
        """How many tiles are side by side, and how many programs' below each other."""
        height, width = (None if d is None else self._sizes[loop.axes[d]] for d in _tiled(loop.axes))
        if height is None:
            return -(-(width or 1) // _LANES), 1
        assert width is not None, "rows without columns"
        return -(-width // _COLUMNS), -(-height // (_ROWS * _STEPS))

    def _loop(self, loop: Loop) -> _Part:
        (right, down), source = self._tiles(loop), self._source
        own = source.own(loop)
        batch = math.prod(self._sizes[a] for d, a in enumerate(loop.axes) if d not in _tiled(loop.axes))
        sums = [step for step in loop.sums if step.kind == "sum"]
        partial = {source.written_to(step): [self._copies(step, loop), *self._shape(step.name)] for step in sums}
        own_values = [*loop.kept, *(step.name for step in loop.sums if step not in sums)]
        made = {name: (self._shape(name), source.dtypes[name]) for name in own_values}
        made |= {name: (shape, torch.float64) for name, shape in partial.items()}
        types = [torch.int64, torch.int64, torch.int64, *[torch.float64] * 3]
        types += [torch.float64 if name in partial else source.dtypes[name] for name in own]
        sizes = [self._sizes[letter] for letter in source.letters]
        grid = right * down * batch, self._count
        launch = launcher(getattr(self._module, source.names[id(loop)]), grid, types, (8, right, down, *sizes), self._device)

        def run(values: Values, count: int) -> None:
            for name, (shape, dtype) in made.items():
                values[name] = torch.empty(shape, dtype=dtype, device=self._device)
            launch([values[name] for name in (*_GIVEN, *own)], (count, right, down, *sizes))

        return _Part(tuple(name for name in own if name not in made), tuple(made), run)

    def _copies(self, step: Step, loop: Loop) -> int:
        """How many partial sums a sum has for each element."""
        outer, inner = _tiled(loop.axes)
        right, down = self._tiles(loop)
        gone = (d for d, letter in enumerate(loop.axes) if letter and not step.axes[d])
        return math.prod({inner: right, outer: down}.get(d, self._sizes[loop.axes[d]]) for d in gone)

    def _added(self, step: Step, loop: Loop) -> _Part:
        copies, shape, dtype = self._copies(step, loop), self._shape(step.name), self._source.dtypes[step.name]
        numel = math.prod(shape[1:])
        wide = 1 if numel == 1 else 32
        grid, counts = (-(-numel // wide), self._count), (copies, numel, _ADDED // wide, wide)
        launch = launcher(self._module.add, grid, (torch.float64, dtype), counts, self._device)

        def run(values: Values, count: int) -> None:
            values[step.name] = torch.empty(shape, dtype=dtype, device=self._device)
            launch([values[f"partial_{step.name}"], values[step.name]], counts)

        return _Part((f"partial_{step.name}",), (step.name,), run)

    def _symmetric(self, step: Step) -> Callable[[Values, int], None] | None:
        """What computes a product that is symmetric; None where torch does, or it is not known to be."""
        (name, *others), tiling, turned = step.reads, self._source.tiling, step.turned[0]
        if tiling is None or not (step.kind == "quadratic" or (step.half and others == [name] and turned != step.turned[1])):
            return None
        numbers = [(kind == "k", int(place)) for kind, place in re.findall(r"(k|numbers\[)(\d+)", step.expression)]
        kind = ("each" if numbers[0][0] else "same") if numbers else ""
        multiply = multiplier(self._module, tiling, self._shape(name), self._device, turned=turned, numbers=kind)
        shape = self._shape(step.name)

        def run(values: Values, count: int) -> None:
            x, coefficients, constants = values[name], values["coefficients"], values["numbers"]
            given = [coefficients[1 + place] if of_rule else constants[place:] for of_rule, place in numbers]
            values[step.name] = out = x.new_empty(shape)
            multiply(x, out, given or [constants] * 3, values["index"])

        return run


class _Part(NamedTuple):
    """Something that a step does, with the values that it reads and makes."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    run: Callable[[Values, int], None]


def _turn(step: Step, values: Values, count: int) -> None:
    values[step.name] = values[step.reads[0]].mT.contiguous()


def _multiply(step: Step, values: Values, count: int) -> None:
    left, right = (values[n].mT if turned else values[n] for n, turned in zip(step.reads, step.turned, strict=True))
    values[step.name] = made = left.new_empty(*left.shape[:-1], right.shape[-1])
    torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out=made.flatten(0, -3))  # whose dtype autocast leaves alone
