"""A rule on whole tensors as C++: loops over the elements of stacks, and torch's products of matrices between them."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.lowering.kernels.cpp import DIALECT, INDEPENDENT, SERIAL, STORAGE, WORDS
from compiled_optim.lowering.kernels.program import indented
from compiled_optim.lowering.kernels.stack_source import Loop, StackSource, multiply, numel, size, source_of
from compiled_optim.memory.cache import processor
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.tensor_program import TensorOp, TensorProgram

PHASES = Path(__file__).with_name("phases.h").read_text(encoding="utf-8")
"""C++ text that all functions share."""

_CHUNK, _MOST_CHUNKS = 32768, 64  # elements of a tensor that one thread takes at a time; the most of these chunks
_WHOLE = 4 * _CHUNK  # elements below which one thread updates a whole tensor, so that it stays in the thread's caches
_KEPT = 1 << 26  # the most bytes of memory that a thread keeps between updates
_LINE = 64  # bytes of a cache line, at which tensors begin

# Where the processor multiplies bfloat16 numbers only one by one, they are multiplied as float32, and products are rounded.
_HALF = torch.bfloat16 if "bf16" in processor() else torch.float32

_VALUE = r"(?<![a-z0-9])e\d+"  # the name of a value, also behind an underscore

FIRST_ARRAYS = ("coefficients", "outcome", "index", "tensors", "grads")
"""The first arrays of every function: the coefficients and the outcome of a coefficient table; for each tensor of the stack,
its column; for each column, the addresses of parameter and buffers, as in a tensor table, and the gradient's."""


class CppLoops(NamedTuple):
    """The loops between two products, as one C++ function, called ``name``.

    It takes the addresses of ``arrays``, which begin with :data:`FIRST_ARRAYS`, and ``sizes``: those of axes by letter, and
    those of loops and sums that :class:`CppStackSource` names.
    """

    name: str
    arrays: list[str]
    sizes: list[str]


class CppStackSource(StackSource):
    """The C++ text of the update of tensors of one shape, which is the same for most other shapes.

    Its ``parts`` are functions and the products between them. Each loop, such as ``loop0``, cuts a tensor into
    ``loop0.chunks`` along ``loop0.axis``. A sum over this axis has one partial sum for each chunk, any other has one.
    """

    _division = "/"
    _partly = "sum", "largest"

    def __init__(self, key: KernelKey, update: TensorProgram, half: torch.dtype) -> None:
        super().__init__(key, update, half)
        self.parts: list[CppLoops | TensorOp] = []
        texts: dict[str, str] = {}  # names of functions, by text without the name
        for is_op, group in itertools.groupby(self.events, lambda event: isinstance(event, TensorOp)):
            if is_op:
                self.parts += [event for event in group if isinstance(event, TensorOp)]
                continue
            self._arrays = {name: i for i, name in enumerate(FIRST_ARRAYS)}  # indices in the part's arrays, by name
            self._sizes = {name: i for i, name in enumerate((*update.letters, "alone"))}
            phases = [indented(self._phase(loop), "      ") for loop in group if isinstance(loop, Loop)]
            text = _PART.format(
                compute=STORAGE[compute_dtype(key.dtypes[0])],
                sizes="".join(f"\n  const int64_t size_{letter} = sizes[{i}];" for i, letter in enumerate(update.letters)),
                alone=f"sizes[{len(update.letters)}]",
                phases=",\n".join(phases),
            )
            name = texts.setdefault(_renamed(text), f"part{len(texts)}")
            self.parts.append(CppLoops(name, [*self._arrays], [*self._sizes]))
        self.text = f"{WORDS}\n{PHASES}" + "".join(text.replace("PART", name, 1) for text, name in texts.items())

    def _phase(self, loop: Loop) -> list[str]:
        inner = max((d for d, letter in enumerate(loop.axes) if letter), default=0)
        chunks, axis = self._extent(f"{loop.name}.chunks"), self._extent(f"{loop.name}.axis")
        before = [f"const T {n} = T(coefficients[{1 + int(n[1:])} * columns + index[t]]);" for n in loop.numbers]
        before += ["const T factor = T(coefficients[index[t]]);"] if "grad" in loop.loads else []
        before += [self._pointer(name) for name in dict.fromkeys([*loop.loads, *loop.stores])]
        before += [f"const Range range{d} = cut({size(a)}, {axis} == {d}, p, {chunks});" for d, a in enumerate(loop.axes)]
        lines: dict[bool, list[str]] = {False: [], True: []}  # by whether they are in the innermost loop
        for name in loop.loads:
            element, is_number = self._element(name, loop), self.dtypes[name].is_floating_point
            value = f"T {name} = {'factor * ' * (name == 'grad')}T({element})"
            value = value if is_number else f"uint32_t {name} = uint32_t(int32_t({element}))"
            lines[bool(self.axes_of(name)[inner])].append(f"const {value};")
        for op in loop.ops:
            lines[bool(op.axes[inner])].append(f"const auto {op.name} = {op.expression};")
        stores = loop.stores.items()
        lines[True] += [f"{self._element(to, loop)} = {STORAGE[self.dtypes[to]]}({value});" for to, value in stores]
        totals: dict[str, str] = {}  # variables that add up sums before these are stored
        begin, end = [], []
        for name, op in loop.sums.items():
            copies, count = self._extent(name), numel(op.axes)
            before.append(self._pointer(name, f"(t * {copies} + p % {copies})"))
            if op.kind == "sum" and op.axes[inner]:
                to = self._element(name, loop)
            else:
                to = totals[name] = f"sum_{op.name}"
            new = op.reads[0]
            lines[True].append(f"{to} = {new} > {to} ? {new} : {to};" if op.is_int else f"{to} += double({new});")
            begin.append(f"clear({self._start(name)}, t, {copies} * {count});")
            end.append(f"add({self._start(name)}, {self._start(op.name)}, t, {copies}, {count});")
        signs = ["+" if self.dtypes[name].is_floating_point else "max" for name in totals]
        reductions = "".join(f" reduction({sign} : {t})" for sign, t in zip(signs, totals.values(), strict=True))
        body = [f"{STORAGE[self.dtypes[name]]} {total} = 0;" for name, total in totals.items()]
        body += [f"#pragma omp simd{reductions}" if totals else INDEPENDENT, *_each(inner, lines[True])]
        body += [f"{element} = with({element}, {t});" for n, t in totals.items() for element in [self._element(n, loop)]]
        if "max" in signs:  # group by group
            i, end_of_group = f"i{inner}", f"end_of<{GROUP}>(i{inner}, last)"
            body = [f"const Range range{inner} = {{{i}, {end_of_group}}};", *body]
            each = f"for (int64_t {i} = range{inner}.first; {i} < last; {i} = {end_of_group}) {{"
            body = [f"const int64_t last = range{inner}.end;", each, *_indented(body), "}"]
        body = [*lines[False], *body]
        for d in (d for d in reversed(range(inner)) if loop.axes[d]):
            body = _each(d, body)
        one, several = "[&](const int64_t t) {", "[&](const int64_t t, const int64_t p) __attribute__((noinline)) {"
        text = [one, *_indented(begin), "},", several, *_indented([*before, *body]), "},", one, *_indented(end), "}"]
        return [f"phase({chunks},", *_indented(text), ")"]

    def _extent(self, name: str) -> str:
        return f"sizes[{self._sizes.setdefault(name, len(self._sizes))}]"

    def _start(self, name: str) -> str:
        index = self._arrays.setdefault(name, len(self._arrays))
        return f"start<{STORAGE[self.dtypes[name]]}>(arrays[{index}])"

    def _pointer(self, name: str, index: str = "t") -> str:
        kind = STORAGE[self.dtypes[name]]
        if name == "grad":
            where = f"start<{kind}>(grads[index[t]])"
        elif name in self.update.inputs:
            where = f"start<{kind}>(tensors[{self.row_of(name)} * columns + index[t]])"
        else:
            where = f"{self._start(name)} + {index} * {numel(self.axes_of(name))}"
        return f"{kind}* __restrict at_{name} = {where};"

    def _element(self, name: str, loop: Loop) -> str:
        return f"at_{name}[{self._index(self.axes_of(name), loop)}]"


def _renamed(text: str) -> str:
    """Return ``text`` with its values numbered in order, so that functions that differ in names only are equal."""
    names = {name: f"e{i}" for i, name in enumerate(dict.fromkeys(re.findall(_VALUE, text)))}
    return re.sub(_VALUE, lambda match: names[match[0]], text)


def stack_source(key: KernelKey, shape: Sequence[int]) -> CppStackSource | str:
    """Return the source for a ``shape``; see :func:`source_of`."""
    return source_of(CppStackSource, key, shape, DIALECT, _HALF)


def _each(d: int, body: Iterable[str]) -> list[str]:
    return [f"for (int64_t i{d} = range{d}.first; i{d} < range{d}.end; i{d}++) {{", *_indented(body), "}"]


def _indented(lines: Iterable[str]) -> list[str]:
    return ["  " + line for line in lines]


_PART = """
OURS void PART(const int64_t* arrays, const int64_t* sizes, const double* numbers, int64_t columns, int64_t count,
               int64_t threads) {{
  using T = {compute};
  const double *coefficients = start<const double>(arrays[0]), *outcome = start<const double>(arrays[1]);
  const int64_t *index = start<const int64_t>(arrays[2]), *tensors = start<const int64_t>(arrays[3]);
  const int64_t* grads = start<const int64_t>(arrays[4]);{sizes}
  if (outcome[1]) return;
  run({alone}, count, threads, [&](const int64_t t) {{ return grads[index[t]] != 0; }},
{phases});
}}
"""


class CppStackKernels:
    """The update of stacks of one shape.

    Attributes:
        temporaries: for each temporary tensor, its byte offset in the memory of all of them, its shape and its dtype.
        bytes: the size of that memory.
    """

    def __init__(self, key: KernelKey, shape: Sequence[int], load: Callable[[str], ctypes.CDLL]) -> None:
        source = stack_source(key, shape[1:])
        assert not isinstance(source, str), "another lowering runs a rule that cannot be written"
        self._source = source
        self._count, self._numbers = shape[0], (ctypes.c_double * len(source.update.numbers))(*source.update.numbers)
        is_whole = math.prod(shape[1:]) < _WHOLE
        self._is_serial = math.prod(shape) <= SERIAL or (is_whole and self._count == 1)
        sizes = {"alone": int(is_whole), **source.update.sizes(shape[1:])}
        for loop in source.loops:
            lengths = [sizes[letter] for letter in loop.axes]
            chunks = min(max(math.prod(lengths) // _CHUNK, 1), _MOST_CHUNKS)
            axis = lengths.index(max(lengths))  # the longest, so that partial sums along the others need little memory
            sizes |= {f"{loop.name}.chunks": chunks, f"{loop.name}.axis": axis}
        for name, (loop, op) in source.partial.items():
            axis = sizes[f"{loop.name}.axis"]
            is_whole_in_a_chunk = op.axes[axis] == loop.axes[axis]  # not of groups: a chunk may end within one
            sizes[name] = 1 if is_whole_in_a_chunk else sizes[f"{loop.name}.chunks"]
        self._allocate(sizes)
        self._events: list[tuple[CppLoops | TensorOp, Any, Any]] = []
        code = load(source.text)
        for event in source.parts:
            function, arguments = None, None
            if isinstance(event, CppLoops):
                function = getattr(code, event.name)
                function.argtypes, function.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3, None
                arguments = (ctypes.c_int64 * len(event.sizes))(*[sizes[size] for size in event.sizes])
            self._events.append((event, function, arguments))

    def _allocate(self, sizes: Mapping[str, int]) -> None:
        """Assign memory to all temporaries; after its last use, a temporary's memory is reused by others of its size."""
        self.temporaries: dict[str, tuple[int, list[int], torch.dtype]] = {}
        nbytes: dict[str, int] = {}
        self.bytes, free = 0, defaultdict[int, list[int]](list)  # free offsets, by size
        temporary = {*self._source.partial, *(op.name for op in self._source.update.ops)}
        uses = [event.arrays if isinstance(event, CppLoops) else [*event.reads, event.name] for event in self._source.parts]
        last = {name: i for i, names in enumerate(uses) for name in names if name in temporary}
        for i, names in enumerate(uses):
            for name in (n for n in names if n in temporary and n not in self.temporaries):
                shape, dtype = self._source.shape(name, self._count, sizes), self._source.dtypes[name]
                nbytes[name] = -(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE
                start = free[nbytes[name]].pop() if free[nbytes[name]] else self.bytes
                self.temporaries[name] = start, shape, dtype
                self.bytes = max(self.bytes, start + nbytes[name])
            for name in (n for n in dict.fromkeys(names) if n in temporary and last[n] == i):
                free[nbytes[name]].append(self.temporaries[name][0])

    def run(self, arguments: Mapping[str, Tensor], columns: int) -> None:
        """Update a stack, with tables of ``columns`` columns, and :data:`FIRST_ARRAYS` by name."""
        temporaries, addresses = _memory.of(self)
        addresses = addresses | {name: tensor.data_ptr() for name, tensor in arguments.items()}
        if ctypes.c_double.from_address(addresses["outcome"] + ctypes.sizeof(ctypes.c_double)).value:  # the step is skipped
            return
        threads = 1 if self._is_serial else torch.get_num_threads()
        for event, function, sizes in self._events:
            if isinstance(event, CppLoops):
                arrays = (ctypes.c_int64 * len(event.arrays))(*map(addresses.__getitem__, event.arrays))
                function(arrays, sizes, self._numbers, columns, self._count, threads)
            else:
                multiply(event, temporaries)


class _Memory(threading.local):
    """The memory of one thread for the temporary tensors of an update.

    Up to :data:`_KEPT` bytes are kept for the next update: allocating them takes as long as using them.
    """

    def __init__(self) -> None:
        self._all = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._known: dict[CppStackKernels, tuple[dict[str, Tensor], dict[str, int]]] = {}

    def of(self, loops: CppStackKernels) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the temporary tensors of ``loops`` by name, and their addresses."""
        if loops in self._known:
            return self._known[loops]
        with torch.inference_mode(False):
            fits, tensors = loops.bytes <= len(self._all), {}
            memory = self._all if fits else torch.empty(loops.bytes, dtype=torch.uint8, device="cpu")
            for name, (start, shape, dtype) in loops.temporaries.items():
                tensors[name] = memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        views = tensors, {name: tensor.data_ptr() for name, tensor in tensors.items()}
        if len(memory) <= _KEPT:
            self._known = {**(self._known if fits else {}), loops: views}
            self._all = memory
        return views


_memory = _Memory()
