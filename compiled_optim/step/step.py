"""One way to update the parameters, made from groups and state, and thrown away when they change."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.checkpoint.state_dict import PreparedLoad
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.watched import Changes
from compiled_optim.lowering.torch_ops.inductor import InlinedStep
from compiled_optim.rule.declared import Declared

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
        """What of the groups may change unreported: identity, length, a write into a hyperparameter that was 0."""
        names = self.kind._declaration.structural_hypers
        return [
            (id(g), len(g.get("params", ())), *[isinstance(g, ParamGroup) and g.nonzero(n) for n in names])
            for g in self._groups
        ]

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

    def prepare(self, grads: Gradients) -> None:
        """Take ``grads``, and follow what was assigned. Nothing is updated yet.

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

    def follow(self, clip_args: tuple[Any, ...]) -> tuple[object, ...] | None:
        """Hand over what was assigned since the last step to a graph that holds whole steps, without preparing one.

        Returns what the graph depends on, as :meth:`key`; None if the step would have to be made anew. ``clip_args`` have
        the gradient scaler's tensors that the graph reads.
        """
        raise NotImplementedError
