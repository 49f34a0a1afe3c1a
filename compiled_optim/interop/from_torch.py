"""The optimizer of another library in the middle of training, continued by one of this package.

A library's optimizer is packed as torch.optim would save it, translated to this package's names, and loaded. None of its
own code runs: no hook, no ``state_dict`` of its class.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from compiled_optim.by_name import labeling
from compiled_optim.catalogue import named
from compiled_optim.checkpoint.group_values import copied
from compiled_optim.checkpoint.read import foreign_options
from compiled_optim.groups.param_group import group_keys
from compiled_optim.groups.parameters import first_few, named_parameters
from compiled_optim.interop import bitsandbytes, fused_adam, optimi
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule.storage import HALVES

Target: TypeAlias = type[CompiledOptimizer]
Packed: TypeAlias = dict[str, Any]
"""An indexed state dict of an optimizer. A last group without parameters has the constructor's values."""

LIBRARIES: dict[str, Callable[[Any, type[Optimizer], Packed], tuple[Target, Packed]]] = {
    "torch.optim": lambda optimizer, source, packed: (named(source.__name__)[1], packed),
    "optimi": optimi.from_optimizer,
    "bitsandbytes.optim": bitsandbytes.from_optimizer,
    "FusedAdam": fused_adam.from_optimizer,
}
"""The functions that translate an optimizer, by the package of its class or by the name of the class."""


def from_torch(optimizer: Optimizer, *, schedulers: Any = None, **options: Any) -> CompiledOptimizer:
    """Make the optimizer of this package that continues from ``optimizer``: ``opt = co.from_torch(opt)``.

    ``optimizer`` may be of torch.optim, of optimi, or of bitsandbytes (Adam, AdamW, Lion, SGD, RMSprop and Adagrad), or a
    ``FusedAdam`` of apex or TransformerEngine. The new optimizer has its groups with all entries and names, copies of its
    state, and its hooks. A number that is a tensor in its groups is the same tensor in the new groups. The old optimizer
    does not change. Delete it: until then memory holds the state twice.

    State keeps its dtype, so averages in float32 of 16-bit parameters become ``state_dtype=torch.float32``. Averages in
    bitsandbytes's 8 bits become ``state_dtype="int8"``, quantized again; pass ``state_dtype=torch.float32`` to keep their
    values. Master weights become ``weights="master"``, or ``"split16"`` where only their lower halves are stored. optimi's
    ``kahan_sum`` is kept.

    Args:
        optimizer: the optimizer. A subclass may replace no method of its library's class but the constructor.
        schedulers: the scheduler that drives the old optimizer, or a list of all that do. They drive the new one from now
            on: each attribute that is the old optimizer becomes the new one, in nested schedulers too. ``()`` leaves all
            unchanged. Schedulers that are not torch's are not detected if they are absent here.
        **options: arguments of the new optimizer that the groups do not have, such as ``weights``, ``state_dtype``,
            ``max_grad_norm`` and ``lowering``.

    Returns:
        The new optimizer.

    Raises:
        TypeError: ``optimizer`` is no optimizer, or one of this package; or an option is none of the new optimizer.
        ValueError: the class, a field or a value has no counterpart here, a torch scheduler drives the old optimizer and is
            not in ``schedulers``, or one that is there does not drive it. Nothing is changed then.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, CompiledOptimizer):
        raise TypeError(f"from_torch takes an optimizer of another library, got {torch.typename(optimizer)}")
    library, source = _source(optimizer)
    with labeling(f"cannot switch from {library}.{source.__name__}"):
        _check_methods(optimizer, source)
        driving = _driving(optimizer, schedulers)
        kind, packed = LIBRARIES[library](optimizer, source, _packed(optimizer))
        *groups, defaults = packed["param_groups"]
        arguments = _arguments(kind, defaults, options)
        new_groups = []
        for index, (group, old) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            states = {param: packed["state"].get(key, {}) for param, key in zip(old["params"], group["params"], strict=True)}
            _keep_dtypes(kind, group, states, options)
            new_groups.append(_with_params(kind, group, old, index))
        new = kind(new_groups, **arguments)
        new.load_state_dict({**packed, "param_groups": groups}, hyperparameters="keep")
    keys = [key for group in groups for key in group["params"]]
    rounded = [
        f"{entry} of '{name}'"
        for key, (name, param) in zip(keys, named_parameters(optimizer.param_groups), strict=True)
        for entry, before in packed["state"].get(key, {}).items()
        if getattr(new.state[param].get(entry), "itemsize", 8) < getattr(before, "itemsize", 0)
    ]
    if rounded and "state_dtype" not in options:
        warnings.warn(f"state of more bytes than {kind.__name__} has was rounded: {first_few(rounded)}", stacklevel=2)
    for name in [name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")]:
        getattr(new, name).update(getattr(optimizer, name))
    new._opt_called = getattr(optimizer, "_opt_called", False)
    for scheduler in driving:
        for name in [name for name, value in vars(scheduler).items() if value is optimizer]:
            setattr(scheduler, name, new)
    return new


def _source(optimizer: Optimizer) -> tuple[str, type[Optimizer]]:
    """Return the library that ``optimizer`` is from, and its class there, also for a user's subclass of it."""
    for kind in type(optimizer).__mro__:
        for library in LIBRARIES:
            is_from_there = f"{kind.__module__}.".startswith(f"{library}.") or kind.__name__ == library
            if is_from_there and kind is not Optimizer and "step" in dir(kind):
                return library, kind
    inner = getattr(optimizer, "optimizer", None)
    hint = f"; pass its .optimizer, a {torch.typename(inner)}" if isinstance(inner, Optimizer) else ""
    known = f"{', '.join(LIBRARIES)} are known{hint}"
    raise ValueError(f"cannot switch from {torch.typename(optimizer)}: {known}")


def _check_methods(optimizer: Optimizer, source: type[Optimizer]) -> None:
    """Raise ``ValueError`` if ``optimizer`` replaces a method of its library's class ``source``."""
    for owner in (optimizer, *type(optimizer).__mro__[: type(optimizer).__mro__.index(source)]):
        for name in [name for name in vars(owner) if callable(getattr(source, name, None)) and not name.startswith("__")]:
            if _unwrapped(getattr(owner, name)) is not _unwrapped(getattr(source, name)):
                who = "it" if owner is optimizer else torch.typename(optimizer)
                raise ValueError(f"{who} has a {name} of its own, and the new one would not have it")


def _module_of(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", ""))  # not changed by functools.wraps


def _unwrapped(function: Any) -> Any:
    """Return ``function`` without the wrappers of torch around steps, and of schedulers around their optimizer's."""
    return inspect.unwrap(function, stop=lambda f: not _module_of(f).startswith("torch."))


def _driving(optimizer: Optimizer, schedulers: Any) -> list[Any]:
    """Return the ``schedulers`` and those in them; ``ValueError`` if one does not drive ``optimizer`` or one is missing."""
    listed = [] if schedulers is None else [*schedulers] if isinstance(schedulers, Iterable) else [schedulers]
    for scheduler in listed:
        if getattr(scheduler, "optimizer", None) is not optimizer:
            raise ValueError(f"schedulers: the {type(scheduler).__name__} does not drive it")
    driving = [inner for scheduler in listed for inner in _with_inner(scheduler)]
    if schedulers is None or listed:
        gc.collect()  # a scheduler may refer to itself, and so survive its last use
        if others := _others(optimizer, driving):
            inner = [id(each) for other in others for each in [*_with_inner(other)][1:]]
            names = " and ".join(type(other).__name__ for other in others if id(other) not in inner)
            advice = "list all in schedulers=[...] to let them drive the new one, or pass schedulers=() to leave them"
            raise ValueError(f"it is driven by {names}: {advice}")
    return driving


def _with_inner(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for value in vars(scheduler).values():
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, LRScheduler):
                yield from _with_inner(inner)


def _others(optimizer: Optimizer, known: Sequence[Any]) -> list[LRScheduler]:
    """Return torch's schedulers that drive ``optimizer`` and are not ``known``. An optimizer has no reference to them."""
    ids = {id(scheduler) for scheduler in known}
    every = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    return [each for each in every if getattr(each, "optimizer", None) is optimizer and id(each) not in ids]


def _packed(optimizer: Optimizer) -> Packed:
    keys: dict[Any, int] = {}
    groups = []
    for group in optimizer.param_groups:
        params = [keys.setdefault(param, len(keys)) for param in group["params"]]
        groups.append({**group, "params": params})
    if stale := [key for key in optimizer.state if isinstance(key, Tensor) and key not in keys]:
        raise ValueError(f"its state has a tensor of shape {tuple(stale[0].shape)} that no group lists: delete it there")
    state = {keys[key] if isinstance(key, Tensor) else key: entries for key, entries in optimizer.state.items()}
    return {"state": state, "param_groups": [*groups, {**optimizer.defaults, "params": []}]}


def _arguments(kind: Target, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments; raise if ``options`` repeat those of groups, or a default has no counterpart."""
    accepted, known = inspect.signature(kind).parameters, {*group_keys(kind), "params"}
    for name, value in defaults.items():
        if name not in known and name not in accepted and value not in (None, False):
            raise ValueError(f"{name}={value!r} has no counterpart in {kind.__name__}")
    if repeated := [name for name in options if name in defaults]:
        raise ValueError(f"{repeated[0]} comes from its groups; assign it to the groups of the new optimizer")
    replaced = {"params", *(["kahan_sum"] if "weights" in options else [])}
    return {**{name: value for name, value in defaults.items() if name in accepted and name not in replaced}, **options}


def _keep_dtypes(kind: Target, group: dict[str, Any], states: Mapping[Tensor, Any], options: Mapping[str, Any]) -> None:
    """Let ``group`` keep float32 state and float32 weights of its 16-bit parameters, unless ``options`` say otherwise."""
    known = group_keys(kind)
    entries = [(name, entry) for param, state in states.items() if param.dtype in HALVES for name, entry in state.items()]
    wide = {name for name, entry in entries if isinstance(entry, Tensor) and entry.dim() and entry.dtype == torch.float32}
    modes = [("master", "master_param" in wide), ("split16", any(name == "remainder" for name, _ in entries))]
    for mode in [mode for mode, is_stored in modes if is_stored and "weights" in known]:
        group.setdefault("weights", mode)
    if wide & {buffer.name for buffer in kind._declaration.buffers} and "state_dtype" in known:
        group.setdefault("state_dtype", torch.float32)
    for name in ("weights", "state_dtype", "kahan_sum"):
        if name in options or (name == "kahan_sum" and "weights" in options):
            group.pop(name, None)


def _with_params(kind: Target, group: Mapping[str, Any], old: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return ``group`` with the tensors and names of the ``old`` one, and copies of all but hyperparameters."""
    names, numbers = group.get("param_names"), {hyper.name for hyper in kind._declaration.hypers}
    params = old["params"] if names is None else [*zip(names, old["params"], strict=True)]
    entries = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key, value in foreign_options([entries]).items():
        raise ValueError(f"{key}={value!r} of param_groups[{index}] has no counterpart in {kind.__name__}")
    for field in [static for static in kind._declaration.statics if not static.init]:
        if entries.get(field.name, field.default) != field.default:
            raise ValueError(
                f"{field.name} of param_groups[{index}] is {entries[field.name]!r}, and {field.default} in {kind.__name__}"
            )
    entries |= {key: copied(entries[key], f"{key} of param_groups[{index}]") for key in entries.keys() - numbers}
    return {**entries, "params": params}
