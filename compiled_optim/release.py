"""Gradient release: backward updates parameters when their gradients are complete, and then frees the gradients."""

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
from compiled_optim.memory.torch_internals import after_backward, backward_number, outside_dynamo
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.step.engine import Engine, refuse_whole
from compiled_optim.step.step import Gradients

_MIB = 1 << 20
_SHARE = 32  # complete gradients wait until they are one part in 32 of all
_REDUCES_LATER = {"DistributedDataParallel", "FullyShardedDataParallel"}
_FEATURE = "gradient release"


def prepare_for_gradient_release(
    model: nn.Module,
    optimizer: CompiledOptimizer,
    ignore_existing_hooks: bool = False,
    *,
    bucket_cap_mb: float | None = None,
) -> None:
    """Let every backward update parameters as soon as their gradients are complete, and then free the gradients.

    So the gradients of a model are never all in memory at once. The training loop does not change::

        co.prepare_for_gradient_release(model, opt)
        for x in batches:
            loss_of(model(x)).backward()              # updates
            opt.step(); opt.zero_grad(); sched.step()

    Still call ``opt.step()``: it ends the step, and schedulers expect it. It also updates parameters of the optimizer that
    are not released: those outside of the model, and those that were frozen when this was called (call this again after you
    unfreeze them). Results and checkpoints are the same as without release, bit for bit if the optimizer works element by
    element. Each backward uses the hyperparameters of the moment. Several optimizers can each release their parameters of a
    model. A copied or unpickled optimizer does not release. ``del opt`` ends the release too.

    A parameter is updated once per step, when one backward has accumulated its gradient. So a step may have several
    backwards through different parameters. If a backward or an update in it fails, some parameters are already updated; call
    ``opt.zero_grad()`` before the next backward. A parameter that is used both in a reentrant checkpoint
    (``use_reentrant=True``) and outside of it gets its gradient in two backwards, which is an error. If a forward uses both
    ``weight.data`` and ``weight``, gradients may be computed from the updated weight; autograd notices that only for
    ``weight.detach()``.

    Args:
        model: the module. Its parameters that require no gradient, or that are not in ``optimizer``, are not released.
        optimizer: any optimizer of this package but LBFGS and those that sum over all parameters, such as Prodigy.
        ignore_existing_hooks: accept parameters that already have post-accumulate-grad hooks. Hooks run in the order of
            their registration; a hook that is registered later may find no gradient.
        bucket_cap_mb: gradients are collected until their parameters have this many MiB, and are then used in one update. 0
            updates every parameter alone. None is 4 or a 32nd of all released parameters, whichever is more.

    Raises:
        TypeError: ``model`` is no module, ``optimizer`` none of this package, or ``bucket_cap_mb`` no number.
        ValueError: ``bucket_cap_mb`` is negative or NaN; the optimizer has no parameter of the model, or needs all gradients
            at once (``max_grad_norm``, ``skip_nonfinite``, ``differentiable=True``, LBFGS); another optimizer releases a
            parameter; a parameter has hooks; the model is wrapped in DistributedDataParallel, which reduces gradients after
            backward and keeps memory for all of them. Nothing is changed then.

    Afterwards, assigning ``max_grad_norm`` or ``skip_nonfinite``, and ``GradScaler.step``, raise ``ValueError``. A second
    backward through a parameter without ``opt.step()`` in between raises ``RuntimeError``: accumulate with
    ``opt.optimizer_accumulation``. So does a step after DistributedDataParallel added gradients. With GradScaler and
    DistributedDataParallel the backward has already moved parameters, by scaled or unreduced gradients: load model and
    optimizer again. Code that reads or clips gradients between backward and step finds none.

    ``torch.compile`` of the model works; each compiled graph produces its gradients together. A function under
    ``torch.compile`` that calls ``opt.step()`` runs uncompiled, or is an error with ``fullgraph=True``. FSDP2 works: shard
    the model first. ``co.CUDAGraphRunner`` captures a whole training step as without release.
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
    refuse_whole(_FEATURE, engine.assigned)
    for name, param in params.items():
        releases = _releases(param)
        if any(other is not release and other.engine is not None for other in releases.values()):
            raise ValueError(f"'{name}' is released for another optimizer; call co.remove_gradient_release(model) first")
        if len(releases) < len(_hooks(param)) and not ignore_existing_hooks:
            raise ValueError(
                f"'{name}' has a post-accumulate-grad hook, which may want its gradient; pass ignore_existing_hooks=True if "
                "it may find it freed or used"
            )
    release.cap = cap
    engine.release = release
    for param in params.values():
        if release not in _releases(param).values():
            param.register_post_accumulate_grad_hook(release.take)  # type: ignore[no-untyped-call]


def remove_gradient_release(model: nn.Module) -> None:
    """End the gradient release of all optimizers for ``model``: ``opt.step()`` uses the gradients again.

    Present gradients stay. Nothing happens for a model without gradient release.

    Raises:
        TypeError: ``model`` is no module.
    """
    _check_module(model)
    removed: set[GradientRelease] = set()
    for param in model.parameters():
        for key, release in _releases(param).items():
            del _hooks(param)[key]
            removed.add(release)
    for release in removed:
        engine = release.engine
        if engine is not None and not any(release in _releases(param).values() for param in engine.params):
            engine.release = None


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _params_of(model: nn.Module, optimizer: CompiledOptimizer) -> dict[str, Tensor]:
    """Return the parameters of ``model`` that ``optimizer`` updates, by their names in the optimizer.

    ``ValueError`` if it does not update each from its own gradient alone, or if gradients are not complete after autograd.
    """
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "_rule"):
        raise ValueError(f"{kind} computes a step from all gradients at once, which gradient release never has")
    if sums := [each.__name__ for each in engine_of(optimizer).groups.kinds if each._rule.has_totals()]:
        raise ValueError(f"gradient release does not go with {sums[0]}, which sums over all parameters")
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(f"gradient release does not go with differentiable=True, which param_groups[{index}] has")
    for name, module in model.named_modules():
        if later := _REDUCES_LATER & {base.__name__ for base in type(module).__mro__}:
            raise ValueError(
                f"gradient release does not go with {min(later)} ('{name}' is one): it reduces gradients when autograd is "
                "done with them, and keeps memory for all of them; shard the model with fully_shard"
            )
    trained = {id(param) for param in model.parameters() if param.requires_grad}
    if params := {name: param for name, param in named_parameters(optimizer.param_groups) if id(param) in trained}:
        return params
    raise ValueError(f"{kind} has none of the model's parameters that require gradients")


def _hooks(param: Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] | None = param._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def _releases(param: Tensor) -> dict[int, GradientRelease]:
    """Return the releases that update ``param`` in backward, by the keys of their hooks."""
    owners = {key: getattr(hook, "__self__", None) for key, hook in _hooks(param).items()}
    return {key: owner for key, owner in owners.items() if isinstance(owner, GradientRelease)}


_Waiting: TypeAlias = tuple[Tensor, torch.Stream | None]  # a parameter, and the stream of its gradient


class GradientRelease:
    """The updates of one optimizer inside of backward.

    Autograd calls :meth:`take` for each parameter, on any of its threads. Complete gradients wait until they have more than
    :attr:`cap` bytes together, or until the end of the backward; then their parameters are updated together. A step lasts
    from one call of the object to the next. It is an error to update a parameter twice in a step.

    The hooks of the parameters hold this object, which keeps neither parameters nor optimizer alive. It does nothing once
    the optimizer is deleted or has another object of this class.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.cap = 0.0
        self._forget()

    @property
    def engine(self) -> Engine | None:
        """The optimizer's engine; None if the optimizer is deleted, or has another object of this class."""
        engine = self._engine()
        return engine if engine is not None and engine.release is self else None

    def take(self, param: Tensor) -> None:
        """Update ``param`` from its complete gradient, at once or later in this backward.

        Raises:
            RuntimeError: it was taken before in this step.
            TypeError, ValueError, RecompileError: as the optimizer's ``step``.
        """
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError("compiled autograd cannot hold a backward with gradient release")
        self._take(param)

    @outside_dynamo
    def _take(self, param: Tensor) -> None:
        if (engine := self.engine) is None or param.grad is None:
            return
        with engine.lock:
            self._look_for_zero_grad(engine)
            if id(param) in self._taken and any(param is p for p in engine.current().params):
                raise RuntimeError(
                    f"'{_name(param, engine)}' was updated in backward and has another gradient before opt.step(): with "
                    "gradient release, call opt.step() after each backward, and do not accumulate gradients; after a "
                    "backward that failed, call opt.zero_grad(); a reentrant checkpoint counts as a separate backward"
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

    def __call__(self, passed: Gradients) -> None:
        """End a step: update the parameters whose gradients wait, and those whose gradients no backward has used.

        Gradients that compiled code passes as ``passed`` are an error, since its backward ran no hooks.

        Raises:
            RuntimeError: a parameter that was updated has a gradient again, or a graph or compiled code holds the step.
            TypeError, ValueError, RecompileError: as the optimizer's ``step``.
        """
        engine = self.engine
        assert engine is not None
        if passed is not None:
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
        present = [p for p in params if p.grad is not None]
        if again := [p for p in present if id(p) in self._taken]:
            raise RuntimeError(
                f"'{_name(again[0], engine)}' was updated in backward and then got a gradient: a backward failed and "
                "opt.zero_grad() was not called before the next one, or something changes gradients after backward, such "
                "as DistributedDataParallel, which does not work with gradient release; load model and optimizer again"
            )
        grads = engine.accumulated.with_zeros(params, [p.grad for p in params])
        if any(grad is not None for grad in grads):
            engine.update(grads, goes_on=self._has_begun)
        engine.mark_stepped()
        self._forget()

    def _look_for_zero_grad(self, engine: Engine) -> None:
        """Start a new step if ``opt.zero_grad()`` was called after a backward that failed."""
        if engine.is_zeroed and (self._open or self._waiting):
            self._forget()
        engine.is_zeroed = False

    def _forget(self) -> None:
        self._waiting: dict[int, _Waiting] = {}  # by id
        self._bytes = 0
        self._taken: set[int] = set()  # ids of the parameters that this step has taken
        self._has_begun = False  # whether some of them are updated
        self._open: set[int] = set()  # the numbers of backwards that have not ended
        self._last: dict[torch.device, torch.Stream] = {}  # the stream of the last update of this step

    @outside_dynamo
    def _end(self, number: int) -> None:
        """Update the waiting parameters at the end of a backward."""
        if (engine := self.engine) is not None:
            with engine.lock:
                self._open.discard(number)
                self._flush(engine, ended=True)

    @torch.no_grad()
    def _flush(self, engine: Engine, *, ended: bool = False) -> None:
        """Update the waiting parameters and free their gradients. After an error, the parameters still wait."""
        refuse_whole(_FEATURE, engine.assigned)
        indices = engine.current().indices
        waiting = [(param, stream) for key, (param, stream) in self._waiting.items() if key in indices]
        grads: list[Tensor | None] = [None] * len(indices)
        for param, _ in waiting:
            grads[indices[id(param)]] = param.grad
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
        """Run on the streams that made the gradients, or on the current ones to ``stay`` there.

        Each update waits for the update before it, since both write the same tables.
        """
        streams = dict(self._last)
        streams |= {param.device: stream for param, stream in waiting if stream is not None}
        with contextlib.ExitStack() as stack:
            for device, stream in streams.items():
                target: Any = _current_stream(device) if stay else stream
                stack.enter_context(torch.cuda.stream(target))
                origins = [origin for param, origin in waiting if param.device == device]
                for other in (*origins, self._last.get(device)):
                    if other is not None and other != target:
                        target.wait_stream(other)
                for param, origin in waiting:
                    if param.device == device and origin != target and param.grad is not None:
                        local(param.grad).record_stream(target)
                self._last[device] = target
            yield


def _current_stream(device: torch.device) -> torch.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _name(param: Tensor, engine: Engine) -> str:
    return next((name for name, each in named_parameters(engine.groups.listed) if each is param), "a parameter")
