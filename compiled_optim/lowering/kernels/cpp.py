"""A rule as C++: a kernel evaluates the coefficients of all parameters and updates all tensors in a single call.

The C++ compiler vectorizes what the rule's two functions wrote down. Nothing of torch is included, so a kernel compiles in
less than a second, and it is kept on disk for the next process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import table as rows
from compiled_optim.lowering.kernels.program import Accesses, Array, Evaluation, Program
from compiled_optim.lowering.kernels.table import CoefficientTable, MeasuredTable, TensorTable
from compiled_optim.memory.cache import library
from compiled_optim.plan.clipping import NAMES
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import INDEX, Written
from compiled_optim.rule.symbols import Dialect, Kind, Statement

WORDS = """\
#include <cmath>
#include <cstdint>
#include <cstring>

// Integers of 32 bits wrap around. Where their sign matters, two's complement has it.
static inline uint32_t shift_right_(uint32_t x, uint32_t count) { return uint32_t(int32_t(x) >> count); }
static inline uint32_t maximum_(uint32_t x, uint32_t y) { return int32_t(x) > int32_t(y) ? x : y; }
static inline uint32_t minimum_(uint32_t x, uint32_t y) { return int32_t(x) < int32_t(y) ? x : y; }
static inline uint32_t integer_(float x) { return uint32_t(int32_t(x)); }
static inline float number_(uint32_t x) { return float(int32_t(x)); }
template <class T> static inline T broadcast_(T x) { return x; }
template <int64_t N> struct Known { constexpr operator int64_t() const { return N; } };  // a number that loops know

template <class T> static inline T sqrt_(T x) { return std::sqrt(x); }
template <class T> static inline T absolute_(T x) { return std::fabs(x); }
template <class T> static inline T sign_(T x) { return T(x > 0) - T(x < 0); }
template <class T> static inline T floor_(T x) { return std::floor(x); }
template <class T> static inline T power_(T x, T y) { return std::pow(x, y); }
template <class T> static inline T maximum_(T x, T y) { const T r = x > y ? x : y; return x != x ? x : r; }
template <class T> static inline T minimum_(T x, T y) { const T r = x < y ? x : y; return x != x ? x : r; }
template <class T> static inline T where_(bool condition, T x, T y) { return condition ? x : y; }
template <class T> static inline T product_(T x, T y) { const T p = x * y; return p == p ? p : T(0); }
template <class T> static inline T bias_correction_(T beta, T step) { return -std::expm1(step * std::log(beta)); }

static inline double double_of(int64_t bits) { double x; std::memcpy(&x, &bits, 8); return x; }
static inline float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline uint32_t to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

static inline float from_bits_(uint32_t bits) { return from_bits(bits); }
static inline float from_upper_(uint32_t bits) { return from_bits(bits << 16); }
static inline uint32_t bits_(float x) { return to_bits(x); }

struct bfloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t(bits) << 16); }
  bfloat16() = default;
  static bfloat16 of_bits(uint32_t bits) { bfloat16 x; x.bits = uint16_t(bits); return x; }
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


CHUNK = 8192  # elements that one thread updates at a time
SERIAL = 32768  # elements below which waking other threads costs more than they save

_STORAGE = {
    **{"float32": "float", "float64": "double", "bfloat16": "bfloat16", "float16": "float16"},
    **{"int8": "int8_t", "uint8": "uint8_t", "int16": "int16_t"},
}
_DIALECT = Dialect("const auto {} = {};", "T({})", "&&", "||", "uint32_t({})")
_ACCESSES = Accesses(
    control="*at<const T>(hypers, {}, 1, 0)",
    row="double_of(owners[{} * count + t])",
    scalar="*scalar({})",
    hyper="*at<const T>(hyper, {}, 1, 0)",
    store_scalar="*scalar({}) = {};",
    store_coefficient="out[{} * count] = {};",
)

# Elements share no memory. Between more than five tensors gcc does not check that itself, and does not vectorize. (With
# "omp simd" it makes slow code of 16-bit tensors: temporaries of a class become arrays.)
_INDEPENDENT = "#pragma GCC ivdep"


def source(key: KernelKey) -> str:
    """The C++ text of the kernel for one key; its entry points are those that :class:`CppKernel` calls."""
    program = Program.of(key, _DIALECT, _ACCESSES)
    text = WORDS + _evaluation(program.evaluation)
    if program.update is None:
        return text
    return text + "".join(_means(program, *means) for means in program.means.items()) + _update(program, program.update)


def _evaluation(evaluation: Evaluation) -> str:
    return _EVALUATION.format(
        gradient=_block(evaluation.gradient),
        factor=evaluation.factor,
        norm=evaluation.norm,
        skip=evaluation.skip,
        controls=len(NAMES),
        hypers=evaluation.hypers,
        group=rows.GROUP_INDEX,
        maximize=rows.MAXIMIZE,
        scalars=rows.SCALARS,
        coefficients=_block(evaluation.coefficients),
    )


class _Store(NamedTuple):
    """A statement that stores an ``expression``, for each element or once for each group of them."""

    expression: str
    text: str
    grouped: bool = False


def _means(program: Program, stage: int, written: Written) -> str:
    sums = {f"sum{i}": expression for i, expression in enumerate(written.results.values())}
    stores = [_Store(expression, f"{name} += double({expression});") for name, expression in sums.items()]
    text = _chunk(program, f"sums{stage}_of_chunk", written, stores, list(sums))
    return text + _MEANS.format(stage=stage, first=len(written.numbers) + 1, width=len(sums), owner=rows.OWNER)


def _update(program: Program, written: Written) -> str:
    stores = [_store(written, array, value) for array, value in program.new_elements(written)]
    (grad,) = (_STORAGE[a.dtype] for a in program.arrays if a.row is None)
    text = _chunk(program, "update_chunk", written, stores)
    return text + _UPDATE.format(grad=grad, numel=rows.NUMEL, owner=rows.OWNER, chunk=CHUNK)


def _store(written: Written, array: Array, value: str) -> _Store:
    """What stores a ``value`` in ``array``, without rounding it again where it is its upper bits."""
    kind, made = _STORAGE[array.dtype], next((s for s in written.statements if s.name == value), None)
    if kind == "bfloat16" and made is not None and made.word == "from_upper":
        value, kind = made.reads[0], "bfloat16::of_bits"
    return _Store(value, f"{array.address}[{_place(array)}] = {kind}({value});", array.grouped)


def _chunk(program: Program, name: str, written: Written, stores: Sequence[_Store], totals: Sequence[str] = ()) -> str:
    """The function ``name`` that does what is ``written`` for the elements of a chunk, and then ``stores``.

    ``totals`` are the variables to which that adds.
    """
    pragma = f"#pragma omp simd reduction(+ : {', '.join(totals)})" if totals else _INDEPENDENT
    loads = {a.element: _load(a) for a in program.arrays if not a.grouped}
    if written.reads_index:
        loads[INDEX] = f"const uint32_t {INDEX} = uint32_t(start + i);"
    if any(a.grouped for a in program.arrays):
        loop = _loop_over_groups(program.arrays, loads, written, stores, pragma)
    else:
        loop = _loop(pragma, "0", "size", [*loads.values(), *written.lines, *(s.text for s in stores)])
    before = [*map(_pointer, program.arrays), "const T factor = T(k[0]);"]
    before += [f"const T k{i} = T(k[{i + 1} * owners]);" for i in range(len(written.numbers))]
    return _CHUNK.format(
        name=name,
        parameters=", double* sums, int64_t chunk_count" if totals else "",
        compute=_STORAGE[program.compute],
        numel=rows.NUMEL,
        size=CHUNK,
        before=_block([*before, *(f"double {total} = 0;" for total in totals)]),
        loop=_block(loop),
        after=_block([f"sums[{i} * chunk_count] = {total};" for i, total in enumerate(totals)]),
    )


def _pointer(array: Array) -> str:
    kind = _STORAGE[array.dtype]
    kind, table = (f"const {kind}", "grads, 0") if array.row is None else (kind, f"tensors, {array.row}")
    start = f"start / {GROUP}" if array.grouped else "start"
    return f"{kind}* __restrict {array.address} = at<{kind}>({table}, count, t) + {start};"


def _load(array: Array) -> str:
    """What defines an element, or a group's number."""
    value = f"{array.address}[{_place(array)}]"
    if array.is_whole:
        return f"const uint32_t {array.element} = uint32_t(int32_t({value}));"
    return f"const T {array.element} = {'factor * ' if array.row is None else ''}T({value});"


def _place(array: Array) -> str:
    return f"g / {GROUP}" if array.grouped else "i"


def _loop(pragma: str, first: str, end: str, body: Sequence[str]) -> list[str]:
    return [pragma, f"for (int64_t i = {first}; i < {end}; i++) {{", *(f"  {line}" for line in body), "}"]


def _loop_over_groups(
    arrays: Sequence[Array], loads: dict[str, str], written: Written, stores: Sequence[_Store], pragma: str
) -> list[str]:
    """Two loops over each group: one until its largest values are known, and one from there on.

    What is late waits for those. The second loop reads what it needs of the first one from the stack.
    """
    kinds = {INDEX: Kind(is_int=True), **{a.element: Kind(a.is_whole) for a in arrays}}
    kinds |= {s.name: s.kind for s in written.statements}

    def is_late(store: _Store) -> bool:
        return kinds.get(store.expression, Kind()).after_reduce

    of_elements = [s for s in written.statements if not s.kind.per_group]
    largest = [s for s in written.statements if s.word == "group_max"]
    of_groups = [s for s in written.statements if s.kind.per_group and s not in largest]
    by_element = [s for s in stores if not s.grouped]
    early = _needed(of_elements, {s.reads[0] for s in largest} | {s.expression for s in stores if not is_late(s)})
    late = [s for s in of_elements if s not in early]
    known = {*loads, *(s.name for s in early)}
    read_again = [name for s in late for name in s.reads] + [s.expression for s in by_element if is_late(s)]
    kept = {n: "uint32_t" if kinds.get(n, Kind()).is_int else "T" for n in dict.fromkeys(read_again) if n in known}
    first = [
        *loads.values(),
        *(s.text for s in early),
        *(f"{name}_of[i - g] = {name};" for name in kept),
        *(f"{s.name}_most = {s.reads[0]} > {s.name}_most ? {s.reads[0]} : {s.name}_most;" for s in largest),
        *(s.text for s in by_element if not is_late(s)),
    ]
    second = [f"const {kind} {name} = {name}_of[i - g];" for name, kind in kept.items()]
    second += [*(s.text for s in late), *(s.text for s in by_element if is_late(s))]
    group = [
        "const int64_t end = g + group_size;",
        *(_load(a) for a in arrays if a.grouped),
        *(s.text for s in of_groups if not s.kind.after_reduce),
        *(f"{kind} {name}_of[{GROUP}];" for name, kind in kept.items()),
        *(f"uint32_t {s.name}_most = 0;" for s in largest),
        *_loop(pragma, "g", "end", first),
        *(f"const uint32_t {s.name} = {s.name}_most;" for s in largest),
        *(s.text for s in of_groups if s.kind.after_reduce),
        *(s.text for s in stores if s.grouped),
        *(_loop(_INDEPENDENT, "g", "end", second) if second else []),
    ]
    return [
        "const auto update_group = [&](const int64_t g, const auto group_size) __attribute__((always_inline)) {",
        *(f"  {line}" for line in group),
        "};",
        f"const int64_t whole_groups = size / {GROUP} * {GROUP};",
        f"for (int64_t g = 0; g < whole_groups; g += {GROUP}) update_group(g, Known<{GROUP}>());",
        "if (whole_groups < size) update_group(whole_groups, size - whole_groups);",
    ]


def _needed(statements: Sequence[Statement], names: set[str]) -> list[Statement]:
    """Those of ``statements`` that define ``names``, and what these read."""
    needed, found = set(names), []
    for statement in reversed(statements):
        if statement.name in needed:
            needed |= {*statement.reads}
            found.append(statement)
    return found[::-1]


def _block(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


_CHUNK = """
static void {name}(const int64_t* tensors, const int64_t* grads, const double* k, int64_t owners, int64_t count, int64_t t,
                   int64_t chunk{parameters}) {{
  using T = {compute};
  const int64_t start = chunk * {size};
  const int64_t left = tensors[{numel} * count + t] - start;
  const int64_t size = left < {size} ? left : {size};
{before}
{loop}
{after}
}}
"""

_EVALUATION = """
// Protected, so that a function of ours calls ours, whatever else of that name the process has loaded.
#define OURS extern "C" __attribute__((visibility("protected")))

template <class P> static inline P* at(const int64_t* table, int64_t row, int64_t count, int64_t t) {{
  return reinterpret_cast<P*>(table[row * count + t]);
}}

static double gradient_factor(const int64_t* hypers, const double* square_sums, int64_t square_sum_count,
                              double* outcome, int32_t leads) {{
  using T = double;
  T square_sum = 0;
  for (int64_t i = 0; i < square_sum_count; i++) square_sum += square_sums[i];
{gradient}
  outcome[0] = {norm};
  outcome[1] = {skip};
  if (leads) outcome[2] += {skip};
  return {factor};
}}

static void coefficients_of(const int64_t* owners, const int64_t* hypers, double* out, double factor, int64_t count,
                            int64_t t) {{
  using T = double;
  const int64_t* hyper = hypers + {controls} + owners[{group} * count + t] * {hypers};
  (void)hyper;
  auto scalar = [&](int64_t i) {{ return at<T>(owners, {scalars} + i, count, t); }};
  out[0] = owners[{maximize} * count + t] ? -factor : factor;
{coefficients}
}}

OURS void evaluate(const int64_t* owners, const int64_t* grads, int64_t count, const int64_t* hypers,
                   const double* square_sums, int64_t square_sum_count, double* outcome, int32_t leads, double* k) {{
  const double factor = gradient_factor(hypers, square_sums, square_sum_count, outcome, leads);
  if (outcome[1]) return;
  for (int64_t t = 0; t < count; t++)
    if (grads[t]) coefficients_of(owners, hypers, k + t, factor, count, t);
}}
"""

_MEANS = """
OURS void average{stage}(const int64_t* tensors, const int64_t* grads, int64_t count, const int64_t* chunks,
                          int64_t chunk_count, int32_t threads, double* k, int64_t owners, const double* outcome,
                          const int64_t* spans, int64_t span_count, double* sums) {{
  if (outcome[1]) return;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && chunk_count > 1)
  for (int64_t c = 0; c < chunk_count; c++) {{
    const int64_t t = chunks[2 * c];
    if (grads[t])
      sums{stage}_of_chunk(tensors, grads, k + tensors[{owner} * count + t], owners, count, t, chunks[2 * c + 1], sums + c,
                       chunk_count);
  }}
  for (int64_t s = 0; s < span_count; s++) {{
    const int64_t t = spans[4 * s], whole = spans[4 * s + 3];
    if (grads[t])
      for (int64_t i = 0; i < {width}; i++) {{
        double sum = 0;
        for (int64_t c = spans[4 * s + 1]; c < spans[4 * s + 2]; c++) sum += sums[i * chunk_count + c];
        k[({first} + i) * owners + t] = sum / double(whole);
      }}
  }}
}}
"""

_UPDATE = """
static double sum_of_squares(const {grad}* __restrict grads, int64_t size) {{
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; i++) {{
    const double x = double(grads[i]);
    sum += x * x;
  }}
  return sum;
}}

OURS void measure(const int64_t* tensors, const int64_t* grads, int64_t count, const int64_t* chunks,
                  int64_t chunk_count, int32_t threads, double* square_sums) {{
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && chunk_count > 1)
  for (int64_t c = 0; c < chunk_count; c++) {{
    const int64_t t = chunks[2 * c], start = chunks[2 * c + 1] * {chunk};
    const int64_t left = tensors[{numel} * count + t] - start;
    square_sums[c] = grads[t] ? sum_of_squares(at<const {grad}>(grads, 0, count, t) + start, left < {chunk} ? left : {chunk})
                              : 0;
  }}
}}

OURS void update(const int64_t* tensors, const int64_t* grads, int64_t count, const int64_t* chunks,
                 int64_t chunk_count, int32_t threads, const double* k, int64_t owners, const double* outcome) {{
  if (outcome[1]) return;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && chunk_count > 1)
  for (int64_t c = 0; c < chunk_count; c++) {{
    const int64_t t = chunks[2 * c];
    if (grads[t]) update_chunk(tensors, grads, k + tensors[{owner} * count + t], owners, count, t, chunks[2 * c + 1]);
  }}
}}

OURS void step(const int64_t* owners, const int64_t* marks, int64_t owner_count, const int64_t* hypers,
               const double* square_sums, int64_t square_sum_count, double* outcome, int32_t leads, double* k,
               const int64_t* tensors, const int64_t* grads, int64_t count, const int64_t* chunks, int64_t chunk_count,
               int32_t threads) {{
  evaluate(owners, marks, owner_count, hypers, square_sums, square_sum_count, outcome, leads, k);
  update(tensors, grads, count, chunks, chunk_count, threads, k, owner_count, outcome);
}}
"""

_POINTER, _INTEGER, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_EVALUATED: list[Any] = [_POINTER, _POINTER, _INTEGER, _POINTER, _POINTER, _INTEGER, _POINTER, _FLAG, _POINTER]
_PIECES: list[Any] = [_POINTER, _POINTER, _INTEGER, _POINTER, _INTEGER, _FLAG]
_COEFFICIENTS: list[Any] = [_POINTER, _INTEGER, _POINTER]
_ARGUMENTS = {
    "measure": [*_PIECES, _POINTER],
    "evaluate": _EVALUATED,
    "average": [*_PIECES, *_COEFFICIENTS, _POINTER, _INTEGER, _POINTER],
    "update": [*_PIECES, *_COEFFICIENTS],
    "step": [*_EVALUATED, *_PIECES],
}


class CppKernel:
    """The compiled kernel of one key, on the CPU; its threads are those of ``torch.set_num_threads``.

    Raises:
        CompilerError: it cannot be compiled or loaded on this machine.
    """

    chunk = stretch = CHUNK

    def __init__(self, key: KernelKey) -> None:
        self._code = library(source(key))
        names = ["measure", "evaluate", "update", "step"] if key.rule.granularity == "element" else ["evaluate"]
        for name in (*names, *(f"average{stage}" for stage in key.rule.stages(dict(key.statics)))):
            function = getattr(self._code, name)
            function.argtypes, function.restype = _ARGUMENTS[name.rstrip("0123456789")], None

    def square_sum_count(self, stretches: int) -> int:
        """One partial sum per stretch, so that their order does not depend on the threads."""
        return stretches

    def measure(self, table: MeasuredTable) -> None:
        self._code.measure(*_pieces(table, table.stretches), table.square_sums.data_ptr())

    def evaluate(self, coefficients: CoefficientTable) -> None:
        self._code.evaluate(*_evaluated(coefficients))

    def average(self, stage: int, table: MeasuredTable, coefficients: CoefficientTable) -> None:
        spans, sums = table.spans.data_ptr(), table.sums.data_ptr()
        average = getattr(self._code, f"average{stage}")
        average(*_pieces(table, table.chunks), *_coefficients(coefficients), spans, len(table.spans), sums)

    def update(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        self._code.update(*_pieces(table, table.chunks), *_coefficients(coefficients))

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        self._code.step(*_evaluated(coefficients), *_pieces(table, table.chunks))


def _evaluated(table: CoefficientTable) -> tuple[int, ...]:
    return (
        table.owners.data_ptr(),
        table.gradients.pointers.data_ptr(),
        table.owners.shape[1],
        table.hypers.data_ptr(),
        table.all_square_sums.data_ptr(),
        len(table.all_square_sums),
        table.outcome.data_ptr(),
        table.leads,
        table.coefficients.data_ptr(),
    )


def _pieces(table: TensorTable, pieces: Tensor) -> tuple[int, ...]:
    threads = torch.get_num_threads() if table.elements > SERIAL else 1
    grads = table.grads
    return table.tensors.data_ptr(), grads.data_ptr(), len(grads), pieces.data_ptr(), len(pieces), threads


def _coefficients(table: CoefficientTable) -> tuple[int, ...]:
    return table.coefficients.data_ptr(), table.coefficients.shape[1], table.outcome.data_ptr()
