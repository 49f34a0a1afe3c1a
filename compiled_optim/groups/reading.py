"""What is read from a parameter group: a value, which is the 0-dim tensor behind it and its number in one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from compiled_optim.torch_internals import fakes_are_made, is_tracing, outside_fakes, quickly_outside_dynamo, refuse_tracing


class Place(Protocol):
    """Where a reading was read."""

    def write(self, value: float | Tensor) -> None:
        """Write what an in-place method made of the reading, if the place is still there."""


class Reading(Tensor):
    """One number of a hyperparameter as it was when it was read: a 0-dim tensor on the parameters' device.

    Nobody else changes it. Where the host knows the number, ``float()``, ``item()``, comparisons, hashing, formatting and
    arithmetic with anything but tensors give what a float gives, and neither wait for the device nor launch anything there.
    With tensors it computes as a tensor. Its own in-place methods, such as ``fill_``, change it and also write what it
    becomes to the place that it was read from. Operators such as ``*=`` write nothing. Clones, deep copies and pickles have
    no place.

    Args:
        number: the number; None where only the device knows it.
        tensor: the value, if ``number`` is None; otherwise any tensor of the same dtype and device.
        place: where it was read; None for a value of its own.
    """

    _number: float | None
    _tensor: Tensor | None
    _place: Place | None

    @staticmethod
    def __new__(cls, number: float | None, tensor: Tensor, place: Place | None = None) -> Reading:
        return reading_of(number, tensor, place)

    # Dynamo then sees a tensor, and guards on no number.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with plain tensors."""
        return _compute(func, list(args), kwargs or {})

    @property
    def plain(self) -> Tensor:
        """The value as a new tensor like any other. The host does not wait for it."""
        if self._number is not None:
            return torch.full((), self._number, dtype=self.dtype, device=self.device)
        assert self._tensor is not None
        return self._tensor if self._is_traced else self._tensor.clone()

    def _write(self, value: float | Tensor) -> None:
        """Become ``value``, once the place has taken it."""
        if self._place is not None:
            self._place.write(value)
        self._number, self._tensor = (None, value) if isinstance(value, Tensor) else (self._rounded(value), None)

    def _rounded(self, number: float) -> float:
        """``number`` as the dtype has it."""
        if self.dtype == torch.float64:
            return number
        with outside_fakes() if fakes_are_made() else nullcontext():
            return torch.full((), number, dtype=self.dtype, device="cpu").item()

    def clone(self, *, memory_format: Any = None) -> Reading:
        """An equal reading without a place."""
        return reading_of(self._number, self if self._number is not None else self.plain)

    def detach(self) -> Reading:
        """Itself, as a tensor's shares its memory: autograd records nothing of a reading."""
        return self

    def item(self) -> float:
        """The number; waits for the device where only that knows it."""
        if self._number is None:
            self._number = self.plain.item()
        return self._number

    tolist = __float__ = item  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        """A copy; as of other tensors on an accelerator, only by ``force``."""
        return self.plain.numpy(force=force)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.plain.__dlpack__(**kwargs)

    def __array__(self, dtype: Any = None) -> Any:
        return _plain(self, on_host=self._number is not None).numpy(force=True).astype(dtype or "float64")

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()]

    @property
    def data(self) -> Tensor:
        """Itself."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        self.copy_(value)

    @property
    def _is_traced(self) -> bool:
        return self._number is None and (type(self._tensor) is not Tensor or is_tracing())

    def __hash__(self) -> int:
        return object.__hash__(self) if self._is_traced else hash(self.item())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._tensor if self._is_traced else self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reading:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # What torch.compile asks of a tensor that wraps another.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        if self._tensor is None:
            self._tensor = self.plain
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Reading:
        return Reading(None, inner["_tensor"])

    def _stable_hash_for_caching(self) -> str:
        return type(self).__qualname__


_make: Callable[..., Reading] = Tensor._make_wrapper_subclass


def reading_of(number: float | None, tensor: Tensor, place: Place | None = None) -> Reading:
    """A :class:`Reading`, at the least cost: a scheduler reads a group four times in a step."""
    made = _make(Reading, (), dtype=tensor.dtype, device=tensor.device)
    made._number = number
    made._tensor = tensor if number is None else None
    made._place = place
    return made


_COPYING = {torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default}
"""Operators that a reading answers with one of the same number."""


def unread(value: Any) -> Any:
    """``value``, which may be a tuple or dict, with readings replaced by numbers where they are known, else by tensors."""
    if isinstance(value, dict):
        return {key: unread(v) for key, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(unread, value))
    if not isinstance(value, Reading):
        return value
    return value.plain if value._number is None else value._number


@quickly_outside_dynamo
def _compute(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compute ``func`` with plain tensors; what is written is on the host where the host knows all numbers."""
    if func in _COPYING and isinstance(args[0], Reading):
        return args[0].clone()
    written = {id(r): r for r in _written(func, args, kwargs)}
    if written:
        refuse_tracing("a write to a parameter group", "set hyperparameters outside of compiled code")
    given = [x for x in tree_leaves((args, kwargs)) if id(x) not in written]
    on_host = bool(written) and all(map(_is_on_host, [*given, *written.values()]))
    targets = {key: _plain(reading, on_host).detach() for key, reading in written.items()}

    def plain(value: Any) -> Any:
        return targets[id(value)] if id(value) in targets else _plain(value, on_host)

    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    for key, target in targets.items():
        written[key]._write(target.item() if on_host else target)
    readings = {id(target): written[key] for key, target in targets.items()}
    return tree_map(lambda value: readings.get(id(value), value), result)


def _plain(value: Any, on_host: bool) -> Any:
    """``value``, or where it is a reading, a plain tensor; on the host a number that the host knows."""
    if not isinstance(value, Reading):
        return value
    return torch.full((), value.item(), dtype=value.dtype, device="cpu") if on_host else value.plain


def _written(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Iterable[Reading]:
    """The readings that ``func`` writes into."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Reading))


def _is_on_host(value: Any) -> bool:
    """Whether the host can compute with an argument without asking a device."""
    if isinstance(value, Reading):
        return value._number is not None
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def _sides(*values: Any) -> Iterable[Any]:
    """Readings among ``values`` as numbers, or where that would wait for the device or others are tensors, as tensors."""
    readings = [v for v in values if isinstance(v, Reading)]
    as_numbers = all(r._number is not None for r in readings)
    as_numbers = as_numbers and not any(isinstance(v, Tensor) and not isinstance(v, Reading) for v in values)
    return ((v._number if as_numbers else v.plain) if isinstance(v, Reading) else v for v in values)


def _operators(operate: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A method that operates on a reading and anything, and the one for the other order."""

    def forward(self: Reading, *other: Any) -> Any:
        if self._number is not None and (not other or type(other[0]) is float):  # as _sides would have it
            return operate(self._number, *other)
        return operate(*_sides(self, *other))

    def reverse(self: Reading, other: Any) -> Any:
        if self._number is not None and type(other) is float:
            return operate(other, self._number)
        return operate(*_sides(other, self))

    return forward, reverse


@quickly_outside_dynamo
def _fill(self: Reading, value: Any) -> Tensor:
    """As of other tensors, but quick where torch's schedulers call it."""
    number = value._number if type(value) is Reading else value
    self._write(number) if type(number) is float else Tensor.fill_(self, value)
    return self


def _of_float(name: str) -> Callable[..., Any]:
    of_float: Callable[..., Any] = getattr(float, name)

    def method(self: Reading, *args: Any) -> Any:
        """As of a float."""
        return of_float(self.item(), *args)

    return method


def _refused(name: str) -> Callable[..., Any]:
    """In place of a method that would touch memory which a reading does not have."""

    def method(self: Reading, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise TypeError(f"a hyperparameter that was read is a value without memory; it has no {name}()")

    return method


_OF_MEMORY = ("apply_", "map_", "map2_", "share_memory_", "requires_grad_", "set_", "resize_", "resize_as_", "rename_")
for _name in _OF_MEMORY:
    setattr(Reading, _name, _refused(_name))
Reading.fill_ = _fill  # type: ignore[assignment, method-assign]
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod"):
    _forward, _reverse = _operators(divmod if _name == "divmod" else getattr(operator, _name))
    setattr(Reading, f"__{_name}__", _forward)
    setattr(Reading, f"__r{_name}__", _reverse)
    if _name != "divmod":
        setattr(Reading, f"__i{_name}__", _forward)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs"):
    setattr(Reading, f"__{_name}__", _operators(getattr(operator, _name))[0])
for _name in (
    "is_integer",
    "as_integer_ratio",
    "hex",
    "__int__",
    "__bool__",
    "__round__",
    "__trunc__",
    "__floor__",
    "__ceil__",
):
    setattr(Reading, _name, _of_float(_name))
Reading.__complex__ = lambda self: complex(self.item())  # type: ignore[method-assign]
