"""The engine of an optimizer: it owns groups and state, and builds and runs steps, one at a time."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.groups.changes import Changes
from compiled_optim.groups.group_list import GroupList
from compiled_optim.groups.numbers import send
from compiled_optim.groups.parameters import named_parameters
from compiled_optim.lowering.inlined import InlinedStep
from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.cache import CompilerError
from compiled_optim.memory.torch_internals import (
    Captures,
    beside_graphs,
    can_capture,
    captures_of,
    current_capture,
    fakes_are_made,
    inductor_captures,
    is_capturing,
    is_fake,
    outside_dynamo,
    outside_inference_mode,
)
from compiled_optim.plan.clipping import CHOSEN, NAMES, Clipping
from compiled_optim.plan.compilations import CompilationLog, spend, users_level
from compiled_optim.plan.output_memory import NO_OUTPUTS
from compiled_optim.plan.schedule import Schedules
from compiled_optim.rule.declared import Declared, no_hyperparameter
from compiled_optim.rule.fields import built_in
from compiled_optim.state import OptimizerState, ParamState
from compiled_optim.step.step import AccumulatedSteps, Gradients, Step
from compiled_optim.step.trial import Trial

MakeStep: TypeAlias = Callable[["Engine", Callable[[Tensor], Tensor | None]], Step]
Launcher: TypeAlias = Callable[[Step, Callable[[], Any] | None], Any]

_keys = itertools.count()
ENGINES: WeakValueDictionary[str, Engine] = WeakValueDictionary()
"""All live engines, by :attr:`Engine.key`."""

NAMED: WeakValueDictionary[str, Engine] = WeakValueDictionary()
"""Live engines that have built a step, by :attr:`Engine.name`."""

_NEEDS_ALL = {
    "max_grad_norm": "the norm of all gradients is not known before the last of them, when the others are used and freed",
    "skip_nonfinite": "whether all gradients are finite is not known before the last of them, when the others are used",
    "grad_scale": "gradients are used before a gradient scaler can unscale them; train in bfloat16 without one",
    "found_inf": "gradients are used before a gradient scaler can look at them; train in bfloat16 without one",
}
"""Why each of :data:`NAMES` needs all gradients together."""


def _renew_locks() -> None:
    """Give engines new locks in a forked process, which lacks the threads that may hold the old ones."""
    for engine in [*ENGINES.values()]:
        engine.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_renew_locks)


class Engine:
    """Owns the groups and the state of an optimizer, rebuilds its step when they change, and runs it.

    Attributes:
        lock: held by a thread that steps, saves, loads or rebuilds the step.
        key: the engine's key in this process.
        name: the name by which operators find the engine, in another process too; empty before the first step is built.
        is_open: whether more groups come before the first step is built.
        changes: where groups and state report writes.
        groups: the optimizer's parameter groups.
    """

    def __init__(self, make: MakeStep) -> None:
        self._make = make
        self.lock = threading.RLock()
        self.key = str(next(_keys))
        ENGINES[self.key] = self
        self.name = ""
        self.is_open = False
        self.changes = Changes()

    def begin(self, kind: type[Declared], lowering: str) -> None:
        """Start empty, for an optimizer of this ``kind`` that is being constructed or copied."""
        self.kind, self.lowering = kind, lowering
        self.groups = GroupList(kind, self.changes)
        self.step: Step | None = None  # the last one that was built
        self.launcher: Launcher | None = None  # called instead of Step.launch
        self.release: Callable[[Gradients], None] | None = None  # ends steps that update in backward
        self.is_zeroed = False  # whether zero_grad was called outside of backward, since a release looked
        self.note_zero_grad: Callable[[Engine], None] | None = None  # called in a runner before gradients become None
        self.launches = 0  # how many updates, of some parameters or all, were launched
        self.runs = 0  # how many steps were run, captured ones included
        self.steps = 0  # how many steps were taken, replayed ones included
        self._in_graphs = ""  # the identity of the last step that a CUDA graph of compiled code held
        self.inlined: InlinedStep | None = None  # the step that compiled code may hold instead of an operator
        self._assign({"max_grad_norm": None, "skip_nonfinite": False})
        self.is_called = False  # whether a step was taken; torch's schedulers read this
        self.schedules = Schedules()
        self.accumulated = AccumulatedSteps()
        self.clipping = Clipping(torch.device("cpu"))
        self.log = CompilationLog()
        self.takes_sparse = kind._gradients == "sparse"  # whether some parameters have sparse gradients
        self.outputs = NO_OUTPUTS  # of the end of updates
        self.trial = Trial()
        self.is_watching = False  # whether steps record changes of a few elements of each parameter
        self._read_by_graphs: list[object] = []  # memory of steps in graphs that users captured: never freed
        self.replace_state({})

    def replace_state(self, values: Mapping[Any, Any]) -> None:
        """Replace the state by ``values``, a mapping of mappings: by the object itself if it was the state before."""
        with self.changes.reported("the state was replaced"):
            self.changes.is_state_handed_out = bool(values)
            self.accumulated.forget()
            if isinstance(values, OptimizerState) and values.belongs_to(self.changes):
                self.state = values
                return
            self.state = OptimizerState(changes=self.changes, names=self.groups.state_names)
            self.state.update(values)

    @property
    def params(self) -> list[Tensor]:
        """All parameters, group by group, when the step was last built."""
        return [] if self.step is None else self.step.params

    def assign(self, name: str, value: Any) -> None:
        """Assign ``value`` to one of :data:`NAMES`; an error, and no change, if it does not fit."""
        if self.release is not None:
            refuse_whole("gradient release", {name: value})
        if self.accumulated.was_on:
            refuse_whole("optimizer accumulation", {name: value})
        assigned = {**self.assigned, name: value if isinstance(value, Tensor) else built_in(value)}
        self._reassign(assigned) if name in CHOSEN else self._assign(assigned)

    def unassign(self, name: str) -> None:
        """Delete one of :data:`NAMES`; ``KeyError`` if it is not assigned."""
        others = dict(self.assigned)
        del others[name]
        self._reassign(others)

    def _reassign(self, assigned: dict[str, Any]) -> None:
        """Do :meth:`_assign` and :meth:`follow_clipping`. Undo it after an error or an interrupt."""
        before = self.assigned
        try:
            self._assign(assigned)
            self.follow_clipping()
        except BaseException as error:
            self._assign(before)
            if not isinstance(error, (TypeError, ValueError)):  # compiled code may have the new numbers
                self.changes.outdate_compiled("an assignment of max_grad_norm or skip_nonfinite was interrupted")
            raise

    def _assign(self, assigned: dict[str, Any]) -> None:
        # By name, since a gradient scaler assigns too, and as arguments of Clipping.take: no interrupt separates them.
        self.assigned, self.clip_args = assigned, tuple(map(assigned.get, NAMES))

    def add_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a parameter group; an error, and no change, if it does not fit."""
        with self.lock, self.groups.adding(param_group):
            if self.is_open:
                return
            known = {*self.state}
            try:
                self.renew()
            except (TypeError, ValueError):
                for param in [p for p in self.state if p not in known]:
                    self.state.drop_quietly(param)
                raise

    def _drop_unstepped(self) -> None:
        """Drop the state of parameters that left the groups before their first step, as torch has none for them.

        State with another step count or other numbers stays, even if a user wrote them.
        """
        present = {param for group in self.groups.listed for param in group["params"]}
        gone = [p for p, entries in self.state.items() if isinstance(entries, ParamState) and p not in present]
        for param in [p for p in gone if self.state[p].is_initial()]:
            del self.state[param]

    def current(self) -> Step:
        """Return the step, rebuilt if groups or state changed."""
        if self.step is None or self.step.stale():
            with self.lock:
                self.renew()
        assert self.step is not None
        return self.step

    @outside_inference_mode()
    def renew(self, grads: Gradients = None, reason: str = "") -> tuple[Step, Gradients]:
        """Rebuild the step from groups and state. Return it, and ``grads`` in the new order of the parameters.

        Reports show the ``reason``, by default the one that :meth:`Step.stale` returns.
        """
        reason = reason or ("" if self.step is None else self.step.stale())
        self.changes.outdate(reason or "the step is being rebuilt")  # to the end, even after an interrupt
        by_id = {} if grads is None else dict(zip(map(id, self.params), grads, strict=True))

        def grad_of(param: Tensor) -> Tensor | None:
            return by_id[id(param)] if id(param) in by_id else gradient(param)

        self.groups.adopt(checked=self.step is None)
        self._drop_unstepped()
        send(self.changes)
        self.takes_sparse = any(kind._gradients == "sparse" for kind in self.groups.kinds)
        self.accumulated.keep(p for group in self.groups.listed for p in group["params"])
        step = self._make(self, grad_of)
        step.is_in_user_graph = self.step is not None and self.step.is_in_user_graph  # until it is reported, below
        self.step = step
        present = {name for name, _ in named_parameters(self.groups.listed)}
        self.log.keys = {pair: key for pair, key in self.log.keys.items() if pair[0] in present}
        self._take_name()
        step.leave_graphs()
        if reason:
            self.log.rebuilds[reason] += 1
            self.log.rebuilt = reason
        self.changes.stale = ""
        return step, None if grads is None else list(map(grad_of, self.params))

    def _take_name(self) -> None:
        """Choose the name by which operators find the engine, for as long as it lives and has these parameters.

        Every process that makes this optimizer computes the same name, so that caches of compiled code serve all of them.
        The last part numbers live engines that are equal in all else.
        """
        params = named_parameters(self.groups.listed)
        facts = [(name, None if is_lazy(param) else tuple(param.shape), str(param.dtype)) for name, param in params]
        first = f"{facts[0][0]} {facts[0][1]}" if facts else "nothing"
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        description = f"{self.kind.__qualname__} of {first}, {len(facts)} in all, {digest}"
        if without_number(self.name) != description:
            NAMED.pop(self.name, None)
            names = (f"{description} #{number}" for number in itertools.count())
            self.name = next(name for name in names if NAMED.setdefault(name, self) is self)

    def _prepared(self, grads: Gradients, captures: Captures = (), *, ahead: bool = False) -> tuple[Step, Gradients]:
        """Return a step that is prepared for ``grads``, or preallocated ``ahead`` of them, and ``grads`` in its order."""
        self.clipping.take(self.clip_args)
        step = self.step
        if step is None or (reason := step.stale_for(grads)):
            step, grads = self.renew(grads, "" if step is None else reason)
            reason = step.stale_for(grads)
            assert not reason, reason
        try:
            step.preallocate() if ahead else step.prepare(grads, captures)
        except CompilerError:  # the next try gives the plans another lowering
            return self._prepared(grads, captures, ahead=ahead)
        return step, grads

    def preallocate(self) -> Step:
        """Return the step, with all of its long-lived memory allocated; see :meth:`Step.preallocate`."""
        with self.lock:
            return self._prepared([None] * len(self.current().params), ahead=True)[0]

    def preallocate_for_graphs(self) -> bool:
        """Update the step, and allocate its memory if a compiler's CUDA graph can hold it. Return whether one can."""
        with self.lock:
            self.groups.check_numbers()
            step = self.current()
            fits = self._fits_graphs(step)
            if fits and not any(map(is_capturing, step.devices)):  # during one, nothing can be allocated
                step = self.preallocate()
                fits = self._fits_graphs(step)
                if fits and self._in_graphs != step.identity:
                    cause = ""
                    if self._in_graphs:
                        cause = f"{self.log.rebuilt or 'the step was rebuilt'}, and compiled code holds the step"
                        spend(f"{self.kind.__name__} would capture its step again: {cause}")
                    self._guard()
                    self.log.captures.append(cause)
                    self._in_graphs = step.identity
            return fits

    def _fits_graphs(self, step: Step) -> bool:
        """Return whether replays are complete steps, as long as no change is reported."""
        is_plain = self.release is None and self.launcher is None and not (step.refusal or step.only_whole)
        limit, grad_scale, found_inf, _ = self.clip_args
        is_near = not isinstance(limit, Tensor) or [limit.device] == [*step.devices]
        is_there = len(step.devices) == 1 and can_capture(step.devices[0])
        return is_plain and is_there and is_near and grad_scale is None and found_inf is None

    def inline(self, present: Sequence[int]) -> str:
        """Build :attr:`inlined` for gradients of the parameters at ``present``. Return why it cannot be inlined, or ""."""
        with self.lock:
            obstacles = {
                "gradients are released in backward": self.release is not None,
                "another launcher runs it": self.launcher is not None,
                "it accumulates gradients in the state": self.accumulated.was_on,
            }
            if why := next((reason for reason, holds in obstacles.items() if holds), ""):
                return why
            step, indices = self.current(), {*present}
            grads = [p if i in indices else None for i, p in enumerate(step.params)]  # stand for gradients, which are fake
            if reason := step.woken(grads) or step.stale_for([None] * len(grads)):
                step, _ = self.renew(grads, reason)
            self.clipping.take(self.clip_args)
            inlined = step.inlined()
            if isinstance(inlined, str):
                return inlined
            self.mark_stepped()
            self._guard()
            self.inlined = inlined
            return ""

    def _guard(self) -> None:
        """Note that compiled code may hold the step, and then runs it without calling the engine."""
        self.changes.is_guarded = True
        self.let_read()

    def let_read(self) -> None:
        """Note that graphs or compiled code may read numbers at any time: assignments reach their tensors at once."""
        self.changes.are_numbers_read = True
        send(self.changes)

    def hand_out(self, name: str, group: int) -> None:
        """Note that a user gets the live tensors of a hyperparameter; ``KeyError`` or ``IndexError`` if there is none."""
        live = self.current().live
        if name not in live[self.groups.index_of(group)]:
            raise KeyError(no_hyperparameter(self.groups.distinct[group].kind, name))
        self.groups.distinct[group].tensors(name)

    def follow_clipping(self) -> None:
        """Pass assigned clipping to inlined steps and CUDA graphs of compiled code, or mark their step as stale."""
        if not (self._in_graphs or self.inlined) or any(map(is_capturing, self.current().devices)):
            return
        with self.lock:
            if self.inlined is not None:
                self.clipping.take(self.clip_args)
                if not self.inlined.follows(self.clipping):
                    self.changes.outdate("max_grad_norm or skip_nonfinite was switched on or off")
            if self._in_graphs and (reason := self.current().follow(self.clip_args)):
                self.changes.outdate(reason)

    @outside_dynamo
    def run(self, grads: Gradients = None, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, without hooks, in one thread at a time; see :meth:`prepare` and :meth:`Step.launch`."""
        with self.lock:
            loss = seen = None
            if self.release is not None:
                self.release(grads)
            elif self.accumulated.was_on:
                step = self.current()
                if self.launcher is not None and step.refusal:
                    raise ValueError(step.refusal)
                present = list(map(gradient, step.params)) if grads is None else grads
                self.update(self.accumulated.with_zeros(step.params, present), goes_on=False)
            else:
                step = self.prepare(grads)
                loss = step.launch(closure) if self.launcher is None else self.launcher(step, closure)
                self.finish(step)
                seen = step if grads is None else None  # else compiled code has it
            if self.trial.is_open and self.launcher is None:  # else a graph has it
                self._try(seen, ends=True)
        return loss

    def run_in_graph(self, grads: Gradients) -> None:
        """Do as :meth:`run` in compiled code, which a compiler is recording in a CUDA graph, or may record next.

        Allocations during the recording would be in the graph's memory. So missing tensors are allocated outside of it.
        """
        with self.lock:
            step = self.step
            assert step is not None
            captures = captures_of(step.devices)
            if captures and not all(map(inductor_captures, captures)):
                self.run(grads)  # another capture, not the compiler's
                return
            if step.stale_for(grads) or step.unprepared(self.clip_args):
                step, grads = beside_graphs(lambda: self._prepared(grads, ahead=True), step.devices[0])
            if captures and step.refusal:
                raise RuntimeError(step.refusal)
            self._begin_step(captures)
            step = self._prepared(grads, captures)[0]
            step.launch()
            self.finish(step)

    def update(self, grads: list[Tensor | None], *, goes_on: bool) -> None:
        """Update the parameters that have one of ``grads``; with ``goes_on`` as a part of the step of the last update."""
        with self.lock:
            step = self.prepare(grads)
            if not goes_on:  # after it, some parameters have counted the step
                self.schedules.evaluate()  # outside of `launching`, where step counts are not integers
            with self.accumulated.launching(step.params, grads, self.state):
                step.launch_part()
            self.finish(step, counts=not (goes_on or self.accumulated.is_on))
            if self.trial.is_open and not self.accumulated.is_on:
                self._try(step, grads)

    def _try(self, step: Step | None, grads: Gradients = None, *, ends: bool = False) -> None:
        """Let the trial see a step, or a part of one, and warn where it ``ends``. An error in it does not break the step."""
        try:
            if step is not None:
                self.trial.see(step.plans, dict(zip(map(id, step.params), grads or map(gradient, step.params), strict=True)))
            warning = self.trial.end(self.clipping, self.schedules) if ends else ""
        except Exception as error:
            warning, reason = "", f"the first step could not be judged: {type(error).__name__}: {error}"
            self.trial = Trial(is_open=False, findings=(("not judged", (), reason, ""),))
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=users_level())

    def prepare(self, grads: Gradients = None) -> Step:
        """Do the host's part of a step, and return the step. Nothing is updated yet. ``grads`` as in :meth:`Step.prepare`.

        Raises as the optimizer's ``step``.
        """
        step = self.current() if self.step is None else self.step
        if captures := captures_of(step.devices):
            self._check_capture(step, grads)
        self._begin_step(captures)
        return self._prepared(grads, captures)[0]

    def _begin_step(self, captures: Captures) -> None:
        if fakes_are_made() and not all(map(is_fake, self.params)):
            raise RuntimeError(
                "a step of real parameters under FakeTensorMode would compute with fake tensors; leave the mode, or make "
                "the parameters in it"
            )
        self.mark_stepped()
        if self.changes.unsent:
            send(self.changes, captures, self.step.devices if self.step else ())

    def mark_stepped(self) -> None:
        """Record for torch's schedulers that a step was taken; an error if a number is out of range."""
        if self.changes.is_refused:
            self.groups.check_numbers()
        self.is_called = True

    def finish(self, step: Step, *, counts: bool = True) -> None:
        """End a step or a part of one, after its launch; ``counts`` is true for one part of each step."""
        self.launches += 1
        self.runs += counts
        if not step.is_recorded:
            self.steps += counts
            self.log.has_stepped = True
            if counts:
                self.log.moved_steps += self.log.has_moved
                self.log.has_moved = False
        step.finish()

    def _check_capture(self, step: Step, grads: Gradients) -> None:
        """Raise ``RuntimeError`` if a graph cannot hold the step; note that a user's graph reads its memory from now on."""
        name = self.kind.__name__
        if not step.is_recorded and any(current_capture(device) in _runner_captures for device in step.devices):
            raise RuntimeError(
                f"{name} is stepped in a function that a CUDAGraphRunner captures, but is not one of the "
                "runner's optimizers; name it there"
            )
        if reason := step.stale_for(grads) or step.unprepared(self.clip_args):
            raise RuntimeError(
                f"{name}.step() cannot be captured in a CUDA graph now: {reason}; "
                "take one step before capturing, or let co.CUDAGraphRunner do so"
            )
        if not step.is_recorded:
            if not step.is_in_user_graph:
                self._read_by_graphs.append(step.memory)
            step.is_in_user_graph = True
            self.let_read()


_runner_captures: set[object] = set()


@contextlib.contextmanager
def recorded_by_runner(device: torch.device) -> Iterator[None]:
    """Refuse captures of steps meanwhile, on any thread, by optimizers that are not the runner's."""
    capture = current_capture(device)
    _runner_captures.add(capture)
    try:
        yield
    finally:
        _runner_captures.discard(capture)


def without_number(name: str) -> str:
    """Return the name of an engine without its last part, a number that distinguishes engines of equal optimizers."""
    return name.rpartition(" #")[0]


def refuse_whole(where: str, assigned: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``assigned`` switches on clipping, skipping or a scaler, which need all gradients together.

    ``where`` names the feature that never has all gradients.
    """
    for name, value in assigned.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} does not go with {where}: {_NEEDS_ALL[name]}")
