"""A rule's functions and what every gradient goes through before them, as the text of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compiled_optim.plan.clipping import NAMES, scaled
from compiled_optim.rule.rule import Rule, Written
from compiled_optim.rule.symbols import Code, Dialect, Symbol


@dataclass(frozen=True)
class Evaluation:
    """What happens once for each parameter, as statements over variables that a kernel defines around them.

    ``gradient`` reads ``square_sum`` and ``control0``, ``control1``, ... ; its results are the expressions ``factor``,
    ``norm`` and ``skip``. ``lines`` read ``step``, the parameter's numbers by name, ``hyper0``, ``hyper1``, ... and
    ``scalar0``, ... ; the results are the expressions ``new_scalars``, the step count first, and ``numbers``. A parameter's
    group has ``hypers`` hyperparameters.
    """

    gradient: list[str]
    factor: str
    norm: str
    skip: str
    hypers: int
    lines: list[str]
    new_scalars: list[str]
    numbers: list[str]


@dataclass(frozen=True)
class Program:
    """The functions of a kernel: ``means`` by their stage, and an ``update`` where the rule is elementwise."""

    evaluation: Evaluation
    means: dict[int, Written]
    update: Written | None

    @classmethod
    def of(cls, rule: Rule, statics: Mapping[str, Any], dialect: Dialect) -> Program:
        """The program of ``rule`` under these static choices."""
        before = Code(dialect, "s")
        clipping = {name: Symbol(before, f"control{i}") for i, name in enumerate(NAMES)}
        factor, norm, skip = map(before.operand, scaled(Symbol(before, "square_sum"), **clipping))
        lines, returned = rule.written_coefficients(statics, dialect)
        new_scalars = ["step", *(returned[s.name] for s in rule.scalars)]
        numbers = [returned[name] for name in rule.coefficient_names(statics)]
        hypers = sum(h.length for h in rule.present_hypers(statics))
        evaluation = Evaluation(before.lines, factor, norm, skip, hypers, lines, new_scalars, numbers)
        if rule.granularity != "element":
            return cls(evaluation, {}, None)
        *means, update = rule.written(statics, dialect)
        return cls(evaluation, {stage: sums for stage, sums in enumerate(means) if sums.results}, update)
