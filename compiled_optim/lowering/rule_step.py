"""The one computation that every lowering to torch operations performs, on a parameter's elements or on a stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.layout import compute_dtype
from compiled_optim.rule.rule import Rule, argument_names

Step = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


def rule_step(rule: Rule, statics: Mapping[str, Any]) -> Step:
    """The function ``(param, grad, buffers, coefficients) -> (new param, new buffers)`` for one set of static choices.

    Arithmetic is in float32 for float32 and lower, in float64 for float64; results are rounded to each tensor's dtype.
    ``coefficients``, of the dtype of the arithmetic, broadcast against the parameter: the factor of the gradient, a mark
    that is not 0 where everything stays as it is, and the rule's own.
    """
    present = rule.present_buffers(statics)
    takes = argument_names(rule.update)
    given = {**dict.fromkeys(b.name for b in rule.buffers), **statics}

    def step(
        param: Tensor, grad: Tensor, buffers: Sequence[Tensor], coefficients: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        dtype = compute_dtype(param.dtype)
        factor, skip, *numbers = coefficients
        values = {**given, "param": param.to(dtype), "grad": factor * grad.to(dtype), "c": rule.numbers(*numbers)}
        values |= {name: buffer.to(dtype) for name, buffer in zip(present, buffers, strict=True)}
        new = rule.update(**{name: values[name] for name in takes})
        live = skip == 0

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(live, new.to(old.dtype), old)

        return chosen(new["param"], param), [chosen(new[name], old) for name, old in zip(present, buffers, strict=True)]

    return step
