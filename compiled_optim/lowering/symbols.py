"""A rule's functions as straight-line code in another language.

A rule is run once on symbols, which write down the operations they meet; ``if`` on a static choice is decided then.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compiled_optim.controls import NAMES
from compiled_optim.fields import Rule, argument_names
from compiled_optim.lowering import vocabulary
from compiled_optim.lowering.gradient import scaled


class Symbol:
    """A value in generated code. Operators on symbols append statements to the code they belong to."""

    def __init__(self, code: Code, name: str) -> None:
        self.code = code
        self.name = name

    def _binary(self, operator: str, other: Any, *, swapped: bool = False) -> Symbol:
        left, right = self.code.operand(self), self.code.operand(other)
        return self.code.assign(f"{right} {operator} {left}" if swapped else f"{left} {operator} {right}")

    def __add__(self, other: Any) -> Symbol:
        return self._binary("+", other)

    def __radd__(self, other: Any) -> Symbol:
        return self._binary("+", other, swapped=True)

    def __sub__(self, other: Any) -> Symbol:
        return self._binary("-", other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._binary("-", other, swapped=True)

    def __mul__(self, other: Any) -> Symbol:
        return self._binary("*", other)

    def __rmul__(self, other: Any) -> Symbol:
        return self._binary("*", other, swapped=True)

    def __truediv__(self, other: Any) -> Symbol:
        return self._binary("/", other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return self._binary("/", other, swapped=True)

    def __neg__(self) -> Symbol:
        return self.code.assign(f"-{self.name}")

    def __eq__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._binary("==", other)

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._binary("!=", other)

    def __lt__(self, other: Any) -> Symbol:
        return self._binary("<", other)

    def __le__(self, other: Any) -> Symbol:
        return self._binary("<=", other)

    def __gt__(self, other: Any) -> Symbol:
        return self._binary(">", other)

    def __ge__(self, other: Any) -> Symbol:
        return self._binary(">=", other)

    def __and__(self, other: Any) -> Symbol:
        return self._binary(self.code.dialect.both, other)

    def __or__(self, other: Any) -> Symbol:
        return self._binary(self.code.dialect.either, other)

    def __bool__(self) -> bool:
        raise TypeError("a rule cannot branch on a value; use where(), or a static field")


@dataclass(frozen=True)
class Dialect:
    """How statements, numbers and logic are written in one language; ``{}`` stands for the parts.

    A word of the vocabulary is called with an underscore behind its name, as a function that the language's text defines.
    """

    statement: str
    number: str
    both: str
    either: str


class Code:
    """The statements of one generated function body, in single assignment form."""

    def __init__(self, dialect: Dialect, prefix: str) -> None:
        self.lines: list[str] = []
        self.dialect = dialect
        self._prefix = prefix

    def operand(self, value: Any) -> str:
        """How ``value``, a symbol or a Python number, is written inside an expression."""
        return value.name if isinstance(value, Symbol) else self.dialect.number.format(repr(float(value)))

    def assign(self, expression: str) -> Symbol:
        """Append a statement and return the name it defines."""
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(self.dialect.statement.format(name, expression))
        return Symbol(self, name)

    def trace(self, function: Callable[..., tuple[Any, ...]], values: dict[str, Any]) -> tuple[Any, ...]:
        """Run ``function`` on symbols, with the vocabulary re-bound to calls in this language."""

        def call(word: str) -> Callable[..., Symbol]:
            return lambda *args: self.assign(f"{word}_({', '.join(self.operand(a) for a in args)})")

        rebound = types.FunctionType(
            function.__code__, {**function.__globals__, **{word: call(word) for word in vocabulary.__all__}}
        )
        results: tuple[Any, ...] = rebound(**{name: values[name] for name in argument_names(function)})
        return results


@dataclass(frozen=True)
class Program:
    """Both functions of a rule as statements over variables that a kernel defines around them.

    ``coefficients`` reads ``step``, ``hyper0``, ``hyper1``, ... and ``scalar0``, ... ; its results are the expressions
    ``new_scalars`` (the step first) and ``numbers``. ``update`` reads ``param``, ``grad``, ``buffer0``, ... and ``k0``, ...
    for the numbers; its results are ``new_param`` and ``new_buffers``, of the buffers that are present. Before both,
    ``gradient`` reads ``square_sum`` and ``control0``, ``control1``, ... and ends in ``factor``, ``norm`` and ``skip``.
    """

    gradient: list[str]
    factor: str
    norm: str
    skip: str
    coefficients: list[str]
    new_scalars: list[str]
    numbers: list[str]
    update: list[str]
    new_param: str
    new_buffers: list[str]

    @classmethod
    def of(cls, rule: Rule, statics: Mapping[str, Any], dialect: Dialect) -> Program:
        """The program of ``rule`` under these static choices."""
        choices = {s.name: statics[s.name] for s in rule.statics}

        before = Code(dialect, "s")
        controls = {name: Symbol(before, f"control{i}") for i, name in enumerate(NAMES)}
        factor, norm, skip = before.trace(scaled, {**controls, "square_sum": Symbol(before, "square_sum")})

        scalars = Code(dialect, "c")
        step = Symbol(scalars, "step")
        numbers = itertools.count()
        hypers: dict[str, Any] = {}
        for h in rule.hypers:
            elements = tuple(Symbol(scalars, f"hyper{next(numbers)}") for _ in range(h.length))
            hypers[h.name] = elements if h.is_tuple else elements[0]
        old = {s.name: Symbol(scalars, f"scalar{i}") for i, s in enumerate(rule.scalars)}
        results = scalars.trace(rule.coefficients, {**choices, **hypers, **old, "step": step})
        count = len(rule.scalars)
        names = rule.coefficient_names
        assert len(results) - count == len(names), f"{rule.name}.coefficients and .update disagree"

        body = Code(dialect, "e")
        present = rule.present_buffers(statics)
        values: dict[str, Any] = {b.name: None for b in rule.buffers}
        values |= {name: Symbol(body, f"buffer{i}") for i, name in enumerate(present)}
        values |= {name: Symbol(body, f"k{i}") for i, name in enumerate(names)}
        values |= {"param": Symbol(body, "param"), "grad": Symbol(body, "grad")}
        new_param, *new_buffers = body.trace(rule.update, {**choices, **values})
        kept = [new for b, new in zip(rule.buffers, new_buffers, strict=True) if b.name in present]
        return cls(
            before.lines,
            before.operand(factor),
            before.operand(norm),
            before.operand(skip),
            scalars.lines,
            [scalars.operand(v) for v in (step, *results[:count])],
            [scalars.operand(v) for v in results[count:]],
            body.lines,
            body.operand(new_param),
            [body.operand(v) for v in kept],
        )
