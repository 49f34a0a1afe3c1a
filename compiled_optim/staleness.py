"""What a captured graph depends on without reading it again, and what of it changed since: in words, with names.

Device-independent: everything is compared on the host, by identity and address.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from compiled_optim.addresses import Addresses
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.plan import parameter_name
from compiled_optim.sharding import local

_GRAD = attrgetter("grad")
_REQUIRES_GRAD = attrgetter("requires_grad")
_TRAINING = attrgetter("training")


def described(optimizer: CompiledOptimizer) -> dict[str, str]:
    """Everything about ``optimizer`` whose change makes a graph of its step stale, by name."""
    bound = optimizer.max_grad_norm
    facts = {
        "max_grad_norm": "off" if bound is None else _place(bound) if _is_copied(bound, optimizer) else "on",
        "skip_nonfinite": str(optimizer.skip_nonfinite),
    }
    for (i, name), function in optimizer.scheduled().items():
        facts[f"schedule of param_groups[{i}][{name!r}]"] = f"{getattr(function, '__name__', 'object')} at {id(function):#x}"
    declared = optimizer.declaration
    for i, group in enumerate(optimizer.param_groups):
        label = f"param_groups[{i}]"
        facts[label] = f"{len(group['params'])} parameters"
        for name in ("maximize", "differentiable", *(s.name for s in declared.statics)):
            facts[f"{label}[{name!r}]"] = str(group.get(name))
        for name in declared.structural_hypers:
            zero = hasattr(group, "nonzero") and not group.nonzero(name)
            facts[f"{label}[{name!r}]"] = "0" if zero else "another number than 0"
        for j, param in enumerate(group["params"]):
            name = parameter_name(group, i, j)
            facts[f"parameter '{name}'"] = _place(param)
            state: Mapping[str, Any] = vars(optimizer)["state"].get(param) or {}  # which hands nothing out
            for entry in (b.name for b in declared.buffers if b.name in state):
                facts[f"state {entry!r} of '{name}'"] = _place(state[entry])
            if param.grad is not None:
                facts[f"gradient dtype of '{name}'"] = str(param.grad.dtype)
                if param.grad.is_sparse:
                    facts[f"gradient of '{name}'"] = _words(param.grad)
    return facts


def _is_copied(bound: float | Tensor, optimizer: CompiledOptimizer) -> TypeGuard[Tensor]:
    devices = {unit.plan.device for unit in optimizer.units}
    return isinstance(bound, Tensor) and (bound.dtype != torch.float64 or bound.device not in devices)


def _place(tensor: Tensor) -> str:
    kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    return f"{kind} at {local(tensor).data_ptr():#x}"


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What changed from ``old`` to ``new``: the first three things, with old and new value; empty if nothing did.

    State that moved is named where nothing else changed, from which that may have followed. A gradient that came or went
    is no difference, since a table follows it.
    """
    quiet = ("gradient", "state")
    changes = [f"{label} {old[label]} -> {value}" for label, value in new.items() if label in old and old[label] != value]
    changes += [f"{label} is new" for label in new if label not in old and not label.startswith(quiet)]
    changes += [f"{label} is gone" for label in old if label not in new and not label.startswith(quiet)]
    changes = [change for change in changes if not change.startswith("state")] or changes
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more


class Surroundings:
    """The tensors, modules and modes that a captured training step read in Python, as they were then.

    Args:
        optimizers: those that the training step uses.
        modules: those that it reads.

    Attributes:
        params: the optimizers' parameters.
        others: those of the modules that no optimizer of the step updates.
    """

    def __init__(self, optimizers: Sequence[CompiledOptimizer], modules: Iterable[nn.Module]) -> None:
        self.params = [p for o in optimizers for p in o.traceable_params()]
        names = {
            id(p): parameter_name(group, i, j)
            for o in optimizers
            for i, group in enumerate(o.param_groups)
            for j, p in enumerate(group["params"])
        }
        self._optimized = set(names)
        known = {id(m): (name, m) for root in modules for name, m in root.named_modules()}
        self._modules = [m for _, m in known.values()]
        self._module_names = [name or type(m).__name__ for name, m in known.values()]
        # Read past the module's own methods, which look at three dicts for every name.
        places = [(name, d) for name, m in known.values() for d in (m._parameters, m._buffers, m._modules)]
        self._prefixes = [f"{name}." if name else "" for name, _ in places]
        self._dicts: list[dict[str, Any]] = [entries for _, entries in places]
        self._snapshots = [dict(entries) for entries in self._dicts]
        self._full = list(filter(None, self._dicts))
        self._empty = [entries for entries in self._dicts if not entries]
        self._held = self._contents()
        others: dict[int, tuple[str, Tensor]] = {}
        for prefix, entries in zip(self._prefixes, self._snapshots, strict=True):
            for key, tensor in entries.items():
                if isinstance(tensor, Tensor) and id(tensor) not in names:
                    others.setdefault(id(tensor), (prefix + key, tensor))
        self.others = [t for _, t in others.values() if isinstance(t, nn.Parameter)]
        self.names = [names.get(id(p), "?") for p in self.params]
        self.names += [name for name, t in others.values() if isinstance(t, nn.Parameter)]
        placed = [(name, t) for name, t in others.values() if _has_address(t)]
        self._tensors = [*self.params, *(t for _, t in placed)]
        self._tensor_names = [*self.names[: len(self.params)], *(name for name, _ in placed)]
        self._addresses = Addresses(self._tensors)
        self._sees_gradients = len(placed) == len(others)
        self._places = self._tensor_places()
        self._requires_grad = self._require_grad()
        self._training = list(map(_TRAINING, self._modules))
        self._modes = _modes(self._device)

    @property
    def _device(self) -> torch.device:
        return self.params[0].device

    @property
    def all_params(self) -> list[Tensor]:
        """:attr:`params` and :attr:`others`, in the order of :attr:`names`."""
        return [*self.params, *self.others]

    def change(self) -> str:
        """What is not as it was, with old and new value; empty if everything is.

        Raises:
            RuntimeError: a module no longer holds a parameter that an optimizer updates. Only a new optimizer can follow.
        """
        contents = self._contents()
        if any(self._empty) or len(contents) != len(self._held) or not all(map(is_, contents, self._held)):
            return self._replaced()
        self._addresses.read()
        if self._addresses.moved:
            return self._first("parameter '{}' {} -> {}", self._tensor_names, self._places, self._tensor_places())
        flags = self._require_grad()
        if flags != self._requires_grad:
            return self._first("requires_grad of '{}' {} -> {}", self.names, self._requires_grad, flags)
        training = list(map(_TRAINING, self._modules))
        if training != self._training:
            return self._first("training mode of '{}' {} -> {}", self._module_names, self._training, training)
        modes = _modes(self._device)
        if modes != self._modes:
            return self._first("{} {} -> {}", list(modes), list(self._modes.values()), list(modes.values()))
        return ""

    def look(self) -> None:
        """Look at the gradients, as :meth:`change` does."""
        self._addresses.read()

    @property
    def gradients(self) -> object:
        """What was seen of the gradients: equal to what it was before if none was replaced since."""
        return self._addresses.version if self._sees_gradients and not self._addresses.unlike else object()

    def mark(self, updated: Collection[int]) -> None:
        """Note the ids of the parameters that the step writes, for :meth:`count_versions`."""
        self._addresses.mark([id(t) in updated for t in self._tensors])

    def count_versions(self) -> None:
        """Let autograd know that these parameters were written."""
        self._addresses.finish()

    def put_back(self) -> None:
        """Let the modules hold what they held."""
        for entries, before in zip(self._dicts, self._snapshots, strict=True):
            if list(entries) != list(before) or not all(map(is_, entries.values(), before.values())):
                entries.clear()
                entries.update(before)

    def _contents(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._full)))

    def _replaced(self) -> str:
        for prefix, entries, before in zip(self._prefixes, self._dicts, self._snapshots, strict=True):
            for key in {**before, **entries}:
                old, new = before.get(key), entries.get(key)
                if new is old and (key in before) == (key in entries):
                    continue
                if id(old) in self._optimized:
                    raise RuntimeError(
                        f"parameter '{prefix}{key}' of the module is no longer the tensor that the optimizer updates (after "
                        "load_state_dict(assign=True)?); make a new optimizer and runner, or load with assign=False"
                    )
                kinds = [type(x).__name__ if key in there else "absent" for x, there in ((old, before), (new, entries))]
                another = "another " if kinds[0] == kinds[1] else ""
                return f"'{prefix}{key}' of the module {kinds[0]} -> {another}{kinds[1]}"
        return "entries of a module changed their order"

    @staticmethod
    def _first(text: str, names: Sequence[str], old: Sequence[Any], new: Sequence[Any]) -> str:
        return next(text.format(n, a, b) for n, a, b in zip(names, old, new, strict=True) if a != b)

    def _require_grad(self) -> list[bool]:
        return [*map(_REQUIRES_GRAD, self.params), *map(_REQUIRES_GRAD, self.others)]

    def _tensor_places(self) -> list[str]:
        return list(map(_place, self._tensors))


def _has_address(tensor: Tensor) -> bool:
    """Whether a tensor of a module, which may be of any class and layout, is one piece of memory."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _modes(device: torch.device) -> dict[str, object]:
    autocast = torch.is_autocast_enabled(device.type)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.get_autocast_dtype(device.type) if autocast else False,
    }


class DroppedGradients:
    """Which gradients ``zero_grad`` set to None before anything was added to them; none is kept alive for that.

    Args:
        params: the parameters, with the gradients that they have now.

    Attributes:
        places: which of the parameters, as far as was reported.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        found: list[Tensor | None] = list(map(_GRAD, self._params))
        self._found = [None if g is None else (weakref.ref(g), g._version) for g in found]
        self.places: set[int] = set()

    @property
    def ids(self) -> set[int]:
        """The ids of those parameters."""
        return {id(self._params[i]) for i in self.places}

    def report(self, params: Iterable[Tensor]) -> None:
        """Note that the gradients of ``params``, which no step used yet, are about to become None."""
        wanted = set(map(id, params))
        for i, (param, found) in enumerate(zip(self._params, self._found, strict=True)):
            if id(param) in wanted:
                grad: Tensor | None = param.grad
                if grad is None or found is None:
                    untouched = grad is None and found is None
                else:
                    reference, version = found
                    untouched = reference() is grad and version == grad._version
                if untouched:
                    self.places.add(i)


class CapturedGradients:
    """Which gradients a captured training step found, and which it left.

    A gradient that ``zero_grad`` dropped before anything was added to it may be anything; it is None in the capture. Where
    the step reads or adds to what it found, what a parameter has later is copied to there. A parameter that no optimizer of
    the step updates matters only if the step changes its gradient.

    Args:
        params: the parameters.
        names: theirs.
        updated: how many of them, the first ones, the step's optimizers update.
        cleared: ids of those whose gradients the function drops, as far as is known.

    Attributes:
        dropped: those that it does drop.
        repeats: whether the step leaves what it finds, so that nothing is to be done where nobody replaced a gradient.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], updated: int, cleared: Collection[int] = ()) -> None:
        self._params = list(params)
        self._names = list(names)
        self._updated = updated
        self._originals: list[Tensor | None] = list(map(_GRAD, params))
        self._cleared = {i for i, p in enumerate(self._params) if id(p) in cleared}
        for i in self._cleared:
            self._params[i].grad = None
        self._found: list[Tensor | None] = list(map(_GRAD, params))
        self._versions = [None if g is None else g._version for g in self._found]
        self.dropped = DroppedGradients(self._params)
        self._watched: list[int] = []
        self.repeats = False
        self._concerned: list[Tensor] = []
        self._given: list[Tensor | None] = []

    def leave(self) -> None:
        """Note what the captured step left."""
        left_now = list(map(_GRAD, self._params))
        changed = {
            i
            for i, (found, left, version) in enumerate(zip(self._found, left_now, self._versions, strict=True))
            if left is not found or (found is not None and found._version != version)
        }
        concerned = changed.union(range(self._updated))
        self._watched = sorted(concerned - self.dropped.places)
        self._concerned = [self._params[i] for i in sorted(concerned)]
        self._given = [left_now[i] for i in sorted(concerned)]
        self.repeats = all(left_now[i] is self._found[i] for i in self._watched)

    def accept(self) -> None:
        """Let go of the gradients that nobody reads again.

        Raises:
            RuntimeError: a gradient that was None in the capture, since other calls drop it, was not dropped in this one.
        """
        kept = self._cleared - self.dropped.places
        if kept:
            raise RuntimeError(
                f"the function drops the gradient of '{self._names[min(kept)]}' in some calls and in others does not; "
                "a graph can only do the same in every call"
            )
        self._originals = []
        for i in self.dropped.places:
            self._found[i] = None

    def put_back(self) -> None:
        """Restore what was found, after a capture that failed."""
        for param, original in zip(self._params, self._originals, strict=True):
            param.grad = original

    def change(self) -> str:
        """Which parameter's gradient is not what the graph finds; empty if all are, or were copied to where it reads."""
        copied: list[tuple[Tensor, Tensor]] = []
        for i in self._watched:  # none where the function drops its gradients first
            found, grad = self._found[i], self._params[i].grad
            if grad is found:
                continue
            if grad is None or found is None or not _fits(grad, found):
                return f"gradient of '{self._names[i]}' {_words(found)} -> {_words(grad)}"
            copied.append((found, grad))
        with torch.no_grad():
            for found, grad in copied:
                if found.is_sparse:
                    found._indices().copy_(grad._indices())
                    found._values().copy_(grad._values())
                else:
                    found.copy_(grad)
        return ""

    def restore(self) -> None:
        """Give every parameter the gradient that the step leaves, as its Python would have."""
        if not all(map(is_, map(_GRAD, self._concerned), self._given)):
            for param, left in zip(self._concerned, self._given, strict=True):
                param.grad = left


def _fits(grad: Tensor, found: Tensor) -> bool:
    """Whether ``grad`` can be copied to where ``found`` is."""
    if grad.shape != found.shape or grad.layout != found.layout:
        return False
    return not grad.is_sparse or (grad._nnz() == found._nnz() and grad.is_coalesced() == found.is_coalesced())


def _words(grad: Tensor | None) -> str:
    if grad is None:
        return "None"
    if grad.is_sparse:
        return f"with {grad._nnz()} {'' if grad.is_coalesced() else 'un'}coalesced entries"
    return f"at {local(grad).data_ptr():#x}"
