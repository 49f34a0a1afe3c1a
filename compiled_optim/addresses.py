"""Where many tensors lie, read in one call."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compiled_optim.lowering import cpp_library
from compiled_optim.torch_internals import data_ptr_function

_ADDRESS: Callable[..., int] = Tensor.data_ptr

_READER = """\
#include <cstdint>

extern "C" int32_t read_addresses(void* tensors, int64_t count, void* (*item)(void*, int64_t), void* (*address)(void*),
                                  int64_t* values) {
  int32_t changed = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t value = reinterpret_cast<int64_t>(address(item(tensors, i)));
    changed |= value != values[i];
    values[i] = value;
  }
  return changed;
}
"""


class Addresses:
    """The addresses of a fixed number of tensors with storage; 0 for an empty one.

    Attributes:
        values: (tensors,) int64 on the CPU.
    """

    def __init__(self, count: int) -> None:
        self.values = torch.zeros(count, dtype=torch.int64)
        self._memory = self.values.data_ptr()

    def read(self, tensors: Sequence[Tensor]) -> bool:
        """Read the addresses of ``tensors``, all of them dense; whether any is another than last time."""
        assert len(tensors) == len(self.values)
        if (reader := _reader()) is None:
            return self.set(list(map(_ADDRESS, tensors)))
        function, *helpers = reader
        return bool(function(tensors, len(tensors), *helpers, self._memory))

    def set(self, values: Sequence[int]) -> bool:
        """Take ``values``; whether any is another than last time."""
        row = self.values.numpy()
        changed: bool = row.tolist() != list(values)
        row[:] = values
        return changed


@functools.cache
def _reader() -> tuple[Callable[..., int], int, int] | None:
    """A function in C++ with the two that it calls; None without a compiler or where torch does not offer what it needs."""
    address = data_ptr_function()
    if address is None or sys.platform != "linux" or cpp_library.compiler() is None:
        return None
    function = ctypes.PyDLL(str(cpp_library.library(_READER))).read_addresses  # PyDLL: the interpreter stays locked
    function.argtypes = [ctypes.py_object, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int32
    item = ctypes.cast(ctypes.pythonapi.PyList_GetItem, ctypes.c_void_p).value
    assert item is not None
    return function, item, address
