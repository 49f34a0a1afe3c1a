"""What a step uses, made from groups and state, and thrown away when they change."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from compiled_optim.checkpoint.state_dict import PreparedLoad
from compiled_optim.groups.live import Live
from compiled_optim.lowering.choice import LOWERINGS, lower, refuse
from compiled_optim.lowering.interface import Capturable
from compiled_optim.lowering.torch_ops.inductor import InductorLowering
from compiled_optim.lowering.torch_ops.inlined import InlinedStep, obstacle
from compiled_optim.lowering.totals import SquareSums, Totals
from compiled_optim.memory.cache import CompilerError
from compiled_optim.memory.torch_internals import can_capture, let_stay
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Plan, partition
from compiled_optim.rule.declared import Declared
from compiled_optim.step.holdings import Holdings
from compiled_optim.step.numerics import NumericsReport, check_numerics

_identities = itertools.count()


class Step:
    """One way to update the parameters, for as long as groups and state are what it was made from.

    A step is :meth:`prepare`, the host's part; :meth:`launch`, the device's part, which a graph may capture; and
    :meth:`finish`. The methods from :meth:`key` on are what a CUDA graph needs.

    Missing state is made. ``clipping`` is, here and below, what :meth:`Clipping.take` takes. ``TypeError`` or ``ValueError``
    says what of it, of a parameter or of its state does not fit.
    """

    name: str  # in reports
    devices: tuple[torch.device, ...]  # where the work is done
    only_whole = ""  # why no graph can hold `launch` alone, but only a function that steps; empty if one can

    def __init__(self, holdings: Holdings, clipping: tuple[Any, ...], grad_of: Callable[[Tensor], Tensor | None]) -> None:
        self._holdings = holdings
        self.identity = str(next(_identities))
        self.params: list[Tensor] = list(dict.fromkeys(p for g in holdings.own_groups for p in g["params"]))
        self.live = [g.for_compiled_code[0] for g in holdings.own_groups]
        self.vectors = [g.for_compiled_code[1] for g in holdings.own_groups]
        self.is_recorded = False  # whether a runner captures steps now, so that none is taken
        self._shapes = holdings.shapes()

    @classmethod
    def check_options(cls, optimizer: type[Declared], options: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where such steps do not do what the constructor's ``options`` ask of them."""
        raise NotImplementedError

    @property
    def memory(self) -> object:
        """What a graph of :meth:`launch` reads, to be kept for as long as the graph."""
        raise NotImplementedError

    @property
    def graph(self) -> Step | str:
        """Itself, or why no CUDA graph can hold it."""
        return self

    def check_numerics(self) -> NumericsReport:
        """Which parameters the next step is too small to move. ``NotImplementedError`` where that cannot be foreseen."""
        raise NotImplementedError(f"{self._holdings.kind.__name__} cannot check its numerics: its steps need a closure")

    def is_current(self) -> bool:
        """Whether nobody has reported a change, or replaced a group behind the optimizer's back."""
        return not self._holdings.changes.pending and self._holdings.shapes() == self._shapes

    def describes(self, grads: list[Tensor | None] | None) -> bool:
        """Look at all parameters and gradients, their own or ``grads``; whether the step can be taken with them."""
        return True

    def wakes(self, grads: list[Tensor | None] | None) -> bool:
        """Whether a parameter without state has a gradient, so that the step must be made anew."""
        return False

    def obstacle(self, grads: list[Tensor | None] | None, clipping: tuple[Any, ...]) -> str:
        """Why a graph that is being captured cannot hold this step; empty if it can."""
        return "" if self.is_current() else "groups or state changed since the last step"

    def settle(self, clipping: tuple[Any, ...]) -> None:
        """Make everything that :meth:`launch` uses, so that preparing and launching allocate nothing that stays.

        That holds until groups, state or clipping change, for gradients of the dtypes that they had last, or of their
        parameters', and for one launch that is captured. ``CompilerError`` as :meth:`prepare`.
        """

    def inlined(self, clipping: tuple[Any, ...]) -> InlinedStep | str:
        """The step as operations of a graph that is being traced, or why it is an operator there."""
        return "its steps are not made of a rule"

    @property
    def is_settled(self) -> bool:
        """Whether there is memory that only a launch which is captured reads."""
        return True

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Take ``grads``, one entry for each of ``params``, or their own; follow what was assigned. Nothing is updated yet.

        Raises:
            CompilerError: something does not compile on this machine. A step that is made now does without.
        """

    def launch(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. Where the step re-evaluates the model itself, return what ``closure`` returned first."""
        raise NotImplementedError

    def launch_part(self, *, first: bool) -> None:
        """Update those parameters that have a prepared gradient, of which the ``first`` part of a step has some."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let go of the gradients."""

    def save(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict, with the values of ``flags`` for run-time flags."""
        return self._holdings.save(flags)

    def prepare_load(
        self, saved: Mapping[str, Any], strict: bool, hyperparameters: Literal["checkpoint", "keep"]
    ) -> PreparedLoad:
        """Check what copies a state dict into groups and state; an error where it does not fit."""
        return self._holdings.prepare_load(saved, strict, hyperparameters)

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

    @property
    def scaler(self) -> tuple[Any, Any]:
        """``grad_scale`` and ``found_inf`` of the last step."""
        return self._holdings.clipping.scaler

    def follow(self, clipping: tuple[Any, ...]) -> tuple[object, ...] | None:
        """Hand over what was assigned since the last step to a graph that holds whole steps, without preparing one.

        Returns what the graph depends on, as :meth:`key`; None if the step would have to be made anew. ``clipping`` has the
        gradient scaler's tensors that the graph reads.
        """
        raise NotImplementedError


class RuleStep(Step):
    """The step of an optimizer that has a rule: plans, each with a lowering that runs it."""

    def __init__(self, holdings: Holdings, clipping: tuple[Any, ...], grad_of: Callable[[Tensor], Tensor | None]) -> None:
        groups = holdings.own_groups
        holdings.schedules.follow(groups)
        super().__init__(holdings, clipping, grad_of)
        if holdings.accumulated.was_on:
            holdings.accumulated.check(groups)
        plans = partition(holdings.accumulated.rule, groups, holdings.state, grad_of)
        self.devices = tuple(dict.fromkeys(plan.device for plan in plans))
        if plans:
            if holdings.clipping.device != plans[0].device:
                holdings.clipping = Clipping(plans[0].device)
            holdings.clipping.skip_overflow({param.dtype for plan in plans for param in plan.params})
        self._clipping = holdings.clipping
        self._clipping.take(*clipping)
        differentiable = any(g.get("differentiable", False) for g in groups)
        if differentiable and self._clipping.measures_norm:
            raise ValueError("differentiable=True does not work with max_grad_norm and skip_nonfinite: clip before the step")
        self.lowerings = [lower(plan, holdings.lowering, self._clipping, holdings.log, differentiable) for plan in plans]
        self.name = " and ".join(sorted({lowering.name for lowering in self.lowerings})) or "eager"
        for plan in plans:
            plan.settle(None)
        has_totals = any(plan.rule.has_totals(plan.statics) for plan in plans)
        if has_totals and differentiable:
            raise ValueError(f"differentiable=True does not go with {plans[0].rule.name}, which sums over all parameters")
        self._totals = Totals(self.lowerings, self._clipping) if has_totals else None
        self._report_shared_memory(plans)
        self._schedules = holdings.schedules
        self._schedules.count(plans)
        self._square_sums: SquareSums | None = None
        for param in self.params:
            if can_capture(param.device) and not isinstance(param, torch.nn.Parameter):  # those stay by themselves
                let_stay(param)
        self._pinned: list[object] = []  # what graphs may use for as long as this step is the present one
        self._inlined: InlinedStep | None = None
        place = {id(p): i for i, p in enumerate(self.params)}
        self._positions = [[place[id(p)] for p in plan.params] for plan in plans]
        planned = {i for positions in self._positions for i in positions}
        self._meta = [p for plan in plans if plan.is_meta for p in plan.params]
        self._stateless = [i for i in range(len(self.params)) if i not in planned]

    def _report_shared_memory(self, plans: Sequence[Plan]) -> None:
        if later := [f"'{member.name}'" for plan in plans if plan.shares_memory for member in plan.members]:
            more = f" and {len(later) - 3} more" if len(later) > 3 else ""
            self._holdings.log.fall_back(
                f"{', '.join(later[:3])}{more} share memory with other parameters, and are updated after them",
                "a step has more launches for it",
            )

    @classmethod
    def check_options(cls, optimizer: type[Declared], options: Mapping[str, Any]) -> None:
        lowering = options["lowering"]
        if lowering not in LOWERINGS:
            raise ValueError(f"lowering must be one of {', '.join(LOWERINGS)}, got {lowering!r}")
        if options["differentiable"] and optimizer._gradients == "sparse":
            raise ValueError(f"differentiable=True needs dense gradients; {optimizer.__name__} takes sparse ones")
        if options["differentiable"] and optimizer._granularity != "element":
            raise ValueError(
                f"differentiable=True is for optimizers that work element by element; {optimizer.__name__} does not"
            )

    @property
    def memory(self) -> object:
        """Tables, coefficients and scheduled hyperparameters."""
        return self.lowerings, self._square_sums, self._schedules

    def check_numerics(self) -> NumericsReport:
        self._holdings.check_numbers()
        Live.send(self._holdings.changes)
        return check_numerics(self._holdings.kind.__name__, [lowering.plan for lowering in self.lowerings])

    def is_current(self) -> bool:
        """Whether, besides, nobody has ceased to clip, and no meta parameter has got memory."""
        clips = self._square_sums is None or self._clipping.measures_norm
        return clips and all(p.is_meta for p in self._meta) and super().is_current()

    def describes(self, grads: list[Tensor | None] | None) -> bool:
        """Whether the plans still describe parameters and gradients; a parameter without state has none."""
        if self.wakes(grads):
            return False
        state, runs_user_code = self._holdings.hands_out_state, bool(self._schedules.functions)
        by_plan = zip(self.lowerings, self._by_plan(grads), strict=True)
        return all([lowering.plan.read(own, state=state, keep_alive=runs_user_code) for lowering, own in by_plan])

    def wakes(self, grads: list[Tensor | None] | None) -> bool:
        return any((self.params[i].grad if grads is None else grads[i]) is not None for i in self._stateless)

    def _by_plan(self, grads: list[Tensor | None] | None) -> Sequence[list[Tensor | None] | None]:
        if grads is None:
            return [None] * len(self.lowerings)
        return [list(map(grads.__getitem__, positions)) for positions in self._positions]

    def inlined(self, clipping: tuple[Any, ...]) -> InlinedStep | str:
        self._clipping.take(*clipping)
        plans = [lowering.plan for lowering in self.lowerings]
        reason = "" if self.name == InductorLowering.name else f"it is lowered to {self.name}"
        if not reason and (name := self._holdings.unreported()):
            reason = f"{name} is 0, and who has its tensor may write another number to it"
        reason = reason or obstacle(plans, self._clipping)
        self._holdings.log.compiled_step = f"an operator: {reason}" if reason else "its own operations"
        if reason:
            return reason
        made = self._inlined
        if made is None or not made.follows(self._clipping):
            made = InlinedStep(plans, self._positions, self._clipping, self._schedules)
            hypers = [vector for group, name in made.hypers for vector in self.vectors[group][name]]
            for tensor in (*made.tensors, *made.clipping, *hypers):
                let_stay(tensor)
        self._inlined = made
        return made

    def settle(self, clipping: tuple[Any, ...]) -> None:
        self._clipping.take(*clipping)
        self._make(self._by_plan([None] * len(self.params)))
        for lowering in self.lowerings:
            self._clipping.outcome(lowering.plan.device)
            if isinstance(lowering, Capturable):
                lowering.settle()
        self._pinned = [memory for lowering in self.lowerings for memory in lowering.plan.memory()]

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Compile what is not compiled yet, and let every lowering take its gradients and what was assigned."""
        by_plan = self._by_plan(grads)
        self._make(by_plan)
        for lowering, own in zip(self.lowerings, by_plan, strict=True):
            lowering.prepare(own)

    def _make(self, by_plan: Sequence[list[Tensor | None] | None]) -> None:
        """Make what the lowerings and the norm need and what does not exist yet; ``by_plan`` are their gradients."""
        changes = self._holdings.changes
        for lowering, own in zip(self.lowerings, by_plan, strict=True):
            if not lowering.is_compiled:
                changes.pending = True  # to the end, whatever interrupts it
                try:
                    lowering.compile()
                except CompilerError as error:
                    refuse(lowering.plan, str(error))
                    raise
                lowering.plan.settle(own)
        changes.pending = False
        if self._clipping.measures_norm and self._square_sums is None:
            self._square_sums = SquareSums(self.lowerings)
            self._holdings.hand_captures.leave()

    def launch(self, closure: Callable[[], Any] | None = None) -> None:
        """Evaluate the schedules, measure the gradients where that is needed, and update."""
        self.launch_part(first=True)

    def launch_part(self, *, first: bool) -> None:
        if first:  # after it, some parameters have counted the step
            self._schedules.evaluate()
        if self._square_sums is not None:
            self._square_sums.measure()
        if self._totals is not None:
            self._totals.launch()
            return
        for lowering in self.lowerings:
            lowering.launch()

    def finish(self) -> None:
        for lowering in self.lowerings:
            lowering.finish()

    @property
    def is_settled(self) -> bool:
        return all(lowering.is_settled for lowering in self.lowerings if isinstance(lowering, Capturable))

    def obstacle(self, grads: list[Tensor | None] | None, clipping: tuple[Any, ...]) -> str:
        """What a graph could not hold: anything but the work of a step like the last one."""
        elsewhere = any(t.device != device for device in self.devices for t in self._clipping.tensors(device))
        clips = clipping[0] is not None or clipping[-1]
        reasons = {
            "groups or state changed since the last step": not self.is_current(),
            "a parameter got its first gradient": self.wakes(grads),
            "its kernels are not compiled yet": not self._is_compiled,
            "clipping was switched on or off": clips != (self._square_sums is not None),
            "max_grad_norm or skip_nonfinite was assigned": not self._clipping.are_tensors(*clipping),
            "max_grad_norm is a tensor on another device": elsewhere and not self.is_recorded,
        }
        reason = next((r for r, holds in reasons.items() if holds), "")
        return reason or ("" if self.describes(grads) else "a parameter moved or its gradient has another dtype")

    @property
    def _is_compiled(self) -> bool:
        return all(lowering.is_compiled for lowering in self.lowerings)

    @property
    def graph(self) -> Step | str:
        """Itself, or which parameter is updated by something that no graph can hold."""
        if self._holdings.accumulated.was_on:
            return "a CUDA graph repeats one micro-batch, and optimizer_accumulation tells them apart in Python"
        for lowering in self.lowerings:
            if not isinstance(lowering, Capturable):
                return (
                    f"a CUDA graph holds steps with lowering='multi_tensor'; {self._holdings.kind.__name__} updates "
                    f"'{lowering.plan.members[0].name}' in another way ({lowering.name})"
                )
        return self

    @property
    def _capturable(self) -> list[Capturable]:
        return cast("list[Capturable]", self.lowerings)

    def key(self) -> tuple[object, ...]:
        return (self._square_sums, *(lowering.launch_key() for lowering in self._capturable))

    def copy_gradients(self) -> None:
        """Where a table does not say where they are, bring the gradients to where the graph reads them."""
        for lowering in self._capturable:
            lowering.copy_gradients_for_graph()

    @contextlib.contextmanager
    def reserve(self, steps: int) -> Iterator[None]:
        """Let every lowering of the steps that are captured upload at the end of the ``with`` block."""
        with contextlib.ExitStack() as stack:
            for lowering in self._capturable if self._is_compiled else ():  # else no step is captured
                stack.enter_context(lowering.uploading_later(steps))
            with super().reserve(steps):
                yield

    def follow(self, clipping: tuple[Any, ...]) -> tuple[object, ...] | None:
        if not (self.is_current() and self._is_compiled):
            return None
        if self._holdings.hands_out_state and any(lowering.plan.state_moved for lowering in self.lowerings):
            return None
        self._clipping.take(*clipping)
        if self._clipping.measures_norm != (self._square_sums is not None):
            return None
        Live.send(self._holdings.changes)
        for lowering in self._capturable:
            lowering.upload_hyperparameters()
        return (self._square_sums, *self.lowerings, *(lowering.copied() for lowering in self._capturable))
