"""The one computation that every lowering of an elementwise rule performs on a parameter's elements."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from compiled_optim.fields import Rule, compute_dtype

Step = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


def elementwise_step(rule: Rule, statics: Mapping[str, Any]) -> Step:
    """The function ``(param, grad, buffers, coefficients) -> (new param, new buffers)`` for one set of static choices.

    Arithmetic is in float32 for float32 and lower, in float64 for float64; results are rounded to each tensor's dtype.
    ``coefficients`` broadcast against the parameter; the first is the sign of the gradient, -1 to maximize.
    """
    present = rule.present_buffers(statics)
    takes = inspect.signature(rule.update).parameters
    choices = {s.name: statics[s.name] for s in rule.statics if s.name in takes}
    absent = {b.name: None for b in rule.buffers if b.name not in present}
    names = rule.coefficient_names

    def step(
        param: Tensor, grad: Tensor, buffers: Sequence[Tensor], coefficients: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        dtype = compute_dtype(param.dtype)
        sign, *numbers = coefficients
        values = {name: buffer.to(dtype) for name, buffer in zip(present, buffers, strict=True)}
        new_param, *new_buffers = rule.update(
            param=param.to(dtype),
            grad=sign * grad.to(dtype),
            **values,
            **absent,
            **dict(zip(names, numbers, strict=True)),
            **choices,
        )
        kept = [new for field, new in zip(rule.buffers, new_buffers, strict=True) if field.name in present]
        return new_param.to(param.dtype), [new.to(old.dtype) for new, old in zip(kept, buffers, strict=True)]

    return step
