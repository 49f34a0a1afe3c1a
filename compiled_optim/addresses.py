"""Where many tensors and their gradients lie, looked at in one call."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compiled_optim.lowering import cpp_library
from compiled_optim.lowering.layout import is_plain, overlap_shifted
from compiled_optim.torch_internals import build_identity, pointer_offset

EMPTY = 16
"""The address of a gradient without elements, which has none: 0 says that there is no gradient."""

_UNLIKE, _MOVED = 1, 2
_FLAGS = 2  # bits, below the version, in what a look returns

_SOURCE = f"""\
// For the headers of torch {torch.__version__}
#include <ATen/core/Tensor.h>

#include <cstring>
#include <memory>
#include <vector>

using Impl = c10::TensorImpl;

extern "C" {{  // of Python, whose headers may be missing
char* PyList_GetItem(char* list, int64_t index);
void* PyInterpreterState_Get();
void* PyInterpreterState_ThreadHead(void* interpreter);
void* PyThreadState_Next(void* thread);
char* PyCapsule_New(void* pointer, const char* name, void (*destructor)(char*));
void* PyCapsule_GetPointer(char* capsule, const char* name);
void Py_IncRef(char* object);
extern char _Py_NoneStruct;
}}

struct Form {{  // a tensor as it was when the watch was made
  Impl* const* object;
  const void* address;
  const int64_t* extents;  // sizes, then strides
  int64_t dim;
  int64_t numel;
  int64_t span;  // elements from the first to behind the last
  int64_t bytes;  // the same in bytes
  c10::ScalarType dtype, grad_dtype;
}};

struct Watch {{
  std::vector<Form> forms;
  std::vector<int64_t> extents;
  std::vector<c10::Storage> held;  // gradients that a kernel may be reading while other code runs
  int64_t with_gradient;
  int64_t* gradients;
  char* present;
  const char* written;
  int64_t version;
}};

static bool is_plain(const Impl& t) {{
  constexpr c10::DispatchKeySet other{{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                      c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python}};
  return t.has_storage() && !t.key_set().has_any(other);
}}

static bool lies_as(const Impl& t, const Form& form, c10::ScalarType dtype) {{
  if (t.dim() != form.dim || t.dtype().toScalarType() != dtype) return false;
  const int64_t *sizes = t.sizes().data(), *strides = t.strides().data();
  bool equal = true;
  for (int64_t d = 0; d < form.dim; d++)
    equal &= sizes[d] == form.extents[d] & strides[d] == form.extents[form.dim + d];
  return equal;
}}

static bool has_memory(const Impl& t, const Form& form) {{  // a storage can be shorter than a tensor in it
  return !form.numel || (t.storage_offset() + form.span) * t.itemsize() <= t.unsafe_storage().nbytes();
}}

static bool has_other_threads() {{
  return PyThreadState_Next(PyInterpreterState_ThreadHead(PyInterpreterState_Get()));
}}

static bool overlaps(const Impl& g, const Form& form) {{  // all elements with the same ones are no matter
  const auto *start = static_cast<const char*>(g.data()), *own = static_cast<const char*>(form.address);
  return start != own && start < own + form.bytes && own < start + form.span * g.itemsize();
}}

static void prefetch(const std::vector<Form>& forms, int64_t i, int64_t end) {{
  if (i + 16 < end) __builtin_prefetch(forms[i + 16].object);
  if (i + 8 < end) {{
    const auto* t = reinterpret_cast<const char*>(*forms[i + 8].object);
    for (size_t line = 0; line < sizeof(Impl); line += 64) __builtin_prefetch(t + line);
  }}
  if (i + 4 < end) __builtin_prefetch((**forms[i + 4].object).unsafe_storage().unsafeGetStorageImpl());
}}

static Watch* in(char* capsule) {{ return static_cast<Watch*>(PyCapsule_GetPointer(capsule, nullptr)); }}

static void destroy(char* capsule) {{ delete in(capsule); }}

static char* none() {{
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}}

extern "C" char* make_watch(int64_t count, Impl* const* const* tensors, int64_t with_gradient,
                            Impl* const* const* examples, int64_t* gradients, char* present) try {{
  auto watch = std::make_unique<Watch>();
  size_t size = 0;
  for (int64_t i = 0; i < count; i++) size += 2 * (**tensors[i]).dim();
  watch->extents.reserve(size);
  for (int64_t i = 0; i < count; i++) {{
    Impl& t = **tensors[i];
    if (!is_plain(t)) return none();
    const int64_t* extents = watch->extents.data() + watch->extents.size();
    for (const auto& part : {{t.sizes(), t.strides()}})
      watch->extents.insert(watch->extents.end(), part.begin(), part.end());
    const auto dtype = t.dtype().toScalarType();
    const auto grad_dtype = i < with_gradient ? (*examples[i])->dtype().toScalarType() : dtype;
    int64_t span = 1;
    for (int64_t d = 0; d < t.dim(); d++) span += (t.sizes()[d] - 1) * t.strides()[d];
    const int64_t bytes = t.numel() ? span * t.itemsize() : 0;
    watch->forms.push_back(
        {{tensors[i], t.mutable_data(), extents, t.dim(), t.numel(), span, bytes, dtype, grad_dtype}});
  }}
  watch->with_gradient = with_gradient;
  watch->gradients = gradients;
  watch->present = present;
  watch->written = present;
  watch->version = 0;
  return PyCapsule_New(watch.release(), nullptr, destroy);
}} catch (...) {{
  return none();
}}

extern "C" int64_t look(char* capsule, char* given, int64_t offset, int64_t first, int64_t end, int64_t hold) {{
  Watch* watch = in(capsule);
  const bool own = given == &_Py_NoneStruct;
  const auto& forms = watch->forms;
  if (hold || has_other_threads()) watch->held.resize(watch->with_gradient);
  int64_t seen = 0;
  bool renewed = false;
  for (int64_t i = first; i < end; i++) try {{
    prefetch(forms, i, end);
    const Form& form = forms[i];
    Impl& t = **form.object;
    if (!is_plain(t) || t.mutable_data() != form.address || !lies_as(t, form, form.dtype)) seen |= {_MOVED};
    if (i >= watch->with_gradient) continue;
    const Impl* gradient = nullptr;
    if (own) {{
      if (t.grad().defined()) gradient = t.grad().unsafeGetTensorImpl();
    }} else if (char* item = PyList_GetItem(given, i); item != &_Py_NoneStruct) {{
      gradient = *reinterpret_cast<Impl**>(item + offset);
    }}
    int64_t found = 0;
    if (gradient) {{
      const Impl& g = *gradient;
      if (is_plain(g) && g.device() == t.device() && lies_as(g, form, form.grad_dtype) && has_memory(g, form) &&
          !overlaps(g, form)) {{
        found = form.numel ? reinterpret_cast<int64_t>(g.data()) : {EMPTY};
        if (!watch->held.empty()) watch->held[i] = g.storage();
      }} else {{
        seen |= {_UNLIKE};
      }}
    }}
    watch->present[i] = gradient != nullptr;
    renewed |= found != watch->gradients[i];
    watch->gradients[i] = found;
  }} catch (...) {{
    seen |= {_MOVED};
  }}
  watch->version += renewed;
  return watch->version << {_FLAGS} | seen;
}}

extern "C" void finish(char* capsule) {{
  Watch* watch = in(capsule);
  for (int64_t i = 0; i < watch->with_gradient; i++) {{
    Impl& t = **watch->forms[i].object;
    if (watch->written[i] && !t.is_inference()) t.bump_version();
  }}
  watch->held.clear();
}}

extern "C" void mark_written(char* capsule, const char* written) {{ in(capsule)->written = written; }}
"""

Longs: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Watch(Protocol):
    """Looks at tensors and, for the first of them, at their gradients.

    It keeps the memory of the gradients that it found until :meth:`finish` where other code runs meanwhile, on other threads
    or as a schedule, so that nobody frees what a kernel is reading. What a look finds out is recorded before it returns, so
    that an interrupt right after it loses nothing.
    """

    def look(self, grads: list[Tensor | None] | None, first: int, end: int, hold: bool) -> int:
        """Look at the tensors from ``first`` to ``end``, and at ``grads`` or their own gradients.

        ``hold`` says that code of the user's runs before :meth:`finish`.

        Returns:
            Flags and, above them, the gradients' version.
        """

    def finish(self) -> None:
        """Let go of the gradients, and let autograd know which tensors were written."""

    def mark(self, written: Bytes) -> None:
        """Take ``written`` for what :meth:`finish` tells autograd, in place of the tensors that had a gradient."""


class Addresses:
    """Where tensors lie, and in which form, when this object is made; and where the gradients of some of them do.

    Args:
        tensors: dense ones with memory of their own, whose gradients are looked at too.
        grad_dtypes: what a gradient has to be, to be read where it lies; the tensor's own by default.
        others: more such tensors, whose gradients do not matter.

    Attributes:
        gradients: (tensors,) int64: the gradients' addresses when they were last read; 0 for a missing one, and
            for one that cannot be read where it lies.
        present: (tensors,) uint8: whether there was a gradient.
        moved: whether any tensor was last seen elsewhere than at first, or in another form.
        unlike: whether a gradient cannot be read where it lies: its dtype, strides or layout are not as expected.
        version: another number whenever ``gradients`` changed.
    """

    def __init__(
        self, tensors: Sequence[Tensor], grad_dtypes: Sequence[torch.dtype] | None = None, others: Sequence[Tensor] = ()
    ) -> None:
        dtypes = [t.dtype for t in tensors] if grad_dtypes is None else grad_dtypes
        self.gradients: Longs = np.zeros(len(tensors), dtype=np.int64)
        self.present: Bytes = np.zeros(len(tensors), dtype=np.uint8)
        watched = (tensors, others, dtypes, self.gradients, self.present)
        self._watch: Watch = _CppWatch.of(*watched) or _PythonWatch(*watched)
        self._first_count, self._count = len(tensors), len(tensors) + len(others)
        self.moved = self.unlike = False
        self.version = 0
        self.read()

    def read(self, grads: list[Tensor | None] | None = None, *, others: bool = True, hold: bool = False) -> None:
        """Look at the tensors, at their gradients or ``grads`` in their place, and at the others.

        ``hold`` says that code of the user's runs before :meth:`finish`.
        """
        seen = self._watch.look(grads, 0, self._count if others else self._first_count, hold)
        self.moved = bool(seen & _MOVED)
        self.unlike = bool(seen & _UNLIKE)
        self.version = seen >> _FLAGS

    def others_moved(self) -> bool:
        """Look at the others only: whether one is elsewhere than at first, or in another form."""
        return bool(self._watch.look(None, self._first_count, self._count, False) & _MOVED)

    def finish(self) -> None:
        """Let go of the gradients, and let autograd know that their tensors, or the marked ones, were written."""
        self._watch.finish()

    def mark(self, written: Sequence[bool]) -> None:
        """Say which of the tensors :meth:`finish` reports as written."""
        self._watch.mark(np.array(written, dtype=np.uint8))


class _CppWatch:
    """A watch in C++, which reads torch's own objects."""

    def __init__(self, functions: Functions, capsule: object, held: object) -> None:
        self._functions = functions
        self._capsule = capsule
        self._held = held
        self._written: Bytes | None = None

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        others: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        gradients: Longs,
        present: Bytes,
    ) -> _CppWatch | None:
        """A watch for these tensors; None where there can be none."""
        functions = reader()
        if isinstance(functions, str):
            return None
        everything, offset = [*tensors, *others], functions.offset
        if not all(ctypes.c_uint64.from_address(id(t) + offset).value == t._cdata for t in everything):
            return None
        examples = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in dtypes}
        objects = np.array([id(t) + offset for t in everything], dtype=np.int64)
        kinds = np.array([id(examples[dtype]) + offset for dtype in dtypes], dtype=np.int64)
        arrays = (gradients, present)
        capsule = functions.make(
            len(everything), objects.ctypes.data, len(tensors), kinds.ctypes.data, *(a.ctypes.data for a in arrays)
        )
        return None if capsule is None else cls(functions, capsule, (everything, objects, arrays))

    def look(self, grads: list[Tensor | None] | None, first: int, end: int, hold: bool) -> int:
        """See :class:`Watch`."""
        return self._functions.look(self._capsule, grads, self._functions.offset, first, end, hold)

    def finish(self) -> None:
        """See :class:`Watch`."""
        self._functions.finish(self._capsule)

    def mark(self, written: Bytes) -> None:
        """See :class:`Watch`."""
        self._written = written
        self._functions.mark(self._capsule, written.ctypes.data)


class _PythonWatch:
    """A watch in Python, for machines where nothing can be compiled."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        others: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        gradients: Longs,
        present: Bytes,
    ) -> None:
        self._tensors, self._others, self._dtypes = list(tensors), list(others), list(dtypes)
        self._gradients = gradients
        self._present = self._written = present
        self._forms = _forms([*self._tensors, *self._others])
        self._held: list[Tensor | None] = []
        self._version = 0

    def look(self, grads: list[Tensor | None] | None, first: int, end: int, hold: bool) -> int:
        """See :class:`Watch`."""
        everything = [*self._tensors, *self._others]
        seen = 0 if _forms(everything[first:end]) == self._forms[first:end] else _MOVED
        if first:
            return seen
        self._held = list(map(gradient, self._tensors)) if grads is None else grads
        row = [0] * len(self._tensors)
        for i, (tensor, dtype, grad) in enumerate(zip(self._tensors, self._dtypes, self._held, strict=True)):
            if grad is not None and _lies_like(grad, tensor, dtype):
                row[i] = grad.data_ptr() or EMPTY
            elif grad is not None:
                seen |= _UNLIKE
        self._present[:] = [grad is not None for grad in self._held]
        if row != self._gradients.tolist():
            self._version += 1
            self._gradients[:] = row
        return self._version << _FLAGS | seen

    def finish(self) -> None:
        """See :class:`Watch`."""
        torch.autograd.graph.increment_version(
            [t for t, is_written in zip(self._tensors, self._written.tolist(), strict=True) if is_written]
        )
        self._held = []

    def mark(self, written: Bytes) -> None:
        """See :class:`Watch`."""
        self._written = written


def gradient(tensor: Tensor) -> Tensor | None:
    """The gradient of ``tensor``; a non-leaf without one is not asked, since torch warns about that."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _forms(tensors: Sequence[Tensor]) -> list[object]:
    return [(t.data_ptr(), t.dtype, t.shape, t.stride(), is_plain(t)) for t in tensors]


def _lies_like(grad: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        grad.layout is torch.strided
        and grad.dtype == dtype
        and grad.device == tensor.device
        and grad.shape == tensor.shape
        and grad.stride() == tensor.stride()
        and is_plain(grad)
        and not overlap_shifted(grad, tensor)
    )


class Functions(NamedTuple):
    """What the C++ library offers, and how far into a tensor's Python object its pointer to torch's own object lies."""

    offset: int
    make: Callable[..., object]
    look: Callable[..., int]
    finish: Callable[..., None]
    mark: Callable[..., None]


@functools.cache
def reader() -> Functions | str:
    """The functions in C++, compiled once per machine and build of torch; or why there are none."""
    if sys.platform != "linux" or not cpp_library.compiler():
        return "no C++ compiler was found"
    offset = pointer_offset()
    if offset is None:
        return "this version of torch is not understood"
    torch_directory = Path(torch.__file__).parent
    flags = (f"-I{torch_directory / 'include'}", f"-L{torch_directory / 'lib'}", "-lc10", "-ltorch_cpu")
    try:
        library = cpp_library.library(f"// {build_identity()}\n{_SOURCE}", ("-std=c++20", *flags), ctypes.PyDLL)
    except cpp_library.CompilerError as error:
        return str(error)
    thing, pointer, integer = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64
    return Functions(
        offset,
        _function(library.make_watch, thing, integer, pointer, integer, pointer, pointer, pointer),
        _function(library.look, integer, thing, thing, integer, integer, integer, integer),
        _function(library.finish, None, thing),
        _function(library.mark_written, None, thing, pointer),
    )


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
