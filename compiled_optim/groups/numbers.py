"""The numbers of a group: one vector on the device, which steps, compiled code and captured graphs read."""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from compiled_optim.groups.changes import Changes
from compiled_optim.memory.layout import is_lost, scalar_dtype
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

_C_TYPES: dict[torch.dtype, Any] = {torch.float64: ctypes.c_double, torch.float32: ctypes.c_float}

QuickWrite: TypeAlias = "tuple[float, float, Any, list[Any], int, set[int], Callable[[Any], bool]]"
"""How to write a hyperparameter: the least and the most number; a C variable if it is one on the host, else None; the list
and the index where the host keeps it; the exposed numbers; and a function that writes, and returns whether it did. While
nothing is exposed, a float in range may be written to variable and list instead."""


class GroupNumbers:
    """All numbers of a group's hyperparameters in one vector on the device, and what the host knows of them.

    Steps read number ``i`` from ``tensors[i]``: the element ``i`` of the vector, or a tensor that a user passed. Numbers are
    named by these indices below. On an accelerator, a Python number waits for the next step, which sends all waiting
    numbers in one copy. It is sent at once if other code may read the vector before.

    Args:
        values: the initial numbers.
        structural: the numbers on whose being 0 a step depends.
        device: of the vector.
        devices: where steps can read tensors of users.
        changes: takes reports that a structural number becomes or ceases to be 0, and the waiting numbers.

    Attributes:
        vector: (numbers,), of float64 where the device has it. Its address stays.
        tensors: the 0-dim tensors from which steps read the numbers.
        written: the Python numbers that were written last; None after a tensor, and while the device writes.
        passed: numbers in tensors that a user passed, and may write to or share with other groups.
        exposed: elements of the vector that other code has, and may write to without a report.
        shown: numbers that users read as tensors.
        driven: numbers that a step or a graph writes, so that the host does not know them.
        inputs: the tensors that compiled code takes: the vector, then each tensor that was ever passed. They are vectors,
            since torch 2.13 traces a 0-dim float64 tensor of the CPU as a Python number.
        inputs_of: the index in ``inputs`` of each number that is not in the vector.
        followers: objects that know the addresses of ``tensors``: ``is_behind`` tells them of changes until they ``follow``.
    """

    def __init__(
        self,
        values: Sequence[float | Tensor],
        structural: Collection[int],
        device: torch.device,
        devices: Collection[torch.device],
        changes: Changes,
    ) -> None:
        self.changes, self._structural = changes, structural
        known = [without_wait(value) for value in values]
        self.vector = _on(device, [0.0 if isinstance(value, Tensor) else value for value in known])
        self._elements = [self.vector[i] for i in range(len(values))]  # `unbind` makes views that refuse writes
        self.tensors = [*self._elements]
        self.written = [None if isinstance(value, Tensor) else value for value in known]
        self.passed: set[int] = set()
        self.exposed: set[int] = set()
        self.shown: set[int] = set()
        self.driven: set[int] = set()
        self.inputs, self.inputs_of = [self.vector], dict[int, int]()  # not detached: all views need one base in a trace
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._versions: dict[int, int | None] = {}  # of passed and exposed tensors, after the last write from here
        self._fetched: dict[int, tuple[int | None, float]] = {}  # numbers that were read from the device, with versions
        self._replaced: dict[int, float] = {}  # negative numbers for which the tensors hold -0.0
        self._copies: dict[int, Tensor] = {}  # copies of driven numbers that users read last
        self._memories: dict[int, Any] = {}  # numbers as C variables at their tensors' last known addresses
        for i, (value, now) in enumerate(zip(values, known, strict=True)):
            if isinstance(value, Tensor) and value.is_floating_point() and value.device in devices:
                self._pass(i, value if value.dim() == 0 else value.reshape(()))
                self.shown.add(i)
            elif isinstance(value, Tensor):
                self.put(i, now)
                self.show_as(i, value)
        changes.numbers.add(self)

    def is_private(self, i: int) -> bool:
        """Return whether no other code has the tensor of a number."""
        return i not in self.exposed and i not in self.passed

    def certain(self, i: int) -> float | None:
        """Return the Python number that was written last; None after a tensor, or if other code may have written since."""
        if i in self.driven:
            return None
        if i in self.exposed or i in self.passed:
            known, version = self._versions[i], _version(self.tensors[i])
            return None if known is None or known != version else self.written[i]
        return self.written[i]

    def is_as_written(self, i: int) -> bool:
        """Return whether a number still is the one in :attr:`written`, maybe after a wait if other code may have written."""
        if (written := self.written[i]) is None or self.is_private(i):
            return written is not None
        if self.tensors[i].is_meta or is_lost(self.tensors[i]):
            return True
        if i not in self.passed and address(self.tensors[i]) != address(self.vector[i]):
            return True  # in the vector, which compiled code reads
        current = self.as_float(i)
        return current == written or (math.isnan(current) and math.isnan(written))

    def _meant(self, i: int, number: float) -> float:
        """Return the negative number for which a tensor holds ``number``; itself if it was not put there for one."""
        is_mark = number == 0 and i in self._replaced and math.copysign(1.0, number) < 0
        return self._replaced[i] if is_mark else number

    def known(self, i: int) -> float | None:
        """Return the Python number that was written or fetched last; None if only the device knows the current one."""
        if (memory := self._memory(i)) is not None:
            number, written = self._meant(i, memory.value), self.written[i]
            return written if number == written else number
        if self._is_on_host(self.tensors[i]):
            with suppress(RuntimeError, AssertionError):  # its memory was freed, or a mode makes all tensors fake
                return self._meant(i, self.tensors[i].item())
        if (certain := self.certain(i)) is not None or i in self.driven:
            return certain
        version, fetched = self._fetched.get(i, (None, math.nan))
        return None if version is None or version != self._version(i) else fetched

    def nonzero(self, i: int) -> bool:
        """Return whether a number may differ from 0: not if a Python 0 was written last. The device is not read."""
        return self.certain(i) != 0 or self.known(i) != 0

    def as_float(self, i: int) -> float:
        """Return a number, read from the device if the host does not know it."""
        return self._meant(i, self.tensors[i].item()) if (known := self.known(i)) is None else float(known)

    def value(self, i: int) -> float | Tensor:
        """Return the current number, as a tensor if only the device knows it; NaN for a tensor without memory."""
        tensor = self.tensors[i]
        if tensor.is_meta or is_lost(tensor) or is_fake(tensor) != is_fake(self.vector):
            return math.nan
        return tensor.detach() if (known := self.known(i)) is None else known

    def read(self, i: int, label: str) -> float | Tensor:
        """Return a tensor or a number for users, maybe after a wait. Raise ``ValueError`` if the storage was freed."""
        tensor = self.tensors[i]
        if i in self.shown:
            return tensor
        if i in self.driven:
            self.warn_of_lost_write(i, label)
            self._copies[i] = tensor.detach().clone()
            return self._copies[i]
        if (known := self.known(i)) is not None:
            return known
        if is_lost(tensor):
            raise ValueError(f"{label} is a tensor whose storage was freed; it has no value")
        if is_fake(tensor):
            return tensor.detach().clone()
        self._fetched[i] = self._version(i), self._meant(i, tensor.item())
        return self._fetched[i][1]

    def _version(self, i: int) -> int | None:
        """Return a number that each write by others changes; None if torch does not count them."""
        return 0 if self.is_private(i) else _version(self.tensors[i])

    def warn_of_lost_write(self, i: int, label: str) -> None:
        """Warn if other code wrote to the copy of a driven number that was read last."""
        copy = self._copies.get(i)
        if copy is not None and not copy.is_inference() and copy._version:
            del self._copies[i]
            warn_of_driven(label)

    def drive(self, i: int, *, begin: bool) -> None:
        """Note that the device begins or ceases to write a number. Afterwards the host does not know it."""
        if begin:
            if i in self.passed:
                self.put(i, without_wait(self.tensors[i]))
            send(self.changes)
        if begin or i in self.driven:
            self.written[i] = None
            for known in (self._copies, self._fetched, self._replaced):
                known.pop(i, None)
        (self.driven.add if begin else self.driven.discard)(i)
        if begin:
            self.shown.discard(i)

    def expose(self, i: int) -> None:
        """Note that other code gets the tensor of a number."""
        if self.is_private(i):
            if i in self._structural and not self.nonzero(i):
                self.changes.outdate_compiled("a hyperparameter of 0 that decides which buffers exist was handed out")
            self._versions[i] = _version(self.vector)
            self.exposed.add(i)
        self._fall_behind()
        send(self.changes)

    def show_as(self, i: int, element: object) -> None:
        """Let users read the tensor if the ``element`` that they passed is one, else the number."""
        if isinstance(element, Tensor) and i not in self.driven:
            self.shown.add(i)
            self.expose(i)
        else:
            self.shown.discard(i)

    def write(self, i: int, value: float | Tensor) -> None:
        """Set a number to ``value``, which may be a 1-element tensor on any device."""
        is_zero = not isinstance(value, Tensor) and value == 0
        is_watched = i in self._structural and self.changes.is_guarded and (self.certain(i) == 0) != is_zero
        what = "a hyperparameter that decides which buffers exist became 0, or is no longer 0"
        with self.changes.reported(what) if is_watched else nullcontext():
            self.written[i] = None  # until the end, in case of an interrupt
            self._replaced.pop(i, None)
            if isinstance(value, Tensor):
                self._fill(i, value)
            elif not self._wait(i, value):
                self._fill(i, value)
                self.written[i] = value

    def put(self, i: int, value: float | Tensor) -> None:
        """Let steps read a number from the vector, and no longer from a tensor that a user passed.

        A ``value`` that requires grad becomes such a tensor: a differentiable step reaches back through it. The vector gets
        the value while steps still read the other tensor, in case of an interrupt.
        """
        if isinstance(value, Tensor) and value.requires_grad:
            self._pass(i, value.reshape(()).to(self.vector.device, self.vector.dtype))
            return
        self._fall_behind()
        if i in self._structural:
            self.changes.outdate_compiled("a hyperparameter that decides which buffers exist was written")
        before = _version(self.vector)
        _copy_into(self._elements[i], value)
        self.note_write(before)
        self.written[i] = None
        self.tensors[i] = self._elements[i]
        for known in (self._memories, self._fetched, self._replaced):
            known.pop(i, None)
        if i in self.inputs_of:
            self.inputs[self.inputs_of[i]] = self.vector[i : i + 1]
        if i in self.exposed:
            self._versions[i] = _version(self.vector)
        self.passed.discard(i)
        self.shown.discard(i)
        self.written[i] = None if isinstance(value, Tensor) else value
        self._follow()

    def _pass(self, i: int, tensor: Tensor) -> None:
        """Let steps read a number from a ``tensor`` that a user passed."""
        self._fall_behind()
        self.written[i] = None
        for known in (self._memories, self._fetched, self._replaced):
            known.pop(i, None)
        self.tensors[i] = tensor
        self.changes.unsent.pop((self, i), None)
        self._versions[i] = _version(tensor)
        self.passed.add(i)
        if i not in self.inputs_of:
            self.inputs_of[i] = len(self.inputs)
            self.inputs.append(tensor)
            self.changes.outdate("a tensor was passed for a number, which compiled code takes")
        self.inputs[self.inputs_of[i]] = (tensor.detach() if tensor.requires_grad else tensor).view(1)
        self._follow()

    def _fall_behind(self) -> None:
        for follower in self.followers:
            follower.is_behind = True  # until it followed, in case of an interrupt

    def _follow(self) -> None:
        for follower in self.followers:
            follower.follow()

    def take_over(self, before: GroupNumbers) -> None:
        """Let users read as tensors those numbers that they read so ``before`` the group moved to another device."""
        self.shown, self.exposed = set(), set()
        for i in before.shown:
            self.show_as(i, before.tensors[i])
        self.followers = before.followers
        self._fall_behind()
        self._follow()

    def is_shared(self, i: int) -> bool:
        """Return whether the tensor of a number is also another one's, in this group or in another."""
        wanted = address(self.tensors[i])
        same = [(n, j) for n in [*self.changes.numbers] for j in [*n.passed] if address(n.tensors[j]) == wanted]
        return len(same) > 1

    def replace_negative(self, i: int) -> bool:
        """Let steps read -0.0 for a negative number, which users still read. Return whether one was written last.

        Its sign tells it from a 0 that other code writes.
        """
        if (number := self.written[i]) is None or not -math.inf < number < 0:
            return False
        if number != self._replaced.get(i):
            self.write(i, -0.0)
            self.written[i] = self._replaced[i] = number
        return True

    def quick_write(self, i: int, hyper: Hyper) -> QuickWrite:
        """Return what writes floats in range to private numbers of ``hyper``, from ``i`` on, as fast as schedulers expect.

        It is valid until one of them is put, passed or driven. The vector's version does not change.
        """
        least, most = hyper.span
        if hyper.is_tuple:
            return least, most, None, self.written, i, self.exposed, functools.partial(self._write_floats, i, hyper)
        write = functools.partial(self._write_float, i, least, most)
        return least, most, self._memories.get(i), self.written, i, self.exposed, write

    def _write_float(self, i: int, least: float, most: float, value: Any) -> bool:
        if type(value) is not float or not least <= value <= most:
            return False
        if (memory := self._memories.get(i)) is None or (self.exposed and self._memory(i) is not memory):
            return self._wait(i, value)
        memory.value = self.written[i] = value
        return True

    def _write_floats(self, start: int, hyper: Hyper, values: Any) -> bool:
        least, most = hyper.span
        fits = type(values) is tuple and len(values) == hyper.length
        fits = fits and all([type(value) is float and least <= value <= most for value in values])
        return fits and all([self._write_float(i, least, most, value) for i, value in enumerate(values, start)])

    def _wait(self, i: int, value: float) -> bool:
        """Keep a number on the host until the next step sends it. Return whether that is possible."""
        if self.changes.are_numbers_read or i in self.driven or not self.is_private(i):
            return False
        if (ask := CAPTURING.get(self.vector.device.type)) is None or ask() is not None:
            return False
        self.written[i] = None  # until it waits, in case of an interrupt
        self.changes.unsent[self, i] = value
        self._fetched.pop(i, None)
        self.written[i] = value
        return True

    def _fill(self, i: int, value: float | Tensor) -> None:
        self.changes.unsent.pop((self, i), None)
        self._fetched.pop(i, None)
        tensor, before = self.tensors[i], _version(self.vector) if self.exposed else None
        is_number = not (isinstance(value, Tensor) or tensor.is_inference())
        if is_number and (memory := self._memory(i)) is not None:
            increment_version(tensor)
            memory.value = value
        else:
            _copy_into(tensor, value)
        if self._versions and i not in self.passed:
            self.note_write(before)
        if i in self._versions:
            self._versions[i] = _version(tensor)

    def note_write(self, before: int | None, count: int = 1) -> None:
        """Note ``count`` writes from here into the vector, whose version was ``before``: no other code wrote in them."""
        for i in self.exposed - self.passed:
            if before is not None and self._versions[i] == before:
                self._versions[i] = before + count

    @staticmethod
    def _is_on_host(tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and "cpu" not in CAPTURING and type(tensor) is Tensor

    def _memory(self, i: int) -> Any:
        """Return a number as a C variable, to be used without torch; None if dtype or storage forbid that."""
        tensor, memory = self.tensors[i], self._memories.get(i)
        if memory is None and not self._is_on_host(tensor):
            return None
        where = tensor.data_ptr()
        if memory is None or ctypes.addressof(memory) != where:
            c_type = None if tensor.is_neg() or is_lost(tensor) else _C_TYPES.get(tensor.dtype)
            if c_type is None:
                return None
            self._memories[i] = memory = c_type.from_address(where)
        return memory


def send(changes: Changes, captures: Captures = (), asked: Sequence[torch.device] = ()) -> None:
    """Copy the waiting numbers to their vectors, in one copy per device. The host does not wait for it.

    Of the devices in ``asked``, those in ``captures`` are capturing a graph.
    """
    by_device: dict[torch.device, list[tuple[tuple[Any, int], float]]] = {}
    for where, number in list(changes.unsent.items()):
        by_device.setdefault(where[0].vector.device, []).append((where, number))
    for device, waiting in by_device.items():
        tensors = [numbers.tensors[i] for (numbers, i), _ in waiting]
        versions = {numbers: _version(numbers.vector) for (numbers, _), _ in waiting}
        counts = Counter(numbers for (numbers, _), _ in waiting)
        with as_fake_as(tensors[0]):
            captured = device in captures if device in asked else is_capturing(device)
            if captured:  # replays must not write these numbers again, and the device has finished all earlier work
                beside_graphs(lambda: [t.fill_(n) for t, (_, n) in zip(tensors, waiting, strict=True)])  # noqa: B023
            else:
                torch._foreach_copy_(tensors, list(_on(device, [number for _, number in waiting]).unbind()))
        for numbers, version in versions.items():
            numbers.note_write(version, counts[numbers])
        for where, number in waiting:  # skip numbers that were written since; safe if interrupted
            if changes.unsent.get(where) is number:
                del changes.unsent[where]


def _copy_into(tensor: Tensor, value: float | Tensor) -> None:
    with as_fake_as(tensor):
        live = tensor.detach() if tensor.requires_grad else tensor
        live.copy_(value.detach().reshape(())) if isinstance(value, Tensor) else live.fill_(value)


def _on(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """Return a vector of ``numbers`` on ``device``, without waiting for it."""
    host = torch.tensor(numbers, dtype=scalar_dtype(device), device="cpu")
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def without_wait(element: float | Tensor) -> float | Tensor:
    """Return the current value of ``element``: the number of a tensor on the host, a copy of a tensor on a device."""
    if not isinstance(element, Tensor) or element.requires_grad or is_fake(element):
        return element
    return element.item() if element.device.type == "cpu" else element.clone()


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
