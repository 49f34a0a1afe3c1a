"""A rule as C++: one multi-tensor kernel that updates every tensor in a single call.

The two functions of a rule are run once on symbols, which write down the operations they meet; ``if`` on a static choice
is decided then. The C++ compiler vectorizes the result. Nothing of torch is included, so a kernel compiles in about a
second, and it is kept on disk for the next process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compiled_optim.events import Signature
from compiled_optim.fields import Rule, parameter_names

CHUNK = 8192  # elements that one thread updates at a time

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_STORAGE = {"float32": "float", "float64": "double", "bfloat16": "bfloat16", "float16": "float16"}


class Symbol:
    """A value in generated code. Operators on symbols append statements to the code they belong to."""

    def __init__(self, code: Code, name: str) -> None:
        self.code = code
        self.name = name

    def _binary(self, operator: str, other: Any, *, swapped: bool = False) -> Symbol:
        left, right = self.code.operand(self), self.code.operand(other)
        return self.code.assign(f"{right} {operator} {left}" if swapped else f"{left} {operator} {right}")

    def __add__(self, other: Any) -> Symbol:
        return self._binary("+", other)

    def __radd__(self, other: Any) -> Symbol:
        return self._binary("+", other, swapped=True)

    def __sub__(self, other: Any) -> Symbol:
        return self._binary("-", other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._binary("-", other, swapped=True)

    def __mul__(self, other: Any) -> Symbol:
        return self._binary("*", other)

    def __rmul__(self, other: Any) -> Symbol:
        return self._binary("*", other, swapped=True)

    def __truediv__(self, other: Any) -> Symbol:
        return self._binary("/", other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return self._binary("/", other, swapped=True)

    def __neg__(self) -> Symbol:
        return self.code.assign(f"-{self.name}")

    def __eq__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._binary("==", other)

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._binary("!=", other)

    def __lt__(self, other: Any) -> Symbol:
        return self._binary("<", other)

    def __le__(self, other: Any) -> Symbol:
        return self._binary("<=", other)

    def __gt__(self, other: Any) -> Symbol:
        return self._binary(">", other)

    def __ge__(self, other: Any) -> Symbol:
        return self._binary(">=", other)

    def __and__(self, other: Any) -> Symbol:
        return self._binary("&&", other)

    def __or__(self, other: Any) -> Symbol:
        return self._binary("||", other)

    def __bool__(self) -> bool:
        raise TypeError("a rule cannot branch on a value; use where(), or a static field")


class Code:
    """The statements of one generated function body, in single assignment form."""

    def __init__(self, prefix: str) -> None:
        self.lines: list[str] = []
        self._prefix = prefix

    def operand(self, value: Any) -> str:
        """How ``value`` is written inside an expression; numbers are cast to the type of the computation."""
        return value.name if isinstance(value, Symbol) else f"T({float(value)!r})"

    def assign(self, expression: str) -> Symbol:
        """Append a statement and return the name it defines."""
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(f"const auto {name} = {expression};")
        return Symbol(self, name)

    def trace(self, function: Callable[..., tuple[Any, ...]], values: dict[str, Any]) -> tuple[Any, ...]:
        """Run ``function`` on symbols, with the vocabulary re-bound to calls of the functions in ``_PRELUDE``."""

        def call(name: str) -> Callable[..., Symbol]:
            return lambda *args: self.assign(f"{name}({', '.join(self.operand(a) for a in args)})")

        rebound = types.FunctionType(
            function.__code__, {**function.__globals__, **{name: call(f"{name}_") for name in _WORDS}}
        )
        results: tuple[Any, ...] = rebound(**{name: values[name] for name in parameter_names(function)})
        return results


_WORDS = ("sqrt", "maximum", "where", "bias_correction")

_PRELUDE = """\
#include <cmath>
#include <cstdint>
#include <cstring>

template <class T> static inline T sqrt_(T x) { return std::sqrt(x); }
template <class T> static inline T maximum_(T x, T y) { return x > y || x != x ? x : y; }
template <class T> static inline T where_(bool condition, T x, T y) { return condition ? x : y; }
template <class T> static inline T bias_correction_(T beta, T step) { return -std::expm1(step * std::log(beta)); }

static inline float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

struct bfloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t(bits) << 16); }
  bfloat16() = default;
  explicit bfloat16(float x) {  // round to nearest, ties to even
    const uint32_t u = to_bits(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    bits = uint16_t(x != x ? 0x7fc0 : rounded);
  }
};

struct float16 {
  uint16_t bits;
  operator float() const {  // the multiplication by 2^112 also normalizes subnormal numbers
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
    const float finite = from_bits(magnitude) * from_bits(0x77800000);
    const float special = from_bits(magnitude | 0x7f800000);
    const float x = (bits & 0x7c00) == 0x7c00 ? special : finite;
    return from_bits(to_bits(x) | (uint32_t(bits & 0x8000) << 16));
  }
  float16() = default;
  explicit float16(float x) {  // round to nearest, ties to even
    const uint32_t u = to_bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    const uint32_t normal = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t overflow = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    bits = uint16_t(sign | (magnitude >= 0x477ff000 ? overflow : finite));
  }
};
"""


def source(rule: Rule, statics: dict[str, Any], signature: Signature) -> str:
    """The C++ text of the kernel for one signature.

    Its entry point is ``step(tensors, hypers, chunks, coefficients, tensor count, chunk count, threads)``. ``tensors``
    is a table of rows over the tensors: addresses of parameter, gradient (0 if absent), buffers and scalars, then the
    number of elements, the group and whether to maximize. ``hypers`` holds addresses, a row per group; ``chunks`` holds
    pairs of tensor and first element; ``coefficients`` is scratch memory.
    """
    present = rule.present_buffers(statics)
    compute = "double" if signature.param_dtype == "float64" else "float"
    param, grad, *buffers = (_STORAGE[d] for d in (signature.param_dtype, signature.grad_dtype, *signature.buffer_dtypes))
    scalar_rows = {name: 2 + len(present) + i for i, name in enumerate(("step", *(s.name for s in rule.scalars)))}
    numel_row = 2 + len(present) + len(scalar_rows)
    choices = {s.name: statics[s.name] for s in rule.statics}

    scalars = Code("c")
    step = scalars.assign("*scalar(0) + 1")
    addresses = iter(range(sum(h.length for h in rule.hypers)))
    hypers: dict[str, Any] = {}
    for h in rule.hypers:
        elements = tuple(scalars.assign(f"*reinterpret_cast<const T*>(hyper[{next(addresses)}])") for _ in range(h.length))
        hypers[h.name] = elements if h.is_tuple else elements[0]
    old = {s.name: scalars.assign(f"*scalar({i})") for i, s in enumerate(rule.scalars, 1)}
    results = scalars.trace(rule.coefficients, {**choices, **hypers, **old, "step": step})
    new_scalars, numbers = results[: len(rule.scalars)], results[len(rule.scalars) :]
    names = rule.coefficient_names
    assert len(numbers) == len(names), f"{rule.name}.coefficients and .update disagree"
    store_scalars = [f"*scalar({i}) = {scalars.operand(v)};" for i, v in enumerate((step, *new_scalars))]
    store_numbers = [f"out[{i}] = {scalars.operand(v)};" for i, v in enumerate(numbers, 1)]

    elements_code = Code("e")
    values: dict[str, Any] = {b.name: None for b in rule.buffers}
    values |= {name: elements_code.assign(f"T(buffer{i}[i])") for i, name in enumerate(present)}
    values["param"] = elements_code.assign("T(param[i])")
    values["grad"] = elements_code.assign("sign * T(grad[i])")
    values |= {name: Symbol(elements_code, f"k{i}") for i, name in enumerate(names, 1)}
    new_param, *new_buffers = elements_code.trace(rule.update, {**choices, **values})
    kept = [new for b, new in zip(rule.buffers, new_buffers, strict=True) if b.name in present]
    stores = [f"param[i] = {param}({elements_code.operand(new_param)});"]
    stores += [
        f"buffer{i}[i] = {t}({elements_code.operand(v)});" for i, (t, v) in enumerate(zip(buffers, kept, strict=True))
    ]

    count = len(names) + 1
    pointers = [
        f"{param}* __restrict param = at<{param}>(tensors, 0, count, t) + start;",
        f"const {grad}* __restrict grad = at<const {grad}>(tensors, 1, count, t) + start;",
        *(f"{b}* __restrict buffer{i} = at<{b}>(tensors, {2 + i}, count, t) + start;" for i, b in enumerate(buffers)),
    ]
    constants = ["const T sign = T(k[0]);", *(f"const T k{i} = T(k[{i}]);" for i in range(1, count))]
    return _TEMPLATE.format(
        prelude=_PRELUDE,
        compute=compute,
        hypers=max(1, sum(h.length for h in rule.hypers)),
        count=count,
        scalar_row=scalar_rows["step"],
        numel_row=numel_row,
        coefficients=_block([*scalars.lines, *store_scalars, *store_numbers], 2),
        pointers=_block([*pointers, *constants], 2),
        update=_block([*elements_code.lines, *stores], 4),
        chunk=CHUNK,
    )


def _block(lines: Sequence[str], indent: int) -> str:
    return "\n".join(" " * indent + line for line in lines)


_TEMPLATE = """\
{prelude}
template <class P> static inline P* at(const int64_t* tensors, int64_t row, int64_t count, int64_t t) {{
  return reinterpret_cast<P*>(tensors[row * count + t]);
}}

static void coefficients_of(const int64_t* tensors, const int64_t* hypers, double* out, int64_t count, int64_t t) {{
  using T = double;
  const int64_t* hyper = hypers + tensors[({numel_row} + 1) * count + t] * {hypers};
  (void)hyper;
  auto scalar = [&](int64_t i) {{ return at<T>(tensors, {scalar_row} + i, count, t); }};
  out[0] = tensors[({numel_row} + 2) * count + t] ? -1.0 : 1.0;
{coefficients}
}}

static void update_chunk(const int64_t* tensors, const double* k, int64_t count, int64_t t, int64_t start) {{
  using T = {compute};
  const int64_t left = tensors[{numel_row} * count + t] - start;
  const int64_t size = left < {chunk} ? left : {chunk};
{pointers}
  for (int64_t i = 0; i < size; i++) {{
{update}
  }}
}}

extern "C" void step(const int64_t* tensors, const int64_t* hypers, const int64_t* chunks, double* k, int64_t count,
                     int64_t chunk_count, int32_t threads) {{
  for (int64_t t = 0; t < count; t++)
    if (tensors[count + t]) coefficients_of(tensors, hypers, k + t * {count}, count, t);
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && chunk_count > 1)
  for (int64_t c = 0; c < chunk_count; c++) {{
    const int64_t t = chunks[2 * c];
    if (tensors[count + t]) update_chunk(tensors, k + t * {count}, count, t, chunks[2 * c + 1]);
  }}
}}
"""


@functools.cache
def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of g++, clang++ and c++ on the path; None if there is none."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((found for c in candidates if (found := shutil.which(c))), None)


def build(text: str) -> Callable[..., None]:
    """Compile C++ ``text``, or take it from the cache on disk, and return its function ``step``.

    Raises:
        RuntimeError: the compiler refused, with its message.
    """
    command = [str(compiler()), *_FLAGS]
    key = hashlib.sha256("\0".join([text, *command, _compiler_version(), _processor()]).encode()).hexdigest()[:32]
    library = cache_directory() / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            path = Path(scratch, "kernel.cpp")
            path.write_text(text)
            done = subprocess.run([*command, str(path), "-o", f"{scratch}/kernel.so"], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            os.replace(f"{scratch}/kernel.so", library)  # atomic: another process may be doing the same
    function = ctypes.CDLL(str(library)).step
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2 + [ctypes.c_int32]
    function.restype = None
    return function


def cache_directory() -> Path:
    """Where kernels are kept: beside Inductor's cache if that is placed, else in the user's cache directory."""
    placed = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    root = Path(placed) if placed else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "compiled_optim"


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([str(compiler()), "--version"], capture_output=True, text=True).stdout


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
