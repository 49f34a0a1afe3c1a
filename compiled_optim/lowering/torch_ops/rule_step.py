"""The computations that every lowering to torch operations performs, on a parameter's elements or on a stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.layout import compute_dtype
from compiled_optim.rule.rule import INDEX, Rule, number_type

Step = Callable[..., tuple[Tensor, list[Tensor]]]
Averaged = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def rule_step(rule: Rule, statics: Mapping[str, Any]) -> Step:
    """The function ``(param, grad, buffers, coefficients, index) -> (new param, new buffers)`` for one set of choices.

    Arithmetic is in float32 for float32 and lower, in float64 for float64; results are rounded to each tensor's dtype.
    ``coefficients``, of the dtype of the arithmetic, broadcast against the parameter: the factor of the gradient, a mark
    that is not 0 where everything stays as it is, the rule's own, and its means. ``index``, int32 of the parameter's shape,
    counts elements in the order of memory, for a rule that reads it. With buffers that are grouped, the last dimension holds
    elements in that order, whole groups of them.
    """
    present = rule.present_buffers(statics)
    values_of = _values_of(rule, statics, -1)

    def step(
        param: Tensor,
        grad: Tensor,
        buffers: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        index: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        new = rule.updated(values_of(param, grad, buffers, coefficients) | ({} if index is None else {INDEX: index}))
        live = coefficients[1] == 0

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(live, new.to(old.dtype), old)

        return chosen(new["param"], param), [chosen(new[name], old) for name, old in zip(present, buffers, strict=True)]

    return step


def rule_means(rule: Rule, statics: Mapping[str, Any], stage: int) -> Averaged:
    """The function ``(param, grad, buffers, coefficients) -> [expression, ...]`` of one of the rule's ``means``.

    Each expression has the parameter's shape. ``coefficients`` are as for :func:`rule_step`, without the means of this stage
    and of later ones.
    """
    values_of = _values_of(rule, statics, stage)

    def averaged(param: Tensor, grad: Tensor, buffers: Sequence[Tensor], coefficients: Sequence[Tensor]) -> list[Tensor]:
        found = rule.averaged(stage, values_of(param, grad, buffers, coefficients))
        dtype, device = compute_dtype(param.dtype), param.device
        return [torch.as_tensor(value, dtype=dtype, device=device).expand_as(param) for value in found.values()]

    return averaged


def _values_of(rule: Rule, statics: Mapping[str, Any], stage: int) -> Callable[..., dict[str, Any]]:
    """What makes the values that a rule's functions take of tensors."""
    present = rule.present_buffers(statics)
    whole = rule.whole_buffers(statics)
    given = {**dict.fromkeys(b.name for b in rule.buffers), **statics}
    numbers_of = number_type(rule.number_names(statics)[stage])

    def values_of(param: Tensor, grad: Tensor, buffers: Sequence[Tensor], coefficients: Sequence[Tensor]) -> dict[str, Any]:
        dtype = compute_dtype(param.dtype)
        factor, _, *numbers = coefficients
        values = {**given, "param": param.to(dtype), "grad": factor * grad.to(dtype), "c": numbers_of(*numbers)}
        dtypes = {name: torch.int32 if name in whole else dtype for name in present}
        return values | {name: buffer.to(dtypes[name]) for name, buffer in zip(present, buffers, strict=True)}

    return values_of
