"""A rule's functions as straight-line code in another language.

A rule is called with symbols in place of tensors. A symbol writes down each operation that is applied to it. An ``if`` on a
static choice is decided during the call, and leaves no trace in the code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from typing_extensions import ParamSpec

_P = ParamSpec("_P")
_R = TypeVar("_R")
_words: dict[str, Callable[..., Any]] = {}
_REDUCTIONS = {"dot", "linalg_vector_norm", "mean", "norm", "std", "sum", "var", "vector_norm"}
# What torch and Python call a word of the vocabulary, where that is another name.
_SPELLINGS = {
    "abs": "absolute",
    "pow": "power",
    "float_power": "power",
    "max": "maximum",
    "fmax": "maximum",
    "clamp_min": "maximum",
    "min": "minimum",
    "fmin": "minimum",
    "clamp_max": "minimum",
    "rsqrt": "sqrt",
    "square": "x * x",
    "sgn": "sign",
}


def word(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: makes a word of the vocabulary.

    Called with tensors and numbers, the word runs ``function``; called with symbols, it writes down a call of itself.
    """
    _words[function.__name__] = function
    return word_of_formats(function)


def word_of_formats(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """As :func:`word`, for a word that no optimizer needs, so that messages do not name it."""

    @functools.wraps(function)
    def traced(*values: _P.args, **named: _P.kwargs) -> _R:
        for value in values:
            if isinstance(value, Symbol):
                return cast(_R, value.code.call(function.__name__, *values))
        return function(*values, **named)

    return traced


def _advice(name: str) -> str:
    plain = name.strip("_")
    wanted = _SPELLINGS.get(plain, plain if plain in _words else None)
    if plain in _REDUCTIONS:
        return "return mean(...) or total(...) of the expression from reduce, and read that from c"
    if wanted is None:
        return f"the vocabulary has {', '.join(sorted(_words))}"
    return f"write {wanted}" if wanted not in _words else f"the vocabulary has {wanted}"


class NotWritable(TypeError):
    """A rule does something that other languages cannot. The message continues a sentence that begins with its name."""


class NotWritableName(NotWritable, AttributeError):
    """A rule reads an attribute that symbols do not have."""


def _operator(sign: str, *, swapped: bool = False) -> Any:
    """The method of a symbol that writes down the operator ``sign``."""
    return lambda symbol, other: symbol._binary(sign, other, swapped=swapped)


class Kind(NamedTuple):
    """What a value of generated code is.

    ``whole`` says that it is a 32-bit integer. ``shared`` says that there is one for each group of elements, see
    :func:`~compiled_optim.rule.bits.group_max`, and ``late`` that it depends on all elements of its group.
    """

    whole: bool = False
    shared: bool = False
    late: bool = False


class Symbol:
    """A value in generated code. Operators on symbols append statements to the code they belong to."""

    __slots__ = ("code", "kind", "name")

    def __init__(self, code: Code, name: str, kind: Kind = Kind()) -> None:  # noqa: B008 (immutable)
        self.code = code
        self.name = name
        self.kind = kind

    def _binary(self, operator: str, other: Any, *, swapped: bool = False) -> Symbol:
        whole = self.code.whole(self, other)
        left, right = self.code.operand(self), self.code.operand(other, whole=whole)
        text = f"{right} {operator} {left}" if swapped else f"{left} {operator} {right}"
        return self.code.assign(text, self, other, whole=whole and operator in _WHOLE)

    __add__, __sub__, __mul__, __truediv__ = map(_operator, "+-*/")
    __radd__, __rsub__, __rmul__, __rtruediv__ = (_operator(sign, swapped=True) for sign in "+-*/")
    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = map(_operator, ("==", "!=", "<", "<=", ">", ">="))

    def __pow__(self, other: Any) -> Symbol:
        return self.code.call("power", self, other)

    def __rpow__(self, other: Any) -> Symbol:
        return self.code.call("power", other, self)

    def __abs__(self) -> Symbol:
        return self.code.call("absolute", self)

    def __neg__(self) -> Symbol:
        return self.code.assign(f"-{self.name}", self)

    def __and__(self, other: Any) -> Symbol:
        return self._binary("&" if self.kind.whole else self.code.dialect.both, other)

    def __or__(self, other: Any) -> Symbol:
        return self._binary("|" if self.kind.whole else self.code.dialect.either, other)

    __xor__, __lshift__ = map(_operator, ("^", "<<"))

    def __rshift__(self, other: int) -> Symbol:
        return self.code.call("shift_right", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise NotWritable("cannot branch on a value; use where(), or a static field")

    def __float__(self) -> NoReturn:
        raise NotWritable(f"makes a Python number of a value; {_advice('')}")

    def __getattr__(self, name: str) -> NoReturn:
        raise NotWritableName(f"uses .{name} of a value; {_advice(name)}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotWritable(f"calls torch's {function.__name__}; {_advice(function.__name__)}")


_WHOLE = {"+", "-", "*", "&", "|", "^", "<<"}  # operators that make integers of integers
_MAKES_WHOLE = {
    "bits": True,
    "integer": True,
    "from_bits": False,
    "from_upper": False,
    "number": False,
}  # of words that make one of the other


@dataclass(frozen=True)
class Dialect:
    """How one language writes statements, numbers and logic; ``{}`` stands for the parts.

    In every language a word of the vocabulary is a function with an underscore behind its name, such as ``sqrt_``. In
    ``calls`` are words that take more there.
    """

    statement: str
    number: str
    both: str
    either: str
    integer: str = "{}"
    calls: tuple[tuple[str, str], ...] = ()


PLAIN = Dialect("{} = {}", "{}", "and", "or")  # a language for checking rules, which nobody reads


@dataclass(frozen=True)
class Statement:
    """The statement that defines ``name``, what kind of value that is, which names it reads, and the word that it calls."""

    text: str
    name: str
    kind: Kind
    reads: tuple[str, ...]
    word: str


class Code:
    """The statements of one generated function body, in single assignment form."""

    def __init__(self, dialect: Dialect, prefix: str) -> None:
        self.statements: list[Statement] = []
        self._known: dict[str, Symbol] = {}  # by the expression that defines it
        self.dialect = dialect
        self._prefix = prefix

    @property
    def lines(self) -> list[str]:
        """The text of the statements."""
        return [statement.text for statement in self.statements]

    @staticmethod
    def whole(*values: Any) -> bool:
        """Whether one of ``values`` is an integer of the generated code."""
        return any(isinstance(value, Symbol) and value.kind.whole for value in values)

    def operand(self, value: Any, *, whole: bool = False) -> str:
        """How ``value``, a symbol or a Python number, is written inside an expression: of integers if ``whole``."""
        if isinstance(value, Symbol):
            return value.name
        if whole and isinstance(value, int):
            return self.dialect.integer.format(value)
        if isinstance(value, (int, float)):
            return self.dialect.number.format(repr(float(value)))
        if value is None:
            raise NotWritable("computes with None, which stands for a buffer that is absent")
        raise NotWritable(f"computes with {value!r}; a constant is a Python number")

    def assign(
        self, expression: str, *operands: Any, whole: bool = False, kind: Kind | None = None, word: str = ""
    ) -> Symbol:
        """Append a statement that defines a new name by its ``operands``, and return the symbol of that name.

        Without a ``kind`` the value is shared if all operands are, and late if one is.
        """
        if expression in self._known:
            return self._known[expression]
        read = [value for value in operands if isinstance(value, Symbol)]
        if kind is None:
            shared = bool(read) and all(value.kind.shared for value in read)
            kind = Kind(whole, shared, any(value.kind.late for value in read))
        name = f"{self._prefix}{len(self.statements)}"
        text = self.dialect.statement.format(name, expression)
        self.statements.append(Statement(text, name, kind, tuple(value.name for value in read), word))
        self._known[expression] = Symbol(self, name, kind)
        return self._known[expression]

    def call(self, name: str, *values: Any) -> Symbol:
        """Append a call of a word of the vocabulary, and return the symbol of its result."""
        whole = self.whole(*values)
        if name == "integer" and whole:
            return cast(Symbol, values[0])
        arguments = ", ".join(self.operand(value, whole=whole) for value in values)
        text = dict(self.dialect.calls).get(name, f"{name}_({{}})").format(arguments)
        makes_whole = _MAKES_WHOLE.get(name, whole)
        if name == "group_max":
            return self.assign(text, *values, kind=Kind(makes_whole, shared=True, late=True), word=name)
        if name == "spread":
            late = any(isinstance(value, Symbol) and value.kind.late for value in values)
            return self.assign(text, *values, kind=Kind(makes_whole, shared=False, late=late), word=name)
        return self.assign(text, *values, whole=makes_whole, word=name)
