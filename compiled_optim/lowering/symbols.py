"""A rule's functions and what every gradient goes through before them, as the text of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compiled_optim.controls import NAMES
from compiled_optim.lowering.gradient import scaled
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.symbols import Code, Dialect, Symbol


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
        before = Code(dialect, "s")
        controls = {name: Symbol(before, f"control{i}") for i, name in enumerate(NAMES)}
        factor, norm, skip = scaled(Symbol(before, "square_sum"), **controls)
        written = rule.written(statics, dialect)
        return cls(
            before.lines,
            before.operand(factor),
            before.operand(norm),
            before.operand(skip),
            written.coefficients,
            ["step", *(written.numbers[s.name] for s in rule.scalars)],
            [written.numbers[name] for name in rule.coefficient_names],
            written.update,
            written.results["param"],
            [written.results[name] for name in rule.present_buffers(statics)],
        )
