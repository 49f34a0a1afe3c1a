"""A rule's functions as straight-line code in another language.

A rule is called with symbols in place of tensors. A symbol writes down each operation that is applied to it. An ``if`` on a
static choice is decided during the call, and leaves no trace in the code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from typing_extensions import ParamSpec

_P = ParamSpec("_P")
_R = TypeVar("_R")
_words: dict[str, Callable[..., Any]] = {}
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

    @functools.wraps(function)
    def spoken(*values: _P.args, **named: _P.kwargs) -> _R:
        for value in values:
            if isinstance(value, Symbol):
                return cast(_R, value.code.call(function.__name__, *values))
        return function(*values, **named)

    return spoken


def _advice(name: str) -> str:
    plain = name.strip("_")
    wanted = _SPELLINGS.get(plain, plain if plain in _words else None)
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


class Symbol:
    """A value in generated code. Operators on symbols append statements to the code they belong to."""

    __slots__ = ("code", "name")

    def __init__(self, code: Code, name: str) -> None:
        self.code = code
        self.name = name

    def _binary(self, operator: str, other: Any, *, swapped: bool = False) -> Symbol:
        left, right = self.code.operand(self), self.code.operand(other)
        return self.code.assign(f"{right} {operator} {left}" if swapped else f"{left} {operator} {right}")

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
        return self.code.assign(f"-{self.name}")

    def __and__(self, other: Any) -> Symbol:
        return self._binary(self.code.dialect.both, other)

    def __or__(self, other: Any) -> Symbol:
        return self._binary(self.code.dialect.either, other)

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


@dataclass(frozen=True)
class Dialect:
    """How one language writes statements, numbers and logic; ``{}`` stands for the parts.

    In every language a word of the vocabulary is a function with an underscore behind its name, such as ``sqrt_``.
    """

    statement: str
    number: str
    both: str
    either: str


PLAIN = Dialect("{} = {}", "{}", "and", "or")  # a language for checking rules, which nobody reads


class Code:
    """The statements of one generated function body, in single assignment form."""

    def __init__(self, dialect: Dialect, prefix: str) -> None:
        self.lines: list[str] = []
        self.dialect = dialect
        self._prefix = prefix

    def operand(self, value: Any) -> str:
        """How ``value``, a symbol or a Python number, is written inside an expression."""
        if isinstance(value, Symbol):
            return value.name
        if isinstance(value, (int, float)):
            return self.dialect.number.format(repr(float(value)))
        if value is None:
            raise NotWritable("computes with None, which stands for a buffer that is absent")
        raise NotWritable(f"computes with {value!r}; a constant is a Python number")

    def assign(self, expression: str) -> Symbol:
        """Append a statement that defines a new name, and return the symbol of that name."""
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(self.dialect.statement.format(name, expression))
        return Symbol(self, name)

    def call(self, name: str, *values: Any) -> Symbol:
        """Append a call of a word of the vocabulary, and return the symbol of its result."""
        return self.assign(f"{name}_({', '.join(map(self.operand, values))})")
