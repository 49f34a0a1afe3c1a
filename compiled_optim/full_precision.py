"""State dicts of a model with all bits of its weights, also those that an optimizer keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_optim.by_name import Optimizers, by_label, locked
from compiled_optim.checkpoint import state_dict as checkpoint
from compiled_optim.checkpoint.read import Unloadable, as_buffer, described, plain
from compiled_optim.checkpoint.state_dict import LoadReport, TensorCopies
from compiled_optim.groups.parameters import parameters_of
from compiled_optim.memory.layout import as_part_of, local
from compiled_optim.memory.torch_internals import outside_dynamo
from compiled_optim.optimizer import engine_of
from compiled_optim.rule.storage import parts_of
from compiled_optim.state import StateForm, mode_of, shard_like, weight


class _SplitWeight(NamedTuple):
    """A weight whose bits are in two tensors: the parameter, and an entry of its state."""

    param: Tensor
    name: str  # of the entry
    entry: Tensor
    half: str  # the parameter's dtype

    @property
    def mode(self) -> str:
        return mode_of(self.name, self.entry)

    def joined(self) -> Tensor:
        """Return the weight in float32: a DTensor if the parameter is one.

        If it is halfway between its parameter and another number, by a compensation of half a unit, it is moved one bit
        towards the parameter. So a load restores the same parameter and the same compensation.
        """
        full = weight(self.param, {self.name: self.entry}, self.mode, self.half)
        if self.mode == "kahan":
            param = local(self.param.detach())
            nearer = torch.nextafter(full, param.float())
            is_halfway = (full.to(param.dtype) != param) & (nearer.to(param.dtype) == param)
            full = torch.where(is_halfway, nearer, full)
        return as_part_of(full, self.param)

    def copies(self, value: Tensor) -> TensorCopies:
        """Return pairs (tensor, value to copy into it) that set the weight to ``value``."""
        new = parts_of(shard_like(value, self.param).float(), {}, self.mode, self.half)
        return [(local(self.param), new["param"]), (local(self.entry), new[self.name])]


@outside_dynamo
@torch.no_grad()
def full_precision_state_dict(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """Return a model's state dict, with float32 weights where an optimizer keeps more bits than the 16-bit parameter has.

    ``torch.save(co.full_precision_state_dict(model, opt), path)`` writes a file that a float32 model loads. The float32
    weights are copies. They have all 32 bits with ``weights="split16"`` and ``"master"``, and at least 24 with ``"split8"``
    and ``"kahan"``. float16 weights below 2**-14 have all bits only with ``"master"``. Everything else is as in
    ``model.state_dict()``: buffers, frozen parameters, rounded parameters. A tied parameter is one tensor under all its
    names; DTensors stay DTensors.

    Args:
        model: the module. The names are those of ``model.state_dict()``, with the prefixes of a wrapper.
        optimizer: the optimizer, or a list of several for different parameters. Parameters of other models are ignored.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` none of this package.
        ValueError: no parameter of the model is in the optimizer, or a parameter is in two optimizers; or a state-dict hook
            of the model renames, reshapes or omits one of the float32 weights.
    """
    with _split_weights(model, optimizer) as split:
        entries = _entries(model, split)
        joined = {key: split[key].joined() for key in dict.fromkeys(map(id, entries.values())) if key in split}
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                entries[name] = joined[id(entry)] if id(entry) in joined else entry.detach()
    return entries


@outside_dynamo
@torch.no_grad()
def load_full_precision_state_dict(model: nn.Module, optimizer: Optimizers, state_dict: Mapping[str, Any]) -> None:
    """Load float32 weights into a model and into the extra bits that its optimizers keep of 16-bit parameters.

    The weights are rounded to the bits that model and optimizer can hold together. All entries, buffers too, are copied into
    the existing tensors; other state of the optimizers does not change. Load an optimizer's checkpoint that was saved with
    these weights before you call this. If the saved optimizer had the same ``weights=``, you may also load it afterwards:
    its extra bits belong to the same 16-bit parameters.

    Args:
        model: the module.
        optimizer: as for :func:`full_precision_state_dict`.
        state_dict: from :func:`full_precision_state_dict`, or of the same model in float32, with the keys of
            ``model.state_dict()``. It is not modified. A full tensor may replace a DTensor if it is equal on every process.

    Raises:
        TypeError: as :func:`full_precision_state_dict`, or ``state_dict`` is no dict.
        ValueError: an entry is missing, unexpected, or has for example another shape; or as
            :func:`full_precision_state_dict`. Nothing is changed then.
    """
    with _split_weights(model, optimizer) as split:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {described(state_dict)}")
        saved: dict[str, Any] = plain(state_dict, "the state dict")
        live = {id(t) for t in (*model.parameters(), *model.buffers())}
        entries = _entries(model, split)
        foreign = {name for name, entry in entries.items() if id(entry) not in live}
        copies: TensorCopies = []
        for name, value in _read(entries, saved, foreign).items():
            stored = split.get(id(entries[name]))
            copies += [(entries[name], value)] if stored is None else stored.copies(value)
        if foreign:  # such as entries of get_extra_state; this may fail
            model.load_state_dict({name: saved[name] for name in foreign}, strict=False)
        checkpoint.copy_all(copies)


@contextlib.contextmanager
def _split_weights(model: nn.Module, optimizer: Optimizers) -> Iterator[dict[int, _SplitWeight]]:
    """Yield the weights that have more bits in optimizers than in the model, by ``id`` of the parameter. Steps wait."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {described(model)}")
    params = {id(param) for param in model.parameters()}
    split: dict[int, _SplitWeight] = {}
    is_known = False
    optimizers = by_label(optimizer).values()
    with locked(optimizers):
        for engine in map(engine_of, optimizers):
            engine.current()
            for i, group in enumerate(groups := engine.groups.distinct):
                forms = StateForm.of_group(group.kind._declaration, groups, i)
                for param, j in parameters_of(group).items():
                    is_known |= id(param) in params
                    name, _, half = forms(j).split or ("", "", "")
                    if (entry := engine.state.get(param, {}).get(name)) is not None:
                        split[id(param)] = _SplitWeight(param, name, entry, half)
        if not is_known:
            raise ValueError("no parameter of the model is in the optimizer")
        yield split


def _entries(model: nn.Module, split: Mapping[int, _SplitWeight]) -> dict[str, Any]:
    """Return the state dict of ``model`` with its own tensors, also where hooks replaced parameters in ``split``."""
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in split]
    entries |= {name: p for name, p in named if getattr(entries.get(name), "shape", None) == p.shape}
    present = {id(entry) for entry in entries.values()}
    for name, param in named:
        if id(param) not in present:
            raise ValueError(f"the model's state dict does not have the parameter '{name}' as it is: a hook changes it")
    return entries


def _read(entries: Mapping[str, Any], saved: Mapping[str, Any], foreign: set[str]) -> dict[str, Tensor]:
    """Return the values of ``saved`` for ``entries``, without ``foreign`` ones; ``ValueError`` names all mismatches."""
    absent, others = [name for name in entries if name not in saved], [str(name) for name in saved if name not in entries]
    report = LoadReport(absent, others, [], [])
    values: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, entry in entries.items():
        if name in saved and name not in foreign:
            try:
                values[name] = value = as_buffer(saved[name], name, tuple(entry.shape), entry.dtype)
                checkpoint.check_writable(entry, f"the model's own {name}", tuple(entry.shape), value)
                tied = first.setdefault(id(entry), name)
                if value is not values[tied] and not value.to(values[tied]).allclose(values[tied], 0, 0, equal_nan=True):
                    raise Unloadable(f"{name} is not equal to {tied}, which is the same tensor in the model")
            except Unloadable as problem:
                report.mismatched.append(str(problem))
    checkpoint.refuse_mismatches(report, "the state dict does not match the model")
    return values
