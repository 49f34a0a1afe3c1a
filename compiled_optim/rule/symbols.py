"""A rule's functions as straight-line code in another language.

A rule is called with symbols instead of tensors. A symbol writes down each operation that is applied to it. An ``if`` on a
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
WORDS: dict[str, Callable[..., Any]] = {}
"""The words of the vocabulary, by name."""

OF_FORMATS: dict[str, bool | None] = dict.fromkeys(("bits", "integer", "group_max"), True)
OF_FORMATS |= {**dict.fromkeys(("from_bits", "from_upper", "number", "to_bfloat16"), False), "broadcast": None}
"""Words for this package only, omitted in messages: true if they return integers; None: if their arguments are integers."""

OF_MATRICES = {"gram", "identity", "quadratic"}  # the words that only updates of whole matrices have
_REDUCTIONS = {"dot", "linalg_vector_norm", "mean", "norm", "std", "sum", "var", "vector_norm"}
_SPELLINGS = {
    **dict.fromkeys(("pow", "float_power"), "power"),
    **dict.fromkeys(("max", "fmax", "clamp_min"), "maximum"),
    **dict.fromkeys(("min", "fmin", "clamp_max"), "minimum"),
    **{"abs": "absolute", "rsqrt": "sqrt", "sgn": "sign", "square": "x * x"},
}
"""The words of the vocabulary by their other names in torch and Python."""


def word(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate ``function`` as a word of the vocabulary.

    Called with tensors and numbers, the word runs ``function``; called with symbols, it writes down a call of itself.
    """

    @functools.wraps(function)
    def traced(*values: _P.args, **named: _P.kwargs) -> _R:
        for value in values:
            if isinstance(value, Symbol) and function.__name__ not in value.code.dialect.spelled_out:
                return cast(_R, value.code.call(function.__name__, *values))
        if all(isinstance(value, (int, float)) for value in values):
            raise NotWritable(f"calls {function.__name__} of Python numbers; compute it with Python's own functions")
        return function(*values, **named)

    WORDS[function.__name__] = traced
    return traced


def _advice(name: str) -> str:
    offered, plain = WORDS.keys() - OF_FORMATS.keys() - OF_MATRICES, name.strip("_")
    if plain in _REDUCTIONS:
        return "return mean(...) or total(...) of the expression from reduce, and read that from c"
    wanted = plain if plain in offered else _SPELLINGS.get(plain, ", ".join(sorted(offered)))
    return f"write {wanted}" if wanted == "x * x" else f"the vocabulary has {wanted}"


class NotWritable(TypeError):
    """Raised where a rule does something that other languages cannot. The message continues a sentence about it."""


class NotWritableName(NotWritable, AttributeError):
    """Raised where a rule reads an attribute that symbols do not have."""


class Kind(NamedTuple):
    """The type of a value of generated code; for groups see :func:`~compiled_optim.rule.formats.group_max`."""

    is_int: bool = False  # a 32-bit integer
    per_group: bool = False  # one for each group of elements
    after_reduce: bool = False  # depends on all elements of its group
    is_mask: bool = False  # a comparison; arithmetic takes it as the number 1 or 0


def _operator(sign: str, *, swapped: bool = False) -> Any:
    """Return the method of a symbol that writes down the operator ``sign``."""
    return lambda symbol, other: symbol.code.binary(sign, *((other, symbol) if swapped else (symbol, other)))


def _call(word: str, *, swapped: bool = False) -> Any:
    """Return the method of a symbol that writes down a call of ``word``."""
    return lambda symbol, *others: symbol.code.call(word, *((*others, symbol) if swapped else (symbol, *others)))


def _refused(message: str) -> Any:
    """Return the method of a symbol for an operator that generated code does not have."""

    def refuse(symbol: Symbol, other: Any) -> NoReturn:
        raise NotWritable(message)

    return refuse


class Symbol:
    """A value in generated code. Operators on symbols append statements to the code they belong to."""

    __slots__ = ("code", "kind", "name")

    def __init__(self, code: Code, name: str, kind: Kind = Kind()) -> None:  # noqa: B008 (immutable)
        self.code = code
        self.name = name
        self.kind = kind

    __add__, __sub__, __mul__, __truediv__, __xor__, __lshift__ = map(_operator, ("+", "-", "*", "/", "^", "<<"))
    __radd__, __rsub__, __rmul__, __rtruediv__ = (_operator(sign, swapped=True) for sign in "+-*/")
    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = map(_operator, ("==", "!=", "<", "<=", ">", ">="))
    __pow__, __abs__, __rshift__ = map(_call, ("power", "absolute", "shift_right"))
    __rpow__ = _call("power", swapped=True)
    __matmul__ = __rmatmul__ = _refused('multiplies matrices with @; say granularity="matrix" in the class statement')

    def __neg__(self) -> Symbol:
        value = self.code.as_number(self)
        return self.code.assign(f"-{value.name}", value)

    def __and__(self, other: Any) -> Symbol:
        return self.code.binary("&" if self.kind.is_int else self.code.dialect.both, self, other)

    def __or__(self, other: Any) -> Symbol:
        return self.code.binary("|" if self.kind.is_int else self.code.dialect.either, self, other)

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


COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
_MAKES_INTEGERS = {"+", "-", "*", "&", "|", "^", "<<"}  # operators that make integers of integers


@dataclass(frozen=True)
class Dialect:
    """The syntax of statements, numbers and logic in one language; ``{}`` stands for the parts.

    A word of the vocabulary is called with an underscore behind its name, as ``sqrt_``, or as ``calls`` says. A word in
    ``spelled_out`` is written as the words that it is made of. If ``quadratic``, a polynomial of a symmetric matrix is one
    operation. ``typed`` is a number that has the type of computations, for ``typed_words``: words that would give a plain
    one another type. Of these, ``where`` does so only if both numbers are plain.
    """

    statement: str
    number: str
    both: str
    either: str
    integer: str = "{}"
    calls: tuple[tuple[str, str], ...] = ()
    spelled_out: frozenset[str] = frozenset({"to_bfloat16"})
    quadratic: bool = False
    typed: str = ""
    typed_words: frozenset[str] = frozenset()


PLAIN = Dialect("{} = {}", "{}", "and", "or")  # a language for checking rules only


@dataclass(frozen=True)
class Statement:
    """A statement: its text, the ``name`` that it defines, that value's kind, the names that it reads, and its word."""

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

    def operand(self, value: Any, *, is_int: bool = False) -> str:
        """Write ``value``, a symbol or a Python number, for use in an expression: of integers if ``is_int``."""
        if isinstance(value, Symbol):
            return value.name
        if is_int and isinstance(value, int):
            return self.dialect.integer.format(value)
        if isinstance(value, (int, float)):
            return self.dialect.number.format(repr(float(value)))
        if value is None:
            raise NotWritable("computes with None, which stands for a buffer that is absent")
        raise NotWritable(f"computes with {value!r}; a constant is a Python number")

    def assign(self, expression: str, *operands: Any, is_int: bool = False, word: str = "") -> Symbol:
        """Append a statement that defines a new name by its ``operands``, and return the symbol of that name."""
        if expression in self._known:
            return self._known[expression]
        read = [value for value in operands if isinstance(value, Symbol)]
        per_group = word == "group_max" or (word != "broadcast" and bool(read) and all(v.kind.per_group for v in read))
        kind = Kind(is_int, per_group, word == "group_max" or any(value.kind.after_reduce for value in read))
        name = f"{self._prefix}{len(self.statements)}"
        text = self.dialect.statement.format(name, expression)
        self.statements.append(Statement(text, name, kind, tuple(value.name for value in read), word))
        self._known[expression] = Symbol(self, name, kind)
        return self._known[expression]

    def binary(self, operator: str, left: Any, right: Any) -> Symbol:
        """Append an operation on two values, and return the symbol of its result."""
        is_int, combines = _any_int(left, right), operator in (self.dialect.both, self.dialect.either)
        if not (is_int or combines):
            left, right = self.as_number(left), self.as_number(right)
        text = f"{self.operand(left, is_int=is_int)} {operator} {self.operand(right, is_int=is_int)}"
        result = self.assign(text, left, right, is_int=is_int and operator in _MAKES_INTEGERS)
        result.kind = result.kind._replace(is_mask=operator in COMPARISONS or (combines and not is_int))
        return result

    def call(self, name: str, *values: Any) -> Symbol:
        """Append a call of a word of the vocabulary, and return the symbol of its result."""
        if name in OF_MATRICES:
            raise NotWritable(f"uses {name}, which is for matrices")
        is_int = _any_int(*values)
        if name == "integer" and is_int:
            return cast(Symbol, values[0])
        choice, numbers = (values[:1], values[1:]) if name == "where" else ((), values)
        values = values if is_int else (*choice, *map(self.as_number, numbers))
        texts = [self.operand(value, is_int=is_int) for value in values]
        is_plain = not choice or not any(isinstance(number, Symbol) for number in numbers)
        if name in self.dialect.typed_words and is_plain and not is_int:
            pairs = zip(values, texts, strict=True)
            texts = [text if isinstance(value, Symbol) else self.dialect.typed.format(text) for value, text in pairs]
        arguments = ", ".join(texts)
        text = dict(self.dialect.calls).get(name, f"{name}_({{}})").format(arguments)
        makes_int = OF_FORMATS.get(name)
        return self.assign(text, *values, is_int=is_int if makes_int is None else makes_int, word=name)

    def as_number(self, value: Any) -> Any:
        """Return ``value``; for a comparison 1 or 0, which languages do not all make of one in arithmetic."""
        return self.call("where", value, 1.0, 0.0) if isinstance(value, Symbol) and value.kind.is_mask else value


def _any_int(*values: Any) -> bool:
    """Return whether one of ``values`` is an integer of the generated code, so that all become integers."""
    return any(isinstance(value, Symbol) and value.kind.is_int for value in values)
