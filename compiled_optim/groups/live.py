"""A number of a hyperparameter where kernels read it, and what the host knows of it."""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from compiled_optim.groups.watched import Changes
from compiled_optim.memory.layout import is_lost
from compiled_optim.torch_internals import CAPTURING, fakes_are_made, is_fake, outside_fakes

_C_TYPES: dict[torch.dtype, Any] = {torch.float64: ctypes.c_double, torch.float32: ctypes.c_float}


class Live:
    """One number of a hyperparameter in a 0-dim tensor, which compiled steps and captured graphs read where it lies.

    Args:
        tensor: the tensor.
        number: what it holds, where the host knows; None where it does not.
        is_adopted: whether a user gave the tensor, and may write to it or share it with other groups.

    Attributes:
        groups: those that an adopted tensor stands in, by their ids.
        changes: where to report that the number became 0 or ceased to be; None where that shapes no step.
        is_handed_out: whether somebody has the tensor, and may write to it without a report.
        is_driven: whether the device writes the number by itself, in a step or a graph, so that the host never knows it.
    """

    def __init__(self, tensor: Tensor, number: float | None = None, *, is_adopted: bool = False) -> None:
        self.tensor = tensor
        self.is_adopted = is_adopted
        self.groups: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.changes: Changes | None = None
        self.is_driven = False
        self.is_handed_out = is_adopted
        self._on_host = tensor.device.type == "cpu" and "cpu" not in CAPTURING and type(tensor) is Tensor
        self._found: tuple[int, Any] = (-1, None)  # where the tensor lay, and its number there
        self._written = number
        self._version = _version(tensor)

    @property
    def written(self) -> float | None:
        """The Python number that was written last; None if that was a tensor, or if somebody else may have written."""
        version = _version(self.tensor)
        return None if self.is_driven or version is None or self._version != version else self._written

    def value(self) -> float | Tensor:
        """The number as it is now, in a tensor where only the device knows it; NaN where a tensor without memory stands."""
        if self.tensor.is_meta or is_lost(self.tensor):
            return math.nan
        known = self.number
        return self.tensor.detach() if known is None else known

    def as_float(self) -> float:
        """The number, from the device where only that knows it."""
        known = self.number
        return self.tensor.item() if known is None else known

    @property
    def number(self) -> float | None:
        """The number; None where only the device knows it. The host waits for nothing."""
        if not self._on_host:
            return self.written
        if (memory := self._memory()) is not None:
            number: float = memory.value
            return number
        try:
            return self.tensor.item()
        except (RuntimeError, AssertionError):  # its memory was freed, or a mode makes fakes of all
            return self.written

    def _memory(self) -> Any:
        """The number as C has it, to be read and written without an operator of torch; None where it cannot be."""
        address, memory = self._found  # one object, whatever another thread finds meanwhile
        if self.tensor.data_ptr() == address:
            return memory
        tensor, address = self.tensor, self.tensor.data_ptr()
        c_type = None if tensor.is_neg() or is_lost(tensor) else _C_TYPES.get(tensor.dtype)
        if c_type is None:
            return None
        memory = c_type.from_address(address)
        self._found = address, memory
        return memory

    def drive(self, is_driven: bool) -> None:
        """Note whether the device writes by itself; what it wrote, the host does not know afterwards."""
        if self.is_driven or is_driven:
            self._written = None
        self.is_driven = is_driven

    @property
    def nonzero(self) -> bool:
        """Whether the number may differ from 0: unless a Python 0 was written, and nothing since. The device is not read."""
        return self.written != 0 or self.number not in (0, None)

    def hand_out(self) -> None:
        """Note that somebody gets the tensor."""
        if self.changes is not None and not (self.is_handed_out or self.nonzero):
            self.changes.pending |= self.changes.is_guarded
        self.is_handed_out = True

    def rounds(self, value: float | Tensor) -> bool:
        """Whether a user's tensor would hold another number where ``value``, a number, is written."""
        if not self.is_adopted or isinstance(value, Tensor) or math.isnan(value):
            return False
        return torch.tensor(value, dtype=self.tensor.dtype, device="cpu").item() != value

    def write(self, value: float | Tensor) -> None:
        """Let the number be ``value``, which may be a 1-element tensor on any device, by one operation on the device."""
        is_asked = self.changes is not None and self.changes.is_guarded
        if self.changes is None or not is_asked or (self.written == 0) == (not isinstance(value, Tensor) and value == 0):
            self._write(value)
            return
        self.changes.pending = True
        self._write(value)
        self.changes.pending = True  # another thread may have rebuilt in between

    def _write(self, value: float | Tensor) -> None:
        self._written = None  # until the end, whatever interrupts it
        if (
            self._on_host
            and not isinstance(value, Tensor)
            and not self.tensor.is_inference()
            and (memory := self._memory()) is not None
        ):
            increment_version(self.tensor)
            memory.value = value
            self._version, self._written = self.tensor._version, value
            return
        with outside_fakes() if fakes_are_made() and not is_fake(self.tensor) else nullcontext():
            live = self.tensor.detach() if self.tensor.requires_grad else self.tensor
            if isinstance(value, Tensor):
                live.copy_(value.detach().reshape(()))
                return
            live.fill_(value)
        self._version = _version(self.tensor)
        self._written = value


def _version(tensor: Tensor) -> int | None:
    """How often ``tensor`` was written; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def address(tensor: Tensor) -> int:
    """Where a tensor lies; another number for each tensor without memory, and for a fake one, which must not be asked."""
    return (0 if is_fake(tensor) else tensor.data_ptr()) or -id(tensor)
