"""Gradient release: parameters are updated inside of backward, and their gradients freed there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compiled_optim.groups.parameters import named_parameters
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.plan.clipping import NAMES
from compiled_optim.step.release import GradientRelease

_MIB = 1 << 20
_SHARE = 32  # whole gradients wait until they are one part in so many of all
_REDUCES_LATER = {"DistributedDataParallel", "FullyShardedDataParallel"}


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

    ``opt.step()`` ends a step: schedulers find it called as always. It also updates, as without release, those parameters of
    the optimizer that have a gradient which no backward took: others than the model's, and those that were frozen here,
    until this is called again. ``opt.zero_grad()`` finds nothing to do. Numbers are the same as without release, bit for bit
    where an optimizer works element by element, and so are checkpoints; each backward uses the hyperparameters of its time.
    Several optimizers can each release their part of a model. A copy of an optimizer, or an unpickled one, does not release.
    ``del opt`` ends it too.

    A parameter is updated once per step, when all of its uses in one backward have added their part. So a step may consist
    of several backwards through different parameters. After a backward that failed, also in an update, some parameters are
    updated; call ``opt.zero_grad()`` before the next one. A parameter that is used in a reentrant checkpoint
    (``use_reentrant=True``) and outside of it gets its gradient in parts, which is an error. A forward that reads one as
    ``weight.data`` and as ``weight`` may get gradients at the updated value: autograd does not notice, as it does with
    ``weight.detach()``.

    Args:
        model: the module that holds the parameters. Those that require no gradient, or that ``optimizer`` has not, are left
            alone.
        optimizer: any of this package with a rule, which is all but LBFGS.
        ignore_existing_hooks: accept parameters that have post-accumulate-grad hooks of somebody else. Hooks run in the
            order of their registration, so later ones may find no gradient.
        bucket_cap_mb: how many MiB of whole gradients, counted as their parameters' size, wait for a common update; 0 for
            none, by which every parameter is updated by itself. None: 4, or a 32nd of all parameters if that is more.

    Raises:
        TypeError: ``model`` is no module, ``optimizer`` none of this package, or ``bucket_cap_mb`` no number.
        ValueError: ``bucket_cap_mb`` is negative or NaN; the optimizer has no parameter of the model, or needs all gradients
            at once (``max_grad_norm``, ``skip_nonfinite``, ``differentiable=True``, LBFGS); another optimizer releases a
            parameter; a parameter has hooks; the model is wrapped in DistributedDataParallel, which reduces gradients later
            and keeps memory for all of them. Nothing is changed then.

    Later, ``ValueError`` is raised where ``max_grad_norm`` or ``skip_nonfinite`` is assigned, or a ``GradScaler`` steps.
    ``RuntimeError`` is raised by a second backward through a parameter without ``opt.step()`` in between, as in gradient
    accumulation, for which there is ``opt.optimizer_accumulation``, and by a step after DistributedDataParallel added
    gradients. The last two, scaler and DistributedDataParallel, come after the backward has moved parameters, by gradients
    that were scaled, or of one process: load model and optimizer again. Code that reads or clips gradients between backward
    and step finds none.

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
    before = engine.release
    release = before if isinstance(before, GradientRelease) else GradientRelease(engine)
    for name, value in zip(NAMES, engine.clipping, strict=True):
        release.refuse(name, value)
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
