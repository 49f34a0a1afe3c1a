"""A rule as C++: a kernel evaluates the coefficients of all parameters and updates all tensors in a single call.

The C++ compiler vectorizes what the rule's two functions wrote down. Nothing of torch is included, so a kernel compiles in
less than a second, and it is kept on disk for the next process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import table as rows
from compiled_optim.lowering.kernels.program import Evaluation, Program
from compiled_optim.lowering.kernels.table import CoefficientTable, MeasuredTable, TensorTable
from compiled_optim.memory.cache import library
from compiled_optim.plan.clipping import NAMES
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.bits import GROUP
from compiled_optim.rule.rule import INDEX, NUMBERS, Written
from compiled_optim.rule.symbols import Dialect, Kind, Statement

WORDS = """\
#include <cmath>
#include <cstdint>
#include <cstring>

// Integers of 32 bits wrap around. Where their sign matters, it is that of two's complement.
static inline uint32_t shift_right_(uint32_t x, uint32_t count) { return uint32_t(int32_t(x) >> count); }
static inline uint32_t maximum_(uint32_t x, uint32_t y) { return int32_t(x) > int32_t(y) ? x : y; }
static inline uint32_t minimum_(uint32_t x, uint32_t y) { return int32_t(x) < int32_t(y) ? x : y; }
static inline uint32_t integer_(float x) { return uint32_t(int32_t(x)); }
static inline float number_(uint32_t x) { return float(int32_t(x)); }
template <class T> static inline T spread_(T x) { return x; }
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

STORAGE = {
    **{"float32": "float", "float64": "double", "bfloat16": "bfloat16", "float16": "float16"},
    **{"int8": "int8_t", "uint8": "uint8_t", "int16": "int16_t"},
}

# Elements share no memory. Between more than five tensors gcc does not check that itself, and does not vectorize. (With
# "omp simd" it makes slow code of 16-bit tensors: temporaries of a class become arrays.)
_INDEPENDENT = "#pragma GCC ivdep"


@dataclass(frozen=True)
class Result:
    """An expression, and where it goes: a statement with ``{}`` for the expression; once for each group if ``shared``."""

    expression: str
    store: str
    shared: bool = False


def stored(written: Written, value: str, place: str, kind: str, *, shared: bool = False) -> Result:
    """What stores a ``value`` as one of the C++ type ``kind``, without rounding it again where it is its upper bits."""
    defined = {s.name: s for s in written.statements}.get(value)
    if defined is not None and defined.word == "from_upper" and kind == "bfloat16":
        return Result(defined.reads[0], f"{place} = bfloat16::of_bits({{}});", shared)
    return Result(value, f"{place} = {kind}({{}});", shared)


@dataclass(frozen=True)
class Sums:
    """Numbers that a chunk adds up: the C++ names of the totals."""

    names: Sequence[str]


def storage(key: KernelKey) -> list[str]:
    """The C++ types of parameter, gradient and buffers."""
    return [STORAGE[d] for d in (key.param_dtype, key.grad_dtype, *key.buffer_dtypes)]


def chunk(key: KernelKey, name: str, written: Written, results: Sequence[Result], sums: Sums | None = None) -> str:
    """The function ``name`` that does what is ``written`` for the elements of a chunk, and stores the ``results``.

    Where it adds up ``sums``, results may be statements that add to them.
    """
    statics = dict(key.statics)
    grouped = [name in key.rule.grouped_buffers(statics) for name in key.rule.present_buffers(statics)]
    loop = _grouped if any(grouped) else _plain
    total = "" if sums is None else "\n".join(f"  double {name} = 0;" for name in sums.names) + "\n"
    pragma = _INDEPENDENT if sums is None else f"#pragma omp simd reduction(+ : {', '.join(sums.names)})"
    return _CHUNK.format(
        name=name,
        compute="double" if key.param_dtype == "float64" else "float",
        numel=rows.NUMEL,
        size=CHUNK,
        pointers=block(_pointers(key, written, grouped), 2),
        before=total,
        loop=loop(key, written, results, pragma, grouped),
        sums="" if sums is None else ", double* sums, int64_t chunk_count",
        after=block([] if sums is None else [f"sums[{i} * chunk_count] = {n};" for i, n in enumerate(sums.names)], 2),
    )


def block(lines: Sequence[str], indent: int) -> str:
    """Indented ``lines``."""
    return "\n".join(" " * indent + line for line in lines)


def _pointers(key: KernelKey, written: Written, grouped: Sequence[bool]) -> list[str]:
    param, grad, *buffers = storage(key)
    offsets = [f"start / {GROUP}" if is_grouped else "start" for is_grouped in grouped]
    return [
        f"{param}* __restrict params = at<{param}>(tensors, {rows.PARAM}, count, t) + start;",
        f"const {grad}* __restrict grad_values = at<const {grad}>(grads, 0, count, t) + start;",
        *(
            f"{b}* __restrict buffers{i} = at<{b}>(tensors, {rows.BUFFERS + i}, count, t) + {offset};"
            for i, (b, offset) in enumerate(zip(buffers, offsets, strict=True))
        ),
        "const T factor = T(k[0]);",
        *(f"const T k{i} = T(k[{i + 1} * owners]);" for i in range(len(written.numbers))),
    ]


def _loads(key: KernelKey, written: Written, grouped: Sequence[bool]) -> dict[str, str]:
    """What defines the values of an element, by name."""
    loads = {"param": "const T param = T(params[i]);", "grad": "const T grad = factor * T(grad_values[i]);"}
    for i, (shared, kind) in enumerate(zip(grouped, storage(key)[2:], strict=True)):
        text = (
            f"const uint32_t buffer{i} = uint32_t(int32_t(buffers{i}[i]));"
            if _is_whole(kind)
            else f"const T buffer{i} = T(buffers{i}[i]);"
        )
        loads |= {} if shared else {f"buffer{i}": text}
    return loads | ({INDEX: f"const uint32_t {INDEX} = uint32_t(start + i);"} if written.reads_index else {})


def _is_whole(kind: str) -> bool:
    """Whether a buffer holds integers."""
    return kind.endswith(("int8_t", "int16_t"))


def _stored(result: Result) -> str:
    return result.store.format(result.expression)


def _plain(key: KernelKey, written: Written, results: Sequence[Result], pragma: str, grouped: Sequence[bool]) -> str:
    lines = [*_loads(key, written, grouped).values(), *written.lines, *map(_stored, results)]
    return f"  {pragma}\n  for (int64_t i = 0; i < size; i++) {{\n{block(lines, 4)}\n  }}"


def _grouped(key: KernelKey, written: Written, results: Sequence[Result], pragma: str, grouped: Sequence[bool]) -> str:
    """Two loops over each group: up to the largest values of the group, and from there on."""
    kinds = {s.name: s.kind for s in written.statements}
    loads = _loads(key, written, grouped)

    def is_late(result: Result) -> bool:
        return kinds.get(result.expression, Kind()).late

    late_results = [r for r in results if is_late(r) and not r.shared]
    of_elements = [s for s in written.statements if not s.kind.shared]
    peaks = [s for s in written.statements if s.kind.shared and s.kind.late and not kinds.get(s.reads[0], Kind()).shared]
    of_group = [s for s in written.statements if s.kind.shared and s not in peaks]
    early = _early(of_elements, {s.reads[0] for s in peaks} | {r.expression for r in results if not is_late(r)})
    late = [s for s in of_elements if s not in early]
    needed = [name for s in late for name in s.reads] + [r.expression for r in late_results]
    known = {*loads, *(s.name for s in early)}
    kept = [name for name in dict.fromkeys(needed) if name in known]
    wholes = {INDEX, *(f"buffer{i}" for i, kind in enumerate(storage(key)[2:]) if _is_whole(kind))}
    types = {name: "uint32_t" if kinds.get(name, Kind(name in wholes)).whole else "T" for name in kept}
    shared = [f"const T buffer{i} = T(buffers{i}[g / {GROUP}]);" for i, is_shared in enumerate(grouped) if is_shared]
    first = [
        *loads.values(),
        *(s.text for s in early),
        *(f"{name}_of[i - g] = {name};" for name in kept),
        *(f"{s.name}_most = {s.reads[0]} > {s.name}_most ? {s.reads[0]} : {s.name}_most;" for s in peaks),
        *(_stored(r) for r in results if not is_late(r) and not r.shared),
    ]
    second = [f"const {types[name]} {name} = {name}_of[i - g];" for name in kept]
    second += [*(s.text for s in late), *map(_stored, late_results)]
    between = [f"const uint32_t {s.name} = {s.name}_most;" for s in peaks]
    between += [*(s.text for s in of_group if s.kind.late), *(_stored(r) for r in results if r.shared)]
    return _GROUPED.format(
        group=GROUP,
        pragma=pragma,
        shared=block([*shared, *(s.text for s in of_group if not s.kind.late)], 4),
        kept=block([f"{types[name]} {name}_of[{GROUP}];" for name in kept], 4),
        peaks=block([f"uint32_t {s.name}_most = 0;" for s in peaks], 4),
        first=block(first, 6),
        between=block(between, 4),
        second=_SECOND.format(pragma=_INDEPENDENT, lines=block(second, 6)) if second else "",
    )


def _early(statements: Sequence[Statement], needed: set[str]) -> list[Statement]:
    """Those of ``statements`` without which the ``needed`` values are not known: nothing that waits for a group."""
    needed, found = set(needed), []
    for statement in reversed(statements):
        if statement.name in needed:
            needed |= {*statement.reads}
            found.append(statement)
    return found[::-1]


_CHUNK = """
static void {name}(const int64_t* tensors, const int64_t* grads, const double* k, int64_t owners, int64_t count, int64_t t,
                   int64_t chunk{sums}) {{
  using T = {compute};
  const int64_t start = chunk * {size};
  const int64_t left = tensors[{numel} * count + t] - start;
  const int64_t size = left < {size} ? left : {size};
{pointers}
{before}{loop}
{after}
}}
"""

_GROUPED = """\
  const auto update_group = [&](const int64_t g, const auto group_size) __attribute__((always_inline)) {{
    const int64_t end = g + group_size;
{shared}
{kept}
{peaks}
    {pragma}
    for (int64_t i = g; i < end; i++) {{
{first}
    }}
{between}
{second}  }};
  int64_t whole_groups = size / {group} * {group};
  for (int64_t g = 0; g < whole_groups; g += {group}) update_group(g, Known<{group}>());
  if (whole_groups < size) update_group(whole_groups, size - whole_groups);"""

_SECOND = """\
    {pragma}
    for (int64_t i = g; i < end; i++) {{
{lines}
    }}
"""


SERIAL = 32768  # elements below which waking other threads costs more than they save
_DIALECT = Dialect("const auto {} = {};", "T({})", "&&", "||", "uint32_t({})")


def source(key: KernelKey) -> str:
    """The C++ text of the kernel for one key; its entry points are those that :class:`CppKernel` calls."""
    program = Program.of(key.rule, dict(key.statics), _DIALECT)
    text = WORDS + _evaluation(program.evaluation)
    if program.update is None:
        return text
    return text + "".join(_means(key, *means) for means in program.means.items()) + _update(key, program.update)


def _evaluation(program: Evaluation) -> str:
    clipping = [f"const T control{i} = *at<const T>(hypers, {i}, 1, 0);" for i in range(len(NAMES))]
    numbers = {name: f"double_of(owners[{row} * count + t])" for row, name in enumerate(NUMBERS, rows.FIRST_NUMBER)}
    inputs = ["const T step = *scalar(0) + 1;", *(f"const T {name} = {number};" for name, number in numbers.items())]
    inputs += [f"const T hyper{i} = *at<const T>(hyper, {i}, 1, 0);" for i in range(program.hypers)]
    inputs += [f"const T scalar{i} = *scalar({i + 1});" for i in range(len(program.new_scalars) - 1)]
    results = [f"*scalar({i}) = {value};" for i, value in enumerate(program.new_scalars)]
    results += [f"out[{i + 1} * count] = {value};" for i, value in enumerate(program.numbers)]
    return _EVALUATION.format(
        clipping=block([*clipping, *program.gradient], 2),
        factor=program.factor,
        norm=program.norm,
        skip=program.skip,
        controls=len(clipping),
        hypers=program.hypers,
        group=rows.GROUP_INDEX,
        maximize=rows.MAXIMIZE,
        scalars=rows.SCALARS,
        coefficients=block([*inputs, *program.lines, *results], 2),
    )


def _means(key: KernelKey, stage: int, written: Written) -> str:
    sums = {f"sum{i}": expression for i, expression in enumerate(written.results.values())}
    added = [Result(expression, f"{name} += double({{}});") for name, expression in sums.items()]
    text = chunk(key, f"sums{stage}_of_chunk", written, added, Sums(list(sums)))
    return text + _MEANS.format(stage=stage, first=len(written.numbers) + 1, width=len(sums), owner=rows.OWNER)


def _update(key: KernelKey, written: Written) -> str:
    statics = dict(key.statics)
    param, grad, *buffers = storage(key)
    new_param, *new_buffers = written.results.values()
    results = [stored(written, new_param, "params[i]", param)]
    for i, (name, kind, value) in enumerate(zip(key.rule.present_buffers(statics), buffers, new_buffers, strict=True)):
        shared = name in key.rule.grouped_buffers(statics)
        place = f"g / {GROUP}" if shared else "i"
        results.append(stored(written, value, f"buffers{i}[{place}]", kind, shared=shared))
    text = chunk(key, "update_chunk", written, results)
    return text + _UPDATE.format(grad=grad, numel=rows.NUMEL, owner=rows.OWNER, chunk=CHUNK)


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
{clipping}
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
_ARGUMENTS = {
    "measure": [*_PIECES, _POINTER],
    "evaluate": _EVALUATED,
    "average": [*_PIECES, _POINTER, _INTEGER, _POINTER, _POINTER, _INTEGER, _POINTER],
    "update": [*_PIECES, _POINTER, _INTEGER, _POINTER],
    "step": [*_EVALUATED, *_PIECES],
}


class CppKernel:
    """A compiled kernel on the CPU; its threads are those of ``torch.set_num_threads``."""

    chunk = stretch = CHUNK

    def __init__(self, code: ctypes.CDLL, *, updates: bool, stages: Sequence[int]) -> None:
        names = ["measure", "evaluate", "update", "step"] if updates else ["evaluate"]
        for name in (*names, *(f"average{stage}" for stage in stages)):
            function = getattr(code, name)
            function.argtypes, function.restype = _ARGUMENTS[name.rstrip("0123456789")], None
        self._code = code

    def square_sum_count(self, stretches: int) -> int:
        """One partial sum per stretch, so that their order does not depend on the threads."""
        return stretches

    def measure(self, table: MeasuredTable) -> None:
        self._code.measure(*_pieces(table, table.stretches), table.square_sums.data_ptr())

    def evaluate(self, coefficients: CoefficientTable) -> None:
        self._code.evaluate(*_evaluated(coefficients))

    def average(self, stage: int, table: MeasuredTable, coefficients: CoefficientTable) -> None:
        getattr(self._code, f"average{stage}")(
            *_pieces(table, table.chunks),
            coefficients.coefficients.data_ptr(),
            coefficients.coefficients.shape[1],
            coefficients.outcome.data_ptr(),
            table.spans.data_ptr(),
            len(table.spans),
            table.sums.data_ptr(),
        )

    def update(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        numbers = coefficients.coefficients
        self._code.update(
            *_pieces(table, table.chunks), numbers.data_ptr(), numbers.shape[1], coefficients.outcome.data_ptr()
        )

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


def build(key: KernelKey) -> CppKernel:
    """The kernel for one key. Raises ``CompilerError`` where it cannot be compiled or loaded on this machine."""
    stages = key.rule.stages(dict(key.statics))
    return CppKernel(library(source(key)), updates=key.rule.granularity == "element", stages=list(stages))
