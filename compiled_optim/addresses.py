"""Where many tensors and their gradients lie, read in one call."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from compiled_optim.lowering import cpp_library
from compiled_optim.lowering.layout import is_plain
from compiled_optim.sharding import is_sharded, local
from compiled_optim.torch_internals import build_identity, pointer_offset

EMPTY = 16  # the address of an empty gradient, which has none: 0 says that there is no gradient
_UNLIKE, _MOVED, _RENEWED, _NOT_PLAIN = 1, 2, 4, 8

Look: TypeAlias = Callable[[list[Tensor | None] | None, bool], int]
"""Looks at tensors and their gradients, or those given; says what it saw, and learns where the tensors are if asked to."""

_SOURCE = f"""\
// For the headers of torch {torch.__version__}
#include <ATen/core/Tensor.h>

using Impl = c10::TensorImpl;

extern "C" char* PyList_GetItem(char* list, int64_t index);
extern "C" char _Py_NoneStruct;

static bool is_plain(const Impl& t) {{
  constexpr c10::DispatchKeySet other{{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                      c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python}};
  return t.has_storage() && !t.key_set().has_any(other);
}}

static int64_t form_of(const Impl& t) {{
  auto form = static_cast<uint64_t>(t.dtype().toScalarType());
  for (const auto& extents : {{t.sizes(), t.strides()}})
    for (const int64_t extent : extents) form = (form ^ static_cast<uint64_t>(extent)) * 0x9E3779B97F4A7C15u;
  return static_cast<int64_t>(form);
}}

extern "C" int32_t read_tensors(int64_t count, Impl* const* const* tensors, Impl* const* const* examples,
                                int64_t* addresses, int64_t* forms, int64_t* gradients, char* given, int64_t offset,
                                int32_t learns) try {{
  const bool own = given == &_Py_NoneStruct;
  int32_t seen = 0;
  for (int64_t i = 0; i < count; i++) {{
    Impl& t = **tensors[i];
    if (!is_plain(t)) return {_MOVED | _NOT_PLAIN};
    const auto address = reinterpret_cast<int64_t>(t.mutable_data());
    const int64_t form = form_of(t);
    if (learns) {{
      addresses[i] = address;
      forms[i] = form;
    }} else if (address != addresses[i] || form != forms[i]) {{
      seen |= {_MOVED};
    }}
    int64_t found = 0;
    const Impl* gradient = nullptr;
    if (own) {{
      if (t.grad().defined()) gradient = t.grad().unsafeGetTensorImpl();
    }} else if (char* item = PyList_GetItem(given, i); item != &_Py_NoneStruct) {{
      gradient = *reinterpret_cast<Impl**>(item + offset);
    }}
    if (gradient) {{
      const Impl& g = *gradient;
      if (is_plain(g) && g.dtype() == (*examples[i])->dtype() && g.device() == t.device() && g.sizes() == t.sizes() &&
          g.strides() == t.strides()) {{
        found = reinterpret_cast<int64_t>(g.data());
        if (!found) found = {EMPTY};
      }} else {{
        seen |= {_UNLIKE};
      }}
    }}
    if (found != gradients[i]) seen |= {_RENEWED};
    gradients[i] = found;
  }}
  return seen;
}} catch (...) {{
  return {_MOVED | _NOT_PLAIN};
}}

extern "C" void count_versions(int64_t count, Impl* const* const* tensors, const int64_t* written) {{
  for (int64_t i = 0; i < count; i++)
    if (written[i]) (**tensors[i]).bump_version();
}}
"""


class Addresses:
    """Where tensors lie, and in which form; and where their gradients do.

    Args:
        tensors: dense ones; of DTensors the local shards are looked at, and no gradients.
        grad_dtypes: what a gradient has to be, to be read where it lies; the tensor's own by default.

    Attributes:
        values: (tensors,) int64: the addresses when this object was made.
        moved: whether a tensor was last seen elsewhere than then, or in another form.
        gradients: (tensors,) int64: the gradients' addresses when they were last read; 0 for a missing one, and
            for one that is to be asked itself.
        unlike: whether one is to be asked itself, since its dtype, strides or layout are not as expected.
        version: another number whenever ``gradients`` changed.
        written: (tensors,) int64, for :meth:`count_versions`.
        refusal: why plain tensors are looked at one by one in Python; empty if they are not.
    """

    def __init__(self, tensors: Sequence[Tensor], grad_dtypes: Sequence[torch.dtype] | None = None) -> None:
        self._tensors = list(tensors)
        self._grad_dtypes = [t.dtype for t in tensors] if grad_dtypes is None else list(grad_dtypes)
        self._sharded = any(map(is_sharded, tensors))
        self.values, self._forms, self.gradients, self.written = (np.zeros(len(tensors), dtype=np.int64) for _ in range(4))
        self.version = 0
        self.refusal = ""
        self._count: Callable[[], object] | None = None
        self._look = self._in_one_call() or self._one_by_one
        self._look(None, True)
        self.read()

    def read(self, grads: list[Tensor | None] | None = None) -> None:
        """Look at all tensors, and at their gradients or ``grads`` in their place."""
        seen = self._look(grads, False)
        self.moved = bool(seen & _MOVED)
        self.unlike = bool(seen & _UNLIKE)
        self.version += bool(seen & _RENEWED)

    def count_versions(self) -> None:
        """Let autograd know that the tensors where ``written`` is not 0 were written."""
        if self._count is None:
            tensors = [t for t, is_written in zip(self._tensors, self.written.tolist(), strict=True) if is_written]
            torch.autograd.graph.increment_version(tensors)
        else:
            self._count()

    def _in_one_call(self) -> Look | None:
        if self._sharded:
            return None
        functions, offset = reader(), pointer_offset()
        if isinstance(functions, str) or offset is None:
            self.refusal = functions if isinstance(functions, str) else "this version of torch is not understood"
            return None
        function, count_versions = functions
        examples = {dtype: torch.empty(0, dtype=dtype) for dtype in self._grad_dtypes}
        pointers = [np.array([id(t) + offset for t in self._tensors], dtype=np.int64)]
        pointers += [np.array([id(examples[d]) + offset for d in self._grad_dtypes], dtype=np.int64)]
        held = (*pointers, self.values, self._forms, self.gradients)
        arguments = (len(self._tensors), *(row.ctypes.data for row in held))

        def look(grads: list[Tensor | None] | None, learns: bool, _held: object = (held, examples)) -> int:
            return function(*arguments, grads, offset, learns)

        understood = all(ctypes.c_uint64.from_address(id(t) + offset).value == t._cdata for t in self._tensors)
        if not understood or look(None, True) & _NOT_PLAIN:
            return None
        if not any(t.is_inference() for t in self._tensors):  # which have no version
            written = self.written.ctypes.data
            self._count = functools.partial(count_versions, len(self._tensors), pointers[0].ctypes.data, written)
        return look

    def _one_by_one(self, grads: list[Tensor | None] | None, learns: bool) -> int:
        tensors = list(map(local, self._tensors)) if self._sharded else self._tensors
        values = [t.data_ptr() for t in tensors]
        forms = [hash((t.dtype, t.shape, t.stride())) for t in tensors]
        if learns:
            self.values[:], self._forms[:] = values, forms
        seen = _MOVED * (values != self.values.tolist() or forms != self._forms.tolist())
        if self._sharded:
            return seen | _UNLIKE
        gradients = [0] * len(tensors)
        for i, (tensor, dtype) in enumerate(zip(tensors, self._grad_dtypes, strict=True)):
            if (found := gradient(tensor) if grads is None else grads[i]) is not None:
                if _lies_like(found, tensor, dtype):
                    gradients[i] = found.data_ptr() or EMPTY
                else:
                    seen |= _UNLIKE
        if gradients != self.gradients.tolist():
            self.gradients[:] = gradients
            seen |= _RENEWED
        return seen


def gradient(tensor: Tensor) -> Tensor | None:
    """The gradient of ``tensor``; a non-leaf without one is not asked, since torch warns about that."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _lies_like(grad: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        grad.layout is torch.strided
        and grad.dtype == dtype
        and grad.shape == tensor.shape
        and grad.stride() == tensor.stride()
        and is_plain(grad)
    )


@functools.cache
def reader() -> tuple[Callable[..., int], Callable[..., None]] | str:
    """The functions in C++ that look at tensors and count their versions, compiled once per machine and build of torch.

    Or why there are none.
    """
    if sys.platform != "linux" or not cpp_library.compiler():
        return "no C++ compiler was found"
    torch_directory = Path(torch.__file__).parent
    flags = (f"-I{torch_directory / 'include'}", f"-L{torch_directory / 'lib'}", "-lc10", "-ltorch_cpu")
    try:
        library = cpp_library.library(f"// {build_identity()}\n{_SOURCE}", ("-std=c++20", *flags), ctypes.PyDLL)
    except cpp_library.CompilerError as error:
        return str(error)
    read, count = library.read_tensors, library.count_versions
    read.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.py_object, ctypes.c_int64, ctypes.c_int32]
    read.restype = ctypes.c_int32
    count.argtypes, count.restype = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p], None
    return read, count
