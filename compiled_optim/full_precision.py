"""A model's weights with all the bits that its optimizers keep of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_optim.checkpoint.check import Copies, check_writable, is_same
from compiled_optim.checkpoint.read import Unloadable, as_buffer, described, plain
from compiled_optim.checkpoint.state_dict import set_apart
from compiled_optim.groups.parameters import parameters_of
from compiled_optim.memory.sharding import local, spread_like
from compiled_optim.memory.torch_internals import outside_dynamo
from compiled_optim.named import Optimizers, check_disjoint, listed, locked
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.storage import parts_of
from compiled_optim.state import from_shard, mode_of, part_of, shard_like, structure, weight


class _Split(NamedTuple):
    """A weight whose bits are in two places: the parameter, and an entry of its state."""

    param: Tensor
    name: str  # of the entry
    entry: Tensor
    half: str  # the parameter's dtype

    @property
    def mode(self) -> str:
        return mode_of(self.name, self.entry)

    def joined(self) -> Tensor:
        """The float32 of the weight: a DTensor where the parameter is one.

        Where a compensation of half a unit makes it halfway between its parameter and another number, it is one bit nearer
        to the parameter. So a load finds the same parameter again, and the same compensation.
        """
        found = weight(self.param, {self.name: self.entry}, self.mode, self.half)
        if self.mode == "kahan":
            param = local(self.param.detach())
            nearer = torch.nextafter(found, param.float())
            is_halfway = (found.to(param.dtype) != param) & (nearer.to(param.dtype) == param)
            found = torch.where(is_halfway, nearer, found)
        return from_shard(found, self.param)

    def copies(self, value: Tensor) -> Copies:
        """What to copy into which tensor, so that the weight is ``value``."""
        new = parts_of(shard_like(value, self.param).float(), {}, self.mode, self.half)
        return [(local(self.param), new["param"]), (local(self.entry), new[self.name])]


@outside_dynamo
@torch.no_grad()
def full_precision_state_dict(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """The state dict of a model, with weights in float32 where an optimizer keeps more bits of them than the model has.

    ``torch.save(co.full_precision_state_dict(model, opt), path)`` writes what a model in float32 loads. Those weights are
    copies: of all 32 bits with ``weights="split16"`` and ``"master"``, of 24 with ``"split8"``, and of at least as many with
    ``"kahan"``; in float16 below 2**-14, only ``"master"`` has them all. Everything else is as in ``model.state_dict()``:
    buffers, frozen parameters, and parameters that are only rounded. A parameter with several names is one tensor under all
    of them; DTensors stay DTensors.

    Args:
        model: the module; one that wraps it gives names with its prefixes, as its own ``state_dict()`` does.
        optimizer: the optimizer, or a list of several for different parameters, which may have others than the model's.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` none of this package.
        ValueError: no parameter of the model is in the optimizer, or a parameter is in two optimizers; or a hook of
            the model gives another name or shape to one of those weights in its state dict, or leaves it out.
    """
    optimizers = _checked(model, optimizer)
    with locked(optimizers):
        split = _split(model, optimizers)
        entries = _entries(model, split)
        joined = {key: split[key].joined() for key in dict.fromkeys(map(id, entries.values())) if key in split}
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                entries[name] = joined[id(entry)] if id(entry) in joined else entry.detach()
    return entries


@outside_dynamo
@torch.no_grad()
def load_full_precision_state_dict(model: nn.Module, optimizer: Optimizers, state_dict: Mapping[str, Any]) -> None:
    """Load weights in float32 into a model and what its optimizers keep beside it, as much of them as both can hold.

    It takes what :func:`full_precision_state_dict` gives, or the state dict of the same model in float32. All of it is
    copied, buffers too, into the tensors that are there; the rest of the optimizers' state stays as it is. A checkpoint that
    an optimizer saved together with these weights may be loaded before this. It may be loaded after this too where both
    optimizers have the same ``weights=``: what it has beside the weights belongs to the same numbers of 16 bits then.

    Args:
        model: the module.
        optimizer: as for :func:`full_precision_state_dict`.
        state_dict: an entry for each of ``model.state_dict()``, and no others. It is not modified. A tensor in place of a
            DTensor must be whole, and the same on every process.

    Raises:
        TypeError: as :func:`full_precision_state_dict`, or ``state_dict`` is no dict.
        ValueError: an entry is missing, unexpected, or not what it must be, such as of another shape; nothing is changed
            then. Or as :func:`full_precision_state_dict`.
    """
    optimizers = _checked(model, optimizer)
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {described(state_dict)}")
    given: dict[str, Any] = plain(state_dict, "the state dict")
    with locked(optimizers):
        split = _split(model, optimizers)
        live = {id(t) for t in (*model.parameters(), *model.buffers())}
        entries = _entries(model, split)
        foreign = {name for name, entry in entries.items() if id(entry) not in live}
        copies: Copies = []
        for name, value in _read(entries, given, foreign).items():
            stored = split.get(id(entries[name]))
            copies += [(entries[name], value)] if stored is None else stored.copies(value)
        if foreign:  # such as what modules add with get_extra_state; this may fail
            model.load_state_dict({name: given[name] for name in foreign}, strict=False)
        copies = [(target, source) for target, source in copies if not is_same(target, source)]
        for target, source in set_apart(copies, [target for target, _ in copies]):
            target.copy_(spread_like(source, target))


def _checked(model: Any, optimizer: Any) -> list[CompiledOptimizer]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {described(model)}")
    optimizers = listed(optimizer)
    check_disjoint(optimizers)
    return optimizers


def _split(model: nn.Module, optimizers: Sequence[CompiledOptimizer]) -> dict[int, _Split]:
    """The weights that have more bits in the optimizers than in the model, by the ``id`` of the parameter."""
    params = {id(param) for param in model.parameters()}
    found: dict[int, _Split] = {}
    is_known = False
    for optimizer in optimizers:
        engine = engine_of(optimizer)
        engine.current()
        groups, state = engine.distinct_groups, engine.state
        for i, group in enumerate(groups):
            for param, j in parameters_of(group).items():
                is_known |= id(param) in params
                choices = structure(engine.kind._declaration, groups, i, j)
                name = part_of(choices)
                if name is not None and (entry := state.get(param, {}).get(name)) is not None:
                    found[id(param)] = _Split(param, name, entry, choices["weights"][1])
    if not is_known:
        raise ValueError("no parameter of the model is in the optimizer")
    return found


def _entries(model: nn.Module, split: Mapping[int, _Split]) -> dict[str, Any]:
    """The state dict of ``model`` with its own tensors, also in place of what hooks made of the parameters in ``split``."""
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in split]
    entries |= {name: p for name, p in named if getattr(entries.get(name), "shape", None) == p.shape}
    found = {id(entry) for entry in entries.values()}
    for name, param in named:
        if id(param) not in found:
            raise ValueError(f"the model's state dict does not have the parameter '{name}' as it is: a hook changes it")
    return entries


def _read(entries: Mapping[str, Any], given: Mapping[str, Any], foreign: set[str]) -> dict[str, Tensor]:
    """What of ``given`` goes into the tensors in ``entries``, but for ``foreign`` ones; ``ValueError`` names all misfits."""
    problems = {
        "missing": [name for name in entries if name not in given],
        "unexpected": [str(name) for name in given if name not in entries],
    }
    values: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, entry in entries.items():
        if name in given and name not in foreign:
            try:
                values[name] = value = as_buffer(given[name], name, tuple(entry.shape), entry.dtype)
                check_writable(entry, f"the model's own {name}", tuple(entry.shape), value)
                tied = first.setdefault(id(entry), name)
                if value is not values[tied] and not value.to(values[tied]).allclose(values[tied], 0, 0, equal_nan=True):
                    raise Unloadable(f"{name} is not equal to {tied}, which is the same tensor in the model")
            except Unloadable as problem:
                problems.setdefault("mismatched", []).append(str(problem))
    if any(problems.values()):
        parts = [f"{kind}: {', '.join(found)}" for kind, found in problems.items() if found]
        raise ValueError(f"the state dict does not match the model; {'; '.join(parts)}")
    return values
