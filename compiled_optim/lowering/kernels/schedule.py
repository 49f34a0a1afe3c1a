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

from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule import symbols
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.symbols import Dialect
from compiled_optim.rule.tensor_program import OF_GROUPS, Axes, TensorOp, TensorProgram, written

S = TypeVar("S", bound="Schedule")

_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16}
_NOT_RULES = (__file__, *(str(Path(file).parent) for file in (symbols.__file__, torch.__file__)))


@dataclass
class Loop:
    """A loop over the elements of ``axes``: it evaluates operations, adds up ``sums``, and stores what is read after it.

    Among ``sums`` are the largest of groups, too. They are named by what the loop writes for each, a partial result or all.

    ``loads`` are what it reads from memory and ``numbers`` the coefficients that it reads, ``kept`` the values that it
    stores. ``results`` are the new values of parameter and buffers, by the names of these.
    """

    name: str
    axes: Axes
    sums: dict[str, TensorOp]
    results: dict[str, str]
    ops: list[TensorOp] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def stores(self) -> dict[str, str]:
        """What it stores, by where."""
        return {**{name: name for name in self.kept}, **self.results}


Event: TypeAlias = Loop | TensorOp  # of matrices: a product, or one that is to be transposed


class Schedule:
    """The ``events`` of an update, in order; a language's own class prints the ``loops`` among them as its ``text``.

    Each loop computes again the values that it needs, where these have an element for each of the tensor's, or a single one.
    Other values, sums, what groups share and what products take are computed once and kept. New parameters and buffers are
    stored by the last loop that reads the old ones, if it computes them, and otherwise at the end.

    ``dtypes`` are of what may lie in memory, by name: inputs, values, and ``partial`` results of sums. Values in half
    precision are of the dtype ``half``.
    """

    text: str
    _division: ClassVar[str]  # of integers, as the language writes it
    _partly: ClassVar[Collection[str]] = ("sum",)  # kinds whose results are partial before they are in one number

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
        rest, done = list(self._once), set[str]()
        while rest:
            found = self._next([s for s in rest if self._needs(s) <= done], rest, done)
            self.events.append(self._loop(self._space(found[0]), found) if _is_looped(found[0]) else found[0])
            done |= {op.name for op in found}
            rest = [op for op in rest if op.name not in done]
        late = {old: new for old, new in update.results.items() if not self._stored_early(old, new)}
        for axes in sorted({update.inputs[old] for old in late}, key=lambda axes: (-_rank(axes), axes)):
            self.events.append(self._loop(axes, (), {o: n for o, n in late.items() if update.inputs[o] == axes}))
        read = multiplied.union(*(loop.loads for loop in self.loops))
        for loop in self.loops:
            loop.kept = [op.name for op in loop.ops if op.name in self._names & read]
        sums = ((name, loop, op) for loop in self.loops for name, op in loop.sums.items())
        self.partial = {name: (loop, op) for name, loop, op in sums if name != op.name}
        self.dtypes |= {name: torch.int32 if s.is_int else torch.float64 for name, (_, s) in self.partial.items()}

    def _stored_early(self, old: str, new: str) -> bool:
        """Whether the last loop that reads ``old`` stores ``new``: it computes that, and no other result needs ``old``."""
        readers = [loop for loop in self.loops if old in loop.loads]
        others = [value for other, value in self.update.results.items() if other != old]
        if not readers or old in self._read(others) or new not in {op.name for op in readers[-1].ops}:
            return False
        readers[-1].results[old] = new
        return True

    def axes_of(self, name: str) -> Axes:
        """The axes of a value: of an operation, of an input, or of a coefficient, which has none."""
        if (op := self._ops.get(name.removeprefix("partial_"))) is not None:
            return op.axes
        return self.update.inputs.get(name, ("",) * len(self.update.axes))

    def shape(self, name: str, count: int, sizes: Mapping[str, int]) -> list[int]:
        """The shape of a value of ``count`` tensors; ``sizes`` are by letter, and of partial results their number."""
        copies = [sizes[name]] if name in self.partial else []
        return [count, *copies, *(sizes[letter] for letter in self.axes_of(name) if letter)]

    def _place(self, d: int, axes: Axes, loop: Loop) -> str:
        """The place along an axis, in a loop over elements that may be of groups along it."""
        return f"i{d}" if axes[d] == loop.axes[d] else f"i{d} {self._division} {GROUP}"

    def _index(self, axes: Axes, loop: Loop) -> str:
        """The place of an element among all of its tensor."""
        index = ""
        for d, letter in enumerate(axes):
            if letter:
                place = self._place(d, axes, loop)
                index = f"({index}) * {size(letter)} + {place}" if index else place
        return index or "0"

    def _next(self, ready: Sequence[TensorOp], rest: Sequence[TensorOp], done: set[str]) -> list[TensorOp]:
        """The operations that one event takes: of small values first, so that loops over all elements are few."""
        elementwise = [s for s in ready if _is_looped(s)]
        small = [s for s in elementwise if _rank(self._space(s)) < _rank(self.update.axes)]
        first = (small or elementwise or ready)[0]
        if first not in elementwise:
            return [first]
        found: list[TensorOp] = []
        for op in (s for s in rest if _is_looped(s) and self._space(s) == self._space(first)):
            if self._needs(op) <= done.union(s.name for s in found if s.kind == "element"):
                found.append(op)
        return found

    def _space(self, op: TensorOp) -> Axes:
        """The axes of the loop that evaluates an operation."""
        return self.axes_of(op.reads[0]) if op.reduces else op.axes

    def _needs(self, op: TensorOp) -> set[str]:
        """What must be done before an operation can be evaluated."""
        return self._read(op.reads) & self._names

    def _loop(self, axes: Axes, found: Iterable[TensorOp], results: dict[str, str] | None = None) -> Loop:
        sums = {f"partial_{s.name}" if s.kind in self._partly else s.name: s for s in found if s.reduces}
        loop = Loop(f"loop{len(self.loops)}", axes, sums, results or {})
        self.loops.append(loop)
        own = {s.name for s in found if s.kind == "element"}
        wanted = [*own, *(s.reads[0] for s in sums.values()), *loop.results.values()]
        read = self._read(wanted, own)
        loop.ops = [s for s in self.update.ops if s.name in read and (s.name in own or s.name not in self._names)]
        others = sorted(read - {s.name for s in loop.ops})
        loop.loads = [name for name in others if name in self.dtypes]
        loop.numbers = [name for name in others if name not in self.dtypes]
        return loop

    def _read(self, names: Iterable[str], own: Collection[str] = ()) -> set[str]:
        """Values, and what they are computed from in a loop that evaluates its ``own`` ones."""
        found, rest = set[str](), list(names)
        while rest:
            if (name := rest.pop()) not in found:
                found.add(name)
                rest += self._ops[name].reads if name in self._ops and (name in own or name not in self._names) else ()
        return found


def _is_looped(op: TensorOp) -> bool:
    return op.reduces or op.kind == "element"


def _rank(axes: Axes) -> int:
    return len("".join(axes))


def size(letter: str) -> str:
    """What code calls the size of an axis."""
    return f"size_{letter}" if letter else "1"


def numel(axes: Axes) -> str:
    """The number of elements of a tensor."""
    return " * ".join(map(size, filter(None, axes))) or "1"


def source_of(kind: Callable[..., S], key: KernelKey, shape: Sequence[int], dialect: Dialect, *more: Any) -> S | str:
    """A ``kind`` of schedule for tensors of a ``shape``, which is made once, of key and update and ``more``.

    If the rule does what only a compiler for all of torch can, what and where, in words; empty if dtypes are the reason.
    """
    if not {*key.dtypes} <= _DTYPES:
        return ""
    found: S | str = _source(kind, dataclasses.replace(key, arrangement=""), tuple(shape), dialect, *more)
    return found


@functools.cache
def _source(kind: Callable[..., Any], key: KernelKey, shape: tuple[int, ...], dialect: Dialect, *more: Any) -> Any:
    try:
        update = written(key.rule, dict(key.statics), shape, compute_dtype(key.dtypes[0]), dialect)
    except Exception as error:  # whatever an update, which torch can run, says of a symbol that is no tensor
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
    product = torch.bmm(left, right, out=out.flatten(0, -3))  # whose dtype autocast leaves alone
    if op.half and product.dtype != torch.bfloat16:
        product.copy_(product.to(torch.bfloat16))
