"""The C++ loops over the elements of a chunk, and over groups of elements where a rule has numbers of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_optim.lowering.kernels import table as rows
from compiled_optim.plan.kernel_key import KernelKey
from compiled_optim.rule.bits import GROUP
from compiled_optim.rule.rule import INDEX, Written
from compiled_optim.rule.symbols import Kind, Statement

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
