"""The facts that a captured graph assumes and does not read again, and their changes since: in words, with names."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import CellType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from compiled_optim.groups.parameters import first_few, named_parameters
from compiled_optim.memory.addresses import Addresses
from compiled_optim.memory.layout import TORCH_TYPES, local
from compiled_optim.step.engine import Engine


def tensor_text(tensor: Tensor) -> str:
    """Return the shape, dtype, device and address of a tensor, in words."""
    kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    return f"{kind} at {local(tensor).data_ptr():#x}"


def gradient_text(grad: Tensor | None) -> str:
    """Return the address of a gradient, or the number of entries of a sparse one, in words."""
    if grad is None:
        return "None"
    if grad.is_sparse:
        return f"with {grad._nnz()} {'' if grad.is_coalesced() else 'un'}coalesced entries"
    return f"at {local(grad).data_ptr():#x}"


def modules_of(function: Callable[..., Any], visited: set[int] | None = None) -> Iterator[nn.Module]:
    """Yield the modules that ``function`` refers to: by closure, default, global, or attribute of its ``self``."""
    visited = set() if visited is None else visited
    if id(function) in visited:
        return
    visited.add(id(function))
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
                yield from modules_of(item, visited)


_REQUIRES_GRAD, _TRAINING, _ABSENT = attrgetter("requires_grad"), attrgetter("training"), object()


class Guards:
    """The tensors, modules and modes that a captured training step read in Python, as of construction.

    Attributes:
        params: names by parameter: the optimizers' parameters, then those that only the modules have.
        updated: the number of the optimizers' parameters.
        addresses: those of the parameters, their gradients, and other tensors of the modules; :meth:`change` reads them.
    """

    def __init__(self, engines: Sequence[Engine], modules: Iterable[nn.Module]) -> None:
        self._engines = engines
        self._updated = {param: name for engine in engines for name, param in named_parameters(engine.groups.listed)}
        self._modules = {module: name for root in modules for name, module in root.named_modules()}
        # Not by the module's own methods, which search three dicts for every name.
        dicts = [(name, entries) for m, name in self._modules.items() for entries in (m._parameters, m._buffers, m._modules)]
        self._dicts = [(f"{name}." if name else "", entries, dict(entries)) for name, entries in dicts]  # with a copy
        self._full = [entries for _, entries in dicts if entries]
        self._empty = [entries for _, entries in dicts if not entries]
        self._contents = self._read_contents()
        others: dict[Tensor, str] = {}
        for prefix, entries, _ in self._dicts:
            for key, tensor in entries.items():
                if isinstance(tensor, Tensor) and tensor not in self._updated:
                    others.setdefault(tensor, prefix + key)
        self.params = self._updated | {t: name for t, name in others.items() if isinstance(t, nn.Parameter)}
        self.updated = len(self._updated)
        is_one_piece = {t: type(t) in TORCH_TYPES and t.layout is torch.strided for t in others}
        self._tensors = self._updated | {t: name for t, name in others.items() if is_one_piece[t]}
        self._sees_gradients = all(is_one_piece.values())
        self.addresses = Addresses([*self._tensors])
        self._texts = list(map(tensor_text, self._tensors))
        named = {
            "requires_grad": self.params.values(),
            "training mode": (n or type(m).__name__ for m, n in self._modules.items()),
        }
        self._flag_names = [f"{flag} of '{name}'" for flag, names in named.items() for name in names]
        self._flag_names += ["grad mode", "inference mode", "autocast"]
        self._flags = self._read_flags()

    def change(self) -> str:
        """Return the first change, with old and new value; empty if nothing changed.

        Raises:
            RuntimeError: a module has another tensor instead of a parameter, and its optimizer does not have that tensor.
        """
        contents = self._read_contents()
        if any(self._empty) or len(contents) != len(self._contents) or not all(map(is_, contents, self._contents)):
            return self._replaced()
        self.addresses.read()
        if self.addresses.moved:
            names = (f"parameter '{name}'" for name in self._tensors.values())
            return _first_change(names, self._texts, map(tensor_text, self._tensors))
        flags = self._read_flags()
        return "" if flags == self._flags else _first_change(self._flag_names, self._flags, flags)

    @property
    def gradients(self) -> object:
        """A token of the gradients: equal to an earlier one if none was replaced since."""
        return self.addresses.version if self._sees_gradients and not self.addresses.unlike else object()

    def mark(self, written: Collection[Tensor]) -> None:
        """Record the parameters that the step writes: ``addresses.finish`` increments their versions for autograd."""
        self.addresses.set_written([t in written for t in self._tensors])

    def put_back(self) -> None:
        """Restore the tensors and modules that the modules had."""
        for _, entries, before in self._dicts:
            if list(entries) != list(before) or not all(map(is_, entries.values(), before.values())):
                entries.clear()
                entries.update(before)

    def _read_contents(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._full)))

    def _replaced(self) -> str:
        present = {param for engine in self._engines for _, param in named_parameters(engine.groups.listed)}
        for prefix, entries, before in self._dicts:
            for key in {**before, **entries}:
                old, new = before.get(key, _ABSENT), entries.get(key, _ABSENT)
                if new is old:
                    continue
                if isinstance(old, Tensor) and old in present and new not in present:
                    raise RuntimeError(
                        f"parameter '{prefix}{key}' of the module is no longer the tensor that the optimizer updates (after "
                        "load_state_dict(assign=True)?); put the new one into the group's params, or load with assign=False"
                    )
                kinds = ["absent" if x is _ABSENT else type(x).__name__ for x in (old, new)]
                return f"'{prefix}{key}' of the module {kinds[0]} -> {'another ' * (kinds[0] == kinds[1])}{kinds[1]}"
        return "entries of a module changed their order"

    def _read_flags(self) -> list[Any]:
        """Return ``requires_grad`` of parameters, ``training`` of modules, and torch's modes."""
        kind = next(iter(self.params)).device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
        return [*map(_REQUIRES_GRAD, self.params), *map(_TRAINING, self._modules), *modes]


def _first_change(names: Iterable[str], old: Iterable[Any], new: Iterable[Any]) -> str:
    return next(f"{n} {a} -> {b}" for n, a, b in zip(names, old, new, strict=True) if a != b)


@contextlib.contextmanager
def watching_zero_grad(engines: Sequence[Engine]) -> Iterator[set[Tensor]]:
    """Collect the parameters whose gradients ``zero_grad`` sets to None before anything used or changed them.

    It keeps no gradient alive.
    """
    runs = [engine.runs for engine in engines]
    params = [p for engine in engines for p in engine.params]
    initial = [(None, 0) if p.grad is None else (weakref.ref(p.grad), p.grad._version) for p in params]
    indices: set[int] = set()  # in ``params``: Dynamo traces the function below, and supports no sets of tensors
    dropped: set[Tensor] = set()

    def note(optimizer: Engine) -> None:
        used = {id(p) for engine, before in zip(engines, runs, strict=True) if engine.runs > before for p in engine.params}
        wanted = {id(p) for p in optimizer.params if id(p) not in used}
        for index, (param, (reference, version)) in enumerate(zip(params, initial, strict=True)):
            if id(param) in wanted:
                grad = param.grad
                if grad is None or reference is None:
                    is_untouched = grad is None and reference is None
                else:
                    is_untouched = reference() is grad and version == grad._version
                if is_untouched:
                    indices.add(index)

    try:
        for engine in engines:
            engine.note_zero_grad = note
        yield dropped
    finally:
        dropped.update(params[index] for index in indices)
        for engine in engines:
            engine.note_zero_grad = None


_KEY = "compiled_optim.capture"  # in the metadata of a node, which live as long as the node
_ELSEWHERE = "made elsewhere"


class LiveAutograd:
    """The parameters whose autograd nodes were made outside of a runner's calls, and live through them."""

    def __init__(self) -> None:
        self._through: set[Tensor] = set()  # parameters whose marked nodes lived through the last call
        self._released: set[Tensor] = set()  # those whose marked nodes did not

    def adopt(self, params: Iterable[Tensor]) -> None:
        """Mark the existing nodes as made on the stream on which the runner captures."""
        for _, notes in _notes(params):
            notes[_KEY] = self

    @contextlib.contextmanager
    def watching(self, params: Collection[Tensor]) -> Iterator[None]:
        """Record which nodes live through a call on the stream of the capture, and adopt those that it makes."""
        before = self._foreign(params)
        yield
        self._through = _made_elsewhere(params)
        self._released = before - self._through
        self.adopt(p for p in params if p not in self._through)

    def allow_capture(self, params: Mapping[Tensor, str]) -> bool:
        """Return whether all autograd nodes that were made outside of the runner were released by the last call.

        Raises:
            RuntimeError: a node is alive that lived through the last call; ``params`` has its parameter's name.
        """
        live = self._foreign(params)
        names = [f"'{name}'" for param, name in params.items() if param in live & self._through]
        if names:
            raise RuntimeError(
                f"a tensor that depends on {first_few(names)}, such as the loss, still holds the autograd graph of an "
                "uncaptured step, so that no backward pass can be captured: detach() it before you keep it. "
                "DistributedDataParallel keeps such a graph; wrap the model on a stream, and pass stream= to the runner"
            )
        return live <= self._released

    def _foreign(self, params: Collection[Tensor]) -> set[Tensor]:
        """Mark the nodes that the runner did not make, and return the parameters whose marked nodes are alive."""
        for _, notes in _notes(params):
            if notes.get(_KEY) is not self:
                notes[_KEY] = _ELSEWHERE
        return _made_elsewhere(params)


def _made_elsewhere(params: Iterable[Tensor]) -> set[Tensor]:
    """Return the parameters with marked nodes; a mark disappears with its node."""
    torch.clear_autocast_cache()  # it keeps nodes alive that nothing else does
    return {param for param, notes in _notes(params) if notes.get(_KEY) == _ELSEWHERE}


def _notes(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each parameter that takes gradients, with the metadata of its autograd node, which is made if it has none."""
    for param in params:
        if param.requires_grad and param.is_leaf:
            yield param, cast("dict[str, Any]", get_gradient_edge(param).node.metadata)
