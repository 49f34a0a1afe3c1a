"""The optimizer's state: the entries of each parameter, their initial values, checks and storage.

A buffer is stored in floating point, or in codes of 8 bits with a scale for each group of elements; groups follow one
another in the order of memory of the codes. A weight of 16 bits may have one entry more, for the bits that its dtype lacks.
State that was stored with other ``weights`` or ``state_dtype`` is converted. Entries may be DTensors: each process converts
its shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.groups.changes import Changes, WatchedDict
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.per_parameter import choices_of
from compiled_optim.memory.layout import (
    DTYPES,
    MemoryOrder,
    as_part_of,
    as_real,
    flat,
    full_tensor,
    is_lost,
    is_sharded,
    local,
    placement,
    scalar_dtype,
    scalars_device,
    spread_like,
    zeros_spread_like,
)
from compiled_optim.memory.torch_internals import is_fake
from compiled_optim.rule import formats
from compiled_optim.rule.fields import Buffer, Scalar
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.storage import (
    CODE_DTYPES,
    HALVES,
    PARTS,
    REMAINDER_DTYPES,
    code_name,
    joined,
    parts_beside,
    parts_of,
    scale_name,
)

CODES = {dtype: kind for kind, dtype in CODE_DTYPES.items()}
"""By dtype of codes, the kind of the numbers that they stand for."""
SPLITS = {dtype: mode for mode, dtype in REMAINDER_DTYPES.items()}
_PART_OF = {"kahan": "kahan_comp", "split8": "remainder", "split16": "remainder", "master": "master_param"}


class ParamState(WatchedDict[str, Any]):
    """The state of one parameter: ``step``, the rule's scalars and its buffers, by name, and foreign entries.

    Entries can be assigned, written in place, and given other memory with ``.data =``. The next step follows. Only a write
    with ``dict.__setitem__(state, name, tensor)`` goes past this class and is not noticed: steps go on with the old tensor.
    """

    initial: Mapping[str, float | Tensor] | None = None
    """The values that the optimizer filled it with when it was empty; None if it never was."""
    rule = ""
    """The name of the rule that last used it; empty if entries were written since."""

    def is_initial(self, *, foreign: bool = False) -> bool:
        """Return whether every entry is as the optimizer made it; ``foreign`` ignores foreign ones. Waits for the device."""
        initial, names = self.initial, [name for name in self if not foreign or self._is_watched(name)]
        return initial is not None and all(name in initial and _holds(self[name], initial[name]) for name in names)

    def serve(self, rule: str) -> None:
        """Record the rule that uses it from now on. If that changes, drop all entries but foreign ones and :data:`PARTS`."""
        if self.rule not in ("", rule):
            for name in [name for name in self if self._is_watched(name) and name not in PARTS]:
                self.drop_quietly(name)
        self.rule = rule

    def _written(self, *key: Any) -> str:
        return f"state {''.join(map(repr, key)) or 'entries'} of a parameter was written"

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if self._is_watched(key):
            self.rule = ""


class OptimizerState(WatchedDict[Any, Any]):
    """``optimizer.state``: parameter -> :class:`ParamState`. A missing entry reads as an empty one, as in torch.

    Under a key that is no tensor, hooks and wrappers may keep anything; steps ignore it. ``names`` are those of every
    :class:`ParamState`.
    """

    def belongs_to(self, changes: Changes) -> bool:
        """Return whether it reports to ``changes``, as all that were the state of one optimizer do."""
        return self._changes is changes

    def _is_watched(self, *key: Any) -> bool:
        return not key or isinstance(key[0], Tensor)

    def _written(self, *key: Any) -> str:
        return "the state of a parameter was replaced"

    def __missing__(self, key: Any) -> Any:
        entries = self._watched(key, {})
        self.set_quietly(key, entries)
        return entries

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, self._watched(key, value))

    def _watched(self, key: Any, value: Any) -> Any:
        return ParamState(value, changes=self._changes, names=self._names) if isinstance(key, Tensor) else value

    @contextlib.contextmanager
    def kept_after_errors(self) -> Iterator[None]:
        """Restore the state of every parameter if a ``with`` block ends in an error."""
        before = [(entries, {**entries}, entries.rule) for entries in self.values() if isinstance(entries, ParamState)]
        try:
            yield
        except BaseException:
            for entries, values, rule in before:
                dict.clear(entries)
                entries.update_quietly(values)
                entries.rule = rule
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Leave out state that no step has touched and no process shares: torch makes it in each process's first step."""
        entries_of = {key: entries for key, entries in self.items() if isinstance(entries, ParamState) and entries}
        tensors = [local(e) for entries in entries_of.values() for e in entries.values() if isinstance(e, Tensor)]
        shared = any(entry.device.type == "cpu" and entry.is_shared() for entry in tensors)  # type: ignore[no-untyped-call]
        if shared or not all(entries.is_initial(foreign=True) for entries in entries_of.values()):
            return super().__reduce_ex__(protocol)
        foreign = {k: {n: e for n, e in entries.items() if not entries._is_watched(n)} for k, entries in entries_of.items()}
        return dict, ({**self, **foreign},)

    @property
    def foreign(self) -> dict[Any, Any]:
        """The entries under keys that are no tensors."""
        return {key: value for key, value in self.items() if not isinstance(key, Tensor)}

    def replace_foreign(self, values: Mapping[Any, Any]) -> None:
        """Replace all entries under keys that are no tensors by ``values``."""
        for key in self.foreign:
            self.drop_quietly(key)
        self.update_quietly(values)


def _holds(entry: Any, value: float | Tensor) -> bool:
    """Return whether every number of ``entry`` can be read and is ``value``; True for a meta tensor."""
    if not isinstance(entry, Tensor) or is_lost(entry) or is_fake(entry):
        return False
    numbers = as_real(local(entry.detach()))
    return entry.is_meta or bool((numbers == torch.as_tensor(value, dtype=numbers.dtype, device=numbers.device)).all())


def has_declared_entries(declaration: Declaration, state: Mapping[Any, Any]) -> bool:
    """Return whether ``state``, one parameter's, has an entry of ``declaration``, and not only foreign ones."""
    return any(name in state for name in (*declaration.scalar_names, *[b.name for b in declaration.buffers]))


def initial_values(declaration: Declaration, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
    """Return, by name, the initial number of every scalar and buffer of ``declaration`` in ``group``.

    A differentiable step depends on the hyperparameter that fills a buffer: its value is then not detached from autograd.
    """
    fields: tuple[Scalar | Buffer, ...] = (*declaration.scalars, *declaration.buffers)
    assert FunctionType not in {type(field.init) for field in fields}, "a finished rule has is_copy instead"
    values: dict[str, Any] = {"step": 0.0, **{field.name: field.init for field in fields}}
    for field, init in [(field, init) for field in fields if type(init := field.init) is str]:
        value, recorded = group[init], isinstance(field, Buffer) and group.get("differentiable", False)
        values[field.name] = value.detach() if isinstance(value, Tensor) and not recorded else value
    return values


class StateForm(NamedTuple):
    """How a parameter's state is stored: in which entries, shapes and dtypes.

    ``choices``, by name, also determine the code of its step: static choices, results of options, facts, and for each
    structural hyperparameter, whether it may differ from 0.
    """

    declaration: Declaration
    param: Tensor
    choices: dict[str, Any]
    buffers: tuple[str, ...]  # the names of those that a step needs

    @classmethod
    def of_group(
        cls, declaration: Declaration, groups: Sequence[ParamGroup], index: int, loaded: Mapping[str, Any] | None = None
    ) -> Callable[[int], StateForm]:
        """Return a function: position in ``groups[index]["params"]`` -> form, once the group has the ``loaded`` entries."""
        group, numbers, params = groups[index], loaded or {}, groups[index]["params"]
        statics = declaration.choices(group, numbers)
        structural = {n: numbers[n] != 0 if n in numbers else group.nonzero(n) for n in declaration.structural_hypers}
        options = [option for option in declaration.options if option.name in group]
        cache: dict[Any, tuple[dict[str, Any], tuple[str, ...]]] = {}

        def of(position: int) -> StateForm:
            chosen = choices_of(declaration.options, group, index, position) if options else {}
            facts = {f.name: f.holds(params[position].shape, declaration.name) for f in declaration.facts}
            if (key := (*chosen.items(), *facts.items())) not in cache:
                choices = {**statics, **chosen, **facts, **structural}
                cache[key] = choices, declaration.present_buffers(choices)
            return cls(declaration, params[position], *cache[key])

        return of

    @property
    def split(self) -> tuple[str, str, str] | None:
        """The one of :data:`PARTS` that the weight has, with the mode and dtype in which it is stored; None without one."""
        mode, half = self.choices.get("weights") or ("", "")
        return (_PART_OF[mode], mode, half) if mode in _PART_OF else None

    def shape_of(self, field: Buffer) -> tuple[int, ...]:
        """Return the shape of a buffer."""
        return self.declaration.shape_of(field, self.param.shape, self.choices)

    def dtype_of(self, field: Buffer) -> torch.dtype:
        """Return the dtype of a buffer."""
        return self.declaration.dtype_of(field, self.param.dtype, self.choices)

    def missing(
        self, buffers: Container[str], state: Mapping[str, Any], initial: Mapping[str, float | Tensor]
    ) -> dict[str, Tensor]:
        """Return new tensors for the scalars and ``buffers`` that ``state`` lacks or has on another device than ``param``.

        An entry on another device is copied. A scalar may be a number or a tensor, and becomes a float64 tensor.
        """
        device = scalars_device([self.param])
        dtype = scalar_dtype(device)
        tensors: dict[str, Tensor] = {}
        for name in self.declaration.scalar_names:
            value: Any = state.get(name)
            if value is None or (isinstance(value, Tensor) and value.is_meta):
                value = initial[name]
            elif isinstance(value, Tensor) and (value.device, value.dtype, value.dim()) == (device, dtype, 0):
                continue
            if isinstance(value, Tensor) and value.requires_grad:  # goes on with its graph, in a differentiable step
                with torch.enable_grad():
                    tensors[name] = value.reshape(()).to(device, dtype)
            else:
                fresh = torch.empty((), dtype=dtype, device=device)
                tensors[name] = fresh.copy_(value.reshape(())) if isinstance(value, Tensor) else fresh.fill_(value)
        for field in self.declaration.buffers:
            if field.name in buffers:
                value = state.get(field.name)
                if value is None or (value.is_meta and not self.param.is_meta):
                    tensors[field.name] = self._new_buffer(field, initial[field.name])
                elif value.device != self.param.device:
                    tensors[field.name] = value.to(self.param.device)
        return tensors

    def _new_buffer(self, field: Buffer, value: float | Tensor) -> Tensor:
        """Return a state buffer filled with ``value``.

        A buffer of the parameter's shape also has its memory format. It and a grouped one have a DTensor's placements.
        """
        param, dtype = self.param, self.dtype_of(field)
        if field.grouped:
            buffer = zeros_spread_like(param, self.shape_of(field), dtype)
        elif field.shape is None:
            buffer = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
        else:
            buffer = torch.zeros(self.shape_of(field), dtype=dtype, device=param.device)
        return buffer if isinstance(value, float) and value == 0.0 else fill(buffer, value)

    def check(self, state: ParamState, name: str) -> None:
        """Raise ``ValueError`` if a buffer or scalar in ``state`` does not fit the parameter, called ``name``."""
        param = self.param
        for scalar in self.declaration.scalar_names:
            value = state.get(scalar)
            if value is not None and not _is_number(value):
                got = f"{value.dtype}, shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
                what = f"state '{scalar}' of '{name}'"
                raise ValueError(f"{what} must be a real number or a 1-element tensor of one, got {got}")
        for field in self.declaration.buffers:
            if (value := state.get(field.name)) is None:
                continue
            what, expected, wanted = f"state '{field.name}' of '{name}'", self.shape_of(field), self.dtype_of(field)
            if not isinstance(value, Tensor) or tuple(value.shape) != expected:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
                raise ValueError(f"{what} must have shape {expected}, got {got}")
            fits = value.dtype == wanted if wanted not in DTYPES else value.dtype in DTYPES
            if value.is_complex() != param.is_complex() or not fits:
                raise ValueError(f"{what} is {value.dtype} for a parameter of {param.dtype}")
            if value.layout is not torch.strided:
                raise ValueError(f"{what} is {value.layout}, not dense")
            if is_fake(value) and not is_fake(param):
                raise ValueError(f"{what} has no memory: it is a FakeTensor")

    def convert(self, state: ParamState, name: str) -> None:
        """Store the entries in ``state`` of the parameter, called ``name``, in this form.

        So an option may be assigned while state exists, a parameter may get another order of memory, and numbers may be
        assigned instead of codes. Entries that :meth:`check` refuses are not converted.

        Raises:
            ValueError: codes have no fitting scales, or a weight has two of :data:`PARTS`.
        """
        fields = {b.name: b for b in self.declaration.buffers if state.get(b.name) is not None}
        if not fields or not all([_is_readable(field, state[entry], self.param) for entry, field in fields.items()]):
            return
        try:
            stored = self.converted({entry: state[entry] for entry in fields})
        except ValueError as error:
            raise ValueError(f"the state of '{name}' does not fit: {error}") from error
        for entry in fields.keys() & stored.keys():
            if (dtype := fields[entry].dtype) and (wanted := dtype(self.choices)) not in (None, stored[entry].dtype):
                stored[entry] = stored[entry].detach().to(wanted)
        state.update_quietly(stored)
        for entry in fields.keys() - stored.keys():
            state.drop_quietly(entry)

    def converted(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``entries`` stored in this form; those that need not change as they are.

        Buffers are decoded and encoded. A weight is joined with its part, and stored with as many bits as the new part has.
        The parameter does not change.

        Raises:
            ValueError: codes have no scales, or not as many as groups, or are of the other kind; or a weight has two parts.
        """
        remaining, stored = dict(entries), self._stored_part(entries)
        for field in [b for b in self.declaration.buffers if b.int8]:
            if name := held_name(field, entries):
                stored |= self._stored_buffer(field, name, entries)
                for entry in (field.name, code_name(field.name), scale_name(field.name)):
                    remaining.pop(entry, None)
        return {name: entry for name, entry in remaining.items() if name not in PARTS} | stored

    def _stored_buffer(self, field: Buffer, name: str, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries that store the buffer ``field``, which is in ``entries`` under ``name``."""
        value, param, wanted = entries[name], self.param, self.dtype_of(field)
        if wanted not in CODES and value.dtype not in CODES:
            return {name: value}
        coded, scale = code_name(field.name), scale_name(field.name)
        shape = self.shape_of(self._field(scale))
        if value.dtype in CODES:
            scales = check_codes(field, value, entries.get(scale))
            if wanted == value.dtype and _are_in_place(value, scales, param):
                is_shaped = tuple(scales.shape) == shape or is_sharded(scales)
                return {coded: value, scale: scales if is_shaped else scales.reshape(shape)}
            if placement(value) == placement(scales) == placement(param):
                value = as_part_of(decoded(local(value), local(scales)), param)
            else:
                value = decoded(full_tensor(value), full_tensor(scales))
        if wanted not in CODES:
            return {field.name: value.to(wanted)}
        order = MemoryOrder(local(param))
        vector = filled(flat(order.arranged(shard_like(value, param).float())))
        computed = formats.scale_of(vector)
        codes = torch.empty_like(order.target, dtype=wanted, requires_grad=False)
        flat(codes).copy_(formats.encoded(vector, computed, CODES[wanted])[: codes.numel()])
        scales = zeros_spread_like(param, shape, computed.dtype)
        local(scales).copy_(computed.view_as(local(scales)))
        return {coded: as_part_of(codes, param), scale: scales}

    def _stored_part(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of the weight, by name, if ``entries`` have one and the choices want one."""
        if self.split is None:
            stored_part(entries)
            return {}
        name, mode, half = self.split
        if name in entries and mode_of(name, entries[name]) == mode:
            return {name: entries[name]}  # others are left from an interrupted conversion
        if (stored := stored_part(entries)) is None:
            return {}
        value = local(self.param.detach())
        full = weight(self.param, {stored: entries[stored]}, mode_of(stored, entries[stored]), half)
        part = parts_beside(value.float(), full, mode, half)[name]
        dtype = self.dtype_of(self._field(name))
        return {name: as_part_of(torch.empty_like(value, dtype=dtype).copy_(part), self.param)}

    def _field(self, name: str) -> Buffer:
        return next(b for b in self.declaration.buffers if b.name == name)


def fill(entry: Tensor, value: float | Tensor) -> Tensor:
    """Set every number of ``entry``, both parts of a complex one, to ``value``."""
    (as_real(local(entry)) if type(entry) is not Tensor or entry.is_complex() else entry).fill_(value)
    return entry


def _is_number(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return hasattr(value, "__float__") and not isinstance(value, complex)
    is_single = value.numel() == 1 and value.layout is torch.strided
    return is_single and not value.is_complex() and not is_lost(value)


def _is_readable(field: Buffer, value: Any, param: Tensor) -> bool:
    """Return whether the entry ``value`` can be converted."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or is_lost(local(value)):
        return False
    has_shape = field.grouped or field.shape is not None or value.shape == param.shape
    return has_shape and is_fake(value) == is_fake(param)


def held_name(field: Buffer, entries: Mapping[str, Any]) -> str | None:
    """Return the name of the entry that holds the buffer ``field``, or None; the plain name if both entries exist.

    The plain entry may hold codes too, as in old checkpoints.
    """
    if field.name in entries:
        return field.name
    return coded if (coded := code_name(field.name)) in entries else None


def check_codes(field: Buffer, codes: Tensor, scales: Tensor | None) -> Tensor:
    """Return the ``scales`` of ``codes`` of the buffer ``field``; ``ValueError`` if they do not belong together."""
    if CODES[codes.dtype] != field.int8:
        raise ValueError(f"{code_name(field.name)} is {codes.dtype}; its codes are of {field.int8} numbers")
    if scales is None or not scales.is_floating_point():
        raise ValueError(f"{code_name(field.name)} has codes of 8 bits without {scale_name(field.name)}, their scales")
    groups = -(-codes.numel() // GROUP)
    if scales.numel() != groups and not is_sharded(codes):
        raise ValueError(f"{scale_name(field.name)} has {scales.numel()} numbers for {groups} groups of {GROUP} codes")
    return scales


def _are_in_place(codes: Tensor, scales: Tensor, param: Tensor) -> bool:
    """Return whether ``codes`` and ``scales`` fit ``param`` as they are, or will once they are sharded like it."""
    if placement(codes) == placement(scales) == placement(param):
        order = MemoryOrder(local(param))
        if _order(local(codes)) == _order(order.target):
            return True
        moved = order.arranged(local(codes).to(param.device))
        return not _are_full(local(codes), local(scales)) and _are_full(moved, local(scales))
    return local(codes).is_contiguous() and local(param).is_contiguous()  # groups of DTensors are in that order


def _order(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the sizes and strides of the order of memory in which the elements of a tensor are updated."""
    strides = MemoryOrder(tensor).target.stride()
    return [(size, stride) for size, stride in zip(tensor.shape, strides, strict=True) if size > 1]


def _are_full(codes: Tensor, scales: Tensor) -> bool:
    """Return whether each group, in the order of memory of ``codes``, has the largest code or a zero scale, as after steps.

    This finds codes that a file format brought into another order than their scales. Groups with an infinite scale are
    ignored.
    """
    largest_found = _vector(codes).int().abs().view(-1, GROUP).amax(1)
    scales = scales.detach().reshape(-1).to(largest_found.device)
    largest = torch.where(scales == 0, 0, torch.iinfo(codes.dtype).max)
    return bool(((largest_found == largest) | scales.isinf()).all())


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers, in float32, of codes in their order of memory, with their scales."""
    scales = scales.detach().reshape(-1).to(codes.device).float()
    numbers = formats.decoded(_vector(codes).int(), scales, CODES[codes.dtype])
    result = torch.empty_like(MemoryOrder(codes).target, dtype=torch.float32)
    flat(result).copy_(numbers[: codes.numel()])
    return result


def _vector(codes: Tensor) -> Tensor:
    """Return all of ``codes`` in their order of memory, :func:`filled`."""
    order = MemoryOrder(codes)
    order.load()
    return filled(flat(order.target))


def filled(vector: Tensor) -> Tensor:
    """Return ``vector``, with its last element repeated up to a whole number of groups.

    A step then computes in the padding only values that the group has already. Zeros times an infinite scale would be NaN.
    """
    missing = -vector.shape[0] % GROUP
    return torch.cat([vector, vector[-1:].expand(missing)]) if missing else vector


def stored_part(entries: Mapping[str, Any]) -> str | None:
    """Return which of :data:`PARTS` is in ``entries``, or None; ``ValueError`` if several are."""
    stored = [name for name in PARTS if name in entries]
    if len(stored) > 1:
        raise ValueError(f"it has both {' and '.join(stored)}, but a weight has at most one of them")
    return stored[0] if stored else None


def mode_of(name: str, part: Tensor) -> str:
    """Return the mode of a weight whose part has this name; ``ValueError`` if the part's dtype does not fit."""
    if name == "remainder" and part.dtype not in SPLITS:
        raise ValueError(f"remainder is {part.dtype} instead of {' or '.join(map(str, SPLITS))}")
    if name != "remainder" and not part.is_floating_point():
        raise ValueError(f"{name} is {part.dtype}, which is no floating-point number")
    return SPLITS[part.dtype] if name == "remainder" else "kahan" if name == "kahan_comp" else "master"


def weight(param: Tensor, parts: Mapping[str, Any], mode: str, half: str) -> Tensor:
    """Return this process's shard, in float32, of a weight of the dtype ``half`` that is stored in ``mode``."""
    values = {name: shard_like(parts[name], param) for name in PARTS if parts.get(name) is not None}
    numbers = {name: part.float() if part.is_floating_point() else part for name, part in values.items()}
    return joined(local(param.detach()).float(), numbers, mode, half)  # type: ignore[no-any-return]


def adds_nothing(param: Tensor, name: str, part: Tensor) -> bool:
    """Return whether ``param`` alone holds the whole weight, as where ``part`` is 0 or ``param`` is in float32."""
    value, bits, mode = local(param.detach()), shard_like(part, param), mode_of(name, part)
    if value.is_complex():
        return False
    value = value.float()
    for half in [HALVES[param.dtype]] if param.dtype in HALVES else HALVES.values():
        if mode == "kahan":
            low = formats.nearest(value - bits.float(), half)
            both = low + bits.float()  # or one bit less, in full_precision_state_dict
            is_held = (value == both) | (value == both.nextafter(low)) if param.dtype not in HALVES else bits == 0
        else:
            is_held = parts_of(value, {}, mode, half)[name] == bits
        if bool(is_held.all()):
            return True
    return False


def shard_like(tensor: Tensor, param: Tensor) -> Tensor:
    """Return this process's shard of ``tensor``, on the device of ``param``, as ``param`` is sharded."""
    if placement(tensor) != placement(param):
        tensor = spread_like(full_tensor(tensor), param)
    return local(tensor.detach()).to(param.device)
