"""What a captured graph depends on without reading it again, and what of it changed since: in words, with names.

Device-independent: everything is compared on the host, by identity and address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        "max_grad_norm": "off" if bound is None else _place(bound) if _is_copied(bound) else "on",
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
            state = optimizer.state.get(param) or {}
            for entry in (b.name for b in declared.buffers if b.name in state):
                facts[f"state {entry!r} of '{name}'"] = _place(state[entry])
            if param.grad is not None:
                facts[f"gradient dtype of '{name}'"] = str(param.grad.dtype)
                if param.grad.is_sparse:
                    facts[f"gradient of '{name}'"] = _words(param.grad)
    return facts


def _is_copied(bound: float | Tensor) -> TypeGuard[Tensor]:
    return isinstance(bound, Tensor) and bound.dtype != torch.float64


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
    """

    def __init__(self, optimizers: Sequence[CompiledOptimizer], modules: Iterable[nn.Module]) -> None:
        self.params = [p for o in optimizers for p in o.traceable_params()]
        names = {
            id(p): parameter_name(group, i, j)
            for o in optimizers
            for i, group in enumerate(o.param_groups)
            for j, p in enumerate(group["params"])
        }
        self.names = [names.get(id(p), "?") for p in self.params]
        self._optimized = set(names)
        known = {id(m): (name, m) for root in modules for name, m in root.named_modules()}
        places = [
            (name, entries, key)
            for name, m in known.values()
            for entries in (m._parameters, m._buffers)
            for key, tensor in entries.items()
            if tensor is not None
        ]
        self._entries: list[dict[str, Any]] = [entries for _, entries, _ in places]
        self._keys = [key for _, _, key in places]
        self._held = [entries[key] for _, entries, key in places]
        self._held_names = [f"{name}.{key}" if name else key for name, _, key in places]
        others = {
            id(t): (t, n)
            for t, n in zip(self._held, self._held_names, strict=True)
            if id(t) not in names and _has_address(t)
        }
        self._tensors = [*self.params, *(t for t, _ in others.values())]
        self._tensor_names = [*self.names, *(n for _, n in others.values())]
        self._addresses = Addresses(self._tensors)
        self._places = self._tensor_places()
        self._requires_grad = list(map(_REQUIRES_GRAD, self.params))
        self._modules = [m for _, m in known.values()]
        self._module_names = [name or type(m).__name__ for name, m in known.values()]
        self._training = list(map(_TRAINING, self._modules))
        self._modes = _modes(self._device)

    @property
    def _device(self) -> torch.device:
        return self.params[0].device

    def change(self) -> str:
        """What is not as it was, with old and new value; empty if everything is.

        Raises:
            RuntimeError: a module no longer holds a parameter that an optimizer updates. Only a new optimizer can follow.
        """
        if not all(map(is_, map(dict.get, self._entries, self._keys), self._held)):
            return self._replaced()
        self._addresses.read()
        if self._addresses.moved:
            return self._first("parameter '{}' {} -> {}", self._tensor_names, self._places, self._tensor_places())
        flags = list(map(_REQUIRES_GRAD, self.params))
        if flags != self._requires_grad:
            return self._first("requires_grad of '{}' {} -> {}", self.names, self._requires_grad, flags)
        training = list(map(_TRAINING, self._modules))
        if training != self._training:
            return self._first("training mode of '{}' {} -> {}", self._module_names, self._training, training)
        modes = _modes(self._device)
        if modes != self._modes:
            return self._first("{} {} -> {}", list(modes), list(self._modes.values()), list(modes.values()))
        return ""

    def _replaced(self) -> str:
        for entries, key, held, name in zip(self._entries, self._keys, self._held, self._held_names, strict=True):
            if entries.get(key) is not held:
                if id(held) in self._optimized:
                    raise RuntimeError(
                        f"parameter '{name}' of the module is no longer the tensor that the optimizer updates (after "
                        "load_state_dict(assign=True)?); make a new optimizer and runner, or load with assign=False"
                    )
                return f"'{name}' of the module was replaced by another tensor"
        raise AssertionError

    @staticmethod
    def _first(text: str, names: Sequence[str], old: Sequence[Any], new: Sequence[Any]) -> str:
        return next(text.format(n, a, b) for n, a, b in zip(names, old, new, strict=True) if a != b)

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


class CapturedGradients:
    """Which gradients a captured training step found, and which it left.

    A gradient that ``zero_grad`` dropped before anything was added to it may be anything. One that was replaced in another
    way may have been read: what a parameter has later is copied to where the graph reads. Any other must be the same tensor.

    Args:
        params: the parameters.
        names: theirs.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        self._params = list(params)
        self._names = list(names)
        self.entry: list[Tensor | None] = list(map(_GRAD, params))
        self._versions = [None if g is None else g._version for g in self.entry]
        self._dropped: set[int] = set()
        self._left: list[Tensor | None] = []
        self._carried: list[int] = []
        self._settled = self._repeats = False
        self._nones = 0

    def drop(self, params: Iterable[Tensor]) -> None:
        """Note that the gradients of ``params``, which no step used yet, are about to become None."""
        wanted = set(map(id, params))
        for i, (param, found, version) in enumerate(zip(self._params, self.entry, self._versions, strict=True)):
            if id(param) in wanted and param.grad is found and (found is None or found._version == version):
                self._dropped.add(i)

    def leave(self) -> None:
        """Note what the captured step left."""
        self._left = list(map(_GRAD, self._params))
        replaced = [
            i
            for i, (found, left) in enumerate(zip(self.entry, self._left, strict=True))
            if found is not None and left is not None and found is not left
        ]
        self._carried = [i for i in replaced if i not in self._dropped]
        self._settled = self._dropped == set(range(len(self._params)))
        self._repeats = all(map(is_, self.entry, self._left))
        self._nones = self.entry.count(None)

    def forget_dropped(self) -> None:
        """Let go of the gradients that nobody reads again, once the capture is accepted."""
        for i in self._dropped:
            self.entry[i] = None

    def put_back(self) -> None:
        """Restore what was found, after a capture that failed."""
        for param, found in zip(self._params, self.entry, strict=True):
            param.grad = found

    def change(self) -> str:
        """Which parameter's gradient is not what the graph finds; empty if all are, or were copied to where it reads."""
        if self._settled:
            return ""
        now = list(map(_GRAD, self._params))
        if self._repeats and (now.count(None) == self._nones == len(now) or all(map(is_, now, self.entry))):
            return ""
        carried = set(self._carried)
        for i, (found, grad) in enumerate(zip(self.entry, now, strict=True)):
            if i in self._dropped or (i not in carried and grad is found):
                continue
            if i in carried and grad is not None and found is not None and _fits(grad, found):
                continue
            return f"gradient of '{self._names[i]}' {_words(found)} -> {_words(grad)}"
        with torch.no_grad():
            for i in self._carried:
                found, grad = self.entry[i], now[i]
                assert found is not None
                assert grad is not None
                if found.is_sparse:
                    found._indices().copy_(grad._indices())
                    found._values().copy_(grad._values())
                else:
                    found.copy_(grad)
        return ""

    def restore(self) -> None:
        """Give every parameter the gradient that the step leaves, as its Python would have."""
        if self._repeats:
            return
        now = list(map(_GRAD, self._params))
        if not all(map(is_, now, self._left)):
            for param, grad, left in zip(self._params, now, self._left, strict=True):
                if grad is not left:
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
