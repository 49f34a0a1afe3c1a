"""A rule as C++: one multi-tensor kernel that updates every tensor in a single call.

The C++ compiler vectorizes what the rule's two functions wrote down. Nothing of torch is included, so a kernel compiles in
less than a second, and it is kept on disk for the next process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.cpp_library import library
from compiled_optim.lowering.kernel_table import KernelTable, TableRows
from compiled_optim.lowering.symbols import Program
from compiled_optim.rule.symbols import Dialect
from compiled_optim.signature import Signature

SERIAL = 32768  # elements below which waking other threads costs more than they save
CHUNK = 8192  # elements that one thread updates at a time

_STORAGE = {"float32": "float", "float64": "double", "bfloat16": "bfloat16", "float16": "float16"}


_DIALECT = Dialect("const auto {} = {};", "T({})", "&&", "||")

_PRELUDE = """\
#include <cmath>
#include <cstdint>
#include <cstring>

template <class T> static inline T sqrt_(T x) { return std::sqrt(x); }
template <class T> static inline T absolute_(T x) { return std::fabs(x); }
template <class T> static inline T sign_(T x) { return T(x > 0) - T(x < 0); }
template <class T> static inline T power_(T x, T y) { return std::pow(x, y); }
template <class T> static inline T maximum_(T x, T y) { const T r = x > y ? x : y; return x != x ? x : r; }
template <class T> static inline T minimum_(T x, T y) { const T r = x < y ? x : y; return x != x ? x : r; }
template <class T> static inline T where_(bool condition, T x, T y) { return condition ? x : y; }
template <class T> static inline T product_(T x, T y) { const T p = x * y; return p == p ? p : T(0); }
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


def source(signature: Signature) -> str:
    """The C++ text of the kernel for one signature; its entry point is ``step``."""
    rule, statics = signature.rule, dict(signature.statics)
    program = Program.of(rule, statics, _DIALECT)
    rows = TableRows(rule, statics)
    param, grad, *buffers = (_STORAGE[d] for d in (signature.param_dtype, signature.grad_dtype, *signature.buffer_dtypes))
    controls = [f"const T control{i} = *at<const T>(hypers, {i}, 1, 0);" for i in range(rows.controls)]
    inputs = ["const T step = *scalar(0) + 1;"]
    inputs += [f"const T hyper{i} = *reinterpret_cast<const T*>(hyper[{i}]);" for i in range(rows.hypers)]
    inputs += [f"const T scalar{i} = *scalar({i + 1});" for i in range(len(rule.scalars))]
    results = [f"*scalar({i}) = {value};" for i, value in enumerate(program.new_scalars)]
    results += [f"out[{i + 1} * count] = {value};" for i, value in enumerate(program.numbers)]
    pointers = [
        f"{param}* __restrict params = at<{param}>(tensors, 0, count, t) + start;",
        f"const {grad}* __restrict grad_values = at<const {grad}>(grads, 0, count, t) + start;",
        *(
            f"{b}* __restrict buffers{i} = at<{b}>(tensors, {rows.buffers + i}, count, t) + start;"
            for i, b in enumerate(buffers)
        ),
        "const T factor = T(k[0]);",
        *(f"const T k{i} = T(k[{i + 1} * count]);" for i in range(len(program.numbers))),
    ]
    loads = ["const T param = T(params[i]);", "const T grad = factor * T(grad_values[i]);"]
    loads += [f"const T buffer{i} = T(buffers{i}[i]);" for i in range(len(buffers))]
    stores = [f"params[i] = {param}({program.new_param});"]
    stores += [f"buffers{i}[i] = {b}({v});" for i, (b, v) in enumerate(zip(buffers, program.new_buffers, strict=True))]
    return _TEMPLATE.format(
        prelude=_PRELUDE,
        grad=grad,
        controls=_block([*controls, *program.gradient], 2),
        factor=program.factor,
        norm=program.norm,
        skip=program.skip,
        hypers_at=rows.controls,
        compute="double" if signature.param_dtype == "float64" else "float",
        hypers=rows.hypers,
        scalar_row=rows.scalars,
        numel_row=rows.numel,
        group_row=rows.group,
        maximize_row=rows.maximize,
        coefficients=_block([*inputs, *program.coefficients, *results], 2),
        pointers=_block(pointers, 2),
        update=_block([*loads, *program.update, *stores], 4),
        chunk=CHUNK,
    )


def _block(lines: Sequence[str], indent: int) -> str:
    return "\n".join(" " * indent + line for line in lines)


_TEMPLATE = """\
{prelude}
template <class P> static inline P* at(const int64_t* tensors, int64_t row, int64_t count, int64_t t) {{
  return reinterpret_cast<P*>(tensors[row * count + t]);
}}

static double sum_of_squares(const {grad}* __restrict grads, int64_t size) {{
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; i++) {{
    const double x = double(grads[i]);
    sum += x * x;
  }}
  return sum;
}}

static double gradient_factor(const int64_t* hypers, const double* square_sums, int64_t square_sum_count,
                              double* outcome, int32_t leads) {{
  using T = double;
  T square_sum = 0;
  for (int64_t i = 0; i < square_sum_count; i++) square_sum += square_sums[i];
{controls}
  outcome[0] = {norm};
  outcome[1] = {skip};
  if (leads) outcome[2] += {skip};
  return {factor};
}}

static void coefficients_of(const int64_t* tensors, const int64_t* hypers, double* out, double factor, int64_t count,
                            int64_t t) {{
  using T = double;
  const int64_t* hyper = hypers + {hypers_at} + tensors[{group_row} * count + t] * {hypers};
  (void)hyper;
  auto scalar = [&](int64_t i) {{ return at<T>(tensors, {scalar_row} + i, count, t); }};
  out[0] = tensors[{maximize_row} * count + t] ? -factor : factor;
{coefficients}
}}

static void update_chunk(const int64_t* tensors, const int64_t* grads, const double* k, int64_t count, int64_t t,
                         int64_t chunk) {{
  using T = {compute};
  const int64_t start = chunk * {chunk};
  const int64_t left = tensors[{numel_row} * count + t] - start;
  const int64_t size = left < {chunk} ? left : {chunk};
{pointers}
  for (int64_t i = 0; i < size; i++) {{
{update}
  }}
}}

extern "C" void measure(const int64_t* tensors, const int64_t* grads, const int64_t* chunks, int64_t count,
                        int64_t chunk_count, double* square_sums, int32_t threads) {{
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && chunk_count > 1)
  for (int64_t c = 0; c < chunk_count; c++) {{
    const int64_t t = chunks[2 * c], start = chunks[2 * c + 1] * {chunk};
    const int64_t left = tensors[{numel_row} * count + t] - start;
    square_sums[c] = grads[t] ? sum_of_squares(at<const {grad}>(grads, 0, count, t) + start, left < {chunk} ? left : {chunk})
                              : 0;
  }}
}}

extern "C" void step(const int64_t* tensors, const int64_t* grads, const int64_t* chunks, int64_t count,
                     int64_t chunk_count, const int64_t* hypers, const double* square_sums, int64_t square_sum_count,
                     double* outcome, int32_t leads, double* k, int32_t threads) {{
  const double factor = gradient_factor(hypers, square_sums, square_sum_count, outcome, leads);
  if (outcome[1]) return;
  for (int64_t t = 0; t < count; t++)
    if (grads[t]) coefficients_of(tensors, hypers, k + t, factor, count, t);
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && chunk_count > 1)
  for (int64_t c = 0; c < chunk_count; c++) {{
    const int64_t t = chunks[2 * c];
    if (grads[t]) update_chunk(tensors, grads, k + t, count, t, chunks[2 * c + 1]);
  }}
}}
"""


class CppKernel:
    """A compiled kernel on the CPU; its threads are those of ``torch.set_num_threads``."""

    chunk = stretch = CHUNK

    def __init__(self, code: ctypes.CDLL) -> None:
        pointer, integer, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        tensors: list[Any] = [pointer, pointer, pointer, integer, integer]
        self._measure, self._step = code.measure, code.step
        self._measure.argtypes = [*tensors, pointer, flag]
        self._step.argtypes = [*tensors, pointer, pointer, integer, pointer, flag, pointer, flag]
        self._measure.restype = self._step.restype = None

    def square_sum_count(self, stretches: int) -> int:
        """One partial sum per stretch, so that their order does not depend on the threads."""
        return stretches

    def measure(self, table: KernelTable) -> None:
        """Write the partial sums of the squares of the gradients."""
        self._measure(*self._tensors(table, table.stretches), table.square_sums.data_ptr(), self._threads(table))

    def __call__(self, table: KernelTable) -> None:
        """Update the tensors of ``table``."""
        self._step(
            *self._tensors(table, table.chunks),
            table.hypers.data_ptr(),
            table.all_square_sums.data_ptr(),
            len(table.all_square_sums),
            table.outcome.data_ptr(),
            table.leads,
            table.coefficients.data_ptr(),
            self._threads(table),
        )

    @staticmethod
    def _tensors(table: KernelTable, pieces: Tensor) -> tuple[int, ...]:
        return table.tensors.data_ptr(), table.grads.data_ptr(), pieces.data_ptr(), len(table.grads), len(pieces)

    @staticmethod
    def _threads(table: KernelTable) -> int:
        return torch.get_num_threads() if table.elements > SERIAL else 1


def build(signature: Signature) -> CppKernel:
    """The kernel for one signature.

    Raises:
        CompilerError: it cannot be compiled or loaded on this machine.
    """
    return CppKernel(library(source(signature)))
