"""Steps of several gradients, whose buffers take each gradient when it is there, so that no gradient need be kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.rule.declared import Declared
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.transforms import GOES_ON, STAYS, accumulating


class AccumulatedSteps:
    """Which parameters of an optimizer of this ``kind`` have taken gradients of a step without having moved."""

    def __init__(self, kind: type[Declared]) -> None:
        self._kind = kind
        self.was_on = False  # once, from when on the rule is another one
        self.is_on = False  # whether the next gradients are not the last ones of their step
        self._open: set[int] = set()  # ids of these parameters; the optimizer has them all

    @property
    def rule(self) -> Rule:
        """What steps follow."""
        rule, accumulation = self._kind._rule, self._kind._accumulation
        return accumulating(rule, accumulation) if self.was_on and accumulation else rule

    def check(self, groups: Sequence[Mapping[str, Any]], *, begins: bool = False) -> None:
        """Raise ``ValueError`` where the state of a group's parameters cannot take several gradients for one step.

        Checks only if accumulation is on, or ``begins``.
        """
        if not (begins or self.is_on or self._open):
            return
        name, accumulation = self._kind.__name__, self._kind._accumulation
        if accumulation is None:
            raise ValueError(
                f"{name} has no optimizer accumulation: a step of it needs whole gradients, and not only averages that its "
                "state can take one by one"
            )
        for index, group in enumerate(groups):
            rule, where = self._kind._rule, f"{name} has no optimizer accumulation with param_groups[{index}]"
            for choice in ("cautious", "differentiable", *accumulation.unless):
                if group.get(choice):
                    raise ValueError(f"{where}[{choice!r}]=True: a step needs whole gradients besides their averages")
            for hyper in rule.structural_hypers:
                if not group.nonzero(hyper):  # type: ignore[attr-defined]
                    raise ValueError(f"{where}[{hyper!r}]=0: there is no state to take gradients, which would be lost")

    def check_ended(self, what: str) -> None:
        """Raise ``RuntimeError`` where state holds a part of a step."""
        if self._open:
            raise RuntimeError(
                f"state cannot be {what} between the micro-batches of a step; set optimizer_accumulation to False and take "
                "the last one first"
            )

    def forget(self) -> None:
        """Note that the state of whole steps replaced the state."""
        self._open.clear()

    def keep(self, params: Iterable[Tensor]) -> None:
        """Forget all parameters but ``params``, which the optimizer has now, and keeps alive until this is called again."""
        self._open.intersection_update(map(id, params))

    def with_zeros(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """``grads``; where they end a step, with zeros for those of ``params`` that had earlier gradients in it."""
        if self.is_on:
            return list(grads)
        pairs = zip(params, grads, strict=True)
        return [torch.zeros_like(p) if g is None and id(p) in self._open else g for p, g in pairs]

    @contextlib.contextmanager
    def launching(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: Mapping[Any, Any]
    ) -> Iterator[None]:
        """Add to step counts, for a launch inside a ``with`` block, fractions that tell the rule its place in the step.

        They say of each of ``params`` that has a gradient in ``grads`` whether the step has had one before, and whether
        another one follows.
        """
        present = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        if not present or not (self.is_on or self._open):
            yield
            return
        marks = [GOES_ON * (id(p) in self._open) + STAYS * self.is_on for p in present]
        counts = [state[p]["step"] for p in present]
        torch._foreach_add_(counts, marks)
        counted = 0.0
        try:
            yield
            counted = float(self.is_on)  # by the launch, though the step does not end
        finally:
            torch._foreach_sub_(counts, [mark + counted for mark in marks])
        ids = set(map(id, present))
        self._open = self._open | ids if self.is_on else self._open - ids
