"""One way to update the parameters, thrown away when groups or state change; and steps of several gradients."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.checkpoint.state_dict import PreparedLoad
from compiled_optim.groups.live import Changes
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.lowering.torch_ops.inductor import InlinedStep
from compiled_optim.memory.torch_internals import Captures
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.rule import Rule
from compiled_optim.rule.transforms import GOES_ON, STAYS, accumulating

Gradients: TypeAlias = "list[Tensor | None] | None"
"""One entry for each parameter of a step; None for the parameters' own."""

_identities = itertools.count()


class Step:
    """One way to update the parameters, for as long as groups and state are what it was made from.

    A step is :meth:`prepare`, the host's part; :meth:`launch`, the device's part, which a graph may capture; and
    :meth:`finish`. The methods from :meth:`key` on are what a CUDA graph needs. ``clip_args`` are the arguments of
    :meth:`Clipping.take`.

    Args:
        kind: the optimizer's class.
        groups: its groups; one may be listed again.
        changes: where groups and state report writes.
    """

    name: str  # in reports
    devices: tuple[torch.device, ...]  # where the work is done
    only_whole = ""  # why no graph can hold `launch` alone, but only a function that steps; empty if one can

    def __init__(self, kind: type[Declared], groups: Sequence[ParamGroup], changes: Changes) -> None:
        self.kind, self.changes = kind, changes
        self._groups = groups
        self.identity = str(next(_identities))
        distinct = {id(group): group for group in groups}.values()
        self.params: list[Tensor] = list(dict.fromkeys(p for g in distinct for p in g["params"]))
        self.places = {id(param): place for place, param in enumerate(self.params)}  # where each stands there, by id
        self.live = [g.for_compiled_code[0] for g in distinct]
        self.vectors = [g.for_compiled_code[1] for g in distinct]
        self.is_recorded = False  # whether a runner captures steps now, so that none is taken
        self.is_in_user_graph = False  # whether a graph that a user captured, without a runner, reads what it uses now
        self._made_of = self._shapes()

    @classmethod
    def check_options(cls, optimizer: type[Declared], options: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where such steps do not do what the constructor's ``options`` ask of them."""
        raise NotImplementedError

    @property
    def memory(self) -> object:
        """What a graph of :meth:`launch` reads, to be kept for as long as the graph."""
        raise NotImplementedError

    @property
    def refusal(self) -> str:
        """Why no CUDA graph can hold the step; empty if one can."""
        return ""

    def is_current(self) -> bool:
        """Whether nobody has reported a change, or replaced a group behind the optimizer's back."""
        return not self.changes.pending and self._shapes() == self._made_of

    def _shapes(self) -> list[tuple[Any, ...]]:
        """What groups may change without a report: identity, length, and (in place) whether a hyperparameter is 0."""
        lengths = [(id(group), len(dict.get(group, "params", ()))) for group in self._groups]
        groups = [group for group in self._groups if isinstance(group, ParamGroup)]
        return [*lengths, *[(g.nonzero(key),) for g in groups for key in g.kind._declaration.structural_hypers]]

    def describes(self, grads: Gradients) -> bool:
        """Look at all parameters and ``grads``; whether the step can be taken with them."""
        return True

    def wakes(self, grads: Gradients) -> bool:
        """Whether a parameter without state has a gradient, so that the step must be made anew."""
        return False

    def obstacle(self, grads: Gradients, clip_args: tuple[Any, ...]) -> str:
        """Why a graph that is being captured cannot hold this step; empty if it can."""
        return "" if self.is_current() else "groups or state changed since the last step"

    def preallocate(self) -> None:
        """Make everything that :meth:`launch` uses, so that preparing and launching allocate nothing that stays.

        That holds until groups, state or clipping change, for gradients of the dtypes that they had last, or of their
        parameters', and for one launch that is captured. ``CompilerError`` as :meth:`prepare`.
        """

    @property
    def is_preallocated(self) -> bool:
        """Whether there is memory that only a launch which is captured reads."""
        return True

    def inlined(self) -> InlinedStep | str:
        """The step as operations of a graph that is being traced, or why it is an operator there."""
        return "its steps are not made of a rule"

    is_settled = False  # whether :meth:`resumes` may say yes

    def resumes(self, grads: Gradients, clip_args: tuple[Any, ...]) -> bool:
        """Do what :meth:`prepare` does, at less cost, if all but the addresses of gradients is as it was; whether it is.

        Nothing is done for good where it is not. No graph is being captured.
        """
        return False

    def prepare(self, grads: Gradients, captures: Captures = ()) -> None:
        """Take ``grads``, and follow what was assigned. Nothing is updated yet. Graphs of ``captures`` are being captured.

        Raises:
            CompilerError: something does not compile on this machine. A step that is made now does without.
        """

    def launch(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. Where the step re-evaluates the model itself, return what ``closure`` returned first."""
        raise NotImplementedError

    def launch_part(self) -> None:
        """Update the parameters that have a prepared gradient: a part of a step, before which schedules were evaluated."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let go of the gradients."""

    def saved(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict`` of groups and state, as checkpoints have it."""
        return state_dict

    def prepare_load(
        self, state_dict: Mapping[str, Any], prepare: Callable[[Mapping[str, Any]], PreparedLoad]
    ) -> PreparedLoad:
        """Check what copies ``state_dict``; ``prepare`` checks the entries for groups and state."""
        return prepare(state_dict)

    def key(self) -> tuple[object, ...]:
        """What a graph of :meth:`launch` depends on: it is valid for as long as this stays equal."""
        raise NotImplementedError

    def copy_gradients(self) -> None:
        """Bring the prepared gradients to where :meth:`launch`, if it is captured now or was before, reads them."""

    @contextlib.contextmanager
    def reserve(self, steps: int) -> Iterator[None]:
        """Let up to ``steps`` steps inside a ``with`` block be captured by one who follows assignments himself."""
        try:
            self.is_recorded = True
            yield
        finally:
            self.is_recorded = False

    def leave_graphs(self) -> None:
        """Warn where the optimizer no longer uses what a user's graph reads."""
        if self.is_in_user_graph:
            self.is_in_user_graph = False
            warnings.warn(
                "groups, state or clipping changed after step() was captured in a CUDA graph, which still uses the old "
                "ones; capture it again, or use co.CUDAGraphRunner",
                RuntimeWarning,
                stacklevel=3,
            )

    def follow(self, clip_args: tuple[Any, ...]) -> tuple[object, ...] | None:
        """Hand over what was assigned since the last step to a graph that holds whole steps, without preparing one.

        Returns what the graph depends on, as :meth:`key`; None if the step would have to be made anew. ``clip_args`` have
        the gradient scaler's tensors that the graph reads.
        """
        raise NotImplementedError


class AccumulatedSteps:
    """The parameters of an optimizer whose state has gradients of a step that has not moved them yet."""

    def __init__(self) -> None:
        self.was_on = False  # once, from when on the rule is another one
        self.is_on = False  # whether the next gradients are not the last ones of their step
        self._open: set[int] = set()  # ids of these parameters; the optimizer has them all

    def rule(self, kind: type[Declared]) -> Rule:
        """What steps follow that follow the rule of ``kind``."""
        rule, accumulation = kind._rule, kind._accumulation
        return accumulating(rule, accumulation) if self.was_on and accumulation else rule

    def check(self, groups: Sequence[ParamGroup], *, begins: bool = False) -> None:
        """Raise ``ValueError`` where the state of a group's parameters cannot take several gradients for one step.

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
        """Add fractions to step counts during a ``with`` block, which tell the rule the micro-batch's place in the step.

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
