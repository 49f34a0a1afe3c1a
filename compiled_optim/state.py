"""The optimizer's state: what each parameter owns, how it starts, and which dtype it has."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.conversion import converted
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.per_parameter import choices_of
from compiled_optim.groups.watched import Changes, WatchedDict
from compiled_optim.memory.layout import DTYPES, as_real, is_lost, scalar_dtype, scalars_device
from compiled_optim.memory.sharding import local, zeros_spread_like
from compiled_optim.rule.fields import Buffer, Scalar
from compiled_optim.rule.rule import Declaration, Rule
from compiled_optim.torch_internals import is_fake


class ParamState(WatchedDict[str, Any]):
    """The state of one parameter: ``step``, the rule's scalars and its buffers, by name, and what somebody else keeps there.

    Entries can be assigned, written in place, and given other memory with ``.data =``. The next step follows. Only a write
    with ``dict.__setitem__(state, name, tensor)`` goes past this class and is not noticed: steps go on with the old tensor.

    Args:
        values, changes: as for a :class:`WatchedDict`.
        names: what a step may look at; None for everything. Under other names somebody may keep anything.
    """

    initial: Mapping[str, float | Tensor] | None = None
    """What the optimizer filled it with when it was empty; None if it never was."""

    def __init__(self, values: Any = (), *, changes: Changes | None = None, names: Container[str] | None = None) -> None:
        super().__init__(values, changes=changes)
        self._names = names

    def is_initial(self) -> bool:
        """Whether every entry is as the optimizer made it, so that nothing is lost with them. Waits for the device."""
        initial = self.initial
        return initial is not None and all(name in initial and _holds(e, initial[name]) for name, e in self.items())

    def _is_watched(self, *key: Any) -> bool:
        return self._names is None or not key or key[0] in self._names


class OptimizerState(WatchedDict[Any, Any]):
    """``optimizer.state``: parameter -> :class:`ParamState`. A missing entry reads as an empty one, as in torch.

    Under a key that is no tensor somebody may keep anything, at which no step looks. ``names`` are those of every
    :class:`ParamState`.
    """

    def __init__(self, values: Any = (), *, changes: Changes | None = None, names: Container[str] | None = None) -> None:
        super().__init__(values, changes=changes)
        self._names = names

    def _is_watched(self, *key: Any) -> bool:
        return not key or isinstance(key[0], Tensor)

    def __missing__(self, key: Any) -> Any:
        entries = self._kept(key, {})
        self.set_quietly(key, entries)
        return entries

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, self._kept(key, value))

    def _kept(self, key: Any, value: Any) -> Any:
        return ParamState(value, changes=self._changes, names=self._names) if isinstance(key, Tensor) else value

    @property
    def others(self) -> dict[Any, Any]:
        """What somebody keeps under keys that are no tensors."""
        return {key: value for key, value in self.items() if not isinstance(key, Tensor)}

    def replace_others(self, values: Mapping[Any, Any]) -> None:
        """Let ``values`` be all that is kept under keys that are no tensors."""
        for key in self.others:
            self.drop_quietly(key)
        for key, value in values.items():
            self.set_quietly(key, value)


def _holds(entry: Any, value: float | Tensor) -> bool:
    """Whether every number of ``entry`` can be read and is ``value``. What has no memory by design holds any."""
    if not isinstance(entry, Tensor) or is_lost(entry) or is_fake(entry):
        return False
    numbers = as_real(local(entry.detach()))
    return entry.is_meta or bool((numbers == torch.as_tensor(value, dtype=numbers.dtype, device=numbers.device)).all())


def scalar_names(declaration: Declaration) -> tuple[str, ...]:
    """The per-tensor scalars of ``declaration``, the step count first; none without a rule, which alone reads them."""
    return ("step", *(s.name for s in declaration.scalars)) if isinstance(declaration, Rule) else ()


def has_own_entries(declaration: Declaration, state: Mapping[Any, Any]) -> bool:
    """Whether ``state``, one parameter's, has anything of ``declaration``, and not only what somebody else keeps there."""
    return any(name in state for name in (*scalar_names(declaration), *(b.name for b in declaration.buffers)))


def initial_values(declaration: Declaration, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
    """The number that every scalar and buffer of ``declaration`` starts from in ``group``.

    In a differentiable step, the number in a buffer depends on the hyperparameter that fills it: autograd records that.
    """
    values: dict[str, float | Tensor] = {"step": 0.0}
    declared: tuple[Scalar | Buffer, ...] = (*declaration.scalars, *declaration.buffers)
    for field in declared:
        value = group[field.init] if isinstance(field.init, str) else field.init
        recorded = isinstance(field, Buffer) and group.get("differentiable", False)
        values[field.name] = value if isinstance(value, float) or recorded else value.detach()
    return values


def new_buffer(field: Buffer, param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, value: float | Tensor) -> Tensor:
    """A state buffer of ``shape``, ``dtype`` and ``param``'s device, filled with ``value``.

    A buffer of the parameter's shape also has its memory format. That and a grouped one have a DTensor's placements.
    """
    if field.grouped:
        buffer = zeros_spread_like(param, shape, dtype)
    elif field.shape is None:
        buffer = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    else:
        buffer = torch.zeros(shape, dtype=dtype, device=param.device)
    return buffer if isinstance(value, float) and value == 0.0 else fill(buffer, value)


def fill(entry: Tensor, value: float | Tensor) -> Tensor:
    """Set every number of ``entry``, both parts of a complex one, to ``value``."""
    as_real(local(entry)).fill_(value)
    return entry


def check_entries(declaration: Declaration, param: Tensor, state: ParamState, name: str, choices: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a buffer or scalar in ``state`` is not one for ``param``, called ``name``.

    ``choices`` are those of :func:`structure`.
    """
    for scalar in scalar_names(declaration):
        value = state.get(scalar)
        if value is not None and not _is_number(value):
            got = f"{value.dtype}, shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ValueError(f"state '{scalar}' of '{name}' must be a real number or a 1-element tensor of one, got {got}")
    for field in declaration.buffers:
        if (value := state.get(field.name)) is None:
            continue
        expected = declaration.shape_of(field, param.shape, choices)
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ValueError(f"state '{field.name}' of '{name}' must have shape {expected}, got {got}")
        wanted = declaration.dtype_of(field, param.dtype, choices)
        fits = value.dtype == wanted if wanted not in DTYPES else value.dtype in DTYPES
        if value.is_complex() != param.is_complex() or not fits:
            raise ValueError(f"state '{field.name}' of '{name}' is {value.dtype} for a parameter of {param.dtype}")
        if value.layout is not torch.strided:
            raise ValueError(f"state '{field.name}' of '{name}' is {value.layout}, not dense")
        if is_fake(value) and not is_fake(param):
            raise ValueError(f"state '{field.name}' of '{name}' has no memory: it is a FakeTensor")


def convert(declaration: Declaration, param: Tensor, state: ParamState, name: str, choices: Mapping[str, Any]) -> None:
    """Bring the entries in ``state`` of ``param``, called ``name``, that are stored as other choices said to ``choices``.

    So an option may be assigned while there is state, a parameter get another order of memory, and numbers be assigned in
    place of codes. ``choices`` are those of :func:`structure`. What :func:`check_entries` refuses is left to it.

    Raises:
        ValueError: codes have no scales of theirs, or a weight has two of the entries that hold what its dtype cannot.
    """
    fields = {b.name: b for b in declaration.buffers if state.get(b.name) is not None}
    if not fields or not all(_is_readable(field, state[entry], param) for entry, field in fields.items()):
        return
    try:
        changes = converted(declaration, param, {entry: state[entry] for entry in fields}, choices)
    except ValueError as error:
        raise ValueError(f"the state of '{name}' does not fit: {error}") from error
    for entry, field in fields.items():
        if entry not in changes and (dtype := field.dtype and field.dtype(choices)) not in (None, state[entry].dtype):
            changes[entry] = state[entry].detach().to(dtype)
    state.update_quietly({entry: tensor for entry, tensor in changes.items() if tensor is not None})
    for entry in [entry for entry, tensor in changes.items() if tensor is None]:
        state.drop_quietly(entry)


def _is_readable(field: Buffer, value: Any, param: Tensor) -> bool:
    """Whether the entry ``value`` can be converted if need be."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or is_lost(local(value)):
        return False
    has_shape = field.grouped or field.shape is not None or value.shape == param.shape
    return has_shape and is_fake(value) == is_fake(param)


def _is_number(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return hasattr(value, "__float__") and not isinstance(value, complex)
    is_single = value.numel() == 1 and value.layout is torch.strided
    return is_single and not value.is_complex() and not is_lost(value)


def missing_entries(
    declaration: Declaration,
    buffers: tuple[str, ...],
    param: Tensor,
    state: Mapping[str, Any],
    initial: Mapping[str, float | Tensor],
    choices: Mapping[str, Any],
) -> dict[str, Tensor]:
    """New tensors for the entries that ``declaration`` needs and ``state`` lacks or has on another device than ``param``.

    ``choices`` are those of :func:`structure`.
    An entry on another device is copied. A scalar may be a number or a tensor of any dtype, and becomes a float64 tensor.
    """
    device = scalars_device([param])
    dtype = scalar_dtype(device)
    made: dict[str, Tensor] = {}
    for name in scalar_names(declaration):
        value: Any = state.get(name)
        absent = value is None or (isinstance(value, Tensor) and value.is_meta)
        value = initial[name] if absent else value
        fits = isinstance(value, Tensor) and value.device == device and value.dtype == dtype and not value.dim()
        if absent or not fits:
            made[name] = _scalar_of(value, dtype, device)
    for field in declaration.buffers:
        if (name := field.name) not in buffers:
            continue
        value = state.get(name)
        if value is None or (value.is_meta and not param.is_meta):
            dtype = declaration.dtype_of(field, param.dtype, choices)
            made[name] = new_buffer(field, param, declaration.shape_of(field, param.shape, choices), dtype, initial[name])
        elif value.device != param.device:
            made[name] = value.to(param.device)
    return made


def _scalar_of(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new 0-dim tensor of ``value``; of one that requires grad with its graph, for a differentiable step."""
    if isinstance(value, Tensor) and value.requires_grad:
        with torch.enable_grad():
            return value.reshape(()).to(device, dtype)
    fresh = torch.empty((), dtype=dtype, device=device)
    return fresh.copy_(value.reshape(())) if isinstance(value, Tensor) else fresh.fill_(value)


def structure(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    group_index: int,
    index: int,
    loaded: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What shapes the code and the state of a parameter, by name: of the one at ``index`` of the group at ``group_index``.

    Its items are static choices, what follows from options, facts, and for each structural hyperparameter whether it may
    differ from 0, in its group or among the numbers that are going to be ``loaded`` into that.
    """
    numbers, group = loaded or {}, groups[group_index]
    choices = {s.name: group.get(s.name, s.default) for s in declaration.statics}
    choices |= choices_of(declaration.options, group, group_index, index)
    choices |= {f.name: f.of(group["params"][index].shape) for f in declaration.facts}
    return choices | {
        name: numbers[name] != 0 if name in numbers else group.nonzero(name) for name in declaration.structural_hypers
    }
