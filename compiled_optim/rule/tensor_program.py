"""The update of a rule on whole tensors as statements: on elements, sums along axes, products of matrices.

The update is called with symbols instead of stacks. These know the operations of torch that this module lists; where an
update uses another one, :func:`written` raises :class:`NotWritable`, and only Inductor can compile the update.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, cast

import torch

from compiled_optim.rule.fields import Buffer
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import INDEX, Rule, number_type
from compiled_optim.rule.symbols import COMPARISONS, OF_FORMATS, WORDS, Code, Dialect, Kind, NotWritable, Symbol
from compiled_optim.rule.vocabulary import sqrt, where

OpKind: TypeAlias = Literal["element", "sum", "largest", "product", "quadratic", "transpose"]
Axes: TypeAlias = tuple[str, ...]
"""For each dimension of a stack but the first, the letter of its size; empty where a value is the same all along it.

:data:`OF_GROUPS` is the letter of groups of elements along the columns.
"""
OF_GROUPS = "g"

_COLUMNS = "c"
_LETTERS = {1: "c", 2: "rc", 3: "brc"}  # columns, rows, batch
_PRIMES = (101, 103, 107)  # stand for sizes, so that each size in a buffer's shape is recognized


@dataclass(frozen=True)
class TensorOp:
    """The definition of one value: an ``expression`` of the values in ``reads``, or a sum, product or copy of them.

    ``"largest"`` is the largest integer of each group, at least 0. A ``"product"`` is of two matrices, each transposed
    first if its ``transposed`` is true. ``"quadratic"`` is a + b * x + c * x @ x of a symmetric matrix, with three numbers
    in its expression. ``"transpose"`` is the transposed matrix. ``half`` means bfloat16, and ``is_int`` a 32-bit integer.
    """

    name: str
    kind: OpKind
    axes: Axes
    reads: tuple[str, ...]
    expression: str = ""
    half: bool = False
    transposed: tuple[bool, bool] = (False, False)
    is_int: bool = False

    @property
    def reduces(self) -> bool:
        """Whether it reduces several elements to one number."""
        return self.kind in ("sum", "largest")


@dataclass(frozen=True)
class TensorProgram:
    """A rule's update of a stack: its operations, and the names of the new parameter and buffers.

    They read ``param``, ``grad``, ``buffer0``, ..., whose axes are ``inputs``, ``k0``, ... for coefficients, ``i0``,
    ... for the index of an element along each axis, ``size_c``, ... for sizes, and the ``numbers`` by index.
    """

    axes: Axes
    inputs: Mapping[str, Axes]
    ops: Sequence[TensorOp]
    results: Mapping[str, str]
    numbers: Sequence[float]

    @property
    def letters(self) -> list[str]:
        """The letters of all sizes."""
        axes = [self.axes, *self.inputs.values(), *(op.axes for op in self.ops)]
        return list(dict.fromkeys(filter(None, itertools.chain(*axes))))

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Return the size of each letter for tensors of ``shape``, as the update sees them."""
        return {**dict(zip(self.axes, shape, strict=True)), "": 1, OF_GROUPS: shape[-1] // GROUP}


class _Count:
    """The number of tensors in a stack, on which an update may not depend."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotWritable("depends on the number of tensors in a stack")

    __int__ = __index__ = __float__ = __eq__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class TensorSymbol(Symbol):
    """A stack in an update. It is ``transposed`` if its matrices are stored transposed in memory.

    Its numbers are ``half`` precision (bfloat16), or a boolean ``mask``.
    """

    __slots__ = ("axes", "half", "mask", "transposed")
    code: TensorCode

    def __init__(
        self, code: TensorCode, name: str, axes: Axes, *, half: bool = False, transposed: bool = False, is_int: bool = False
    ) -> None:
        super().__init__(code, name, Kind(is_int))
        self.axes, self.half, self.transposed, self.mask = axes, half, transposed, False

    @property
    def update_axes(self) -> Axes:
        """The axes, as the update sees them."""
        return (*self.axes[:-2], self.axes[-1], self.axes[-2]) if self.transposed else self.axes

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of tensors, which nothing may use, and the sizes."""
        return (_Count(), *(self.code.sizes.get(letter, 1) for letter in self.update_axes))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is computed."""
        return torch.bfloat16 if self.half else self.code.dtype

    @property
    def mT(self) -> TensorSymbol:
        """The transposed matrices."""
        self.code.refuse_masks(self)
        return TensorSymbol(self.code, self.name, self.axes, half=self.half, transposed=not self.transposed)

    def contiguous(self) -> TensorSymbol:
        """Return the same stack, stored in memory as the update sees it."""
        self.code.refuse_masks(self)
        return self.code.upright(self)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return 1 + len(self.axes)

    def to(self, dtype: torch.dtype) -> TensorSymbol:
        """Convert the numbers to bfloat16, or to the dtype of computations."""
        if dtype not in (torch.bfloat16, self.code.dtype):
            raise NotWritable(f"computes in {dtype}")
        half, name = dtype == torch.bfloat16, self.name
        if self.mask:
            return self.code.append("element", self.axes, (name,), f"T({name})", transposed=self.transposed).to(dtype)
        if half and not self.half:
            rounded = f"rounded({name})"
            return self.code.append("element", self.axes, (name,), rounded, half=True, transposed=self.transposed)
        return TensorSymbol(self.code, name, self.axes, half=half, transposed=self.transposed)

    def mean(self, dim: int | Sequence[int], *, keepdim: bool) -> Any:
        """Return the mean along dimensions, which become of size 1."""
        total = self.sum(dim, keepdim=keepdim)
        sizes = [f"size_{letter}" for letter, kept in zip(self.axes, total.axes, strict=True) if letter != kept]
        return self.code.assign(f"{total.name} / T({' * '.join(sizes)})", total) if sizes else self

    def sum(self, dim: int | Sequence[int], *, keepdim: bool) -> TensorSymbol:
        """Sum along dimensions, which become of size 1."""
        dims = {d % self.dim() for d in ((dim,) if isinstance(dim, int) else dim)}
        self.code.refuse_masks(self)
        if not keepdim or not dims or 0 in dims or self.half:
            raise NotWritable("sums along all or the first dimension, or drops dimensions, or sums in bfloat16")
        axes = tuple("" if d in dims else letter for d, letter in enumerate(self.update_axes, 1))
        axes = (*axes[:-2], axes[-1], axes[-2]) if self.transposed else axes
        if axes == self.axes:
            return self
        return self.code.append("sum", axes, (self.name,), transposed=self.transposed)

    def __matmul__(self, other: Any) -> TensorSymbol:
        left, right = self.update_axes, other.update_axes
        fit = len(left) > 1 and left[:-2] == right[:-2] and left[-1] == right[-2]
        if not fit or "" in (*left, *right) or self.half != other.half:
            raise NotWritable("multiplies tensors that are not matrices of one dtype and matching shapes")
        names = self.code.computed(self), self.code.computed(other)
        transposed = (self.transposed, other.transposed)
        return self.code.append("product", (*left[:-1], right[-1]), names, half=self.half, flips=transposed)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _FUNCTIONS:
            return _FUNCTIONS[function](*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


def _lerp(start: TensorSymbol, end: TensorSymbol, weight: TensorSymbol) -> Any:
    change = end - start
    return where(weight < 0.5, start + weight * change, end - change * (1 - weight))


def _vector_norm(x: TensorSymbol, ord: float = 2, dim: int | Sequence[int] = (), *, keepdim: bool = False) -> Any:
    if ord != 2:
        raise NotWritable("takes a norm of another order than 2")
    return sqrt((x * x).sum(dim, keepdim=keepdim))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.lerp: _lerp,
    torch.linalg.vector_norm: _vector_norm,
}


class TensorCode(Code):
    """The operations of one update of stacks with these ``sizes`` by letter, which computes in ``dtype``."""

    def __init__(self, dialect: Dialect, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        super().__init__(dialect, "e")
        self.sizes, self.dtype = sizes, dtype
        self.numbers: list[float] = []
        self.ops: dict[TensorOp, str] = {}  # the name of each value, by the operation that defines it

    def operand(self, value: Any, *, is_int: bool = False) -> str:
        """Write an operand as any code does; a Python number gets an index in ``numbers``: code does not depend on it."""
        if is_int or isinstance(value, Symbol) or not isinstance(value, (int, float)):
            return super().operand(value, is_int=is_int)
        self.numbers.append(float(value))
        return f"T(numbers[{len(self.numbers) - 1}])"

    def binary(self, operator: str, left: Any, right: Any) -> Any:
        """Append an operation as any code does, after alignment in memory; the result of a comparison is a mask."""
        symbols = [value for value in (left, right) if isinstance(value, TensorSymbol)]
        combines = operator in (self.dialect.both, self.dialect.either) and not any(s.kind.is_int for s in symbols)
        if not combines:
            self.refuse_masks(*symbols)
        elif [s.mask for s in symbols] != [True, True]:
            raise NotWritable("combines values that are not both comparisons")
        result: Any = super().binary(operator, *self._aligned(left, right))
        result.mask = combines or operator in COMPARISONS
        return result

    def call(self, name: str, *values: Any) -> Any:
        """Append a call as any code does, after alignment in memory."""
        if name == "identity":
            (matrix,) = values
            rows, columns = len(matrix.axes) - 2, len(matrix.axes) - 1
            return self.append("element", matrix.axes, (), f"T(i{rows} == i{columns})")
        if name == "gram":
            return values[0] @ values[0].mT
        if name == "quadratic":
            return self._quadratic(*values)
        numbers = values[1:] if name == "where" else values
        self.refuse_masks(*numbers)
        if any(getattr(value, "half", False) for value in numbers) or (name in OF_FORMATS and self.dtype != torch.float32):
            raise NotWritable(f"takes {name} in bfloat16 or float64")
        if name == "group_max":
            (x,) = values
            if x.transposed:
                raise NotWritable("stores transposed matrices in groups of elements")
            assert x.axes[-1] == _COLUMNS, "rows of one element have no groups"
            return self.append("largest", (*x.axes[:-1], OF_GROUPS), (x.name,), is_int=True)
        if name == "broadcast":  # a value of each group is read for each of its elements
            (value,) = values
            axes = (*value.axes[:-1], _COLUMNS)
            return self.append("element", axes, (value.name,), value.name, is_int=value.kind.is_int)
        if name == "power" and isinstance(values[1], (int, float)):  # compilers expand it to a product
            base, exponent = values
            expression = f"power_({base.name}, T({float(exponent)!r}))"
            return self.append("element", base.axes, (base.name,), expression, transposed=base.transposed)
        return super().call(name, *self._aligned(*values))

    def _quadratic(self, x: TensorSymbol, *arguments: Any) -> TensorSymbol:
        """Append one operation on bfloat16, if the language has it and all numbers are coefficients, or all constants."""
        *numbers, dtype = arguments
        kinds = {getattr(number, "name", "constant")[0] for number in numbers}
        if not (self.dialect.quadratic and x.half and dtype == self.dtype and all(x.axes) and kinds in ({"k"}, {"c"})):
            return cast(TensorSymbol, WORDS["quadratic"].__wrapped__(x, *arguments))  # type: ignore[attr-defined]
        text = ", ".join(map(self.operand, numbers))
        return self.append("quadratic", x.axes, (self.computed(x),), text, half=True)

    def refuse_masks(self, *values: Any) -> None:
        """Raise :class:`NotWritable` if one of ``values`` is a mask: torch's arithmetic on masks is different."""
        if any(getattr(value, "mask", False) for value in values):
            raise NotWritable("computes with a comparison")

    def assign(self, expression: str, *operands: Any, is_int: bool = False, word: str = "") -> Any:
        """Append an operation on elements, and return the symbol of its result."""
        read = [value for value in operands if isinstance(value, TensorSymbol)]
        if all(value.half for value in read):
            raise NotWritable("computes in bfloat16")
        axes: list[str] = []
        for letters in zip(*(value.axes for value in read), strict=True):
            if len(distinct := {*letters} - {""}) > 1:
                raise NotWritable("computes with stacks whose shapes do not fit each other")
            axes += distinct or {""}
        names = tuple(value.name for value in read)
        transposed = any(value.transposed for value in read if any(value.axes[-2:]))
        return self.append("element", tuple(axes), names, expression, transposed=transposed, is_int=is_int)

    def append(
        self,
        kind: OpKind,
        axes: Axes,
        reads: tuple[str, ...],
        expression: str = "",
        *,
        half: bool = False,
        flips: tuple[bool, bool] = (False, False),
        transposed: bool = False,
        is_int: bool = False,
    ) -> TensorSymbol:
        """Append an operation, unless an equal one exists, and return the symbol of its result."""
        name = self.ops.setdefault(TensorOp("", kind, axes, reads, expression, half, flips, is_int), f"e{len(self.ops)}")
        return TensorSymbol(self, name, axes, half=half, transposed=transposed, is_int=is_int)

    def _aligned(self, *values: Any) -> Sequence[Any]:
        """Return ``values`` aligned: all stored as the update sees them, or all transposed."""
        transposed = {v.transposed for v in values if isinstance(v, TensorSymbol) and any(v.axes[-2:])}
        return [
            self.upright(v) if isinstance(v, TensorSymbol) and (len(transposed) > 1 or self._is_product(v)) else v
            for v in values
        ]

    def upright(self, symbol: TensorSymbol) -> TensorSymbol:
        """Return the same stack, stored in memory as the update sees it."""
        if not symbol.transposed or not any(symbol.axes[-2:]):
            return symbol
        if "" in symbol.axes[-2:]:
            raise NotWritable("transposes sums along rows or columns")
        if (op := self._op(symbol)) is not None and op.kind == "product":  # of the transposed factors, in turn
            flips = not op.transposed[1], not op.transposed[0]
            product = self.append("product", symbol.update_axes, op.reads[::-1], half=op.half, flips=flips)
            return TensorSymbol(self, product.name, product.axes, half=symbol.half)
        return self.append("transpose", symbol.update_axes, (self.computed(symbol),), half=symbol.half)

    def computed(self, symbol: TensorSymbol) -> str:
        """Return the name of an operation that defines ``symbol``; append a copy if it is an input, or rounded numbers."""
        self.refuse_masks(symbol)
        if (op := self._op(symbol)) is not None and op.half == symbol.half:
            return symbol.name
        return self.append("element", symbol.axes, (symbol.name,), symbol.name).name

    def _is_product(self, symbol: TensorSymbol) -> bool:
        return (op := self._op(symbol)) is not None and op.kind == "product"

    def _op(self, symbol: TensorSymbol) -> TensorOp | None:
        return next((op for op, name in self.ops.items() if name == symbol.name), None)


def written(
    rule: Rule, statics: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype, dialect: Dialect
) -> TensorProgram:
    """Write the update of stacks whose tensors have this ``shape``, as it sees it, in another language.

    Raises:
        NotWritable: the update uses what :class:`TensorSymbol` does not know.
    """
    if (letters := _LETTERS.get(len(shape))) is None:
        raise NotWritable("sees more than three dimensions")
    spared = "rc" if letters == "brc" else ""  # loops over rows or columns of one element would take long
    axes = tuple(letter if size > 1 or letter not in spared else "" for letter, size in zip(letters, shape, strict=True))
    code = TensorCode(dialect, dict(zip(axes, shape, strict=True)), dtype)
    inputs = dict.fromkeys(("param", "grad"), axes)
    values: dict[str, Any] = {**statics, **dict.fromkeys(b.name for b in rule.buffers)}
    present, integers = rule.present_buffers(statics), rule.integer_buffers(statics)
    for i, name in enumerate(present):
        inputs[f"buffer{i}"] = buffer_axes = _axes_of(next(b for b in rule.buffers if b.name == name), axes)
        values[name] = TensorSymbol(code, f"buffer{i}", buffer_axes, is_int=name in integers)
    if rule.reads_index(statics):
        index = "0"
        for d, letter in enumerate(axes):
            index = f"({index}) * size_{letter} + i{d}" if letter else index
        values[INDEX] = code.append("element", axes, (), f"as_index({index})", is_int=True)
    names = rule.coefficient_names(statics)
    same = ("",) * len(axes)
    c = number_type(names)(*[TensorSymbol(code, f"k{i}", same) for i in range(len(names))])
    values |= {name: TensorSymbol(code, name, axes) for name in ("param", "grad")} | {"c": c}
    results = rule.updated(values)
    outputs = {}
    for name, old in {"param": "param", **{n: f"buffer{i}" for i, n in enumerate(present)}}.items():
        if not isinstance(symbol := results[name], TensorSymbol) or symbol.update_axes != inputs[old]:
            raise NotWritable(f"returns a {name} of another shape")
        outputs[old] = code.upright(symbol).name
    ops, needed = [], {*outputs.values()}
    for op, name in reversed(code.ops.items()):
        if name in needed:
            ops.append(dataclasses.replace(op, name=name))
            needed |= {*op.reads}
    return TensorProgram(axes, inputs, ops[::-1], outputs, code.numbers)


def _axes_of(buffer: Buffer, axes: Axes) -> Axes:
    if buffer.grouped:
        return (*axes[:-1], OF_GROUPS)
    if buffer.shape is None:
        return axes
    sizes = dict(zip(_PRIMES, axes, strict=False))
    shape = buffer.shape(torch.Size(_PRIMES[: len(axes)]))
    if len(shape) != len(axes) or any(size not in (1, p) for size, p in zip(shape, _PRIMES, strict=False)):
        raise NotWritable("has state of another shape than the parameter's")
    return tuple(sizes.get(size, "") for size in shape)
