"""The optimizer's state: what each parameter owns, how it starts, and which dtype it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.hyperparameters import scalar_dtype
from compiled_optim.lowering.layout import is_lost
from compiled_optim.rule.fields import Buffer, Scalar
from compiled_optim.rule.rule import Declaration
from compiled_optim.sharding import as_part_of, is_sharded, local
from compiled_optim.torch_internals import is_fake
from compiled_optim.watched import WatchedDict


class ParamState(WatchedDict[str, Any]):
    """The state of one parameter: ``step``, the rule's scalars and its buffers, by name.

    Entries can be assigned and written in place, and given other memory with ``.data =``.
    """


class LocalState:
    """The state of a DTensor as its local shard is updated: reads give shards, written shards become DTensors."""

    def __init__(self, state: ParamState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return local(self._state[name])

    def set_quietly(self, name: str, value: Tensor) -> None:
        """Write without reporting: for the engine's own writes."""
        old = self._state[name]
        self._state.set_quietly(name, as_part_of(value, old) if is_sharded(old) else value)


class OptimizerState(WatchedDict[Tensor, ParamState]):
    """``optimizer.state``: parameter -> :class:`ParamState`. A missing entry reads as an empty one, as in torch."""

    def __missing__(self, param: Tensor) -> ParamState:
        state = ParamState(changes=self._changes)
        self.set_quietly(param, state)
        return state

    def __setitem__(self, param: Tensor, values: Any) -> None:
        super().__setitem__(param, ParamState(values, changes=self._changes))


def scalar_names(declaration: Declaration) -> tuple[str, ...]:
    """The per-tensor scalars of ``declaration``, the step count first."""
    return ("step", *(s.name for s in declaration.scalars))


def initial_values(declaration: Declaration, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
    """What every scalar and buffer of ``declaration`` starts from in ``group``.

    A buffer of a differentiable step depends on the hyperparameter that fills it.
    """
    values: dict[str, float | Tensor] = {"step": 0.0}
    declared: tuple[Scalar | Buffer, ...] = (*declaration.scalars, *declaration.buffers)
    for field in declared:
        value = group[field.init] if isinstance(field.init, str) else field.init
        recorded = isinstance(field, Buffer) and group.get("differentiable", False)
        values[field.name] = value if isinstance(value, float) or recorded else value.detach()
    return values


def new_buffer(field: Buffer, param: Tensor, value: float | Tensor) -> Tensor:
    """A state buffer for ``param``: its dtype and device, and where it has its shape, memory format and placements too."""
    if field.shape is None:
        buffer = torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False)
    else:
        buffer = torch.zeros(field.shape_for(param), dtype=param.dtype, device=param.device)
    return buffer if isinstance(value, float) and value == 0.0 else fill(buffer, value)


def fill(entry: Tensor, value: float | Tensor) -> Tensor:
    """Set every number of ``entry``, both parts of a complex one, to ``value``."""
    numbers = local(entry)
    (torch.view_as_real(numbers) if numbers.is_complex() else numbers).fill_(value)
    return entry


def check_entries(declaration: Declaration, param: Tensor, state: ParamState, name: str) -> None:
    """Raise ``ValueError`` where a buffer or scalar in ``state`` is not one for ``param``, called ``name``."""
    for scalar in scalar_names(declaration):
        value = state.get(scalar)
        if value is not None and not _is_number(value):
            got = f"{value.dtype}, shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ValueError(f"state '{scalar}' of '{name}' must be a real number or a 1-element tensor of one, got {got}")
    for field in declaration.buffers:
        value = state.get(field.name)
        if value is None:
            continue
        if not isinstance(value, Tensor) or tuple(value.shape) != field.shape_for(param):
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ValueError(f"state '{field.name}' of '{name}' must have shape {field.shape_for(param)}, got {got}")
        if value.is_complex() != param.is_complex() or value.dtype not in _DTYPES:
            raise ValueError(f"state '{field.name}' of '{name}' is {value.dtype} for a parameter of {param.dtype}")
        if value.layout is not torch.strided:
            raise ValueError(f"state '{field.name}' of '{name}' is {value.layout}, not dense")
        if is_fake(value) and not is_fake(param):
            raise ValueError(f"state '{field.name}' of '{name}' has no memory: it is a FakeTensor")


_DTYPES = {
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
}


def _is_number(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return hasattr(value, "__float__") and not isinstance(value, complex)
    whole = value.numel() == 1 and not value.is_complex() and value.layout is torch.strided
    return whole and not is_lost(value)


def missing_entries(
    declaration: Declaration,
    buffers: tuple[str, ...],
    param: Tensor,
    state: Mapping[str, Any],
    initial: Mapping[str, float | Tensor],
) -> dict[str, Tensor]:
    """The entries that ``declaration`` needs and ``state`` lacks, or has on another device than ``param``; made or moved.

    Numbers and tensors of any dtype are accepted for the scalars, which become float64 tensors.
    """
    device = param.device
    made: dict[str, Tensor] = {}
    for name in scalar_names(declaration):
        value: Any = state.get(name)
        absent = value is None or (isinstance(value, Tensor) and value.is_meta)
        value = initial[name] if absent else value
        dtype = scalar_dtype(device)
        kept = isinstance(value, Tensor) and value.device == device and value.dtype == dtype and not value.dim()
        if absent or not kept:
            fresh = torch.empty((), dtype=dtype, device=device)
            made[name] = fresh.fill_(value) if not isinstance(value, Tensor) else fresh.copy_(value.reshape(()))
    for field in declaration.buffers:
        if (name := field.name) not in buffers:
            continue
        value = state.get(name)
        if value is None or value.is_meta:
            made[name] = new_buffer(field, param, initial[name])
        elif value.device != device:
            made[name] = value.to(device)
    return made


def complete(
    declaration: Declaration,
    buffers: tuple[str, ...],
    param: Tensor,
    state: ParamState,
    initial: Mapping[str, float | Tensor],
) -> None:
    """Give ``state`` its :func:`missing_entries`; existing values stay."""
    for name, entry in missing_entries(declaration, buffers, param, state, initial).items():
        state.set_quietly(name, entry)
