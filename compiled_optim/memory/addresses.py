"""The addresses of many tensors and of their gradients, read in one call.

The call is C++ (``watch.cpp``) where a compiler works, and Python elsewhere; both have the same results.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compiled_optim.memory import cache
from compiled_optim.memory.layout import is_plain, local, overlap_shifted, part_placed_like
from compiled_optim.memory.torch_internals import (
    dispatch_key_of_subclasses,
    dispatch_keys,
    fakes_are_made,
    outside_fakes,
    zeros_without_memory,
)

EMPTY = 16  # stands for the address of a gradient without elements; 0 means that there is no gradient

# `look` returns two flags, and in the bits above them the version of the gradients' addresses.
_UNLIKE, _MOVED = 1, 2
_FLAG_BITS = 2

Longs: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Addresses:
    """The addresses and forms of tensors when this object is made, and the addresses of the gradients of some of them.

    The memory of the gradients is kept alive from :meth:`read` to :meth:`finish` if other code can run in between, on a
    thread or as a schedule, and free memory that a kernel is reading. The results of a read are recorded before it returns,
    so that an interrupt right after it loses nothing.

    All are dense tensors that do not wrap others. The gradients of ``others`` are not read. Kernels can read a gradient in
    place only if it has the dtype in ``grad_dtypes``, by default the tensor's.

    If ``tensors`` are the local parts of DTensors, the ``owners``, then their gradients are the local parts of the owners',
    which must be placed as these. One with another local part counts as moved. Both are told that they were written.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        grad_dtypes: Sequence[torch.dtype] | None = None,
        others: Sequence[Tensor] = (),
        owners: Sequence[Tensor] = (),
    ) -> None:
        dtypes = [t.dtype for t in tensors] if grad_dtypes is None else grad_dtypes
        # Of the last read: the gradients' addresses, 0 if missing or not readable in place; and which gradients exist.
        self.gradients: Longs = np.zeros(len(tensors), dtype=np.int64)
        self.present: Bytes = np.zeros(len(tensors), dtype=np.uint8)
        self._tensors, self._owners = [*tensors, *others], [*owners]  # kept alive: C++ reads them
        watched = (self._tensors, dtypes, self.gradients, self.present, self._owners)
        watch = _cpp_watch(*watched)
        self._watch = _PythonWatch(*watched) if isinstance(watch, str) else watch
        self.drawback = watch if isinstance(watch, str) else ""  # why Python reads them one by one; empty if C++ does
        self.read()

    def read(self, grads: list[Tensor | None] | None = None, *, others: bool = True, keep_alive: bool = False) -> None:
        """Read all addresses: of tensors, of ``grads``, by default the tensors' own, one per tensor, and of ``others``.

        With ``keep_alive`` the gradients are kept alive, since the user's code runs before :meth:`finish`.
        """
        flags = self._watch.look(grads, 0, len(self._tensors if others else self.gradients), keep_alive)
        self.moved = bool(flags & _MOVED)  # whether any tensor has another address or form than at first
        self.unlike = bool(flags & _UNLIKE)  # whether a gradient's dtype, strides, layout or device keep it from being read
        self.version = flags >> _FLAG_BITS  # grows whenever `gradients` changes

    def first_moved(self) -> int | None:
        """Return the index of the first of the tensors, and then the others, that :attr:`moved`; None if none did."""
        indices = range(len(self._tensors))
        return next((i for i in indices if self._watch.look(None, i, i + 1, False) & _MOVED), None)

    def others_moved(self) -> bool:
        """Return whether any of the others has another address or form than at first, for example after ``.data =``."""
        return bool(self._watch.look(None, len(self.gradients), len(self._tensors), False) & _MOVED)

    def finish(self) -> None:
        """Release the gradients, and tell autograd that the tensors with gradients were written."""
        self._watch.finish()

    def set_written(self, written: Sequence[bool]) -> None:
        """Set for each tensor whether :meth:`finish` reports it as written, instead of those with gradients."""
        self._written: Bytes = np.array(written, dtype=np.uint8)  # kept alive: C++ reads it later
        self._watch.set_written(self._written)


class _CppWatch(NamedTuple):
    """The functions of the C++ reader, which reads torch's own objects."""

    look: Callable[[list[Tensor | None] | None, int, int, bool], int]
    finish: Callable[[], None]
    set_written: Callable[[Bytes], None]
    sharding: Longs  # kept alive: C++ reads it


def _cpp_watch(
    tensors: list[Tensor], dtypes: Sequence[torch.dtype], gradients: Longs, present: Bytes, owners: list[Tensor]
) -> _CppWatch | str:
    """Return the C++ reader of ``tensors``, or why none can. The first, one per item of ``dtypes``, may have gradients."""
    result = reader()
    if isinstance(result, str):
        return result
    offset, functions = result
    are_known = [_word(t, offset) for t in [*tensors, *owners]] == [t._cdata for t in [*tensors, *owners]]
    if not are_known or (sharding := _sharding(tensors, owners)) is None:
        return "they are no such objects as torch's tensors are, or DTensors of several classes"
    examples = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in dtypes}
    objects = np.array([id(t) + offset for t in tensors], dtype=np.int64)
    kinds = np.array([id(examples[dtype]) + offset for dtype in dtypes], dtype=np.int64)
    pointers = [array.ctypes.data if len(array) else None for array in (kinds, gradients, present, sharding)]
    capsule = functions.make_watch(offset, len(tensors), objects.ctypes.data, len(dtypes), *pointers)
    if capsule is None:
        return ""  # they have no memory, as fake ones: their steps take no time
    return _CppWatch(
        lambda grads, first, end, keep_alive: functions.look(capsule, grads, first, end, keep_alive),
        lambda: functions.finish(capsule),
        lambda written: functions.set_written(capsule, written.ctypes.data),
        sharding,
    )


def _word(object: object, offset: int) -> int:
    return ctypes.c_uint64.from_address(id(object) + offset).value


def _sharding(tensors: list[Tensor], owners: list[Any]) -> Longs | None:
    """Return a ``Sharding`` of ``watch.cpp``, nothing without ``owners``; None if they are not all as it expects."""
    if not owners:
        return np.zeros(0, dtype=np.int64)
    kind = type(owners[0])
    held = [(kind, tensor, owner._spec) for tensor, owner in zip(tensors, owners, strict=False)]
    words = [_word(owners[0], offset) for offset in range(0, kind.__basicsize__, 8)]
    if any(words.count(id(value)) != 1 for value in held[0]):
        return None
    at = [8 * words.index(id(value)) for value in held[0]]
    is_as_first = [[_word(o, offset) for offset in at] == [*map(id, values)] for o, values in zip(owners, held, strict=True)]
    return np.array([id(kind), id(Tensor), *at, *map(id, owners)], dtype=np.int64) if all(is_as_first) else None


class _PythonWatch:
    """The reader in Python, for machines that cannot compile. It always keeps the gradients alive."""

    def __init__(
        self, tensors: list[Tensor], dtypes: Sequence[torch.dtype], gradients: Longs, present: Bytes, owners: list[Tensor]
    ) -> None:
        self._tensors, self._dtypes, self._gradients, self._present = tensors, dtypes, gradients, present
        self._owners = owners
        self._forms = _forms(tensors)
        self._kept_alive: list[Tensor | None] = []
        self._version = 0
        self.set_written(present)

    def look(self, grads: list[Tensor | None] | None, first: int, end: int, keep_alive: bool) -> int:
        flags = 0 if _forms(self._tensors[first:end]) == self._forms[first:end] else _MOVED
        pairs = zip(self._owners[first:end], self._tensors[first:end], strict=False)
        flags |= 0 if all(local(owner) is tensor for owner, tensor in pairs) else _MOVED
        if first:
            return flags
        tensors = self._tensors[: len(self._dtypes)]
        present = list(map(gradient, self._owners or tensors)) if grads is None else grads
        self._kept_alive = list(map(part_placed_like, present, self._owners)) if grads is None and self._owners else present
        addresses = [0] * len(tensors)
        for i, (tensor, dtype, grad) in enumerate(zip(tensors, self._dtypes, self._kept_alive, strict=True)):
            if grad is not None and _has_form_of(grad, tensor, dtype):
                addresses[i] = grad.data_ptr() or EMPTY
            elif present[i] is not None:
                flags |= _UNLIKE
        self._present[:] = [grad is not None for grad in present]
        if addresses != self._gradients.tolist():
            self._version += 1
            self._gradients[:] = addresses
        return self._version << _FLAG_BITS | flags

    def finish(self) -> None:
        for tensors in (self._tensors[: len(self._written)], self._owners):
            pairs = zip(tensors, self._written.tolist(), strict=False)
            torch.autograd.graph.increment_version([tensor for tensor, is_written in pairs if is_written])
        self._kept_alive = []

    def set_written(self, written: Bytes) -> None:
        self._written = written


def gradient(tensor: Tensor) -> Tensor | None:
    """Return the gradient of ``tensor``. A non-leaf that keeps none is not read, since torch warns about that."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _forms(tensors: Sequence[Tensor]) -> list[object]:
    """Return the properties of tensors that must not change for them to count as unmoved."""
    return [(t.data_ptr(), t.dtype, t.shape, t.stride(), is_plain(t)) for t in tensors]


def _has_form_of(grad: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        grad.layout is torch.strided
        and grad.dtype == dtype
        and grad.device == tensor.device
        and grad.shape == tensor.shape
        and grad.stride() == tensor.stride()
        and is_plain(grad)
        and not overlap_shifted(grad, tensor)
    )


@functools.cache
def reader() -> tuple[int, Any] | str:
    """Return the offset in a tensor's Python object of the pointer to torch's, and the C++ functions; or why they fail.

    They are compiled once per machine and layout of torch's objects.
    """
    if sys.platform != "linux" or not cache.compiler():
        return "no C++ compiler was found"
    # The pointer is found by its value, so that the object may have any layout in this version of torch. The examples are
    # real CPU tensors even where new tensors are others: on the meta device, on a GPU, or in FakeTensorMode.
    with torch.device("cpu"), outside_fakes() if fakes_are_made() else contextlib.nullcontext():
        example = torch.empty(0)
        words = (ctypes.c_uint64 * (Tensor.__basicsize__ // 8)).from_address(id(example))
        offsets = [8 * i for i, word in enumerate(words) if word == example._cdata]
        layout = _offsets()
    if len(offsets) != 1 or layout is None:
        return "this version of torch is not understood"
    constants = {"SEEN_UNLIKE": _UNLIKE, "SEEN_MOVED": _MOVED, "FLAG_BITS": _FLAG_BITS, "NO_ELEMENTS": EMPTY, **layout}
    flags = [f"-D{name}={value}" for name, value in constants.items()]
    source = Path(__file__).with_name("watch.cpp").read_text(encoding="utf-8")
    try:
        library = cache.library(source, flags, ctypes.PyDLL)
    except cache.CompilerError as error:
        return str(error)
    thing, pointer, integer = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, tuple[Any, ...]] = {
        "make_watch": (thing, integer, integer, pointer, integer, pointer, pointer, pointer, pointer),
        "look": (integer, thing, thing, integer, integer, integer),
        "finish": (None, thing),
        "set_written": (None, thing, pointer),
        "missing_function": (ctypes.c_char_p,),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if (name := library.missing_function()) is not None:
        return f"this version of torch has no {name.decode()}"
    return offsets[0], library


def _offsets() -> dict[str, int] | None:
    """Return the offsets in torch's objects that watch.cpp reads, found by value in several tensors; None if ambiguous.

    In a tensor: its storage, its Python object, its number of dimensions with the sizes behind, and last its dispatch keys.
    Some of these mean that its elements differ from its memory. In a storage: the address, and behind it the size.
    """
    complex_numbers = torch.zeros(3, 5, 7, dtype=torch.complex64)
    tensors = [torch.zeros(3, 5, 7), complex_numbers, torch.from_numpy(np.zeros((3, 5, 7)))]
    others = [complex_numbers.conj(), complex_numbers.conj().imag, zeros_without_memory(2)]
    keys = [dispatch_keys(t) for t in (*tensors, *others)]
    at = {
        "STORAGE_AT": _offset_of([(t._cdata, [t.untyped_storage()._cdata]) for t in tensors]),
        "PYTHON_AT": _offset_of([(t._cdata, [id(t)]) for t in tensors]),
        "FORM_AT": _offset_of([(t._cdata, [3, 3, 5, 7]) for t in tensors]),
        "KEYS_AT": _offset_of([(t._cdata, [k]) for t, k in zip((*tensors, *others), keys, strict=True)]),
        "DATA_AT": _offset_of([(t.untyped_storage()._cdata, [t.data_ptr()]) for t in tensors], 11),
        "NBYTES_AT": _offset_of([(t.untyped_storage()._cdata, [t.untyped_storage().nbytes()]) for t in tensors], 11),
    }
    at["OTHER_KEYS"] = (keys[3] | keys[4] | keys[5]) & ~(keys[0] | keys[1]) | dispatch_key_of_subclasses()
    is_in_order = at["STORAGE_AT"] < at["FORM_AT"] < at["KEYS_AT"] and at["DATA_AT"] < at["NBYTES_AT"]
    return at if is_in_order and min(at.values()) > 0 else None


def _offset_of(examples: Sequence[tuple[int, list[int]]], reach: int = 23) -> int:
    """Return the offset of each object's values from its address; 0 unless its first ``reach`` words have them once."""
    words = [(list((ctypes.c_uint64 * reach).from_address(address)), values) for address, values in examples]
    offsets = [{i for i in range(1, reach) if object_words[i : i + len(values)] == values} for object_words, values in words]
    common = set.intersection(*offsets)
    return 8 * common.pop() if len(common) == 1 else 0
