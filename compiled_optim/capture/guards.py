"""What a captured graph depends on without reading it again, and what of it changed since: in words, with names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import CellType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from compiled_optim.groups.parameters import named_parameters, parameter_name
from compiled_optim.memory.addresses import Addresses
from compiled_optim.memory.sharding import local
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.declared import added_choices


def described(optimizer: CompiledOptimizer) -> dict[str, str]:
    """Everything about ``optimizer`` whose change makes a graph of its step stale, by name."""
    bound = optimizer.max_grad_norm
    facts = {
        "max_grad_norm": "off" if bound is None else place(bound) if _is_copied(bound, optimizer) else "on",
        "skip_nonfinite": str(optimizer.skip_nonfinite),
    }
    engine = engine_of(optimizer)
    for (i, name), (_, function) in engine.schedules.functions.items():
        facts[f"schedule of param_groups[{i}][{name!r}]"] = f"{getattr(function, '__name__', 'object')} at {id(function):#x}"
    declared, added = optimizer._declaration, added_choices(type(optimizer))
    for i, group in enumerate(optimizer.param_groups):
        label = f"param_groups[{i}]"
        facts[label] = f"{len(group['params'])} parameters"
        for name in ("maximize", "differentiable", *(s.name for s in declared.statics)):
            facts[f"{label}[{name!r}]"] = str(group.get(name, added.get(name)))
        for name in declared.structural_hypers:
            zero = hasattr(group, "nonzero") and not group.nonzero(name)
            facts[f"{label}[{name!r}]"] = "0" if zero else "another number than 0"
        for j, param in enumerate(group["params"]):
            name = parameter_name(group, i, j)
            facts[f"parameter '{name}'"] = place(param)
            state: Mapping[str, Any] = engine.state.get(param) or {}
            for entry in (b.name for b in declared.buffers if b.name in state):
                facts[f"state {entry!r} of '{name}'"] = place(state[entry])
            if param.grad is not None:
                facts[f"gradient dtype of '{name}'"] = str(param.grad.dtype)
                if param.grad.is_sparse:
                    facts[f"gradient of '{name}'"] = words(param.grad)
    return facts


def _is_copied(bound: float | Tensor, optimizer: CompiledOptimizer) -> TypeGuard[Tensor]:
    step = engine_of(optimizer).step
    devices = () if step is None else step.devices
    return isinstance(bound, Tensor) and (bound.dtype != torch.float64 or bound.device not in devices)


def place(tensor: Tensor) -> str:
    """What a tensor is, and where."""
    kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    return f"{kind} at {local(tensor).data_ptr():#x}"


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What changed from ``old`` to ``new``: the first three things, with old and new value; empty if nothing did.

    State that moved is named only where nothing else changed, since it may have moved because of the other change. A
    gradient that came or went is no difference, since a table follows it.
    """
    quiet = ("gradient", "state")
    changes = [f"{label} {old[label]} -> {value}" for label, value in new.items() if label in old and old[label] != value]
    changes += [f"{label} is new" for label in new if label not in old and not label.startswith(quiet)]
    changes += [f"{label} is gone" for label in old if label not in new and not label.startswith(quiet)]
    changes = [change for change in changes if not change.startswith("state")] or changes
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more


def words(grad: Tensor | None) -> str:
    """Where a gradient is."""
    if grad is None:
        return "None"
    if grad.is_sparse:
        return f"with {grad._nnz()} {'' if grad.is_coalesced() else 'un'}coalesced entries"
    return f"at {local(grad).data_ptr():#x}"


def modules_of(function: Callable[..., Any], seen: set[int] | None = None) -> Iterator[nn.Module]:
    """The modules that ``function`` refers to: by closure, default, global, or attribute of what it is bound to."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, nn.Module):
        yield function
        return
    if (getattr(function, "__module__", None) or "").partition(".")[0] == "torch":
        return
    if isinstance(function, functools.partial):
        values: list[Any] = [function.func, *function.args, *function.keywords.values()]
    else:
        inner = getattr(function, "__func__", function)
        owner = getattr(function, "__self__", None)
        bound = hasattr(owner, "__dict__") and not isinstance(owner, (type, ModuleType))
        values = [*vars(owner).values()] if bound else []
        values += [owner, getattr(function, "__wrapped__", None), getattr(function, "_torchdynamo_orig_callable", None)]
        if (code := getattr(inner, "__code__", None)) is not None:
            cells = (c.cell_contents for c in inner.__closure__ or () if c != CellType())  # an empty one equals another
            names = (inner.__globals__.get(n) for n in code.co_names)
            values += [*cells, *(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values(), *names]
        elif hasattr(function, "__dict__"):
            values += [*vars(function).values(), type(function).__call__]
    for value in values:
        nested = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)
        for item in nested:
            if isinstance(item, nn.Module) or (callable(item) and not isinstance(item, type)):
                yield from modules_of(item, seen)


_REQUIRES_GRAD = attrgetter("requires_grad")
_TRAINING = attrgetter("training")
_TEXTS = ("requires_grad of '{}' {} -> {}", "training mode of '{}' {} -> {}", "{} {} -> {}")


class Surroundings:
    """The tensors, modules and modes that a captured training step read in Python, as they were then."""

    def __init__(self, optimizers: Sequence[CompiledOptimizer], modules: Iterable[nn.Module]) -> None:
        self.params = [p for o in optimizers for p in engine_of(o).params]  # the optimizers'; `others` are the modules'
        names = {id(param): name for o in optimizers for name, param in named_parameters(o.param_groups)}
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
        self._flag_names = (self.names, self._module_names, list(_modes(self._device)))
        self._flags = self._read_flags()

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
        for text, names, old, new in zip(_TEXTS, self._flag_names, self._flags, self._read_flags(), strict=True):
            if new != old:
                return self._first(text, names, old, new)
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
        self._addresses.set_written([id(t) in updated for t in self._tensors])

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

    def _read_flags(self) -> tuple[list[Any], ...]:
        """Whether parameters require grad, whether modules are in training mode, and torch's modes."""
        require_grad = [*map(_REQUIRES_GRAD, self.params), *map(_REQUIRES_GRAD, self.others)]
        return require_grad, list(map(_TRAINING, self._modules)), list(_modes(self._device).values())

    def _tensor_places(self) -> list[str]:
        return list(map(place, self._tensors))


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
