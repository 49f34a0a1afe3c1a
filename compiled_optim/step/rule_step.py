"""The step of an optimizer that has a rule: plans, each with a lowering that runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.groups.numbers import send
from compiled_optim.groups.parameters import first_few, named_parameters
from compiled_optim.lowering.coefficients import TableCoefficients, TorchCoefficients
from compiled_optim.lowering.eager import EagerLowering
from compiled_optim.lowering.inlined import InlinedStep, obstacle
from compiled_optim.lowering.lists import ListLowering
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.lowering.select import LOWERINGS, SquareSums, Totals, lower, refuse
from compiled_optim.memory import addresses
from compiled_optim.memory.cache import CompilerError
from compiled_optim.memory.torch_internals import Captures, can_capture, in_range, let_stay, outside_inference_mode
from compiled_optim.plan.changed_weights import Comparison, check_served
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.output_memory import NO_OUTPUTS
from compiled_optim.plan.plan import Plan, partition
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.rule import Rule
from compiled_optim.step.engine import Engine
from compiled_optim.step.step import Gradients, Step
from compiled_optim.step.watch import KernelLooks, Looks, Watch

_CLIPPED = "max_grad_norm or skip_nonfinite"
_UNCOMPILED = "its kernels are not compiled yet"


class RuleStep(Step):
    """The step of an optimizer that has a rule.

    Missing state is made. ``TypeError`` or ``ValueError`` names the parameter, state or clipping that does not fit.

    Args:
        engine: the owner of groups and state. The step keeps no reference to it.
        grad_of: returns the gradient of a parameter, or None.
    """

    def __init__(self, engine: Engine, grad_of: Callable[[Tensor], Tensor | None]) -> None:
        groups = engine.groups.distinct
        engine.schedules.follow(groups)
        super().__init__(engine.kind, engine.groups.listed, engine.changes)
        engine.accumulated.check(groups)
        rules = {kind: engine.accumulated.rule(kind) for kind in engine.groups.kinds}
        with engine.state.kept_after_errors():
            self.plans = plans = partition([rules[group.kind] for group in groups], groups, engine.state, grad_of)
        self.devices = tuple(dict.fromkeys(plan.device for plan in plans))
        if plans:
            if engine.clipping.device != plans[0].device:
                engine.clipping = Clipping(plans[0].device)
            engine.clipping.skip_overflow({param.dtype for plan in plans for param in plan.params})
        self._log, self._accumulated = engine.log, engine.accumulated
        self._clipping, self._schedules = engine.clipping, engine.schedules
        self._clipping.take(engine.clip_args)
        differentiable = any(g.get("differentiable", False) for g in groups)
        if differentiable and self._clipping.measures_norm:
            raise ValueError("differentiable=True does not work with max_grad_norm and skip_nonfinite: clip before the step")
        self._outputs = outputs = engine.outputs
        if outputs.marks:
            check_served(groups, outputs)
        updated = [plan for plan in plans if not plan.is_meta]
        if outputs.choice:
            outputs.follow([param for plan in updated for param in plan.params], self.params)
        # Of parameters that share memory, an update sees only its own changes.
        of_updates = NO_OUTPUTS if any(plan.shares_memory for plan in plans) else outputs
        chosen = (engine.lowering, self._clipping, self._log, of_updates, differentiable)
        self.lowerings = [lower(plan, *chosen) for plan in plans]
        compared = [plan for plan in updated if outputs.marks and not plan.outputs.marks]
        self._comparisons = [Comparison(plan, outputs) for plan in compared]
        self._tables = [x.coefficients for x in self.lowerings if isinstance(x.coefficients, TableCoefficients)]
        self.name = " and ".join(sorted({lowering.name for lowering in self.lowerings})) or "eager"
        started = time.perf_counter()
        if plans:
            addresses.reader()  # compiled for the first optimizer of a process
        self._log.construction += time.perf_counter() - started
        for plan in plans:
            plan.reread(None)
        self._launched: list[Totals | Lowering] = []  # in the order of the plans, since some share memory
        for lowering in self.lowerings:
            rule = lowering.plan.rule
            of_rule = [each for each in self.lowerings if each.plan.rule is rule]
            has_totals = any(rule.has_totals(each.plan.statics) for each in of_rule)
            if differentiable and (has_totals or not rule.is_elementwise):
                which = "sums over all parameters" if has_totals else "does not work element by element"
                raise ValueError(f"differentiable=True does not go with {rule.name}, which {which}")
            if not has_totals:
                self._launched.append(lowering)
            elif lowering is of_rule[0]:
                self._launched.append(Totals(of_rule, self._clipping))
        if later := [f"'{member.name}'" for plan in plans if plan.shares_memory for member in plan.members]:
            self._log.fall_back(
                f"{first_few(later)} share memory with other parameters, and are updated after them",
                "a step has more launches for it",
            )
        self._schedules.count(plans)
        self._square_sums: SquareSums | None = None
        self._uncompiled = {lowering for lowering in self.lowerings if not isinstance(lowering, EagerLowering)}
        for param in self.params:
            if can_capture(param.device) and not isinstance(param, torch.nn.Parameter):  # torch assumes that those stay
                let_stay(param)
        before = [*engine.step.watches.values()] if isinstance(engine.step, RuleStep) else []
        watched = [x for x in self.lowerings if engine.is_watching and not x.plan.is_meta]
        self.watches: dict[Plan, Watch] = {x.plan: Watch(x, self._clipping, before) for x in watched}
        self._looks: dict[Plan, Looks | KernelLooks] = {}  # of those, once their lowerings are compiled
        self._pinned: list[object] = []  # memory that graphs may use while this is the engine's step
        self._inlined: InlinedStep | None = None
        self._positions = [[self.indices[id(p)] for p in plan.params] for plan in plans]
        planned = {i for positions in self._positions for i in positions}
        self._meta = [p for plan in plans if plan.is_meta for p in plan.params]
        self._stateless = [i for i in range(len(self.params)) if i not in planned]

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
        return self.lowerings, self._square_sums, self._schedules, self.watches

    def view(self, rule: Rule, groups: Collection[int]) -> None:
        """Apply ``rule`` to the parameters of ``groups``, given by index, that have taken a step."""
        every = [lowering.plan for lowering in self.lowerings]
        for plan in [p for p in every if any(member.group in groups for member in p.members)]:
            view = Plan(rule, plan.statics, plan.members, lambda _: None)
            before = view.scalars.clone()
            step_counts = zip(plan.members, before[0].tolist(), strict=True)
            lowering = EagerLowering(view, TorchCoefficients(view, Clipping(plan.device)), self._log)
            lowering.prepare([m.owner if m.group in groups and steps else None for m, steps in step_counts])
            try:
                lowering.launch()
            finally:
                view.scalars.copy_(before)
            lowering.finish()
            if len(plan.scalar_blocks) > 1:  # the view moved the scalars into one, and kernels would write to the others
                self.changes.outdate("the parameters were shown as an average, or as they are trained")

    def stale(self) -> str:
        if reason := super().stale():
            return reason
        if self._square_sums is not None and not self._clipping.measures_norm:
            return f"{_CLIPPED} on -> off"
        if self._meta and not all(p.is_meta for p in self._meta):
            return "a parameter on the meta device got memory"
        return ""

    def _moved_state(self) -> str:
        """Return which state has other memory than when the step was built; empty if none has."""
        if not self.changes.is_state_handed_out:
            return ""
        return next(filter(None, [lowering.plan.moved_state() for lowering in self.lowerings]), "")

    def stale_for(self, grads: Gradients) -> str:
        if reason := self.stale() or (self._stateless and self.woken(grads)):
            return reason
        state, runs_user_code = self.changes.is_state_handed_out, bool(self._schedules.functions)
        for lowering, taken in zip(self.lowerings, self._by_plan(grads), strict=True):
            if reason := lowering.plan.read(taken, state=state, keep_alive=runs_user_code):
                return reason
        return ""

    def has_moved_scalars(self) -> bool:
        """Return whether scalars of state were moved out of their plan's tensor, in which compiled code reads them."""
        plans = [lowering.plan for lowering in self.lowerings] if self.changes.is_state_handed_out else []
        return any(plan.addresses.others_moved() and not plan.holds_scalars() for plan in plans)

    def woken(self, grads: Gradients) -> str:
        """Return that a parameter without state has a gradient, in words."""
        woken = [i for i in self._stateless if (self.params[i].grad if grads is None else grads[i]) is not None]
        return f"{self._name(woken[0])} got its first gradient" if woken else ""

    def _name(self, i: int) -> str:
        names = (f"'{name}'" for name, param in named_parameters(self._distinct) if param is self.params[i])
        return next(names, "a parameter")  # a list may have been written unreported

    def _by_plan(self, grads: Gradients) -> Sequence[Gradients]:
        if grads is None:
            return [None] * len(self.lowerings)
        return [list(map(grads.__getitem__, positions)) for positions in self._positions]

    def unprepared(self, clip_args: tuple[Any, ...]) -> str:
        if self._uncompiled:
            return _UNCOMPILED
        elsewhere = any(t.device != device for device in self.devices for t in self._clipping.tensors(device))
        clips = clip_args[0] is not None or clip_args[-1]
        has_memory = all(coefficients.table.gradients.reserved for coefficients in self._tables)
        reasons = {
            f"{_CLIPPED} {'off -> on' if clips else 'on -> off'}": clips != (self._square_sums is not None),
            "max_grad_norm or skip_nonfinite was assigned": not self._clipping.are_tensors(*clip_args),
            "max_grad_norm is a tensor on another device": elsewhere and not self.is_recorded,
            "it would be captured a second time, with memory for one": not has_memory,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def inlined(self) -> InlinedStep | str:
        lowerings = [x for x in self.lowerings if isinstance(x, ListLowering)]  # all of them, if this is their name
        reason = "" if self.name == ListLowering.name else f"it is lowered to {self.name}"
        reason = reason or ("its health is watched" if self.watches else "")
        reason = reason or ("its changed weights are tracked" if self._outputs.marks else "")
        names = ((group, n) for group in self._groups for n in group.kind._declaration.structural_hypers)
        if not reason and (name := next((n for group, n in names if group.is_exposed(n) and not group.nonzero(n)), "")):
            reason = f"{name} is 0, and its tensor was handed out, so another number may be written into it"
        reason = reason or obstacle([x.plan for x in lowerings], self._clipping)
        self._log.compiled_step = f"an operator: {reason}" if reason else "its own operations"
        if reason:
            return reason
        if self._inlined is None or not self._inlined.follows(self._clipping):
            of_plans = [x.coefficients for x in lowerings]
            inlined = InlinedStep(of_plans, self._distinct, self._positions, self._clipping, self._schedules)
            for tensor in (*inlined.tensors, *inlined.clipping, *(t for i in inlined.groups for t in self.numbers[i])):
                let_stay(tensor)
            self._inlined = inlined
        return self._inlined

    @outside_inference_mode()
    def preallocate(self) -> None:
        self._compile(self._by_plan([None] * len(self.params)))
        for lowering in self.lowerings:
            self._clipping.outcome(lowering.plan.device)
        for coefficients in self._tables:
            coefficients.preallocate()
        self._pinned = [memory for lowering in self.lowerings for memory in lowering.plan.memory()]

    def prepare(self, grads: Gradients, captures: Captures = ()) -> None:
        """Compile what is not compiled yet, and let every lowering take its gradients and assigned numbers."""
        if self._outputs.marks:
            self._outputs.see_writes()
        by_plan = self._by_plan(grads)
        measures = self._square_sums is None and self._clipping.measures_norm
        if self._uncompiled or measures or (self.watches and not self._looks):
            self._compile(by_plan)
        for lowering, plan_grads in zip(self.lowerings, by_plan, strict=True):
            lowering.prepare(plan_grads, captures)
            if self._looks and isinstance(looks := self._looks.get(lowering.plan), Looks):
                looks.see_gradients(lowering.plan.gradients(plan_grads))

    def _compile(self, by_plan: Sequence[Gradients]) -> None:
        """Build missing kernels and tables of the lowerings and of the norm; ``by_plan`` are the plans' gradients."""
        if self._uncompiled:
            self.changes.outdate("the first step was interrupted")  # to the end
            for lowering, plan_grads in zip(self.lowerings, by_plan, strict=True):
                if lowering not in self._uncompiled:
                    continue
                try:
                    lowering.compile()
                except CompilerError as error:
                    self.changes.stale = f"a kernel of {lowering.plan.rule.name} does not compile here"
                    refuse(lowering.plan, error)
                    raise
                lowering.plan.reread(plan_grads)
                self._uncompiled.discard(lowering)
            self.changes.stale = ""
        self._looks = {plan: watch.looks for plan, watch in self.watches.items()}
        if self._square_sums is None and self._clipping.measures_norm:
            self._square_sums = SquareSums(self.lowerings)
            self.leave_graphs()

    def launch(self, closure: Callable[[], Any] | None = None) -> None:
        """Evaluate the schedules, measure the gradients if clipping needs that, and update."""
        self._schedules.evaluate()
        for looks in self._looks.values():
            looks.begin()
        self.launch_part()
        for looks in self._looks.values():
            looks.end()

    def launch_part(self) -> None:
        if self._square_sums is not None:
            in_range("measure", self._square_sums.measure)
        try:
            before = [*map(Comparison.copies, self._comparisons)]
            for launched in self._launched:
                in_range("update", launched.launch)
            for comparison, copies in zip(self._comparisons, before, strict=True):
                comparison.compare(copies)
        except BaseException:  # an interrupt, too
            self._outputs.outdate()
            raise

    def finish(self) -> None:
        for lowering in self.lowerings:
            lowering.finish()
        if self._outputs.marks:
            self._outputs.note_step()

    @property
    def refusal(self) -> str:
        if self._accumulated.was_on:
            return "a CUDA graph repeats one micro-batch, and optimizer_accumulation tells them apart in Python"
        for lowering in self.lowerings:
            if not isinstance(lowering.coefficients, TableCoefficients):
                return (
                    f"a CUDA graph holds steps with lowering='multi_tensor'; {self.kind.__name__} updates "
                    f"'{lowering.plan.members[0].name}' in another way ({lowering.name})"
                )
        return ""

    def key(self, *, whole: bool = False) -> dict[str, object]:
        key = super().key() | {_CLIPPED: "off" if self._square_sums is None else "on"}
        for lowering in self.lowerings:
            key |= lowering.launch_key()
        return key | ({"tensors passed for numbers": [c.hypers.copied() for c in self._tables]} if whole else {})

    def copy_gradients(self) -> None:
        """Copy gradients whose addresses are in no table to the addresses from which the graph reads them."""
        for lowering in self.lowerings:
            lowering.copy_gradients_for_graph()

    @contextlib.contextmanager
    def reserve(self, steps: int) -> Iterator[None]:
        """Let the lowerings of captured steps upload their tables at the end of the ``with`` block."""
        with contextlib.ExitStack() as stack:
            for coefficients in () if self._uncompiled else self._tables:  # else no step is captured
                stack.enter_context(coefficients.table.gradients.uploading_later(steps))
            with super().reserve(steps):
                yield

    def follow(self, clip_args: tuple[Any, ...]) -> str:
        if reason := self.stale() or self._moved_state() or (_UNCOMPILED if self._uncompiled else ""):
            return reason
        self._clipping.take(clip_args)
        if self._clipping.measures_norm != (self._square_sums is not None):
            return f"{_CLIPPED} {'off -> on' if self._clipping.measures_norm else 'on -> off'}"
        send(self.changes)
        for coefficients in self._tables:
            coefficients.hypers.refresh()
        return ""


def step_with_rule(engine: Engine, action: str) -> RuleStep:
    """Return the present step of ``engine``. ``NotImplementedError`` if it has no rule, and so cannot ``action``."""
    if not isinstance(step := engine.current(), RuleStep):
        raise NotImplementedError(f"{engine.kind.__name__} cannot {action}: its steps need a closure")
    return step
