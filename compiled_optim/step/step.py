"""The base class of steps, which are rebuilt when groups or state change; and steps of several gradients."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.checkpoint.state_dict import PreparedLoad
from compiled_optim.groups.changes import Changes
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.lowering.inlined import InlinedStep
from compiled_optim.memory.torch_internals import Captures
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.transforms import GOES_ON, STAYS, accumulating

Gradients: TypeAlias = "list[Tensor | None] | None"
"""One entry for each parameter of a step; None for the parameters' own."""

STEP = "the step"
"""The name of a step's identity in its :meth:`Step.key`."""

_identities = itertools.count()


class Step:
    """One way to update the parameters, valid until groups or state change.

    A step is :meth:`prepare`, the host's part; :meth:`launch`, the device's part, which a graph may capture; and
    :meth:`finish`. The methods from :meth:`key` on are for CUDA graphs. ``clip_args`` are the arguments of
    :meth:`Clipping.take`.

    Args:
        kind: the optimizer's class.
        groups: its groups; one may be listed twice.
        changes: where groups and state report writes.
    """

    name: str  # in reports
    devices: tuple[torch.device, ...]  # where the work is done
    plans: Sequence[Plan] = ()  # the parameters that a rule updates
    only_whole = ""  # why a graph can hold only a function that steps, not `launch` alone; empty if it can

    def __init__(self, kind: type[Declared], groups: Sequence[ParamGroup], changes: Changes) -> None:
        self.kind, self.changes = kind, changes
        self._groups = groups
        self.identity = str(next(_identities))
        self._distinct = distinct = [*{id(group): group for group in groups}.values()]
        self.params: list[Tensor] = list(dict.fromkeys(p for g in distinct for p in g["params"]))
        self.indices = {id(param): index for index, param in enumerate(self.params)}  # in `params`, by id
        self.live = [g.for_compiled_code for g in distinct]
        self.numbers = [g.numbers.inputs for g in distinct]  # of compiled code
        self.is_recorded = False  # whether a runner captures steps now, which does not take them
        self.is_in_user_graph = False  # whether a graph that a user captured, without a runner, reads its memory
        groups = [group for group in distinct if isinstance(group, ParamGroup)]
        self._structural = [(g, name) for g in groups for name in g.kind._declaration.structural_hypers]
        self._made_of = self._facts()

    @classmethod
    def check_options(cls, optimizer: type[Declared], options: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if such steps do not support the constructor's ``options``."""
        raise NotImplementedError

    @property
    def memory(self) -> object:
        """The memory that a graph of :meth:`launch` reads, to be kept alive as long as the graph."""
        raise NotImplementedError

    @property
    def refusal(self) -> str:
        """The reason why no CUDA graph can hold the step; empty if one can."""
        return ""

    def stale(self) -> str:
        """Return why the step must be rebuilt, whatever the gradients; empty if groups and state are as they were."""
        if self.changes.stale:
            return self.changes.stale
        if (facts := self._facts()) == self._made_of:
            return ""
        (sizes, nonzero), (old_sizes, old_nonzero) = facts, self._made_of
        if sizes != old_sizes:
            index = next((i for i, size in enumerate(sizes) if size not in old_sizes), None)
            if index is not None:
                return f"param_groups[{index}] was replaced, or has other parameters"
            return "the groups were reordered" if len(sizes) == len(old_sizes) else "a group was removed"
        pairs = zip(nonzero, old_nonzero, strict=True)
        (group, name), was = next((x, old) for x, (new, old) in zip(self._structural, pairs, strict=True) if new != old)
        words = ("another number than 0", "0") if was else ("0", "another number than 0")
        return f"{group.label}[{name!r}] {' -> '.join(words)}"

    def _facts(self) -> tuple[list[tuple[int, int]], list[bool]]:
        """Return what can change without a report: identity and length of groups, and which hyperparameters are not 0."""
        sizes = [(id(group), len(dict.get(group, "params", ()))) for group in self._groups]
        return sizes, [group.nonzero(name) for group, name in self._structural] if self._structural else []

    def stale_for(self, grads: Gradients) -> str:
        """Read all parameters and ``grads``. Return why the step must be rebuilt before it takes them; empty if it need not.

        Raise the errors of gradients that no step can take.
        """
        return self.stale()

    def woken(self, grads: Gradients) -> str:
        """Return which parameter without state has a gradient, so that the step must be rebuilt; empty if none has."""
        return ""

    def unprepared(self, clip_args: tuple[Any, ...]) -> str:
        """Return what a step needs that a graph in capture cannot get: memory or kernels; empty if it needs nothing."""
        return ""

    def preallocate(self) -> None:
        """Allocate everything that :meth:`launch` uses, so that preparing and launching keep no new memory.

        That holds until groups, state or clipping change, for gradients of their last dtypes, or else of the parameters'
        dtypes, and for one launch that is captured. ``CompilerError`` as :meth:`prepare`.
        """

    def inlined(self) -> InlinedStep | str:
        """Return the step as operations for a graph that is being traced, or why it is an operator there."""
        return "its steps are not made of a rule"

    def prepare(self, grads: Gradients, captures: Captures = ()) -> None:
        """Take ``grads`` and assigned numbers. Nothing is updated yet. Graphs of ``captures`` are being captured.

        Raises:
            CompilerError: something does not compile on this machine. A step that is rebuilt now does not need it.
        """

    def launch(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. If the step re-evaluates the model itself, return the first result of ``closure``."""
        raise NotImplementedError

    def launch_part(self) -> None:
        """Update the parameters that have a prepared gradient: a part of a step, before which schedules were evaluated."""
        raise NotImplementedError

    def finish(self) -> None:
        """Release the gradients."""

    def saved(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return ``state_dict``, of groups and state, in the form of checkpoints."""
        return state_dict

    def prepare_load(
        self, state_dict: Mapping[str, Any], prepare: Callable[[Mapping[str, Any]], PreparedLoad]
    ) -> PreparedLoad:
        """Check ``state_dict`` and return a load; ``prepare`` checks the entries for groups and state."""
        return prepare(state_dict)

    def key(self, *, whole: bool = False) -> dict[str, object]:
        """Return the facts, by name, on which a graph of :meth:`launch` depends, or of ``whole`` steps.

        The graph is valid as long as they stay equal. A text is shown to users where it changed.
        """
        return {STEP: self.identity}

    def copy_gradients(self) -> None:
        """Copy the prepared gradients to the addresses from which a captured :meth:`launch` reads them."""

    @contextlib.contextmanager
    def reserve(self, steps: int) -> Iterator[None]:
        """Let a runner, which follows assignments itself, capture up to ``steps`` steps inside a ``with`` block."""
        try:
            self.is_recorded = True
            yield
        finally:
            self.is_recorded = False

    def leave_graphs(self) -> None:
        """Warn if a user's graph reads memory that the optimizer no longer uses."""
        if self.is_in_user_graph:
            self.is_in_user_graph = False
            warnings.warn(
                "groups, state or clipping changed after step() was captured in a CUDA graph, which still uses the old "
                "ones; capture it again, or use co.CUDAGraphRunner",
                RuntimeWarning,
                stacklevel=3,
            )

    def follow(self, clip_args: tuple[Any, ...]) -> str:
        """Pass values assigned since the last step to a graph that holds whole steps, without preparing one.

        Return why no graph can follow them; empty if one can as long as the :meth:`key` is equal. ``clip_args`` have the
        gradient scaler's tensors that the graph reads.
        """
        raise NotImplementedError


class AccumulatedSteps:
    """The parameters of an optimizer whose state has gradients of a step that has not ended."""

    def __init__(self) -> None:
        self.was_on = False  # in any step so far; from then on the rule is another one
        self.is_on = False  # whether the next gradients are not the last ones of their step
        self._open: set[int] = set()  # ids of these parameters, which the optimizer keeps alive

    def rule(self, kind: type[Declared]) -> Rule:
        """Return the rule of steps of ``kind``: with accumulation once that was on."""
        rule, accumulation = kind._rule, kind._accumulation
        return accumulating(rule, accumulation) if self.was_on and accumulation else rule

    def check(self, groups: Sequence[ParamGroup], *, begins: bool = False) -> None:
        """Raise ``ValueError`` if the state of a group's parameters cannot take several gradients for one step.

        Checks only if accumulation is on, or ``begins``.
        """
        if not (begins or self.is_on or self._open):
            return
        for index, group in enumerate(groups):
            name, accumulation = group.kind.__name__, group.kind._accumulation
            if accumulation is None:
                raise ValueError(
                    f"{name} has no optimizer accumulation: its step needs whole gradients, not only averages, to which "
                    "micro-batches could be added one by one"
                )
            where = f"{name} has no optimizer accumulation with param_groups[{index}]"
            for choice in ("cautious", "differentiable", *accumulation.unless):
                if group.get(choice):
                    raise ValueError(f"{where}[{choice!r}]=True: a step needs whole gradients besides their averages")
            for hyper in group.kind._rule.structural_hypers:
                if not group.nonzero(hyper):
                    raise ValueError(f"{where}[{hyper!r}]=0: without state, the gradients of micro-batches would be lost")

    def check_ended(self, what: str) -> None:
        """Raise ``RuntimeError`` if state holds a part of a step."""
        if self._open:
            raise RuntimeError(
                f"state cannot be {what} between the micro-batches of a step; set optimizer_accumulation to False and take "
                "the last one first"
            )

    def forget(self) -> None:
        """Note that the state was replaced by one without parts of steps."""
        self._open.clear()

    def keep(self, params: Iterable[Tensor]) -> None:
        """Forget all parameters but ``params``, which the optimizer has now and keeps alive until the next call."""
        self._open.intersection_update(map(id, params))

    def with_zeros(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return ``grads``; if they end a step, with zeros for those of ``params`` that had earlier gradients in it."""
        if self.is_on:
            return list(grads)
        pairs = zip(params, grads, strict=True)
        return [torch.zeros_like(p) if g is None and id(p) in self._open else g for p, g in pairs]

    @contextlib.contextmanager
    def launching(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: Mapping[Any, Any]
    ) -> Iterator[None]:
        """Add fractions to step counts during a ``with`` block, which tell the rule where in the step the micro-batch is.

        For each of ``params`` with a gradient in ``grads``, they encode whether the step had one before, and whether another
        one follows.
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
