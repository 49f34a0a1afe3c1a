"""What runs an optimizer's steps, one at a time, apart from what users see of the optimizer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from compiled_optim.groups.live import Live
from compiled_optim.groups.parameters import named_parameters
from compiled_optim.groups.watched import Changes
from compiled_optim.lowering.torch_ops.inductor import InlinedStep
from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.cache import CompilerError
from compiled_optim.memory.torch_internals import (
    beside_graphs,
    can_capture,
    fakes_are_made,
    inductor_captures,
    is_capturing,
    is_fake,
    outside_dynamo,
    outside_inference_mode,
)
from compiled_optim.plan.clipping import CHOSEN, NAMES
from compiled_optim.plan.compilations import spend
from compiled_optim.rule.declared import Declared, no_hyperparameter
from compiled_optim.step import traced
from compiled_optim.step.hand_captures import is_recorded_by_runner
from compiled_optim.step.holdings import Holdings, position
from compiled_optim.step.step import Step
from compiled_optim.step.use_of_gradients import refuse_whole

MakeStep: TypeAlias = Callable[[Holdings, tuple[Any, ...], Callable[[Tensor], Tensor | None]], Step]
Launcher: TypeAlias = Callable[[Step, Callable[[], Any] | None], Any]


class Released(Protocol):
    """What updates parameters inside of backward, in place of :meth:`Engine.run`."""

    def step(self, given: list[Tensor | None] | None) -> None:
        """End an update. ``given`` are None, or gradients that compiled code hands over."""

    def zero_grad(self) -> None:
        """Note that somebody is about to drop all gradients."""

    def refuse(self, name: str, value: object) -> None:
        """Raise ``ValueError`` where ``value``, assigned as the optimizer's ``name``, needs all gradients together."""


class Engine:
    """Makes the step of an optimizer anew when groups or state changed, and runs it."""

    def __init__(self, make: MakeStep) -> None:
        self._make = make
        self.lock = threading.RLock()  # held by whoever steps, saves, loads or makes the step anew
        self.key = traced.register(self)  # under which the engine is found in this process
        self.name = ""  # under which the traced operator finds it, in another process too
        self.is_open = False  # whether more groups come before the first step is made
        self._changes = Changes()

    def begin(self, kind: type[Declared], lowering: str) -> None:
        """Own nothing yet, for an optimizer that is being made, or copied."""
        self.step: Step | None = None  # the one that was made last
        self.launcher: Launcher | None = None  # what steps call in place of Step.launch, if anything
        self.release: Released | None = None  # what updates parameters inside of backward, if anything
        self.launches = 0  # how many updates of some parameters or of all were launched here
        self.runs = 0  # how many steps were run here, captured ones among them
        self.steps = 0  # how many were taken, replayed ones among them
        self._in_graphs: weakref.ref[Step] | None = None  # what compiled code holds CUDA graphs of, or held
        self.inlined: InlinedStep | None = None  # what compiled code may hold in place of an operator
        self.defaults: dict[str, Any] = {}  # what groups take that lack it
        self.given: dict[str, tuple[Any, Any]] = {}  # defaults, and the tensors that they were given as, for groups to adopt
        self.assigned: dict[str, Any] = {"max_grad_norm": None, "skip_nonfinite": False}  # and what a gradient scaler sets
        self.is_called = False  # whether there was a step, which torch's schedulers ask
        self._changes.pending = True
        self.holdings = Holdings(kind, lowering, self._changes)

    @property
    def params(self) -> list[Tensor]:
        """All parameters, group by group, as they were when the step was made last."""
        return [] if self.step is None else self.step.params

    @property
    def live(self) -> list[dict[str, Any]]:
        """The live hyperparameters of each group."""
        return [] if self.step is None else self.step.live

    @property
    def clipping(self) -> tuple[Any, ...]:
        """What :meth:`Clipping.take` takes, as it is assigned now."""
        return tuple(map(self.assigned.get, NAMES))

    def assign(self, name: str, value: Any) -> None:
        """Take ``value`` as one of :data:`NAMES`; an error, and no change, where it does not fit."""
        if self.release is not None:
            self.release.refuse(name, value)
        if self.holdings.accumulated.was_on:
            refuse_whole(name, value, "optimizer accumulation")
        before = dict(self.assigned)
        self.assigned[name] = value
        if name in CHOSEN:
            try:
                self.follow_clipping()
            except (TypeError, ValueError):
                self.assigned = before
                raise

    def add_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a parameter group. One that does not fit is taken back."""
        with self.lock:
            holdings = self.holdings
            known, aliases = {*holdings.state}, dict(holdings.aliases)
            given = {k: tensor for k, (number, tensor) in self.given.items() if self.defaults.get(k) == number}
            holdings.add(param_group, {**self.defaults, **given})
            if self.is_open:
                return
            try:
                self.renew()
            except (TypeError, ValueError):
                holdings.groups.pop()
                for param in [p for p in holdings.state if p not in known]:
                    holdings.state.drop_quietly(param)
                holdings.aliases = aliases
                raise

    def current(self) -> Step:
        """The step, made anew if groups or state changed."""
        if self.step is None or not self.step.is_current():
            with self.lock:
                self.renew()
        assert self.step is not None
        return self.step

    @outside_inference_mode()
    def renew(self, grads: Sequence[Tensor | None] | None = None) -> list[Tensor | None] | None:
        """Make the step anew from groups and state, and return ``grads`` in the order in which the parameters are now."""
        self._changes.pending = True  # to the end, whatever interrupts it
        given = {} if grads is None else dict(zip(map(id, self.params), grads, strict=True))

        def grad_of(param: Tensor) -> Tensor | None:
            return given[id(param)] if id(param) in given else gradient(param)

        self.holdings.adopt(self.defaults, checked=self.step is None)
        Live.send(self._changes)
        self.holdings.accumulated.keep(p for group in self.holdings.own_groups for p in group["params"])
        self.step = self._make(self.holdings, self.clipping, grad_of)
        self.name = traced.named(self, self.holdings.kind.__qualname__, named_parameters(self.holdings.groups))
        self._changes.pending = False
        self.holdings.hand_captures.leave()
        return None if grads is None else list(map(grad_of, self.params))

    @property
    def is_outdated(self) -> bool:
        """Whether groups, state or clipping changed, so that :attr:`step` will be made anew."""
        return self._changes.pending

    def settle(self) -> Step:
        """The step, with everything that it needs, so that taking it allocates nothing that stays; see :meth:`Step.settle`.

        Raises:
            TypeError, ValueError, RecompileError: as the optimizer's ``step``.
        """
        with self.lock:
            self._settle([None] * len(self.current().params))
            assert self.step is not None
            return self.step

    @outside_inference_mode()
    def _settle(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """:meth:`settle` for gradients like ``grads``, which are returned in the order in which the parameters are now."""
        step = self.step
        if step is None or not step.is_current() or not step.describes(grads):
            found = self.renew(grads)
            assert found is not None
            grads = found
        assert self.step is not None
        try:
            self.step.settle(self.clipping)
        except CompilerError:  # which lets the plans have another lowering
            return self._settle(grads)
        return grads

    def settle_for_graphs(self) -> bool:
        """Make the step current, and settled where a compiler's CUDA graph can hold it. Whether one can."""
        with self.lock:
            self.holdings.check_numbers()
            step = self.current()
            if not self._fits_graphs(step) or any(map(is_capturing, step.devices)):  # where nothing could be made
                return self._fits_graphs(step)
            step = self.settle()
            fits = self._fits_graphs(step)
            before, log = self._in_graphs, self.holdings.log
            if fits and (before is None or before() is not step):
                cause = before and "groups, state or clipping changed, or a tensor moved, and compiled code holds the step"
                if cause:
                    spend(f"{self.holdings.kind.__name__} would capture its step again: {cause}")
                self._guard()
                log.captures.append(cause or "")
                self._in_graphs = weakref.ref(step)
            return fits

    def settle_inlined(self, present: Sequence[int]) -> bool:
        """Make the step current, and :attr:`inlined` of it, for gradients at ``present``. Whether code can hold that."""
        with self.lock:
            if self.release is not None or self.launcher is not None or self.holdings.accumulated.was_on:
                return False
            step, there = self.current(), {*present}
            given = [p if i in there else None for i, p in enumerate(step.params)]  # for gradients, which are fake
            if step.wakes(given) or not step.describes([None] * len(given)):  # or a parameter or its state moved
                self.renew(given)
                step = self.current()
            inlined = step.inlined(self.clipping)
            if isinstance(inlined, str):
                return False
            self.mark_stepped()
            self._guard()
            self.inlined = inlined
            return True

    def _guard(self) -> None:
        """Note that compiled code may hold the step, which then asks nobody before it runs."""
        self._changes.is_guarded = True
        self.let_read()

    def let_read(self) -> None:
        """Note that somebody reads numbers where they lie, at any time: none of them waits for a step from now on."""
        self._changes.are_numbers_read = True
        Live.send(self._changes)

    def hand_out(self, name: str, group: int) -> None:
        """Note that somebody gets the live tensors of a hyperparameter; ``KeyError`` or ``IndexError`` if there are none."""
        live = self.current().live
        if name not in live[position(group, len(live))]:
            raise KeyError(no_hyperparameter(self.holdings.kind, name))
        self.holdings.own_groups[group].tensors(name)

    def follow_clipping(self) -> None:
        """Let CUDA graphs of compiled code know what of clipping was assigned, since replays ask nobody; or leave them.

        Raises:
            TypeError, ValueError: what was assigned does not fit.
        """
        if (self._in_graphs or self.inlined) is None or any(map(is_capturing, self.current().devices)):
            return
        with self.lock:
            if self.inlined is not None:
                self.holdings.clipping.take(*self.clipping)
                self._changes.pending |= not self.inlined.follows(self.holdings.clipping)
            if self._in_graphs is not None and self.current().follow(self.clipping) is None:
                self._changes.pending = True

    def _fits_graphs(self, step: Step) -> bool:
        """Whether replays do all that steps must do, for as long as nothing is reported."""
        is_plain = self.release is None and self.launcher is None and isinstance(step.graph, Step) and not step.only_whole
        limit, grad_scale, found_inf, _ = self.clipping
        is_near = not isinstance(limit, Tensor) or [limit.device] == [*step.devices]
        is_there = len(step.devices) == 1 and can_capture(step.devices[0])
        return is_plain and is_there and is_near and grad_scale is None and found_inf is None

    @outside_dynamo
    def run(self, grads: list[Tensor | None] | None = None, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, without hooks; see :meth:`prepare` and :meth:`Step.launch`. One thread at a time does."""
        with self.lock:
            if self.release is not None:
                return self.release.step(grads)
            if self.holdings.accumulated.was_on:
                return self._take_or_end(grads)
            step = self.prepare(grads)
            loss = step.launch(closure) if self.launcher is None else self.launcher(step, closure)
            self.finish(step)
        return loss

    def run_in_graph(self, grads: list[Tensor | None]) -> None:
        """Do as :meth:`run` in compiled code, which a compiler may be recording in a CUDA graph, or be about to.

        What is made meanwhile would lie in the graph's memory, so what is missing is made apart from it.
        """
        with self.lock:
            step = self.step
            assert step is not None
            captures = [device for device in step.devices if is_capturing(device)]
            if captures and not all(map(inductor_captures, captures)):
                self.run(grads)  # somebody else's capture
                return
            if step.obstacle(grads, self.clipping) or not step.is_settled:
                own = grads
                grads = beside_graphs(lambda: self._settle(own), step.devices[0])
                step = self.step
                assert step is not None
            if captures and isinstance(refusal := step.graph, str):
                raise RuntimeError(refusal)
            step = self.prepare(grads, by_inductor=True)
            step.launch()
            self.finish(step)

    def update(self, grads: list[Tensor | None], *, goes_on: bool) -> None:
        """Update those parameters that have a gradient in ``grads``, one entry for each.

        ``goes_on`` says that this goes on with the step whose first part was launched last.
        """
        with self.lock:
            step, accumulated = self.prepare(grads), self.holdings.accumulated
            if not goes_on:  # after it, some parameters have counted the step
                self.holdings.schedules.evaluate()  # outside of `launching`, where step counts are not whole
            with accumulated.launching(step.params, grads, self.holdings.state):
                step.launch_part(first=False)
            self.finish(step, counts=not (goes_on or accumulated.is_on))

    def accumulate(self, on: bool) -> None:
        """Let the next gradients be taken by the state, or let parameters move again.

        Raises:
            ValueError: the state cannot take several gradients for one step, which is then as before.
        """
        accumulated = self.holdings.accumulated
        if on:
            for name, value in zip(NAMES, self.clipping, strict=True):
                refuse_whole(name, value, "optimizer accumulation")
            self.current()
            accumulated.check(self.holdings.own_groups, begins=True)
            if not accumulated.was_on:
                self._changes.pending = accumulated.was_on = True
        accumulated.is_on = on

    def _take_or_end(self, grads: list[Tensor | None] | None) -> None:
        """Take the gradients of a micro-batch, or move all parameters that took some."""
        if self.launcher is not None and isinstance(refusal := self.current().graph, str):
            raise ValueError(refusal)
        params = self.current().params
        found = list(map(gradient, params)) if grads is None else grads
        self.update(self.holdings.accumulated.rest(params, found), goes_on=False)

    def prepare(self, grads: list[Tensor | None] | None = None, *, by_inductor: bool = False) -> Step:
        """The host's part of a step, which may be a new one; nothing is updated yet. ``grads`` as in :meth:`Step.prepare`.

        ``by_inductor`` says that a capture, if there is one, is Inductor's: it drops its graphs when the step is made anew.

        Raises:
            TypeError, ValueError, RecompileError, RuntimeError: as the optimizer's ``step``.
        """
        step, clipping = self.step, self.clipping
        if step is not None and not by_inductor and any(map(is_capturing, step.devices)):
            self._check_capture(step, grads, clipping)
        if fakes_are_made() and not all(map(is_fake, self.params)):
            raise RuntimeError(
                "a step of real parameters under FakeTensorMode would compute with fake tensors; leave the mode, or make "
                "the parameters in it"
            )
        self.mark_stepped()
        Live.send(self._changes)
        self.holdings.clipping.take(*clipping)
        if step is None or not step.is_current() or not step.describes(grads):
            grads = self.renew(grads)
            step = self.step
            assert step is not None
            described = step.describes(grads)
            assert described
        try:
            step.prepare(grads)
        except CompilerError:  # which lets the plans have another lowering
            return self.prepare(grads)
        return step

    def mark_stepped(self) -> None:
        """Let torch's schedulers know that there was a step, unless a number is out of range."""
        self.holdings.check_numbers()
        self.is_called = True

    def finish(self, step: Step, *, counts: bool = True) -> None:
        """End a step that was launched, or a part of one, of which the first ``counts``."""
        self.launches += 1
        self.runs += counts
        if not step.is_recorded:
            self.steps += counts
            self.holdings.log.has_stepped = True
        step.finish()

    def _check_capture(self, step: Step, grads: list[Tensor | None] | None, clipping: tuple[Any, ...]) -> None:
        """Refuse to capture a step that needs more than a graph can hold; warn of assignments after one that is captured."""
        name = self.holdings.kind.__name__
        if not step.is_recorded and any(map(is_recorded_by_runner, step.devices)):
            raise RuntimeError(
                f"{name} is stepped in a function that a CUDAGraphRunner captures, but is not one of the "
                "runner's optimizers; name it there"
            )
        if obstacle := step.obstacle(grads, clipping):
            raise RuntimeError(
                f"{name}.step() cannot be captured in a CUDA graph now: {obstacle}; "
                "take one step before capturing, or let co.CUDAGraphRunner do so"
            )
        if not step.is_recorded:
            self.holdings.hand_captures.keep(step.memory)
            self.let_read()
