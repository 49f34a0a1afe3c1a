"""The update of a stack before it is printed as C++ or Triton: loops over elements, and products between them."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from compiled_optim.lowering.kernels.table import BUFFERS, PARAM
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule import symbols
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.symbols import Dialect
from compiled_optim.rule.tensor_program import OF_GROUPS, Axes, TensorOp, TensorProgram, written

S = TypeVar("S", bound="StackSource")

_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16}
_NOT_RULES = (__file__, *(str(Path(file).parent) for file in (symbols.__file__, torch.__file__)))


@dataclass
class Loop:
    """A loop over the elements of ``axes``: it evaluates ``ops``, adds up ``sums``, and stores values for later events.

    ``sums`` are the reductions, among them the largest values of groups, by the name of the result or partial result.

    ``loads`` are the values that the loop reads from memory, ``numbers`` the coefficients that it reads, ``outputs`` the
    values that it stores. ``results`` are the new values of parameter and buffers, by the names of these.
    """

    name: str
    axes: Axes
    sums: dict[str, TensorOp]
    results: dict[str, str]
    ops: list[TensorOp] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def stores(self) -> dict[str, str]:
        """The names of the values that the loop stores, by the names under which it stores them."""
        return {**{name: name for name in self.outputs}, **self.results}


Event: TypeAlias = Loop | TensorOp  # an operation on matrices: a product or a transposition


class StackSource:
    """The ``events`` of an update, in order. A subclass for each language prints the ``loops`` among them as its ``text``.

    A value with as many elements as the tensor, or with one, is recomputed in each loop that needs it. Other values, sums,
    values of groups and operands of products are computed once and stored. New parameters and buffers are stored by the
    last loop that reads the old ones, if it computes them, and otherwise at the end.

    ``dtypes`` are of all that memory may hold, by name: inputs, values, and ``partial`` results of sums. Values in half
    precision have the dtype ``half``.
    """

    text: str
    _division: ClassVar[str]  # the operator of integer division in the language
    _partly: ClassVar[Collection[str]] = ("sum",)  # kinds of reductions that have partial results

    def __init__(self, key: KernelKey, update: TensorProgram, half: torch.dtype) -> None:
        self.update, compute = update, compute_dtype(key.dtypes[0])
        self.dtypes = dict(zip(update.inputs, key.dtypes, strict=True))
        self.dtypes |= {s.name: half if s.half else torch.int32 if s.is_int else compute for s in update.ops}
        self._ops = {op.name: op for op in update.ops}
        multiplied = {name for s in update.ops if not _is_looped(s) for name in s.reads}
        between = range(1, _rank(update.axes))  # of values with several elements, but not as many as the tensor
        few = {s.name for s in update.ops if _rank(s.axes) in between or OF_GROUPS in s.axes}
        self._once = [s for s in update.ops if s.kind != "element" or s.name in few | multiplied]
        self._names = {s.name for s in self._once}
        self.events: list[Event] = []
        self.loops: list[Loop] = []
        pending, done = list(self._once), set[str]()
        while pending:
            ops = self._next([s for s in pending if self._needs(s) <= done], pending, done)
            self.events.append(self._loop(self._space(ops[0]), ops) if _is_looped(ops[0]) else ops[0])
            done |= {op.name for op in ops}
            pending = [op for op in pending if op.name not in done]
        late = {old: new for old, new in update.results.items() if not self._stored_early(old, new)}
        for axes in sorted({update.inputs[old] for old in late}, key=lambda axes: (-_rank(axes), axes)):
            self.events.append(self._loop(axes, (), {o: n for o, n in late.items() if update.inputs[o] == axes}))
        read = multiplied.union(*(loop.loads for loop in self.loops))
        for loop in self.loops:
            loop.outputs = [op.name for op in loop.ops if op.name in self._names & read]
        sums = ((name, loop, op) for loop in self.loops for name, op in loop.sums.items())
        self.partial = {name: (loop, op) for name, loop, op in sums if name != op.name}
        self.dtypes |= {name: torch.int32 if s.is_int else torch.float64 for name, (_, s) in self.partial.items()}

    def _stored_early(self, old: str, new: str) -> bool:
        """Store ``new`` in the last loop that reads ``old``. Return False if that lacks ``new`` or others need ``old``."""
        readers = [loop for loop in self.loops if old in loop.loads]
        others = [value for other, value in self.update.results.items() if other != old]
        if not readers or old in self._read(others) or new not in {op.name for op in readers[-1].ops}:
            return False
        readers[-1].results[old] = new
        return True

    def axes_of(self, name: str) -> Axes:
        """Return the axes of an operation's value, of an input, or of a coefficient, which has none."""
        if (op := self._ops.get(name.removeprefix("partial_"))) is not None:
            return op.axes
        return self.update.inputs.get(name, ("",) * len(self.update.axes))

    def row_of(self, name: str) -> int:
        """Return the row of a tensor table with the addresses of the parameter, or of a buffer, of this name."""
        return PARAM if name == "param" else BUFFERS + int(name.removeprefix("buffer"))

    def shape(self, name: str, count: int, sizes: Mapping[str, int]) -> list[int]:
        """Return the shape of a value of ``count`` tensors. ``sizes`` has axes by letter, and numbers of partial results."""
        copies = [sizes[name]] if name in self.partial else []
        return [count, *copies, *(sizes[letter] for letter in self.axes_of(name) if letter)]

    def _index_along(self, d: int, axes: Axes, loop: Loop) -> str:
        """Return the index along dimension ``d`` of a value with ``axes``: of the element, or of its group."""
        return f"i{d}" if axes[d] == loop.axes[d] else f"i{d} {self._division} {GROUP}"

    def _index(self, axes: Axes, loop: Loop) -> str:
        """Return the index of an element in the memory of its tensor."""
        index = ""
        for d, letter in enumerate(axes):
            if letter:
                along = self._index_along(d, axes, loop)
                index = f"({index}) * {size(letter)} + {along}" if index else along
        return index or "0"

    def _next(self, ready: Sequence[TensorOp], pending: Sequence[TensorOp], done: set[str]) -> list[TensorOp]:
        """Return the operations of the next event: small values first, so that loops over all elements are few."""
        elementwise = [s for s in ready if _is_looped(s)]
        small = [s for s in elementwise if _rank(self._space(s)) < _rank(self.update.axes)]
        first = (small or elementwise or ready)[0]
        if first not in elementwise:
            return [first]
        ops: list[TensorOp] = []
        for op in (s for s in pending if _is_looped(s) and self._space(s) == self._space(first)):
            if self._needs(op) <= done.union(s.name for s in ops if s.kind == "element"):
                ops.append(op)
        return ops

    def _space(self, op: TensorOp) -> Axes:
        """Return the axes of the loop that evaluates an operation."""
        return self.axes_of(op.reads[0]) if op.reduces else op.axes

    def _needs(self, op: TensorOp) -> set[str]:
        """Return the names of the stored values that an operation reads."""
        return self._read(op.reads) & self._names

    def _loop(self, axes: Axes, ops: Iterable[TensorOp], results: dict[str, str] | None = None) -> Loop:
        sums = {f"partial_{s.name}" if s.kind in self._partly else s.name: s for s in ops if s.reduces}
        loop = Loop(f"loop{len(self.loops)}", axes, sums, results or {})
        self.loops.append(loop)
        evaluated = {s.name for s in ops if s.kind == "element"}
        wanted = [*evaluated, *(s.reads[0] for s in sums.values()), *loop.results.values()]
        read = self._read(wanted, evaluated)
        loop.ops = [s for s in self.update.ops if s.name in read and (s.name in evaluated or s.name not in self._names)]
        others = sorted(read - {s.name for s in loop.ops})
        loop.loads = [name for name in others if name in self.dtypes]
        loop.numbers = [name for name in others if name not in self.dtypes]
        return loop

    def _read(self, names: Iterable[str], fresh: Collection[str] = ()) -> set[str]:
        """Return ``names`` and all values that a loop reads for them. A stored value is not traced unless in ``fresh``."""
        read, todo = set[str](), list(names)
        while todo:
            if (name := todo.pop()) not in read:
                read.add(name)
                todo += self._ops[name].reads if name in self._ops and (name in fresh or name not in self._names) else ()
        return read


def _is_looped(op: TensorOp) -> bool:
    return op.reduces or op.kind == "element"


def _rank(axes: Axes) -> int:
    return len("".join(axes))


def size(letter: str) -> str:
    """Return the name of the size of an axis in code."""
    return f"size_{letter}" if letter else "1"


def numel(axes: Axes) -> str:
    """Return the expression of the number of elements of a tensor."""
    return " * ".join(map(size, filter(None, axes))) or "1"


def source_of(kind: Callable[..., S], key: KernelKey, shape: Sequence[int], dialect: Dialect, *more: Any) -> S | str:
    """Return ``kind(key, update, *more)``, a source for tensors of a ``shape``, which is cached.

    If the rule cannot be printed, return why and where, in words; ``""`` if dtypes are the reason.
    """
    if not {*key.dtypes} <= _DTYPES:
        return ""
    source: S | str = _source(kind, dataclasses.replace(key, arrangement=""), tuple(shape), dialect, *more)
    return source


@functools.cache
def _source(kind: Callable[..., Any], key: KernelKey, shape: tuple[int, ...], dialect: Dialect, *more: Any) -> Any:
    try:
        update = written(key.rule, dict(key.statics), shape, compute_dtype(key.dtypes[0]), dialect)
    except Exception as error:  # any error that torch code raises for a symbol in place of a tensor
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_RULES)]
        where = "".join(f" (line {f.lineno} of {Path(f.filename).name}: {f.line})" for f in frames[-1:])
        does = str(error) if isinstance(error, symbols.NotWritable) else f"is not in the rules' vocabulary: {error}"
        return f"{key.rule.name}.update {does}{where}"
    return kind(key, update, *more)


def multiply(op: TensorOp, values: Mapping[str, Tensor]) -> None:
    """Compute a product of matrices, or a transposed matrix, in torch's operations, into the tensor of its name."""
    out = values[op.name]
    if op.kind == "transpose":
        out.copy_(values[op.reads[0]].mT)
        return
    pairs = zip(op.reads, op.transposed, strict=True)
    left, right = ((values[n].mT if transposed else values[n]).flatten(0, -3) for n, transposed in pairs)
    product = torch.bmm(left, right, out=out.flatten(0, -3))  # `out` keeps its dtype under autocast
    if op.half and product.dtype != torch.bfloat16:
        product.copy_(product.to(torch.bfloat16))
