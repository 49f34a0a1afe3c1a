"""Updates inside of backward: the parameters whose gradients are whole, whose gradients are then freed."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.groups.parameters import named_parameters
from compiled_optim.memory.sharding import local
from compiled_optim.memory.torch_internals import after_backward, backward_number, quickly_outside_dynamo
from compiled_optim.plan.clipping import NAMES
from compiled_optim.step.engine import Engine
from compiled_optim.step.step import Step
from compiled_optim.step.use_of_gradients import refuse_whole

_Waiting: TypeAlias = tuple[Tensor, torch.Stream | None]  # a parameter, and the stream that its gradient was made on


class GradientRelease:
    """The updates of one optimizer inside of backward.

    Autograd calls :meth:`take` for each parameter, on any of its threads. Gradients that are whole wait until they have
    more than :attr:`cap` bytes together, or until the end of the backward; one call then updates their parameters. A step is
    what happens between two calls of :meth:`step`. It is an error if a parameter would be updated twice in it.

    It is registered on parameters, and keeps neither them nor the optimizer alive. One of an optimizer that is gone, or that
    has another, does nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.cap = 0.0
        self._waiting: dict[int, _Waiting] = {}  # by id
        self._bytes = 0
        self._step: Callable[[], Step | None] = lambda: None  # of which the next are the places of parameters, by id
        self._places: dict[int, int] = {}
        self._taken: set[int] = set()  # ids of the parameters that this step has taken
        self._has_begun = False  # whether some are updated
        self._open: set[int] = set()  # the numbers of backwards that have not ended
        self._last: dict[torch.device, torch.Stream] = {}  # where the last update of this step ran

    @property
    def engine(self) -> Engine | None:
        """Of the optimizer; None where this does nothing any more."""
        engine = self._engine()
        return engine if engine is not None and engine.release is self else None

    def take(self, param: Tensor) -> None:
        """Update ``param``, now or at the end of this backward, from its gradient, which is whole.

        Raises:
            RuntimeError: it was taken before in this step.
            TypeError, ValueError, RecompileError: as the optimizer's ``step``.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("compiled autograd cannot hold a backward with gradient release")
        self._take(param)

    @quickly_outside_dynamo
    def _take(self, param: Tensor) -> None:
        if (engine := self.engine) is None or param.grad is None:
            return
        with engine.lock:
            if id(param) in self._taken and any(param is p for p in engine.current().params):
                raise RuntimeError(
                    f"'{_names([param], engine)}' was updated in backward and has another gradient before opt.step(): with "
                    "gradient release, call opt.step() after each backward, and do not accumulate gradients; after a "
                    "backward that failed, call opt.zero_grad(); reentrant checkpoints are backwards of their own"
                )
            self._waiting[id(param)] = param, _current_stream(param.device)  # before what zero_grad() then forgets too
            if not engine.holdings.accumulated.is_on:
                self._taken.add(id(param))
            self._bytes += param.nbytes
            number = backward_number()
            if number not in self._open and number >= 0:
                after_backward(functools.partial(self._end, number))
                self._open.add(number)
            if self._bytes > self.cap or number < 0:
                self._flush(engine)

    def step(self, given: list[Tensor | None] | None) -> None:
        """End a step: update what waits, and parameters that have a gradient which no backward has taken.

        Raises:
            RuntimeError: a parameter that was updated has a gradient again, or a graph or compiled code holds the step.
            TypeError, ValueError, RecompileError: as the optimizer's ``step``.
        """
        engine = self.engine
        assert engine is not None
        if given is not None:
            raise RuntimeError(
                "this step was compiled before gradient release was switched on, and so was its backward; compile the "
                "function again, or call co.remove_gradient_release(model)"
            )
        if engine.launcher is not None:
            raise RuntimeError(
                "a CUDAGraphRunner of the optimizer alone has nothing to capture with gradient release, which updates "
                "parameters in backward; give the runner the whole training step"
            )
        self._flush(engine)
        params = engine.current().params
        left = [p for p in params if p.grad is not None]
        if again := [p for p in left if id(p) in self._taken]:
            raise RuntimeError(
                f"'{_names(again, engine)}' was updated in backward and then got a gradient: a backward failed, after which "
                "opt.zero_grad() must come before the next one, or something goes on with whole gradients, as "
                "DistributedDataParallel does, with which gradient release does not go; load model and optimizer again"
            )
        grads = engine.holdings.accumulated.rest(params, [p.grad for p in params])
        if any(grad is not None for grad in grads):
            engine.update(grads, goes_on=self._has_begun)
        engine.mark_stepped()
        self._forget()

    def zero_grad(self) -> None:
        """Let a backward that failed, or its update, be followed by another one without a step in between."""
        if (self._open or self._waiting) and backward_number() < 0:
            self._forget()

    def refuse(self, name: str, value: object) -> None:
        """As :meth:`Released.refuse`."""
        refuse_whole(name, value, "gradient release")

    def _forget(self) -> None:
        self._bytes, self._has_begun = 0, False
        for collection in (self._waiting, self._taken, self._open, self._last):
            collection.clear()

    @quickly_outside_dynamo
    def _end(self, number: int) -> None:
        """Update what waits at the end of a backward."""
        if (engine := self.engine) is not None:
            with engine.lock:
                self._open.discard(number)
                self._flush(engine, ended=True)

    @torch.no_grad()
    def _flush(self, engine: Engine, *, ended: bool = False) -> None:
        """Update what waits, and free its gradients. Where that is an error, it goes on waiting."""
        for name, value in zip(NAMES, engine.clipping, strict=True):
            self.refuse(name, value)
        places = self._placed(engine.current())
        waiting = [(param, stream) for at, (param, stream) in self._waiting.items() if at in places]
        grads: list[Tensor | None] = [None] * len(places)
        for param, _ in waiting:
            grads[places[id(param)]] = param.grad
        if any(grad is not None for grad in grads):
            with self._after_streams(waiting, stay=ended):
                engine.update(grads, goes_on=self._has_begun)
            self._has_begun = True
        for param, _ in waiting:
            param.grad = None
        self._waiting.clear()
        self._bytes = 0

    def _placed(self, step: Step) -> dict[int, int]:
        """The place of each parameter in ``step``, by id."""
        if self._step() is not step:
            self._step, self._places = weakref.ref(step), {id(param): i for i, param in enumerate(step.params)}
        return self._places

    @contextlib.contextmanager
    def _after_streams(self, waiting: Sequence[_Waiting], *, stay: bool) -> Iterator[None]:
        """Work on the gradients' streams, for which autograd waits, or ``stay`` on the current ones, if it has waited.

        An update follows the one before, since it writes the same tables.
        """
        streams = dict(self._last)
        streams |= {param.device: stream for param, stream in waiting if stream is not None}
        with contextlib.ExitStack() as stack:
            for device, stream in streams.items():
                here: Any = _current_stream(device) if stay else stream
                stack.enter_context(torch.cuda.stream(here))
                made_on = [made for param, made in waiting if param.device == device]
                for other in (*made_on, self._last.get(device)):
                    if other is not None and other != here:
                        here.wait_stream(other)
                for param, made in waiting:
                    if param.device == device and made != here and param.grad is not None:
                        local(param.grad).record_stream(here)
                self._last[device] = here
            yield


def _current_stream(device: torch.device) -> torch.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _names(params: Sequence[Tensor], engine: Engine) -> str:
    """The name of the first of ``params``."""
    found = (name for name, param in named_parameters(engine.holdings.groups) if is_(param, params[0]))
    return next(found, "a parameter")
