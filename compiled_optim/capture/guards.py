"""What a captured graph assumes and does not read again, and what changed since: in words, with names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import CellType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compiled_optim.groups.parameters import first_three, named_parameters, parameter_name
from compiled_optim.memory.addresses import Addresses
from compiled_optim.memory.layout import local
from compiled_optim.optimizer import CompiledOptimizer, engine_of


def guards_of(optimizer: CompiledOptimizer) -> dict[str, str]:
    """Everything about ``optimizer`` whose change makes a graph of its step stale, by name."""
    engine = engine_of(optimizer)
    bound, devices = optimizer.max_grad_norm, () if engine.step is None else engine.step.devices
    if isinstance(bound, Tensor) and (bound.dtype != torch.float64 or bound.device not in devices):
        clips = tensor_place(bound)  # the graph holds the copying of it
    else:
        clips = "off" if bound is None else "on"
    guards = {"max_grad_norm": clips, "skip_nonfinite": str(optimizer.skip_nonfinite)}
    for (i, name), (_, function) in engine.schedules.functions.items():
        guards[f"schedule of param_groups[{i}][{name!r}]"] = (
            f"{getattr(function, '__name__', 'object')} at {id(function):#x}"
        )
    for i, group in enumerate(optimizer.param_groups):
        kind = getattr(group, "kind", engine.kind)  # somebody may have put a plain dict there
        declared, added = kind._declaration, kind._added_choices()
        label = f"param_groups[{i}]"
        guards[label] = f"{len(group['params'])} parameters"
        for name in ("maximize", "differentiable", *(s.name for s in declared.statics)):
            guards[f"{label}[{name!r}]"] = str(group.get(name, added.get(name)))
        for name in declared.structural_hypers:
            zero = hasattr(group, "nonzero") and not group.nonzero(name)
            guards[f"{label}[{name!r}]"] = "0" if zero else "another number than 0"
        for j, param in enumerate(group["params"]):
            name = parameter_name(group, i, j)
            guards[f"parameter '{name}'"] = tensor_place(param)
            state: Mapping[str, Any] = engine.state.get(param) or {}
            for entry in (b.name for b in declared.buffers if b.name in state):
                guards[f"state {entry!r} of '{name}'"] = tensor_place(state[entry])
            if param.grad is not None:
                guards[f"gradient dtype of '{name}'"] = str(param.grad.dtype)
                if param.grad.is_sparse:
                    guards[f"gradient of '{name}'"] = gradient_place(param.grad)
    return guards


def tensor_place(tensor: Tensor) -> str:
    """What a tensor is, and where."""
    kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    return f"{kind} at {local(tensor).data_ptr():#x}"


def gradient_place(grad: Tensor | None) -> str:
    """Where a gradient is; of a sparse one, how many entries it has."""
    if grad is None:
        return "None"
    if grad.is_sparse:
        return f"with {grad._nnz()} {'' if grad.is_coalesced() else 'un'}coalesced entries"
    return f"at {local(grad).data_ptr():#x}"


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
    return first_three(changes)


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


_REQUIRES_GRAD, _TRAINING, _ABSENT = attrgetter("requires_grad"), attrgetter("training"), object()
_FLAGS = ("requires_grad of '{}' {} -> {}", "training mode of '{}' {} -> {}", "{} {} -> {}")
_MODES = ("grad mode", "inference mode", "autocast")


class Guards:
    """The tensors, modules and modes that a captured training step reads in Python, as they were then.

    Attributes:
        params: names by parameter: the optimizers' parameters, then those that only the modules have.
        updated: how many are the optimizers'.
    """

    def __init__(self, optimizers: Sequence[CompiledOptimizer], modules: Iterable[nn.Module]) -> None:
        self._named = {param: name for o in optimizers for name, param in named_parameters(o.param_groups)}
        self._modules = {module: name for root in modules for name, module in root.named_modules()}
        # Read past the module's own methods, which look at three dicts for every name.
        self._dicts = [entries for m in self._modules for entries in (m._parameters, m._buffers, m._modules)]
        self._prefixes = [f"{name}." if name else "" for name in self._modules.values() for _ in range(3)]
        self._snapshots = [dict(entries) for entries in self._dicts]
        self._full = list(filter(None, self._dicts))
        self._empty = [entries for entries in self._dicts if not entries]
        self._contents = self._read_contents()
        others: dict[Tensor, str] = {}
        for prefix, entries in zip(self._prefixes, self._snapshots, strict=True):
            for key, tensor in entries.items():
                if isinstance(tensor, Tensor) and tensor not in self._named:
                    others.setdefault(tensor, prefix + key)
        optimized = {p: self._named.get(p, "?") for o in optimizers for p in engine_of(o).params}
        self.params = optimized | {t: name for t, name in others.items() if isinstance(t, nn.Parameter)}
        self.updated = len(optimized)
        self._tensors = optimized | {t: name for t, name in others.items() if _has_address(t)}
        self._sees_gradients = len(self._tensors) == len(optimized) + len(others)
        self._addresses = Addresses([*self._tensors])
        self._places = list(map(tensor_place, self._tensors))
        self._flags = self._read_flags()

    def change(self) -> str:
        """What is not as it was, with old and new value; empty if everything is.

        Raises:
            RuntimeError: a module no longer holds a parameter that an optimizer updates. Only a new optimizer can follow.
        """
        contents = self._read_contents()
        if any(self._empty) or len(contents) != len(self._contents) or not all(map(is_, contents, self._contents)):
            return self._replaced()
        self._addresses.read()
        if self._addresses.moved:
            places = map(tensor_place, self._tensors)
            return _first_change("parameter '{}' {} -> {}", self._tensors.values(), self._places, places)
        if (flags := self._read_flags()) == self._flags:
            return ""
        module_names = [name or type(module).__name__ for module, name in self._modules.items()]
        changes = zip(_FLAGS, (self.params.values(), module_names, _MODES), self._flags, flags, strict=True)
        return next(_first_change(*change) for change in changes if change[2] != change[3])

    def look(self) -> None:
        """Look at the gradients, as :meth:`change` does."""
        self._addresses.read()

    @property
    def gradients(self) -> object:
        """What was seen of the gradients: equal to what it was before if none was replaced since."""
        return self._addresses.version if self._sees_gradients and not self._addresses.unlike else object()

    def mark(self, written: Collection[Tensor]) -> None:
        """Note the parameters that the step writes, for :meth:`count_versions`."""
        self._addresses.set_written([t in written for t in self._tensors])

    def count_versions(self) -> None:
        """Let autograd know that these parameters were written."""
        self._addresses.finish()

    def put_back(self) -> None:
        """Let the modules hold what they held."""
        for entries, before in zip(self._dicts, self._snapshots, strict=True):
            if list(entries) != list(before) or not all(map(is_, entries.values(), before.values())):
                entries.clear()
                entries.update(before)

    def _read_contents(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._full)))

    def _replaced(self) -> str:
        for prefix, entries, before in zip(self._prefixes, self._dicts, self._snapshots, strict=True):
            for key in {**before, **entries}:
                old, new = before.get(key, _ABSENT), entries.get(key, _ABSENT)
                if new is old:
                    continue
                if isinstance(old, Tensor) and old in self._named:
                    raise RuntimeError(
                        f"parameter '{prefix}{key}' of the module is no longer the tensor that the optimizer updates (after "
                        "load_state_dict(assign=True)?); make a new optimizer and runner, or load with assign=False"
                    )
                kinds = ["absent" if x is _ABSENT else type(x).__name__ for x in (old, new)]
                return f"'{prefix}{key}' of the module {kinds[0]} -> {'another ' * (kinds[0] == kinds[1])}{kinds[1]}"
        return "entries of a module changed their order"

    def _read_flags(self) -> list[list[Any]]:
        """Whether parameters require grad, whether modules are in training mode, and torch's modes."""
        kind = next(iter(self.params)).device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast]
        return [list(map(_REQUIRES_GRAD, self.params)), list(map(_TRAINING, self._modules)), modes]


def _first_change(text: str, names: Iterable[str], old: Iterable[Any], new: Iterable[Any]) -> str:
    return next(text.format(n, a, b) for n, a, b in zip(names, old, new, strict=True) if a != b)


def _has_address(tensor: Tensor) -> bool:
    """Whether a tensor of a module, which may be of any class and layout, is one piece of memory."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
