"""Settings of the whole step, not of a group: clipping, the loss scale, and whether the step is skipped.

All of it is data on the device: nothing recompiles when it changes, and a step never waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.memory.layout import as_real, compute_dtype, scalar, scalar_dtype
from compiled_optim.memory.torch_internals import outside_inference_mode
from compiled_optim.rule.vocabulary import sqrt, where

NAMES = ("max_grad_norm", "grad_scale", "found_inf", "skip_nonfinite")
"""The numbers of one step, in the order in which kernels and :func:`scaled` take them."""

CHOSEN = ("max_grad_norm", "skip_nonfinite")
"""The numbers that users assign; the others are set by a gradient scaler, in the steps that it calls."""

_NEUTRAL = {"max_grad_norm": math.inf, "grad_scale": 1.0, "found_inf": 0.0, "skip_nonfinite": 0.0}


class _Taken(NamedTuple):
    """The arguments of :meth:`Clipping.take` and their tensors, replaced in one assignment, which no interrupt splits."""

    arguments: tuple[Any, ...]
    tensors: dict[str, Tensor]


class Clipping:
    """The clipping of one optimizer as 0-dim tensors, and the norm and skips of its last step. Numbers go to ``device``.

    Numbers that are assigned as ``max_grad_norm`` are written into one tensor, which kernels and graphs read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._taken = _Taken((None, None, None, False), {})
        with outside_inference_mode():
            self._number = scalar(math.inf, device)  # each max_grad_norm that is no tensor; its address never changes
            self._largest_norm = scalar(math.inf, device)  # that does not skip a step
        self._neutral: dict[torch.device, dict[str, Tensor]] = {}
        self._outcomes: dict[torch.device, Tensor] = {}

    def skip_overflow(self, dtypes: Iterable[torch.dtype]) -> None:
        """Let ``skip_nonfinite`` skip norms whose square is infinite where parameters of one of ``dtypes`` are updated."""
        self._largest_norm.fill_(math.sqrt(min(torch.finfo(compute_dtype(dtype)).max for dtype in dtypes)))

    def take(self, values: tuple[Any, ...]) -> None:
        """Take the ``values`` that :func:`scaled` gets in the next steps, in the order of :data:`NAMES`.

        They are numbers, or 0-dim tensors that each step reads anew, or None.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: ``max_grad_norm`` is negative or NaN, or a tensor has more than one element. A tensor on an
                accelerator is not read, since that would wait for the device.
        """
        before, old = self._taken
        if values is before:
            return
        if all(map(is_, values, before)):
            self._taken = _Taken(values, old)
            return
        max_grad_norm, _, _, skip_nonfinite = values
        if not isinstance(skip_nonfinite, bool):
            raise TypeError(f"skip_nonfinite must be a bool, got {skip_nonfinite!r}")
        tensors = {  # an unchanged value keeps its tensor: a kernel's table may refer to it
            name: old[name] if value is known and name in old else self._tensor(name, value)
            for name, value, known in zip(NAMES[:-1], values[:-1], before[:-1], strict=True)
            if value is not None
        }
        if skip_nonfinite:
            tensors["skip_nonfinite"] = self._largest_norm
        if max_grad_norm is not None and max_grad_norm is not before[0]:
            is_readable = not isinstance(max_grad_norm, Tensor) or max_grad_norm.device.type == "cpu"
            if is_readable and not max_grad_norm >= 0:
                raise ValueError(f"max_grad_norm must be >= 0, got {float(max_grad_norm)}")
            if tensors["max_grad_norm"] is self._number:
                self._taken = _Taken((object(), *before[1:]), old)  # until the number is written, in case of an interrupt
                self._number.fill_(float(max_grad_norm))
        self._taken = _Taken(values, tensors)

    def are_tensors(self, *values: Any) -> bool:
        """Return whether :meth:`take` creates no tensor for ``values``: a CUDA graph in capture would not fill it."""
        *numbers, (skips, _) = zip(values, self._taken.arguments, strict=True)
        known = all(new is None or new is old or isinstance(new, Tensor) for new, old in numbers)
        return known and (not skips or "skip_nonfinite" in self._taken.tensors)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of :meth:`take`."""
        return self._taken.arguments

    @property
    def chosen(self) -> list[Tensor | None]:
        """The tensors of :data:`CHOSEN`; None for those that are not set."""
        return [self._taken.tensors.get(name) for name in CHOSEN]

    @property
    def measures_norm(self) -> bool:
        """Whether a step needs the norm of all gradients."""
        return not self._taken.tensors.keys().isdisjoint(CHOSEN)

    @property
    def idle(self) -> bool:
        """Whether a step uses its gradients as they are."""
        return not self._taken.tensors

    def tensors(self, device: torch.device, names: Sequence[str] = NAMES) -> list[Tensor]:
        """Return the numbers, ordered as :data:`NAMES`. Those unset or not in ``names`` are neutral, on ``device``."""
        if device not in self._neutral:
            self._neutral[device] = {name: scalar(value, device) for name, value in _NEUTRAL.items()}
        chosen = {name: tensor for name, tensor in self._taken.tensors.items() if name in names}
        plain = {n: t.detach().reshape(()) if t.dim() or t.requires_grad else t for n, t in chosen.items()}
        return list({**self._neutral[device], **plain}.values())

    def outcome(self, device: torch.device) -> Tensor:
        """Return a (3,) float64 tensor on ``device`` that the step writes: norm, whether it was skipped, number of skips."""
        if device not in self._outcomes:
            self._outcomes[device] = torch.zeros(3, dtype=scalar_dtype(device), device=device)
        return self._outcomes[device]

    def _tensor(self, name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} must be a number or a 1-element tensor, got shape {tuple(value.shape)}")
            return value  # itself, since its owner may move its memory
        if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a number, a 1-element tensor or None, got {value!r}")
        return self._number if name == "max_grad_norm" else scalar(float(value), self.device)


def scaled(
    square_sum: Any, max_grad_norm: Any, grad_scale: Any, found_inf: Any, skip_nonfinite: Any
) -> tuple[Any, Any, Any]:
    """Return the factor of every gradient, the norm before clipping, and 1 where the step is to be skipped, else 0.

    It is written like a rule, so that each lowering evaluates it in its own language. Gradients are first unscaled by
    ``grad_scale``, then clipped as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        square_sum: the sum of the squares of all gradients before unscaling; 0 where it is not needed.
        max_grad_norm: the largest norm allowed, or infinity.
        grad_scale: the factor of the loss.
        found_inf: other than 0 if a gradient scaler saw an infinite or NaN gradient.
        skip_nonfinite: to skip when the norm is above it, infinite or NaN; 0 for no such limit.
    """
    norm = sqrt(square_sum) / grad_scale
    bound = norm + 1e-6
    clip = where(bound <= max_grad_norm, 1.0, max_grad_norm / bound)
    is_over = (norm > skip_nonfinite) | (norm - norm != 0)
    skip = where((found_inf != 0) | ((skip_nonfinite != 0) & is_over), 1.0, 0.0)
    return clip / grad_scale, norm, skip


def square_sum(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the sum of the squares of ``grads``, all on ``device``, with torch operations on lists.

    In float64 no square of a float32 number overflows or underflows. A device without it, MPS, has norms from 1e-22 to 1e19.
    """
    dtype = scalar_dtype(device)
    reals = [as_real(grad.resolve_conj()) for grad in grads if grad is not None and grad.numel()]
    if not reals:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch._foreach_norm(reals, 2, dtype=dtype)
    return torch.stack(torch._foreach_mul(norms, norms)).sum()  # one list: Inductor copies separate tensors one by one
