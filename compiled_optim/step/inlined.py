"""A step as operations of the graph that is being traced, for a compiler to fuse with those around them.

Dynamo reads the tensors of the step from the optimizer whenever compiled code is called, and hands them over. It does not
trace the step itself but calls it on stand-ins, as does whoever compiles the graph; so the step is written like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor

from compiled_optim.lowering.gradient import square_sum
from compiled_optim.lowering.torch_ops import inlined
from compiled_optim.lowering.torch_ops.inlined import InlinedPlan
from compiled_optim.plan.clipping import CHOSEN, Clipping
from compiled_optim.plan.plan import Plan
from compiled_optim.plan.schedule import Schedules


def obstacle(plans: Sequence[Plan], clipping: Clipping) -> str:
    """Why the step of ``plans`` cannot be inlined; empty if it can."""
    reasons = {
        "there are no parameters": not plans,
        "parameters are on several devices": len({plan.device for plan in plans}) > 1,
        "the norm of gradients is taken over several processes": clipping.measures_norm and any(p.sharded for p in plans),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    return reason or next(filter(None, map(inlined.obstacle, plans)), "")


class InlinedStep:
    """The step of all plans as a function of tensors, where :func:`obstacle` finds nothing.

    Attributes:
        tensors: those that it reads and writes besides parameters, gradients, hyperparameters and clipping.
        hypers: which hyperparameters it reads or writes: the indices of their groups, and their names.
        clipping: the numbers called :data:`~compiled_optim.plan.clipping.NAMES`, as vectors of one element; those of a
            gradient scaler are neutral, since each step that one calls has tensors of its own.
        clips: whether users assigned one of them, so that steps without a scaler use them too.
    """

    def __init__(
        self, plans: Sequence[Plan], positions: Sequence[Sequence[int]], clipping: Clipping, schedules: Schedules
    ) -> None:
        self._plans = [InlinedPlan(plan, clipping) for plan in plans]
        self._positions = positions
        self._schedules = schedules
        self.clips = clipping.measures_norm
        self._chosen = clipping.chosen
        used = [where for plan in self._plans for where in plan.hypers]
        self.hypers = list(dict.fromkeys([*used, *schedules.scheduled]))
        self.clipping = [t.view(1) for t in clipping.tensors(plans[0].device, CHOSEN)]
        self._outcome = clipping.outcome(plans[0].device)
        self.tensors = [self._outcome, *(t for plan in self._plans for t in plan.tensors)]

    def follows(self, clipping: Clipping) -> bool:
        """Whether what was assigned is in the tensors that were assigned when this was made."""
        return all(map(is_, clipping.chosen, self._chosen))

    def run(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        tensors: Sequence[Tensor],
        hypers: Sequence[Sequence[Tensor]],
        clipping: Sequence[Tensor],
    ) -> None:
        """Update those of ``params`` that have a gradient.

        There is a parameter and an entry of ``grads`` for each of the optimizer's parameters. The others stand for the
        attributes of these names; of a hyperparameter there are one or more numbers. ``clipping`` is empty where gradients
        are used as they are.
        """
        outcome, *rest = tensors
        values = dict(zip(self.hypers, hypers, strict=True))
        given = []
        for plan in self._plans:
            given.append(rest[: len(plan.tensors)])
            rest = rest[len(plan.tensors) :]
        self._schedules.write([plan.counts(own) for plan, own in zip(self._plans, given, strict=True)], values)
        total = square_sum(grads, outcome.device) if self.clips else None
        for plan, own, places in zip(self._plans, given, self._positions, strict=True):
            own_params, own_grads = [params[i] for i in places], [grads[i] for i in places]
            plan.run(own_params, own_grads, own, values, clipping, outcome, total)
