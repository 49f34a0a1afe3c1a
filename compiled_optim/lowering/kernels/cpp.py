"""A rule as C++: a kernel evaluates the coefficients of all parameters and updates all tensors in a single call.

The C++ compiler vectorizes what the rule's two functions wrote down. Nothing of torch is included, so a kernel compiles in
less than a second, and it is kept on disk for the next process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import table as rows
from compiled_optim.lowering.kernels.cpp_chunk import CHUNK, Result, Sums, block, chunk, storage, stored
from compiled_optim.lowering.kernels.cpp_words import WORDS
from compiled_optim.lowering.kernels.program import Evaluation, Program
from compiled_optim.lowering.kernels.table import CoefficientTable, MeasuredTable, TensorTable
from compiled_optim.memory.cpp_library import library
from compiled_optim.plan.clipping import NAMES
from compiled_optim.plan.kernel_key import KernelKey
from compiled_optim.rule.bits import GROUP
from compiled_optim.rule.rule import NUMBERS, Written
from compiled_optim.rule.symbols import Dialect

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
