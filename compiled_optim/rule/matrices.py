"""Parameters that hold several matrices, for any rule on matrices: ``stacks`` and ``split``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.rule.fields import Option, check_patterns
from compiled_optim.rule.rule import Rule, Values

Split: TypeAlias = Mapping[str, "int | Sequence[int]"]
"""By pattern of names, the number of equal parts along the rows, or the rows of each part."""


def in_parts(rule: Rule) -> Rule:
    """``rule``, if it is on matrices, with the options ``stacks`` and ``split``. :class:`CompiledOptimizer` explains them.

    A rule with state that has not the parameter's rows knows no parts of them, and only has ``stacks``.
    """
    if rule.granularity != "matrix":
        return rule
    options = [Option((), valid=check_patterns, patterns=True, name="stacks")]
    if all(b.shape is None or b.shape(torch.Size((2, 3)))[0] == 2 for b in rule.buffers):
        options.append(Option(None, of=_sizes, valid=_check_split, patterns=True, name="split"))

    def update(values: Values) -> dict[str, Any]:
        if (sizes := values.get("split")) is None:
            return rule.update(values)
        numbers = values["c"]
        c = type(numbers)(*(number.unsqueeze(-1) for number in numbers))  # parts that are equal are a dimension more
        names = ["param", *(b.name for b in rule.buffers if values.get(b.name) is not None)]
        start, parts = 0, []
        for rows, equal in itertools.groupby(sizes):
            count = len(list(equal))
            own = {n: values[n].narrow(-2, start, count * rows).unflatten(-2, (count, rows)) for n in (*names, "grad")}
            parts.append(rule.updated({**values, **own, "c": c}))
            start += count * rows
        whole = {name: torch.cat([part[name].flatten(-3, -2) for part in parts], -2) for name in names}
        return {**whole, "step": 0.0}

    return dataclasses.replace(rule, options=(*rule.options, *options), update=update)


def _check_split(value: Any, what: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise TypeError(f"{what} must be a dict pattern -> parts, such as {{'*qkv*': 3}}, got {value!r}")
    for pattern, parts in value.items():
        sizes = parts if isinstance(parts, (tuple, list)) else [parts]
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            allowed = "a number of equal parts, or a tuple with the rows of each part"
            raise ValueError(f"{pattern!r} of {what} must be {allowed}, got {parts!r}")


def _sizes(
    group: Mapping[str, Any], is_matched: Callable[[Sequence[str]], bool], param: Tensor, where: str
) -> tuple[int, ...] | None:
    """The rows of each part of one parameter; None if it is one whole."""
    split = group.get("split") or {}
    matched = {pattern: parts for pattern, parts in split.items() if is_matched((pattern,))}
    if param.dim() < 2:  # which was flattened after the optimizer was made
        return None
    rows, found = param.shape[-2], set()
    for pattern, parts in matched.items():
        is_even = isinstance(parts, int)
        sizes = (rows // parts,) * parts if is_even else tuple(parts)
        if sum(sizes) != rows:
            wrong = f"{rows} rows are not {parts} equal parts" if is_even else f"it has {rows} rows, the parts {sum(sizes)}"
            raise ValueError(f"split[{pattern!r}]={parts!r} does not fit {where} of shape {tuple(param.shape)}: {wrong}")
        found.add(sizes)
    if len(found) > 1:
        raise ValueError(f"split: {where} matches both {' and '.join(map(repr, matched))}, which differ")
    return next((sizes for sizes in found if len(sizes) > 1), None)
