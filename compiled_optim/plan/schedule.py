"""Hyperparameters as functions of the step count, evaluated on the device as part of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.memory.layout import scalar
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.fields import Hyper

Schedule: TypeAlias = Callable[[Tensor], Any]
"""Step count -> value: a 0-dim tensor, or a tuple of them for a hyperparameter like ``betas``."""


@dataclass(eq=False)
class Schedules:
    """The schedules of one optimizer, by group and hyperparameter."""

    functions: dict[tuple[int, str], tuple[Hyper, Schedule]] = field(default_factory=dict)
    scheduled: list[tuple[int, str]] = field(default_factory=list)  # those that steps write
    _groups: Sequence[ParamGroup] = field(default=(), init=False)
    _counts: Sequence[Tensor] = field(default=(), init=False)

    def copy(self) -> Schedules:
        """Return the same schedules, before they apply to any group."""
        return replace(self, functions=dict(self.functions))

    def set(self, index: int, group: ParamGroup, hyper: Hyper, function: Schedule | None) -> None:
        """Schedule one hyperparameter of one group. A ``function`` of None ends its schedule, at the value it has reached.

        Raises:
            TypeError: ``function`` cannot be called.
            ValueError: ``function`` looks at the value of its argument, or its first value is out of range.
        """
        if function is None:
            self.functions.pop((index, hyper.name), None)
            return
        where = f"the schedule of {hyper.name} in param_groups[{index}]"
        if not callable(function):
            raise TypeError(f"{where} must be a function of the step count, got {function!r}")
        try:
            function(torch.ones((), dtype=torch.float64, device="meta"))
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{where} cannot run on the device: it must not look at the value of the step count: torch.where instead of "
                f"if, torch.cos instead of math.cos ({error})"
            ) from error
        first_step = scalar(1, group.read_only(hyper.name)[0].device)
        values, again = ([float(v) for v in hyper.elements(function(first_step), where)] for _ in range(2))
        for i, value in enumerate(values):
            hyper.check(value, i, where)
        if values != again:
            warnings.warn(
                f"{where} gives {values} and then {again} for the same step count; let it depend on the step count only: it "
                "is also called between steps, and replays of a graph do not run its Python",
                UserWarning,
                stacklevel=3,
            )
        self.functions[index, hyper.name] = hyper, function

    def follow(self, groups: Sequence[ParamGroup]) -> None:
        """Write into the tensors of ``groups`` from now on; plans made of these later accept any number there."""
        self._groups = groups
        for index, name in self.scheduled:
            if index < len(groups):
                groups[index].drive(name, begin=False)
        self.scheduled = [(i, name) for i, name in self.functions if i < len(groups)]
        for index, name in self.scheduled:
            groups[index].drive(name, begin=True)

    def count(self, plans: Sequence[Plan]) -> None:
        """Use the step counts of ``plans`` from now on."""
        self._counts = [block[0] for plan in plans for block in plan.scalar_blocks]

    def evaluate(self) -> None:
        """Write the values for the next step into the groups' tensors, over assigned ones. The host does not wait."""
        self.write(self._counts, {(i, name): self._groups[i].driven(name) for i, name in self.scheduled})

    def write(self, counts: Sequence[Tensor], tensors: Mapping[tuple[int, str], Sequence[Tensor]]) -> None:
        """Write the values for the step after ``counts``, step counts on one or more devices, into ``tensors``.

        These are the tensors of hyperparameters by group and name. Those without a schedule are not written.
        """
        if not (self.scheduled and counts):
            return
        device = counts[0].device
        count = torch.stack([steps.amax().to(device) for steps in counts]).amax() + 1
        for where in self.scheduled:
            hyper, function = self.functions[where]
            values = hyper.elements(function(count), f"the schedule of {hyper.name}")
            for tensor, value in zip(tensors[where], values, strict=True):
                live = tensor.detach().view(1)  # compiled code of torch 2.13 loses writes to a single float64
                live.copy_(value.view(1)) if isinstance(value, Tensor) else live.fill_(value)
