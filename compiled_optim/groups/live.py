"""Group entries that users write and steps read: dicts and lists that report writes, and numbers in tensors."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from compiled_optim.memory.layout import is_lost
from compiled_optim.memory.torch_internals import (
    CAPTURING,
    Captures,
    beside_graphs,
    fakes_are_made,
    is_capturing,
    is_fake,
    outside_fakes,
)
from compiled_optim.rule.fields import Hyper

K = TypeVar("K")
V = TypeVar("V")


_writes = itertools.count()


class Changes:
    """A record of pending changes. Dicts and lists that report writes, and their optimizer, share one such object."""

    pending = True  # until everything derived from groups and state is rebuilt
    is_guarded = False  # whether only compiled code reads ``pending`` before it runs
    is_refused = False  # whether a group may hold a number that steps refuse
    is_state_handed_out = False  # whether other code may hold state tensors, and move their memory
    are_numbers_read = False  # whether other code than a called step reads numbers on the device
    is_warned_of_rate = False  # whether the user was warned of a negative learning rate
    lists = ""  # a text that changes with each write to a list of parameters or groups

    def __init__(self) -> None:
        self.unsent: dict[int, Any] = {}  # by id: numbers that the next step sends to a device

    @contextmanager
    def reported(self, *, is_list: bool = False) -> Iterator[None]:
        """Report a write in a ``with`` block: before it, in case of an interrupt, and after it, for other threads."""
        self.pending = True
        try:
            yield
        finally:
            self.pending = True
            if is_list:
                self.lists = str(next(_writes))

    def refuse(self) -> None:
        """Let the next step look for numbers that it cannot use, and raise."""
        self.is_refused = True
        self.pending |= self.is_guarded

    def warn_of_rate(self, problem: str) -> None:
        """Warn of a negative learning rate, once."""
        if not self.is_warned_of_rate:
            self.is_warned_of_rate = True
            warnings.warn(f"{problem}; steps take 0 in its place", UserWarning, stacklevel=2)


def _reporting(method: Any) -> Callable[..., Any]:
    """Wrap ``method``, which writes, to report writes to watched keys."""

    @functools.wraps(method)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._reported(*args[:1]):
            return method(self, *args, **kwargs)

    return write


class WatchedDict(dict[K, V], Generic[K, V]):
    """A dict that reports each write that goes through its public methods; copies and pickles are plain dicts.

    Args:
        values: the first content, by position as for a dict: some libraries make a copy with ``type(mapping)(items)``.
        changes: takes the reports; None for a dict that is in no optimizer yet.
        names: the keys that steps read in a parameter's state; None for all. Other keys are free for users.
    """

    def __init__(
        self,
        values: Mapping[K, V] | Iterable[tuple[K, V]] = (),
        *,
        changes: Changes | None = None,
        names: Container[str] | None = None,
    ) -> None:
        super().__init__(values)
        self._changes, self._names = Changes() if changes is None else changes, names

    def _is_watched(self, *key: Any) -> bool:
        """Return whether to report a write under ``key``, or one without a key."""
        return self._names is None or not key or key[0] in self._names

    def _reported(self, *key: Any) -> AbstractContextManager[None]:
        return self._changes.reported() if self._is_watched(*key) else nullcontext()

    def set_quietly(self, key: K, value: V) -> None:
        """Write without reporting, for writes of the package that require no rebuild."""
        super().__setitem__(key, value)

    update_quietly, drop_quietly = dict.update, dict.__delitem__  # without reporting; no interrupt splits them

    def update(self, /, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():  # raises before the first write
            self[key] = value

    def setdefault(self, key: K, default: Any = None) -> V:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def pop(self, key: K, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[K, V]:
        if not self:
            raise KeyError("popitem(): dictionary is empty")
        return (key := next(reversed(self))), self.pop(key)

    __setitem__, __delitem__, clear = map(_reporting, (dict.__setitem__, dict.__delitem__, dict.clear))

    def copy(self) -> dict[K, V]:
        return dict(self)

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class WatchedList(list[V], Generic[V]):
    """A list that reports each write; copies, deep copies and pickles are plain lists."""

    def __init__(self, changes: Changes, values: Iterable[V]) -> None:
        super().__init__(values)
        self._changes = changes
        changes.lists = str(next(_writes))

    def _reported(self, *index: Any) -> AbstractContextManager[None]:
        return self._changes.reported(is_list=True)

    append, extend, insert, remove, pop, clear, sort, reverse = map(
        _reporting, (list.append, list.extend, list.insert, list.remove, list.pop, list.clear, list.sort, list.reverse)
    )
    __setitem__, __delitem__, __iadd__, __imul__ = map(
        _reporting, (list.__setitem__, list.__delitem__, list.__iadd__, list.__imul__)
    )

    def __copy__(self) -> list[V]:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


ROUNDING = 1e-12  # the distance that a scheduler's rounding may put a number out of range

_C_TYPES: dict[torch.dtype, Any] = {torch.float64: ctypes.c_double, torch.float32: ctypes.c_float}


class Live:
    """One number of a hyperparameter in a 0-dim tensor, which compiled steps and captured graphs read.

    On an accelerator, a Python number waits for the next step, which sends all waiting numbers in one copy. It is sent at
    once if other code may read the tensor before.

    Args:
        tensor: the tensor.
        changes: takes reports that the number becomes or ceases to be 0, and the waiting numbers.
        number: the value of the tensor; None if the host does not know it.
        is_adopted: whether a user passed the tensor, and may write to it or share it with other groups.
    """

    def __init__(self, tensor: Tensor, changes: Changes, number: float | None = None, *, is_adopted: bool = False) -> None:
        self.tensor, self.changes, self.is_adopted = tensor, changes, is_adopted
        self.is_tensor = is_adopted  # whether users read the tensor itself, since they passed one
        self.has_escaped = is_adopted  # whether other code has the tensor, and may write to it without a report
        self.is_driven = False  # whether a step or a graph writes the number, so that the host does not know it
        self.shapes = False  # whether a step depends on the number being 0
        self.groups: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id: those that have or had the number
        self.written_last = number  # the Python number that was written last; None if a tensor was
        self._device_type = tensor.device.type
        self._on_host = self._device_type == "cpu" and "cpu" not in CAPTURING and type(tensor) is Tensor
        self._memory_last: Any = None  # the number as a C variable at the tensor's last known address
        self._version = _version(tensor)
        self._fetched: tuple[int | None, float] = None, math.nan
        self._replaced = math.nan  # the negative number that was written last if the tensor holds 0 for it
        self._copy: Tensor | None = None  # the copy that was read last while the device writes the number

    @property
    def written(self) -> float | None:
        """The Python number that was written last; None after a tensor, or if other code may have written since."""
        version = _version(self.tensor)
        return None if self.is_driven or version is None or self._version != version else self.written_last

    @property
    def known(self) -> float | None:
        """The Python number that was written or fetched last; None if only the device knows the current one."""
        if self._on_host:
            if (memory := self._memory()) is not None:
                number: float = memory.value
                is_replaced = number == 0 and self.written_last == self._replaced
                return self.written_last if is_replaced or number == self.written_last else number
            with suppress(RuntimeError, AssertionError):  # its memory was freed, or a mode makes all tensors fake
                return self.tensor.item()
        if (written := self.written) is not None:
            return written
        version, fetched = self._fetched
        return None if version is None or version != _version(self.tensor) or self.is_driven else fetched

    @property
    def nonzero(self) -> bool:
        """Whether the number may differ from 0: not if a Python 0 was written last. The device is not read."""
        return self.written != 0 or self.known != 0

    def as_float(self) -> float:
        """Return the number, read from the device if the host does not know it."""
        return self.tensor.item() if (known := self.known) is None else float(known)

    def value(self) -> float | Tensor:
        """Return the current number, as a tensor if only the device knows it; NaN for a tensor without memory."""
        if self.tensor.is_meta or is_lost(self.tensor):
            return math.nan
        return self.tensor.detach() if (known := self.known) is None else known

    def read(self, label: str) -> float | Tensor:
        """Return a tensor or a number for users, maybe after a wait. Raise ``ValueError`` if the storage was freed."""
        if self.is_tensor:
            return self.tensor
        if self.is_driven:
            self.warn_of_lost_write(label)
            self._copy = self.tensor.detach().clone()
            return self._copy
        if (known := self.known) is not None:
            return known
        if is_lost(self.tensor):
            raise ValueError(f"{label} is a tensor whose storage was freed; it has no value")
        if is_fake(self.tensor):
            return self.tensor.detach().clone()
        self._fetched = _version(self.tensor), self.tensor.item()
        return self._fetched[1]

    def warn_of_lost_write(self, label: str) -> None:
        """Warn if other code wrote to the copy that was read last while the device writes the number."""
        if self._copy is not None and not self._copy.is_inference() and self._copy._version:
            self._copy = None
            warn_of_driven(label)

    def drive(self, is_driven: bool) -> None:
        """Note whether the device writes by itself. Afterwards the host does not know the number."""
        if is_driven:
            self.send(self.changes)
        if self.is_driven or is_driven:
            self.written_last = self._copy = None
        self.is_driven = is_driven
        self.is_tensor &= not is_driven

    def escape(self) -> None:
        """Note that other code gets the tensor."""
        if self.shapes and not (self.has_escaped or self.nonzero):
            self.changes.pending |= self.changes.is_guarded
        self.has_escaped = True
        for group in self.groups.values():
            for follower in group.followers:
                follower.is_behind = True
        self.send(self.changes)

    def read_as(self, element: object) -> None:
        """Let users read the tensor if the ``element`` that they passed is one, else the number."""
        self.is_tensor = isinstance(element, Tensor) and not self.is_driven
        if self.is_tensor:
            self.escape()

    def write(self, value: float | Tensor) -> None:
        """Set the number to ``value``, which may be a 1-element tensor on any device."""
        is_number = not isinstance(value, Tensor)
        is_watched = self.shapes and self.changes.is_guarded and (self.written == 0) != (is_number and value == 0)
        with self.changes.reported() if is_watched else nullcontext():
            self.written_last, self._replaced = None, math.nan  # until the end, in case of an interrupt
            if isinstance(value, Tensor):
                self._fill(value)
            elif not self._wait(value):
                self._fill(value)
                self._version, self.written_last = _version(self.tensor), value

    def replace_negative(self) -> bool:
        """Let steps read 0 for a negative number, which users still read. Return whether one was written last."""
        if (number := self.written_last) is None or not -math.inf < number < 0:
            return False
        if number != self._replaced:
            self.write(0.0)
            self.written_last = self._replaced = number
        return True

    def write_plain(self, value: float) -> bool:
        """Write ``value`` without a new version of the tensor, if no other code can write. Return whether that was done."""
        if (memory := self._memory_last) is None:
            return self._wait(value)
        memory.value = self.written_last = value
        return True

    def _wait(self, value: float) -> bool:
        """Keep a number on the host until the next step sends it. Return whether that is possible."""
        if self.changes.are_numbers_read or self.has_escaped or self.is_driven:
            return False
        if (ask := CAPTURING.get(self._device_type)) is None or ask() is not None:
            return False
        if id(self) not in self.changes.unsent:
            self._version = _version(self.tensor)
        self.written_last = value
        self.changes.unsent[id(self)] = self, value
        return True

    def _fill(self, value: float | Tensor) -> None:
        self.changes.unsent.pop(id(self), None)
        on_host = self._on_host and not isinstance(value, Tensor) and not self.tensor.is_inference()
        if on_host and (memory := self._memory()) is not None:
            increment_version(self.tensor)
            memory.value = value
            return
        with as_fake_as(self.tensor):
            live = self.tensor.detach() if self.tensor.requires_grad else self.tensor
            live.copy_(value.detach().reshape(())) if isinstance(value, Tensor) else live.fill_(value)

    def _memory(self) -> Any:
        """Return the number as a C variable, to be used without torch; None if dtype or storage forbid that."""
        address, memory = self.tensor.data_ptr(), self._memory_last
        if memory is None or ctypes.addressof(memory) != address:
            c_type = None if self.tensor.is_neg() or is_lost(self.tensor) else _C_TYPES.get(self.tensor.dtype)
            if c_type is None:
                return None
            self._memory_last = memory = c_type.from_address(address)
        return memory

    @staticmethod
    def send(changes: Changes, captures: Captures = (), asked: Sequence[torch.device] = ()) -> None:
        """Copy the waiting numbers to their tensors, in one copy per device. The host does not wait for it.

        Of the devices in ``asked``, those in ``captures`` are capturing a graph.
        """
        by_device: dict[torch.device, list[tuple[Live, float]]] = {}
        for live, number in list(changes.unsent.values()):
            by_device.setdefault(live.tensor.device, []).append((live, number))
        for device, waiting in by_device.items():
            tensors, numbers = [live.tensor for live, _ in waiting], [number for _, number in waiting]
            with as_fake_as(tensors[0]):
                captured = device in captures if device in asked else is_capturing(device)
                if captured:  # replays must not write these numbers again, and the device has finished all earlier work
                    beside_graphs(lambda: [t.fill_(n) for t, n in zip(tensors, numbers, strict=True)])  # noqa: B023
                else:
                    host = torch.tensor(numbers, dtype=tensors[0].dtype, device="cpu")
                    sent = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
                    torch._foreach_copy_(tensors, list(sent.unbind()))
            for live, number in waiting:  # skip numbers that were written since; safe if interrupted
                if changes.unsent.get(id(live)) == (live, number):
                    live._version = _version(live.tensor)
                    del changes.unsent[id(live)]


class Numbers(tuple[Live, ...]):
    """The numbers of one hyperparameter of one group."""

    entry: Any = None  # their value in the group's dict
    are_open = True  # whether other code may write them, so that ``entry`` may be stale
    are_quick = False  # whether a write of numbers in range changes nothing else
    _hyper: Hyper

    def __new__(cls, numbers: Iterable[Live], hyper: Hyper) -> Numbers:
        instance = super().__new__(cls, numbers)
        instance._hyper = hyper
        return instance

    def problem(self, where: str) -> str:
        """Return the error of the first number out of range, or ''. ``where`` is the group's name."""
        least, most = self._hyper.span
        for index, number in enumerate(self):
            if (value := number.written_last) is not None and not least <= value <= most:
                try:
                    self._hyper.check(value, index, where, ROUNDING)
                except ValueError as error:
                    return str(error)
        return ""

    def write_quickly(self, value: Any) -> bool:
        """Write floats in range if :attr:`are_quick`, as fast as schedulers expect. Return whether that was done."""
        least, most = self._hyper.span
        if not self.are_quick:
            return False
        if not self._hyper.is_tuple:
            return type(value) is float and least <= value <= most and self[0].write_plain(value)
        if type(value) is not tuple or len(value) != len(self):
            return False
        for number in value:
            if type(number) is not float or not least <= number <= most:
                return False
        return all([live.write_plain(number) for live, number in zip(self, value, strict=True)])


def warn_of_driven(label: str) -> None:
    """Warn of a write that the next step overwrites."""
    name = label.partition(" of ")[0].partition("[")[0]
    warnings.warn(
        f"opt.schedule sets {label} in each step, so the value that was written is lost; "
        f"opt.schedule({name}=None) ends that schedule",
        stacklevel=2,
    )


def as_fake_as(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which new tensors are fake if, and only if, ``tensor`` is."""
    if is_fake(tensor) == fakes_are_made():
        return nullcontext()
    mode: AbstractContextManager[Any] = outside_fakes() if fakes_are_made() else tensor.fake_mode  # type: ignore[attr-defined]
    return mode


def _version(tensor: Tensor) -> int | None:
    """Return the write count of ``tensor``; None if torch does not count."""
    return None if tensor.is_inference() else tensor._version


def address(tensor: Tensor) -> int:
    """Return a tensor's address; a unique number for fake tensors, which have none, and for tensors without memory."""
    return (0 if is_fake(tensor) else tensor.data_ptr()) or -id(tensor)
