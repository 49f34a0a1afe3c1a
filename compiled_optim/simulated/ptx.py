"""Analysis of a compiled kernel from its PTX: the memory traffic of one program, and the assembler's report.

Accesses whose address depends on the thread are of elements; the others read a table, once per program. If several threads
access one address, because elements share a number, memory moves it once. The full path is the one with the most accesses of
16 bytes and the fewest masked ones: a program takes it for a complete, well aligned chunk of elements.
"""

from __future__ import annotations

import bisect
import functools
import operator
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# A label, or predicate, operation, operands.
_LINE = re.compile(r"^\s*(?:(\$\w+):|(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)[ \t]*([^;\n]*);)", re.MULTILINE)
_ACCESS = re.compile(r"(ld|st|atom|red)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)$")
_ARITHMETIC = re.compile(r"(?!ld|st|mov|bra|bar|ret)(?!(add|mul|shl|shr|mad)\.(wide\.)?([suw]\w*\.)?[bsu]64)[a-z]")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)$")
_NAME = re.compile(r"%\w+(?:\.\w+)?")


class Access(NamedTuple):
    """One global memory access of a thread."""

    kind: str  # ``ld``, ``st``, ``atom`` or ``red``
    width: str  # of the moved value: ``v4.b32``
    bytes: int  # moved by a thread
    masked: bool  # whether it is predicated
    elementwise: bool  # whether its address differs between threads
    program_bytes: int  # between memory and all threads of a program: a shared address counts once

    def __str__(self) -> str:
        return f"{self.kind}.{self.width}"


class Resources(NamedTuple):
    """The resources that the assembler assigns to one kernel."""

    registers: int  # of a thread
    spills: int  # in bytes
    shared: int  # bytes of shared memory


@functools.lru_cache(maxsize=1024)
def resources(ptx: str, arch: int) -> Resources:
    """Return the assembler's report on ``ptx`` for compute capability ``arch`` (90 for sm_90).

    Raises:
        RuntimeError: the assembler rejects the text.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", "-o", os.devnull, "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr}")
    counted = ("registers", "bytes spill", "bytes smem")
    return Resources(*(sum(map(int, re.findall(rf"(\d+) {what}", done.stderr))) for what in counted))


class PtxKernel(NamedTuple):
    """Facts from the text of a kernel. A loop is on the full path once: it counts as one iteration."""

    threads: int  # of one program
    accesses: list[Access]  # all to global memory
    full_path: list[Access]  # those on the path with the most accesses of 16 bytes and, of such, the fewest masked ones
    operations: int  # on that path, of a thread: instructions from the first element on, without moves and addresses
    barriers: int  # barriers of a program's threads on that path, for example to exchange numbers
    float64: tuple[int, int]  # of the operations on that path, those in float64: in an iteration of its loops, and outside
    extern: tuple[str, ...]  # functions that it calls and does not contain


@functools.lru_cache(maxsize=1024)
def read(ptx: str) -> PtxKernel:
    """Read a kernel's PTX."""
    (threads,) = map(int, re.findall(r"\.reqntid (\d+)", ptx))
    values: dict[str, Any] = {"%tid.x": np.arange(threads), "%laneid": np.arange(threads) % 32}
    lines = _LINE.findall(ptx, ptx.index("\n{"))
    for *_, op, operands in lines:  # the text may read a register above the line that writes it
        _write(op, operands, values)
    accesses: list[Access | None] = []  # of each line
    for _, predicate, op, operands in lines:
        accesses.append(_access(op, operands, bool(predicate), threads, values))
        _write(op, operands, values)
    path = _full_path(lines, accesses)
    barriers = sum(lines[i][2].startswith("bar.sync") for i in path)
    first = next((n for n, i in enumerate(path) if (a := accesses[i]) and a.elementwise), len(path))
    operations = sum(_ARITHMETIC.match(lines[i][2]) is not None for i in path[first:])
    labels = {lines[i][0]: n for n, i in enumerate(path) if lines[i][0]}
    turns = [range(labels[lines[i][3]], n) for n, i in enumerate(path) if lines[i][2][:3] == "bra" and lines[i][3] in labels]
    wide = [n for n, i in enumerate(path) if ".f64" in lines[i][2] and not lines[i][2].startswith("selp")]
    in_turns = sum(any(n in turn for turn in turns) for n in wide)
    extern = re.findall(r"^\.extern \.func.*?(\w+)\s*$", ptx, re.MULTILINE)
    full_path = [a for i in path if (a := accesses[i])]
    return PtxKernel(
        threads, [a for a in accesses if a], full_path, operations, barriers, (in_turns, len(wide) - in_turns), tuple(extern)
    )


def _full_path(lines: list[tuple[str, ...]], accesses: list[Access | None]) -> list[int]:
    """Return the indices of the lines of the full path."""
    jumps = [op.startswith(("bra", "ret")) for _, _, op, _ in lines]
    labels = {label: i for i, (label, *_) in enumerate(lines) if label}
    starts = {*labels.values(), len(lines)}
    ends = [i for i, jump in enumerate(jumps) if jump or i + 1 in starts]
    known: dict[int, tuple[bool, int, int, int, int, list[int]]] = {}

    def best(start: int) -> tuple[bool, int, int, int, int, list[int]]:
        """Return the best path from a line: with element accesses, then most of 16 bytes, fewest masked, most bytes."""
        if start not in known:
            known[start] = (False, 0, 0, 0, -1, [])  # for an edge back to this line
            end = ends[bisect.bisect_left(ends, start)]
            following = [labels[lines[end][3]]] if lines[end][3] in labels else []
            following += [end + 1] if end + 1 < len(lines) and (lines[end][1] or not jumps[end]) else []
            has, wide, unmasked, moved, _, path = max(map(best, following), default=known[start])
            elementwise = [a for a in accesses[start : end + 1] if a and a.elementwise]
            wide, unmasked = wide + sum(a.bytes == 16 for a in elementwise), unmasked - sum(a.masked for a in elementwise)
            moved += sum(a.bytes for a in elementwise)
            known[start] = (has or bool(elementwise), wide, unmasked, moved, start, [*range(start, end + 1), *path])
        return known[start]

    return best(0)[-1]


def _access(op: str, operands: str, masked: bool, threads: int, values: dict[str, Any]) -> Access | None:
    """Return the global memory access of an instruction, or None."""
    if not (match := _ACCESS.match(op)):
        return None
    (address,) = _NAME.findall(operands[operands.index("[") : operands.index("]")])
    value, lanes, bits = values.get(address, _ALIKE), int(match[2] or 1), int(match[3])
    addresses, moved = threads if value is None else len(np.unique(value)), lanes * bits // 8
    return Access(
        match[1], f"v{lanes}.b{bits}" if lanes > 1 else f"b{bits}", moved, masked, addresses > 1, moved * addresses
    )


_ALIKE = np.zeros(1, np.int64)  # an unknown value, equal in all threads, and as well aligned as 0
_LOGIC = {"and": operator.and_, "or": operator.or_, "shr": operator.rshift, "shl": operator.lshift}
_OPERATIONS: dict[int, dict[str, Callable[..., Any]]] = {
    1: {"mov": operator.pos, "cvt": operator.pos},
    2: {"add": operator.add, "mul": operator.mul, **_LOGIC},
    3: {"mad": lambda x, y, z: x * y + z, "bfe": lambda x, start, length: (x >> start) & ((1 << length) - 1)},
}
"""The functions of instructions, by the number of operands and by name."""


def _write(op: str, operands: str, values: dict[str, Any]) -> None:
    """Record the value that an instruction writes: an array with a number per thread, or one for all; None if unknown."""
    if not op or op.startswith(("st.", "bra")):
        return
    written, _, read = operands.partition("}" if operands.startswith("{") else ",")
    names = re.findall(r"[^\s,\[\]{}+]+", read)
    sources = [np.array([int(name, 0)]) if _NUMBER.match(name) else values.get(name, _ALIKE) for name in names]
    if any(source is None for source in sources):
        result = None
    elif compute := _OPERATIONS.get(len(sources), {}).get(op.partition(".")[0]):
        result = compute(*sources)
    else:
        result = _ALIKE if all((source == source[0]).all() for source in sources) else None
    values.update(dict.fromkeys(_NAME.findall(written), result))
