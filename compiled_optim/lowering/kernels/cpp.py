"""A rule as C++: a kernel evaluates the coefficients of all parameters and updates all tensors in a single call.

The C++ compiler vectorizes the statements that the rule's two functions recorded. No header of torch is included, so a
kernel compiles in less than a second. It is cached on disk for the next process.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Iterable, Sequence
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
"""C++ text that all kernels share: the vocabulary of rules, and the 16-bit floating-point types that C++ lacks."""

BLOCK = 8192  # elements that one thread updates at a time
SERIAL = 32768  # elements below which waking other threads costs more than they save

STORAGE = {
    **{torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16", torch.float16: "float16"},
    **{torch.int8: "int8_t", torch.uint8: "uint8_t", torch.int16: "int16_t", torch.int32: "uint32_t"},
}
_CALLS = ("exp", "std::exp({})"), ("log", "std::log({})")
DIALECT = Dialect("const auto {} = {};", "T({})", "&&", "||", "uint32_t({})", _CALLS)
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
    """Return the C++ text of the kernel for one key; it exports the functions that a :class:`CppKernel` launches."""
    text = WORDS + _EVALUATION.format(**evaluation(key, DIALECT, _ACCESSES, "  "))
    squares = _SQUARE_SUMS.format(grad=STORAGE[key.dtypes[1]], numel=rows.NUMEL, block=BLOCK)
    if key.rule.granularity != "element":
        return text + squares
    program = Program(key, DIALECT)
    means = "".join(_means(program, *means) for means in program.means.items())
    stores = [_store(*new, program.served) for new in program.new_elements()]
    stores += [_StoreCode(value, f"{name}_of@[i - origin] = {value};") for name, value in program.sums.items()]
    outputs = _OutputCode(program.served, program.words, program.sums)
    update = _each_block(program, "update", program.update, stores, outputs=outputs)
    return text + means + update + squares + ("" if program.sums else _STEP)


class _StoreCode(NamedTuple):
    """A store of ``expression``: the C++ statement ``text``, or the ``bits`` to store where elements come in pairs."""

    expression: str
    text: str
    array: Array | None = None  # None for a sum
    bits: str = ""
    mark: str = ""  # before ``text``, the bits that it changes; empty if nobody asks


class _Pair(NamedTuple):
    """Two elements packed in one word: its C++ type, the format that unpacks each, and the one that packs both."""

    word: str
    elements: tuple[str, str]
    both: str


# Elements of 16 or 8 bits are updated two at a time, in lanes of 32 bits, so that no shuffle is needed.
_PAIRS = {
    torch.bfloat16: _Pair("pair32", ("from_bits({} << 16)", "from_bits({} & 0xffff0000)"), "({} >> 16) | ({} & 0xffff0000)"),
    torch.float16: _Pair("pair32", ("float16::value({} & 0xffff)", "float16::value({} >> 16)"), "{} | ({} << 16)"),
    torch.int16: _Pair("pair32", ("shift_right_({} << 16, 16)", "shift_right_({}, 16)"), "({} & 0xffff) | ({} << 16)"),
    torch.int8: _Pair("pair16", ("shift_right_({} << 24, 24)", "shift_right_({} << 16, 24)"), "({} & 0xff) | ({} << 8)"),
    torch.uint8: _Pair("pair16", ("({} & 0xff)", "({} >> 8)"), "({} & 0xff) | ({} << 8)"),
}
_TILE = 512  # elements whose bytes are unpacked to words and packed again in separate loops, which gcc widens well
_GROUPS = _TILE // GROUP  # of elements whose scales are computed at once


def _means(program: Program, stage: int, written: Written) -> str:
    sums = {f"sum{i}": expression for i, expression in enumerate(written.results.values())}
    stores = [_StoreCode(expression, f"{name} += double({expression});") for name, expression in sums.items()]
    return _each_block(program, f"sums{stage}", written, stores, list(sums))


def _store(array: Array, value: str, above: str | None, served: torch.dtype | None) -> _StoreCode:
    """Return the store of ``value`` in ``array``, or of the upper half of the bits ``above``, which need no rounding.

    With ``served``, a store in the parameter notes which bits it changes of the element in that dtype.
    """
    kind = STORAGE[array.dtype]
    bits = {"bfloat16": f"bfloat16::upper_of({value})", "float16": f"uint32_t(float16({value}).bits)"}.get(kind, value)
    if above is not None:
        value, kind, bits = above, "bfloat16::of_bits", above
    mark = ""
    if served is not None and array.row == rows.PARAM:
        seen = STORAGE[served if array.dtype.itemsize > 2 else array.dtype]
        mark = f"bits_of({seen}({_location(array)})) ^ bits_of({seen}({kind}({value})))"
    return _StoreCode(value, f"{_location(array)} = {kind}({value});", array, bits, mark)


class _OutputCode:
    """The outputs of an update that are no arrays. Loops leave them on the stack; they are collected behind each loop."""

    def __init__(self, served: torch.dtype | None = None, row: int = 0, sums: Iterable[str] = ()) -> None:
        self.marks, self.sums = served is not None, [*sums]
        words = f"uint32_t* __restrict const words = at<uint32_t>(tensors, {row}, count, t) + start / 32;"
        self.before = [words] * self.marks + [f"T {name}_lanes[32] = {{}};" for name in self.sums]

    def __bool__(self) -> bool:
        return bool(self.before)

    def around(
        self,
        loop: Sequence[str],
        size: int,
        count: str,
        *,
        of_pairs: bool = False,
        cleared: str = "",
        marks: bool = True,
    ) -> list[str]:
        """Return ``loop`` between memory for ``size`` elements or pairs, and the code that collects the first ``count``.

        Without ``marks``, the loop collects changed bits itself.
        """
        suffixes, mark = ("01", f"mark_pairs<{size}>") if of_pairs else ([""], "mark")
        numbers = [(name, f"{name}_of{suffix}") for name in self.sums for suffix in suffixes]
        return [
            *[f"uint32_t changed[{size}]{cleared};"] * (self.marks and marks),
            *[f"if ({count} < {size}) std::memset(changed, 0, sizeof changed);"] * (self.marks and of_pairs),
            *(f"T {of_elements}[{size}]{cleared};" for _, of_elements in numbers),
            *loop,
            *[f"{mark}(words + from / 32, changed, {count});"] * (self.marks and marks),
            *(f"add_in_lanes({name}_lanes, {of_elements}, {count});" for name, of_elements in numbers),
        ]


_NO_OUTPUTS = _OutputCode()
_ON_STACK, _IN_WORD = "changed[i - origin] = {};", "word |= uint32_t(({}) != 0) << (i - from);"
"""Statements that note changed bits. In one word they cost a step least where each element is computed by itself."""


def _each_block(
    program: Program,
    name: str,
    written: Written,
    stores: Sequence[_StoreCode],
    totals: Sequence[str] = (),
    outputs: _OutputCode = _NO_OUTPUTS,
) -> str:
    """Return the C++ function ``name``: for the elements of each block, it runs ``written``, then ``stores``.

    ``totals`` are the variables in which it adds up sums. ``outputs`` are those of an update.
    """
    pragma = f"#pragma omp simd reduction(+ : {', '.join(totals)})" if totals else INDEPENDENT
    elements = [a for a in program.arrays if not a.grouped]
    is_paired = not totals and all(a.dtype in _PAIRS for a in elements)
    if len(elements) < len(program.arrays):
        loop = _loop_over_groups(program.arrays, written, stores, pragma, outputs, is_paired=is_paired)
    else:
        single = elements, written.reads_index, written.lines, stores
        if is_paired:
            loop = _loop_over_pairs(elements, written, stores, _singly(*single), outputs)
        elif outputs:
            loop = _loop_over_words(_singly(*single, marked=_IN_WORD), outputs)
        else:
            loop = _loop(pragma, "0", "size", _singly(*single))
    before = [*map(_pointer, program.arrays), "const T factor = T(k[0]);", *outputs.before]
    sums = [*totals, *(f"sum_of({name}_lanes)" for name in outputs.sums)]
    before += [f"const T k{i} = T(k[{i + 1} * columns]);" for i in range(len(written.numbers))]
    return _EACH_BLOCK.format(
        name=name,
        parameters=", double* sums" if sums else "",
        block_parameters=", double* sums, int64_t block_count" if sums else "",
        block_arguments=", sums + c, block_count" if sums else "",
        column=rows.COLUMN,
        compute=STORAGE[program.compute],
        numel=rows.NUMEL,
        size=BLOCK,
        before=indented([*before, *(f"double {total} = 0;" for total in totals)], "  "),
        loop=indented(loop, "  "),
        after=indented([f"sums[{i} * block_count] = {total};" for i, total in enumerate(sums)], "  "),
    )


def _pointer(array: Array) -> str:
    kind = STORAGE[array.dtype]
    kind, table = (f"const {kind}", "grads, 0") if array.row is None else (kind, f"tensors, {array.row}")
    start = f"start / {GROUP}" if array.grouped else "start"
    return f"{kind}* __restrict {array.address} = at<{kind}>({table}, count, t) + {start};"


def _definition(array: Array, value: str) -> str:
    """Return the statement that sets the variable of an element, or of a group's number, to ``value``."""
    if array.is_int:
        return f"const uint32_t {array.element} = uint32_t(int32_t({value}));"
    return f"const T {array.element} = {'factor * ' if array.row is None else ''}T({value});"


def _location(array: Array) -> str:
    return f"{array.address}[{'g' if array.grouped else 'i'}]"


def _loop(pragma: str, first: str, end: str, body: Sequence[str]) -> list[str]:
    return [pragma, f"for (int64_t i = {first}; i < {end}; i++) {{", *(f"  {line}" for line in body), "}"]


def _singly(
    arrays: Sequence[Array],
    reads_index: bool,
    lines: Sequence[str],
    stores: Sequence[_StoreCode],
    marked: str = _ON_STACK,
) -> list[str]:
    """Return a loop body that loads element ``i`` of ``arrays``, runs ``lines``, notes changes as ``marked``, and stores."""
    index = [f"const uint32_t {INDEX} = uint32_t(start + i);"] if reads_index else []
    loads = [_definition(a, _location(a)) for a in arrays]
    texts = (text for s in stores for text in (s.mark and marked.format(s.mark), s.text) if text)
    return [*index, *loads, *(line.replace("@", "") for line in (*lines, *texts))]


def _in_pairs(arrays: Sequence[Array], reads_index: bool, lines: Sequence[str], stores: Sequence[_StoreCode]) -> list[str]:
    """Return a loop body for both elements of pair ``i`` in the tile at element ``from``; @ in a line becomes 0 and 1."""
    body = [f"const uint32_t {a.element}_word = {_word(a).replace('<', '<const ')};" for a in arrays]
    sums, stores = [s.text for s in stores if s.array is None], [s for s in stores if s.array is not None]
    body += [f"uint32_t stored{n}_0, stored{n}_1;" for n in range(len(stores))]
    for lane in (0, 1):
        index = [f"const uint32_t {INDEX} = uint32_t((start + from) / 2 + i) << 1 | {lane};"] if reads_index else []
        loads = [_definition(a, _PAIRS[a.dtype].elements[lane].format(f"{a.element}_word")) for a in arrays]
        stored = [f"stored{n}_{lane} = {store.bits};" for n, store in enumerate(stores)]
        body += ["{", *(f"  {line.replace('@', str(lane))}" for line in (*index, *loads, *lines, *stored, *sums)), "}"]
    for n, store in enumerate(stores):
        assert store.array is not None
        both = _PAIRS[store.array.dtype].both.format(f"stored{n}_0", f"stored{n}_1")
        body += [_ON_STACK.format(f"({both}) ^ {store.array.element}_word")] if store.mark else []
        body.append(f"{_word(store.array)} = {both};")
    return body


def _word(array: Array) -> str:
    """Return the expression of the word that has both elements of pair ``i``."""
    word = _PAIRS[array.dtype].word
    return f"{array.address}_words[i]" if word == "pair16" else f"reinterpret_cast<{word}*>({array.address} + from)[i]"


def _tile(arrays: Sequence[Array], body: Sequence[str]) -> list[str]:
    """Return ``body`` for a tile of ``pairs`` between a loop that unpacks bytes to words and one that packs them again."""
    of_bytes = [a.address for a in arrays if _PAIRS[a.dtype].word == "pair16"]
    words = {address: f"reinterpret_cast<pair16*>({address} + from)[i]" for address in of_bytes}
    return [
        *(f"uint32_t {address}_words[{_TILE // 2}];" for address in of_bytes),
        *(f"for (int64_t i = 0; i < pairs; i++) {address}_words[i] = {words[address]};" for address in of_bytes),
        *body,
        *(f"for (int64_t i = 0; i < pairs; i++) {words[address]} = uint16_t({address}_words[i]);" for address in of_bytes),
    ]


def _loop_over_words(body: Sequence[str], outputs: _OutputCode) -> list[str]:
    """Return a loop over the elements of each word of ``outputs``."""
    loop = _loop("#pragma omp simd reduction(| : word)" if outputs.marks else INDEPENDENT, "from", "end", body)
    if outputs.marks:
        loop = ["uint32_t word = 0;", *loop, "words[from / 32] |= word;"]
    part = outputs.around(loop, 32, "count", marks=False)
    return [
        "const auto update_word = [&](const int64_t from, const auto count) __attribute__((always_inline)) {",
        *("  const int64_t origin = from, end = from + count;", *(f"  {line}" for line in part), "};"),
        "for (int64_t from = 0; from + 32 <= size; from += 32) update_word(from, Known<32>());",
        "if (size % 32) update_word(size / 32 * 32, size % 32);",
    ]


def _loop_over_pairs(
    arrays: Sequence[Array],
    written: Written,
    stores: Sequence[_StoreCode],
    last: Sequence[str],
    outputs: _OutputCode,
) -> list[str]:
    """Return a loop over pairs of elements, and the body ``last`` for the odd element at the end."""
    body = _in_pairs(arrays, written.reads_index, written.lines, stores)
    tile = [
        f"const int64_t pairs = (size - from < {_TILE} ? size - from : {_TILE}) / 2;",
        *_tile(arrays, _loop(INDEPENDENT, "0", "pairs", body)),
    ]
    if outputs:
        tile = [tile[0], "const int64_t origin = 0;", *outputs.around(tile[1:], _TILE // 2, "pairs", of_pairs=True)]
        cleared = outputs.around(last, 32, "32", cleared=" = {}")  # but for the odd element, the last one of a word or not
        last = ["const int64_t from = i / 32 * 32, origin = from;", *cleared]
    return [
        *(f"for (int64_t from = 0; from < size; from += {_TILE}) {{", *(f"  {line}" for line in tile), "}"),
        *("if (size % 2) {", "  const int64_t i = size - 1;", *(f"  {line}" for line in last), "}"),
    ]


def _loop_over_groups(
    arrays: Sequence[Array],
    written: Written,
    stores: Sequence[_StoreCode],
    pragma: str,
    outputs: _OutputCode,
    *,
    is_paired: bool,
) -> list[str]:
    """Return two loops over the elements of some groups: the first finds the largest value of each group.

    Between them, a loop over the groups computes their scales, several in one instruction. The statements that need the
    scales are in the second loop, which reads results of the first from the stack.
    """
    elements, numbers = ([a for a in arrays if a.grouped == grouped] for grouped in (False, True))
    kinds = {INDEX: Kind(is_int=True), **{a.element: Kind(a.is_int, a.grouped) for a in arrays}}
    kinds |= {s.name: s.kind for s in written.statements}
    of_elements = [s for s in written.statements if not s.kind.per_group]
    largest = [s for s in written.statements if s.word == "group_max"]
    of_groups = [s for s in written.statements if s.kind.per_group and s not in largest]
    reduced = {name for name, kind in kinds.items() if kind.after_reduce}
    by_element = [s for s in stores if s.array not in numbers]
    soon, late = ([s for s in by_element if (s.expression in reduced) == is_late] for is_late in (False, True))
    first = _needed(of_elements, {s.reads[0] for s in largest} | {s.expression for s in soon})
    second = [s for s in _needed(of_elements, {s.expression for s in late}) if s not in first]
    read = {name for s in second for name in s.reads}.union(s.expression for s in late).difference(s.name for s in second)
    # Recomputed rather than stored: its inputs are stored anyway.
    again = [s for s in first if s.name in read and read.issuperset(kinds.keys() & s.reads)]
    read.difference_update(s.name for s in again)
    types = {name: "uint32_t" if kind.is_int else "T" for name, kind in kinds.items() if name in read}
    scales = {name: types.pop(name) for name in [*types] if kinds[name].per_group}
    singles = [_definition(a, _location(a)) for a in numbers]
    first_lines = [
        *(s.text for s in first),
        *(f"{name}_of@[i - origin] = {name};" for name in types),
        *(f"{s.name}_most = {s.reads[0]} > {s.name}_most ? {s.reads[0]} : {s.name}_most;" for s in largest),
    ]
    second_lines = [f"const {kind} {name} = {name}_of@[i - origin];" for name, kind in types.items()]
    second_lines += [s.text for s in (*again, *second)]

    def function(name: str, of_pairs: bool) -> list[str]:
        head = f"const auto {name} = [&](const int64_t first, const int64_t last, const auto group_size)"
        body, lanes, step = (_in_pairs, "01", GROUP // 2) if of_pairs else (_singly, [""], GROUP)
        begin = f"const int64_t begin = (g - first) * {step} + origin, end = begin + group_size;"
        loops = [
            *(f"{kind} {n}_of{lane}[{_GROUPS * step}];" for n, kind in types.items() for lane in lanes),
            *(f"uint32_t {s.name}_of[{_GROUPS}];" for s in largest),
            *(f"{kind} {name}_of[{_GROUPS}];" for name, kind in scales.items()),
            *_over_groups(
                "",
                begin,
                *singles,
                *(s.text for s in of_groups if not s.kind.after_reduce),
                *(f"uint32_t {s.name}_most = 0;" for s in largest),
                *_loop(pragma, "begin", "end", body(elements, written.reads_index, first_lines, soon)),
                *(f"{s.name}_of[g - first] = {s.name}_most;" for s in largest),
            ),
            *_over_groups(
                INDEPENDENT,
                *singles,
                *(f"const uint32_t {s.name} = {s.name}_of[g - first];" for s in largest),
                *(s.text for s in of_groups),
                *(f"{name}_of[g - first] = {name};" for name in scales),
                *(s.text for s in stores if s.array in numbers),
            ),
            *_over_groups(
                "",
                begin,
                *(f"const {kind} {name} = {name}_of[g - first];" for name, kind in scales.items()),
                *_loop(INDEPENDENT, "begin", "end", body([], False, second_lines, late)),
            ),
        ]
        origin = f"const int64_t from = first * {GROUP}, origin = {'0' if of_pairs else 'from'};"
        pairs = f"const int64_t pairs = (last - first) * {GROUP // 2};"
        loops = outputs.around(loops, _GROUPS * step, "(last - first) * group_size", of_pairs=of_pairs)
        lines = [origin, *([pairs, *_tile(elements, loops)] if of_pairs else loops)]
        return [f"{head} __attribute__((always_inline)) {{", *(f"  {line}" for line in lines), "};"]

    update_tile = "update_pairs" if is_paired else "update_groups"
    return [
        *(function(update_tile, True) if is_paired else []),
        *function("update_groups", False),
        f"const int64_t full = size / {GROUP};",
        f"for (int64_t first = 0; first < full; first += {_GROUPS})",
        f"  {update_tile}(first, first + {_GROUPS} < full ? first + {_GROUPS} : full, Known<{GROUP // (1 + is_paired)}>());",
        f"if (size % {GROUP}) update_groups(full, full + 1, size % {GROUP});",
    ]


def _over_groups(pragma: str, *body: str) -> list[str]:
    return [pragma, "for (int64_t g = first; g < last; g++) {", *(f"  {line}" for line in body), "}"]


def _needed(statements: Sequence[Statement], names: set[str]) -> list[Statement]:
    """Return the ``statements`` that define ``names``, and those whose results they read."""
    needed, matches = set(names), []
    for statement in reversed(statements):
        if statement.name in needed:
            needed |= {*statement.reads}
            matches.append(statement)
    return matches[::-1]


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

_SQUARE_SUMS = """
OURS void square_sums(const int64_t* tensors, const int64_t* grads, const int64_t* blocks, double* sums, int64_t count,
                      int64_t block_count, int64_t, int64_t threads) {{
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1 && block_count > 1)
  for (int64_t c = 0; c < block_count; c++) {{
    const int64_t t = blocks[2 * c], start = blocks[2 * c + 1] * {block};
    const int64_t left = tensors[{numel} * count + t] - start;
    sums[c] = grads[t] ? sum_of_squares(at<const {grad}>(grads, 0, count, t) + start, left < {block} ? left : {block}) : 0;
  }}
}}
"""

_STEP = """
OURS void step(const int64_t* inputs, const int64_t* marks, const int64_t* hypers, const double* square_sums,
               double* outcome, double* k, const int64_t* tensors, const int64_t* grads, const int64_t* blocks,
               int64_t columns, int64_t square_sum_count, int64_t leads, int64_t count, int64_t block_count,
               int64_t threads) {
  evaluate(inputs, marks, hypers, square_sums, outcome, k, columns, square_sum_count, leads, 1, 1);
  update(tensors, grads, blocks, outcome, k, count, columns, block_count, threads);
}
"""


class CppKernel(Kernel):
    """The compiled kernel of one key on the CPU. It runs on up to ``torch.get_num_threads()`` threads.

    Raises:
        CompilerError: it cannot be compiled or loaded on this machine.
    """

    block = reduce_block = BLOCK
    most_sums = sys.maxsize  # one per block, so that the order of addition does not depend on the threads

    def __init__(self, key: KernelKey) -> None:
        super().__init__(key)
        text = source(key)
        self._code = library(text)
        for name, parameters in re.findall(r"OURS void (\w+)\(([^)]*)\)", text):  # addresses and counts have 64 bits
            function = getattr(self._code, name)
            function.argtypes, function.restype = [ctypes.c_int64] * len(parameters.split(",")), None

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        if table.output_sums:
            super().step(table, coefficients)
            return

        def arguments() -> Arguments:
            _, _, tables, counts = self._evaluated(coefficients)
            tables = *tables, table.tensors, table.grads, table.blocks
            return (len(table.blocks),), table.elements, tables, (*counts, table.grads.numel())

        sums = coefficients.all_square_sums  # replaced when a norm is measured, without clearing a RowBatch's launches
        self._launch("step", table, arguments, id(sums))

    def _prepared(self, name: str, programs: Ints, elements: int, tensors: Sequence[Tensor], counts: Ints) -> Launch:
        run = functools.partial(getattr(self._code, name), *map(Tensor.data_ptr, tensors), *counts, *programs)
        return (lambda: run(torch.get_num_threads())) if elements > SERIAL else functools.partial(run, 1)
