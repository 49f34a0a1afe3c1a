"""Gradient release: parameters are updated inside of backward when their gradients are whole, which are then freed."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from compiled_optim.groups.parameters import named_parameters
from compiled_optim.memory.layout import local
from compiled_optim.memory.torch_internals import after_backward, backward_number, quickly_outside_dynamo
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.step.engine import Engine, refuse_whole
from compiled_optim.step.step import Gradients

_MIB = 1 << 20
_SHARE = 32  # whole gradients wait until they are one part in so many of all
_REDUCES_LATER = {"DistributedDataParallel", "FullyShardedDataParallel"}
_WHERE = "gradient release"


def prepare_for_gradient_release(
    model: nn.Module,
    optimizer: CompiledOptimizer,
    ignore_existing_hooks: bool = False,
    *,
    bucket_cap_mb: float | None = None,
) -> None:
    """Let every backward update the parameters as soon as their gradients are whole, and free the gradients.

    The gradients of a model are then never all there at once. The training loop stays as it is::

        co.prepare_for_gradient_release(model, opt)
        for x in batches:
            loss_of(model(x)).backward()              # updates
            opt.step(); opt.zero_grad(); sched.step()

    ``opt.step()`` ends a step: schedulers find it called as always. It also updates parameters whose gradient no backward
    took: others than the model's, and those that were frozen here, until this is called again. ``opt.zero_grad()`` finds
    nothing to do. Numbers are the same as without release, bit for bit where an optimizer works element by element, and so
    are checkpoints; each backward uses the hyperparameters of its time. Several optimizers can each release their part of a
    model. A copy of an optimizer, or an unpickled one, does not release. ``del opt`` ends it too.

    A parameter is updated once per step, when all of its uses in one backward have added their part. So a step may consist
    of several backwards through different parameters. After a backward that failed, also in an update, some parameters are
    updated; call ``opt.zero_grad()`` before the next one. It is an error to use a parameter in a reentrant checkpoint
    (``use_reentrant=True``) and outside of it: its gradient comes in parts. A forward that reads ``weight.data`` and
    ``weight`` may get gradients at the updated value: autograd does not notice, as it does with ``weight.detach()``.

    Args:
        model: the module. Parameters that require no gradient, or that ``optimizer`` has not, are left alone.
        optimizer: any of this package with a rule, which is all but LBFGS.
        ignore_existing_hooks: accept parameters that have post-accumulate-grad hooks of somebody else. Hooks run in the
            order of their registration, so later ones may find no gradient.
        bucket_cap_mb: how many MiB of whole gradients, counted as their parameters' size, wait for a common update; with 0
            every parameter is updated by itself. None: 4, or a 32nd of all parameters if that is more.

    Raises:
        TypeError: ``model`` is no module, ``optimizer`` none of this package, or ``bucket_cap_mb`` no number.
        ValueError: ``bucket_cap_mb`` is negative or NaN; the optimizer has no parameter of the model, or needs all gradients
            at once (``max_grad_norm``, ``skip_nonfinite``, ``differentiable=True``, LBFGS); another optimizer releases a
            parameter; a parameter has hooks; the model is wrapped in DistributedDataParallel, which reduces gradients later
            and keeps memory for all of them. Nothing is changed then.

    Later, ``ValueError`` is raised where ``max_grad_norm`` or ``skip_nonfinite`` is assigned, or a ``GradScaler`` steps.
    ``RuntimeError`` is raised by a second backward through a parameter without ``opt.step()`` in between, as in gradient
    accumulation, for which there is ``opt.optimizer_accumulation``, and by a step after DistributedDataParallel added
    gradients. After those of scaler and DistributedDataParallel load model and optimizer again: the backward has moved
    parameters, by gradients that were scaled, or of one process. Code between backward and step finds no gradients.

    ``torch.compile`` of the model works; a compiled part hands over its gradients together. A function under
    ``torch.compile`` that steps runs uncompiled, and with ``fullgraph=True`` it is an error. FSDP2 works: shard the model
    first. ``co.CUDAGraphRunner`` captures a whole training step as always.
    """
    _check_module(model)
    if not isinstance(optimizer, CompiledOptimizer):
        raise TypeError(f"optimizer must be one of compiled_optim, got {type(optimizer).__name__}")
    if bucket_cap_mb is not None and not isinstance(bucket_cap_mb, (int, float)):
        raise TypeError(f"bucket_cap_mb must be a number or None, got {bucket_cap_mb!r}")
    if bucket_cap_mb is not None and not bucket_cap_mb >= 0:  # nor NaN
        raise ValueError(f"bucket_cap_mb must be >= 0, got {bucket_cap_mb}")
    engine = engine_of(optimizer)
    params = _params_of(model, optimizer)
    cap = max(4 * _MIB, sum(p.nbytes for p in params.values()) // _SHARE) if bucket_cap_mb is None else bucket_cap_mb * _MIB
    release = engine.release if isinstance(engine.release, GradientRelease) else GradientRelease(engine)
    refuse_whole(_WHERE, engine.assigned)
    for name, param in params.items():
        _check_hooks(name, param, release, ignore_existing_hooks)
    release.cap = cap
    engine.release = release
    for param in params.values():
        if release not in _releases(param).values():
            param.register_post_accumulate_grad_hook(release.take)  # type: ignore[no-untyped-call]


def remove_gradient_release(model: nn.Module) -> None:
    """Let backward leave the gradients of ``model`` to ``opt.step()`` again, whichever optimizers released them.

    Gradients that are there stay. A model without gradient release stays as it is.

    Raises:
        TypeError: ``model`` is no module.
    """
    _check_module(model)
    found: set[GradientRelease] = set()
    for param in model.parameters():
        for key, release in _releases(param).items():
            del _hooks(param)[key]
            found.add(release)
    for release in found:
        engine = release.engine
        if engine is not None and not any(release in _releases(param).values() for param in engine.params):
            engine.release = None


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _params_of(model: nn.Module, optimizer: CompiledOptimizer) -> dict[str, Tensor]:
    """The parameters of ``model`` that ``optimizer`` updates, by their names in the optimizer.

    ``ValueError`` where it does not update them one by one, or something else than autograd makes their gradients whole.
    """
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "_rule"):
        raise ValueError(f"{kind} computes a step from all gradients at once, which gradient release never has")
    if optimizer._rule.has_totals():
        raise ValueError(f"gradient release does not go with {kind}, which sums over all parameters")
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(f"gradient release does not go with differentiable=True, which param_groups[{index}] has")
    for name, module in model.named_modules():
        if later := _REDUCES_LATER & {base.__name__ for base in type(module).__mro__}:
            raise ValueError(
                f"gradient release does not go with {min(later)} ('{name}' is one): it reduces gradients when autograd is "
                "done with them, and keeps memory for all of them; shard the model with fully_shard"
            )
    own = {id(param) for param in model.parameters() if param.requires_grad}
    if params := {name: param for name, param in named_parameters(optimizer.param_groups) if id(param) in own}:
        return params
    raise ValueError(f"{kind} has none of the model's parameters that require gradients")


def _check_hooks(name: str, param: Tensor, release: GradientRelease, ignore_existing: bool) -> None:
    """Raise ``ValueError`` where somebody else has a hook on ``param``."""
    own = _releases(param)
    if any(other is not release and other.engine is not None for other in own.values()):
        raise ValueError(f"'{name}' is released for another optimizer; call co.remove_gradient_release(model) first")
    if len(own) < len(_hooks(param)) and not ignore_existing:
        raise ValueError(
            f"'{name}' has a post-accumulate-grad hook, which may want its gradient; pass ignore_existing_hooks=True if it "
            "may find it freed or used"
        )


def _hooks(param: Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] | None = param._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def _releases(param: Tensor) -> dict[int, GradientRelease]:
    """Who updates ``param`` in backward, by the keys of the hooks."""
    owners = {key: getattr(hook, "__self__", None) for key, hook in _hooks(param).items()}
    return {key: owner for key, owner in owners.items() if isinstance(owner, GradientRelease)}


_Waiting: TypeAlias = tuple[Tensor, torch.Stream | None]  # a parameter, and the stream that its gradient was made on


class GradientRelease:
    """The updates of one optimizer inside of backward.

    Autograd calls :meth:`take` for each parameter, on any of its threads. Whole gradients wait until they have more than
    :attr:`cap` bytes together, or until the end of the backward; one call then updates their parameters. A step is what
    happens between two calls of the object. It keeps neither parameters nor the optimizer alive.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.cap = 0.0
        self._waiting: dict[int, _Waiting] = {}  # by id
        self._bytes = 0
        self._zeroed = engine.zeroed  # as it was when this looked last
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
            self._look_for_zero_grad(engine)
            if id(param) in self._taken and any(param is p for p in engine.current().params):
                raise RuntimeError(
                    f"'{_name(param, engine)}' was updated in backward and has another gradient before opt.step(): with "
                    "gradient release, call opt.step() after each backward, and do not accumulate gradients; after a "
                    "backward that failed, call opt.zero_grad(); reentrant checkpoints are backwards of their own"
                )
            self._waiting[id(param)] = param, _current_stream(param.device)  # first, so that zero_grad() forgets all of it
            if not engine.accumulated.is_on:
                self._taken.add(id(param))
            self._bytes += param.nbytes
            number = backward_number()
            if number not in self._open and number >= 0:
                after_backward(functools.partial(self._end, number))
                self._open.add(number)
            if self._bytes > self.cap or number < 0:
                self._flush(engine)

    def __call__(self, given: Gradients) -> None:
        """End a step: update what waits, and parameters that have a gradient which no backward has taken.

        ``given`` are gradients that compiled code hands over: an error, since its backward ran no hooks.

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
        self._look_for_zero_grad(engine)
        self._flush(engine)
        params = engine.current().params
        left = [p for p in params if p.grad is not None]
        if again := [p for p in left if id(p) in self._taken]:
            raise RuntimeError(
                f"'{_name(again[0], engine)}' was updated in backward and then got a gradient: a backward failed, after "
                "which opt.zero_grad() must come before the next one, or something goes on with whole gradients, as "
                "DistributedDataParallel does, with which gradient release does not go; load model and optimizer again"
            )
        grads = engine.accumulated.with_zeros(params, [p.grad for p in params])
        if any(grad is not None for grad in grads):
            engine.update(grads, goes_on=self._has_begun)
        engine.mark_stepped()
        self._forget()

    def _look_for_zero_grad(self, engine: Engine) -> None:
        """Let a backward that failed, or its update, be followed by another one after ``opt.zero_grad()``."""
        if self._zeroed != engine.zeroed and (self._open or self._waiting):
            self._forget()
        self._zeroed = engine.zeroed

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
        refuse_whole(_WHERE, engine.assigned)
        places = engine.current().places
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


def _name(param: Tensor, engine: Engine) -> str:
    return next((name for name, each in named_parameters(engine.groups) if each is param), "a parameter")
