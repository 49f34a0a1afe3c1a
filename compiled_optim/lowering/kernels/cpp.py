"""A rule as C++: a kernel evaluates the coefficients of all parameters and updates all tensors in a single call.

The C++ compiler vectorizes what the rule's two functions wrote down. Nothing of torch is included, so a kernel compiles in
less than a second, and it is cached on disk for the next process.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import table as rows
from compiled_optim.lowering.kernels.program import Array, Program, evaluation, indented
from compiled_optim.lowering.kernels.table import Arguments, CoefficientTable, Ints, Kernel, Launch, TensorTable
from compiled_optim.memory.cache import library
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import INDEX, Written
from compiled_optim.rule.symbols import Dialect, Kind, Statement

WORDS = Path(__file__).with_name("words.h").read_text(encoding="utf-8")
"""The vocabulary of rules, the numbers of 16 bits that C++ lacks, and what is the same in all kernels."""

BLOCK = 8192  # elements that one thread updates at a time
SERIAL = 32768  # elements below which waking other threads costs more than they save

STORAGE = {
    **{torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16", torch.float16: "float16"},
    **{torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t", torch.int32: "uint32_t"},
}
DIALECT = Dialect("const auto {} = {};", "T({})", "&&", "||", "uint32_t({})")
_ACCESSES = {
    "control": "*at<const T>(hypers, {}, 1, 0)",
    "row": "double_of(inputs[{} * count + t])",
    "address": "double* const scalars{} = at<double>(inputs, {}, count, t);",
    "scalar": "*scalars{}",
    "hyper": "*at<const T>(hyper, {}, 1, 0)",
    "store_scalar": "*scalars{} = {};",
    "store_coefficient": "out[{} * count] = {};",
}

# Elements share no memory. Between more than five tensors gcc does not check that itself, and does not vectorize. (With
# "omp simd" it makes slow code of 16-bit tensors: temporaries of a class become arrays.)
INDEPENDENT = "#pragma GCC ivdep"


def source(key: KernelKey) -> str:
    """The C++ text of the kernel for one key; its entry points are those that a kernel launches."""
    text = WORDS + _EVALUATION.format(**evaluation(key, DIALECT, _ACCESSES, "  "))
    if key.rule.granularity != "element":
        return text
    program = Program(key, DIALECT)
    return text + "".join(_means(program, *means) for means in program.means.items()) + _update(program)


class _Store(NamedTuple):
    """A statement that stores an ``expression``, for each element or once for each group of them.

    ``bits`` are those that go to an ``address`` in pairs, as :data:`_PAIRS` has them.
    """

    expression: str
    text: str
    grouped: bool = False
    address: str = ""
    bits: str = ""


class _Pair(NamedTuple):
    """How two elements lie in one word: its C++ type, what makes each element of it, and it of the bits of both."""

    word: str
    elements: tuple[str, str]
    both: str


# Elements of 16 bits are updated two at a time, in lanes of 32 bits that nothing has to shuffle.
_PAIRS = {
    torch.bfloat16: _Pair("pair32", ("from_bits({} << 16)", "from_bits({} & 0xffff0000)"), "({} >> 16) | ({} & 0xffff0000)"),
    torch.float16: _Pair("pair32", ("float16::value({} & 0xffff)", "float16::value({} >> 16)"), "{} | ({} << 16)"),
    torch.int16: _Pair("pair32", ("shift_right_({} << 16, 16)", "shift_right_({}, 16)"), "({} & 0xffff) | ({} << 16)"),
    torch.int8: _Pair("pair16", ("shift_right_({} << 24, 24)", "shift_right_({} << 16, 24)"), "({} & 0xff) | ({} << 8)"),
}
_TILE = 512  # elements whose bytes are made words, and are made of words, by loops of their own: gcc widens those well


def _means(program: Program, stage: int, written: Written) -> str:
    sums = {f"sum{i}": expression for i, expression in enumerate(written.results.values())}
    stores = [_Store(expression, f"{name} += double({expression});") for name, expression in sums.items()]
    return _each_block(program, f"sums{stage}", written, stores, list(sums))


def _update(program: Program) -> str:
    stores = [_store(*new) for new in program.new_elements()]
    (grad,) = (STORAGE[a.dtype] for a in program.arrays if a.row is None)
    return _each_block(program, "update", program.update, stores) + _UPDATE.format(grad=grad, numel=rows.NUMEL, block=BLOCK)


def _store(array: Array, value: str, above: str | None) -> _Store:
    """The statement that stores ``value`` in ``array``, or the upper half of the bits ``above``, which need no rounding."""
    kind = STORAGE[array.dtype]
    bits = {"bfloat16": f"bfloat16::upper_of({value})", "float16": f"uint32_t(float16({value}).bits)"}.get(kind, value)
    if above is not None:
        value, kind, bits = above, "bfloat16::of_bits", above
    return _Store(value, f"{_place(array)} = {kind}({value});", array.grouped, array.address, bits)


def _each_block(program: Program, name: str, written: Written, stores: Sequence[_Store], totals: Sequence[str] = ()) -> str:
    """The function ``name``, which runs the statements ``written`` for the elements of each block, and then ``stores``.

    ``totals`` are the variables to which that adds.
    """
    pragma = f"#pragma omp simd reduction(+ : {', '.join(totals)})" if totals else INDEPENDENT
    loads = {a.element: _definition(a, _place(a)) for a in program.arrays if not a.grouped}
    if written.reads_index:
        loads[INDEX] = f"const uint32_t {INDEX} = uint32_t(start + i);"
    if any(a.grouped for a in program.arrays):
        loop = _loop_over_groups(program.arrays, loads, written, stores, pragma)
    else:
        body = [*loads.values(), *written.lines, *(s.text for s in stores)]
        is_paired = not totals and all(a.dtype in _PAIRS for a in program.arrays)
        loop = _loop_over_pairs(program.arrays, written, stores, body) if is_paired else _loop(pragma, "0", "size", body)
    before = [*map(_pointer, program.arrays), "const T factor = T(k[0]);"]
    before += [f"const T k{i} = T(k[{i + 1} * columns]);" for i in range(len(written.numbers))]
    return _EACH_BLOCK.format(
        name=name,
        parameters=", double* sums" if totals else "",
        block_parameters=", double* sums, int64_t block_count" if totals else "",
        block_arguments=", sums + c, block_count" if totals else "",
        column=rows.COLUMN,
        compute=STORAGE[program.compute],
        numel=rows.NUMEL,
        size=BLOCK,
        before=indented([*before, *(f"double {total} = 0;" for total in totals)], "  "),
        loop=indented(loop, "  "),
        after=indented([f"sums[{i} * block_count] = {total};" for i, total in enumerate(totals)], "  "),
    )


def _pointer(array: Array) -> str:
    kind = STORAGE[array.dtype]
    kind, table = (f"const {kind}", "grads, 0") if array.row is None else (kind, f"tensors, {array.row}")
    start = f"start / {GROUP}" if array.grouped else "start"
    return f"{kind}* __restrict {array.address} = at<{kind}>({table}, count, t) + {start};"


def _definition(array: Array, value: str) -> str:
    """The statement that defines an element, or the number of a group of elements, as a ``value``."""
    if array.is_int:
        return f"const uint32_t {array.element} = uint32_t(int32_t({value}));"
    return f"const T {array.element} = {'factor * ' if array.row is None else ''}T({value});"


def _place(array: Array) -> str:
    return f"{array.address}[{f'g / {GROUP}' if array.grouped else 'i'}]"


def _loop(pragma: str, first: str, end: str, body: Sequence[str]) -> list[str]:
    return [pragma, f"for (int64_t i = {first}; i < {end}; i++) {{", *(f"  {line}" for line in body), "}"]


def _loop_over_pairs(arrays: Sequence[Array], written: Written, stores: Sequence[_Store], last: Sequence[str]) -> list[str]:
    """Loops over pairs of elements; the ``last`` one of an odd number is updated by itself."""
    pairs = {array.address: _PAIRS[array.dtype] for array in arrays}
    words = {address: f"reinterpret_cast<{pair.word}*>({address} + first)[i]" for address, pair in pairs.items()}
    of_bytes = [address for address, pair in pairs.items() if pair.word == "pair16"]
    found = {**words, **{address: f"{address}_words[i]" for address in of_bytes}}
    body = [f"const uint32_t {a.element}_word = {found[a.address].replace('<', '<const ')};" for a in arrays]
    body += [f"uint32_t stored{n}_0, stored{n}_1;" for n in range(len(stores))]
    for lane in (0, 1):
        index = [f"const uint32_t {INDEX} = uint32_t((start + first) / 2 + i) << 1 | {lane};"] if written.reads_index else []
        loads = [_definition(a, pairs[a.address].elements[lane].format(f"{a.element}_word")) for a in arrays]
        stored = [f"stored{n}_{lane} = {store.bits};" for n, store in enumerate(stores)]
        body += ["{", *(f"  {line}" for line in (*index, *loads, *written.lines, *stored)), "}"]
    for n, store in enumerate(stores):
        both = pairs[store.address].both.format(f"stored{n}_0", f"stored{n}_1")
        body.append(f"{found[store.address]} = {both};")
    tile = [
        f"const int64_t pairs = (size - first < {_TILE} ? size - first : {_TILE}) / 2;",
        *(f"uint32_t {address}_words[{_TILE // 2}];" for address in of_bytes),
        *(f"for (int64_t i = 0; i < pairs; i++) {address}_words[i] = {words[address]};" for address in of_bytes),
        *_loop(INDEPENDENT, "0", "pairs", body),
        *(f"for (int64_t i = 0; i < pairs; i++) {words[address]} = uint16_t({address}_words[i]);" for address in of_bytes),
    ]
    return [
        *(f"for (int64_t first = 0; first < size; first += {_TILE}) {{", *(f"  {line}" for line in tile), "}"),
        *("if (size % 2) {", "  const int64_t i = size - 1;", *(f"  {line}" for line in last), "}"),
    ]


def _loop_over_groups(
    arrays: Sequence[Array], loads: dict[str, str], written: Written, stores: Sequence[_Store], pragma: str
) -> list[str]:
    """Two loops over each group: one until its largest values are known, and one from there on.

    Statements that need these values are in the second loop. It reads results of the first loop from the stack.
    """
    kinds = {INDEX: Kind(is_int=True), **{a.element: Kind(a.is_int) for a in arrays}}
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
    cached = {n: "uint32_t" if kinds.get(n, Kind()).is_int else "T" for n in dict.fromkeys(read_again) if n in known}
    first = [
        *loads.values(),
        *(s.text for s in early),
        *(f"{name}_of[i - g] = {name};" for name in cached),
        *(f"{s.name}_most = {s.reads[0]} > {s.name}_most ? {s.reads[0]} : {s.name}_most;" for s in largest),
        *(s.text for s in by_element if not is_late(s)),
    ]
    second = [f"const {kind} {name} = {name}_of[i - g];" for name, kind in cached.items()]
    second += [*(s.text for s in late), *(s.text for s in by_element if is_late(s))]
    group = [
        "const int64_t end = g + group_size;",
        *(_definition(a, _place(a)) for a in arrays if a.grouped),
        *(s.text for s in of_groups if not s.kind.after_reduce),
        *(f"{kind} {name}_of[{GROUP}];" for name, kind in cached.items()),
        *(f"uint32_t {s.name}_most = 0;" for s in largest),
        *_loop(pragma, "g", "end", first),
        *(f"const uint32_t {s.name} = {s.name}_most;" for s in largest),
        *(s.text for s in of_groups if s.kind.after_reduce),
        *(s.text for s in stores if s.grouped),
        *(_loop(INDEPENDENT, "g", "end", second) if second else []),
    ]
    return [
        "const auto update_group = [&](const int64_t g, const auto group_size) __attribute__((always_inline)) {",
        *(f"  {line}" for line in group),
        "};",
        f"const int64_t full_groups = size / {GROUP} * {GROUP};",
        f"for (int64_t g = 0; g < full_groups; g += {GROUP}) update_group(g, Known<{GROUP}>());",
        "if (full_groups < size) update_group(full_groups, size - full_groups);",
    ]


def _needed(statements: Sequence[Statement], names: set[str]) -> list[Statement]:
    """Those of ``statements`` that define ``names``, and what these read."""
    needed, found = set(names), []
    for statement in reversed(statements):
        if statement.name in needed:
            needed |= {*statement.reads}
            found.append(statement)
    return found[::-1]


_EACH_BLOCK = """
static void {name}_block(const int64_t* tensors, const int64_t* grads, const double* k, int64_t columns, int64_t count,
                         int64_t t, int64_t block{block_parameters}) {{
  using T = {compute};
  const int64_t start = block * {size};
  const int64_t left = tensors[{numel} * count + t] - start;
  const int64_t size = left < {size} ? left : {size};
{before}
{loop}
{after}
}}

OURS void {name}(const int64_t* tensors, const int64_t* grads, const int64_t* blocks, const double* outcome,
                 const double* k{parameters}, int64_t count, int64_t columns, int64_t block_count, int64_t threads) {{
  if (outcome[1]) return;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && block_count > 1)
  for (int64_t c = 0; c < block_count; c++) {{
    const int64_t t = blocks[2 * c];
    if (grads[t])
      {name}_block(tensors, grads, k + tensors[{column} * count + t], columns, count, t, blocks[2 * c + 1]{block_arguments});
  }}
}}
"""

_EVALUATION = """
static double gradient_factor(const int64_t* hypers, const double* square_sums, int64_t square_sum_count,
                              double* outcome, int64_t leads) {{
  using T = double;
  T square_sum = 0;
  for (int64_t i = 0; i < square_sum_count; i++) square_sum += square_sums[i];
{gradient}
  outcome[0] = {norm};
  outcome[1] = {skip};
  if (leads) outcome[2] += {skip};
  return {factor};
}}

static void coefficients_of(const int64_t* inputs, const int64_t* hypers, double* out, double factor, int64_t count,
                            int64_t t) {{
  using T = double;
  const int64_t* hyper = hypers + {controls} + inputs[{group} * count + t] * {hypers};
  (void)hyper;
  out[0] = inputs[{maximize} * count + t] ? -factor : factor;
{coefficients}
}}

OURS void evaluate(const int64_t* inputs, const int64_t* grads, const int64_t* hypers, const double* square_sums,
                   double* outcome, double* k, int64_t count, int64_t square_sum_count, int64_t leads, int64_t, int64_t) {{
  const double factor = gradient_factor(hypers, square_sums, square_sum_count, outcome, leads);
  if (outcome[1]) return;
  for (int64_t t = 0; t < count; t++)
    if (grads[t]) coefficients_of(inputs, hypers, k + t, factor, count, t);
}}
"""

_UPDATE = """
OURS void square_sums(const int64_t* tensors, const int64_t* grads, const int64_t* blocks, double* sums, int64_t count,
                      int64_t block_count, int64_t, int64_t threads) {{
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && block_count > 1)
  for (int64_t c = 0; c < block_count; c++) {{
    const int64_t t = blocks[2 * c], start = blocks[2 * c + 1] * {block};
    const int64_t left = tensors[{numel} * count + t] - start;
    sums[c] = grads[t] ? sum_of_squares(at<const {grad}>(grads, 0, count, t) + start, left < {block} ? left : {block}) : 0;
  }}
}}

OURS void step(const int64_t* inputs, const int64_t* marks, const int64_t* hypers, const double* square_sums,
               double* outcome, double* k, const int64_t* tensors, const int64_t* grads, const int64_t* blocks,
               int64_t columns, int64_t square_sum_count, int64_t leads, int64_t count, int64_t block_count,
               int64_t threads) {{
  evaluate(inputs, marks, hypers, square_sums, outcome, k, columns, square_sum_count, leads, 1, 1);
  update(tensors, grads, blocks, outcome, k, count, columns, block_count, threads);
}}
"""


class CppKernel(Kernel):
    """The compiled kernel of one key, on the CPU; its threads are those of ``torch.set_num_threads``.

    Raises:
        CompilerError: it cannot be compiled or loaded on this machine.
    """

    block = reduce_block = BLOCK
    most_sums = sys.maxsize  # one per block, so that their order does not depend on the threads

    def __init__(self, key: KernelKey) -> None:
        super().__init__(key)
        text = source(key)
        self._code = library(text)
        for name, parameters in re.findall(r"OURS void (\w+)\(([^)]*)\)", text):  # addresses and counts have 64 bits
            function = getattr(self._code, name)
            function.argtypes, function.restype = [ctypes.c_int64] * len(parameters.split(",")), None

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        def arguments() -> Arguments:
            _, _, tables, counts = self._evaluated(coefficients)
            tables = *tables, table.tensors, table.grads, table.blocks
            return (len(table.blocks),), table.elements, tables, (*counts, table.grads.numel())

        sums = coefficients.all_square_sums  # others once a norm is measured; nobody then clears a RowBatch's launches
        self._launch("step", table, arguments, id(sums))

    def _prepared(self, name: str, programs: Ints, elements: int, tensors: Sequence[Tensor], counts: Ints) -> Launch:
        run = functools.partial(getattr(self._code, name), *map(Tensor.data_ptr, tensors), *counts, *programs)
        return (lambda: run(torch.get_num_threads())) if elements > SERIAL else functools.partial(run, 1)
