"""What a compiled kernel does, read from its PTX: the memory traffic of one program, and what the assembler makes of it.

Accesses whose address depends on the thread belong to elements; the others read a table, once per program. Where several
threads access one address, as they do where elements share a number, memory moves it once. The path that counts is the one
with the fewest masked accesses, on which a program finds a whole chunk of elements, well aligned.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LABEL = re.compile(r"^(\$\w+):")
_INSTRUCTION = re.compile(r"^(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s*([^;]*);")
_BRANCH = re.compile(r"\$L\w*BB\w+")
_ACCESS = re.compile(r"^(ld|st|atom|red)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*$")


@dataclass(frozen=True)
class Access:
    """One global memory access of a thread.

    Attributes:
        kind: ``ld``, ``st``, ``atom`` or ``red``.
        lanes: registers it moves.
        bits: size of each.
        masked: whether it is predicated.
        addresses: how many different ones the threads of a program access.
    """

    kind: str
    lanes: int
    bits: int
    masked: bool
    addresses: int

    @property
    def bytes(self) -> int:
        """Bytes that a thread moves."""
        return self.lanes * self.bits // 8

    @property
    def elementwise(self) -> bool:
        """Whether its address differs between threads."""
        return self.addresses > 1

    @property
    def program_bytes(self) -> int:
        """Bytes that a program moves between memory and all its threads: what threads share counts once."""
        return self.bytes * self.addresses

    def __str__(self) -> str:
        return f"{self.kind}.v{self.lanes}.b{self.bits}" if self.lanes > 1 else f"{self.kind}.b{self.bits}"


@dataclass
class _Block:
    accesses: list[Access]
    successors: list[int]
    barriers: int = 0


@dataclass(frozen=True)
class Resources:
    """What the assembler gives one kernel: registers of a thread, bytes spilled, bytes of shared memory."""

    registers: int
    spills: int
    shared: int


@functools.lru_cache(maxsize=1024)
def resources(ptx: str, arch: int) -> Resources:
    """The assembler's report on ``ptx`` for compute capability ``arch`` (90 for sm_90).

    Raises:
        RuntimeError: the assembler refuses the text.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", "-o", os.devnull, "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers is not None, done.stderr
    shared = re.search(r"(\d+) bytes smem", done.stderr)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return Resources(int(registers[1]), spills, int(shared[1]) if shared else 0)


def threads(ptx: str) -> int:
    """Threads of one program."""
    found = re.search(r"\.reqntid (\d+)", ptx)
    assert found is not None
    return int(found[1])


def external_functions(ptx: str) -> list[str]:
    """Functions that ``ptx`` calls and does not contain."""
    return re.findall(r"^\.extern \.func.*?(\w+)\s*$", ptx, re.MULTILINE)


def full_path(ptx: str) -> list[Access]:
    """The accesses a thread makes on the path with element accesses and the fewest masked ones.

    A loop counts as one turn of it: its blocks are on the path once.
    """
    return [access for block in _full_path(ptx) for access in block.accesses]


def barriers(ptx: str) -> int:
    """How often the threads of a program wait for each other on the :func:`full_path`, as to exchange numbers."""
    return sum(block.barriers for block in _full_path(ptx))


@functools.lru_cache(maxsize=1024)
def _full_path(ptx: str) -> tuple[_Block, ...]:
    blocks = _blocks(ptx)

    def best(i: int) -> dict[bool, tuple[int, int, list[int]]]:
        """The way from block ``i`` on, with and without element accesses: fewest masked ones, then most bytes."""
        if i not in known:
            known[i] = {}  # an edge back to this block leads nowhere
            own = [a for a in blocks[i].accesses if a.elementwise]
            onward = [way for s in blocks[i].successors for way in best(s).items()] or [(False, (0, 0, []))]
            ways: dict[bool, tuple[int, int, list[int]]] = {}
            for has, (unmasked, moved, path) in onward:
                way = (unmasked - sum(a.masked for a in own), moved + sum(a.bytes for a in own), [i, *path])
                ways[has or bool(own)] = max(way, ways.get(has or bool(own), way))
            known[i] = ways
        return known[i]

    known: dict[int, dict[bool, tuple[int, int, list[int]]]] = {}
    ways = best(0)
    return tuple(blocks[i] for i in ways[max(ways)][2])


def accesses(ptx: str) -> list[Access]:
    """All global memory accesses in the text."""
    return [a for block in _blocks(ptx) for a in block.accesses]


def _blocks(ptx: str) -> list[_Block]:
    instructions = list(_instructions(ptx))
    by_thread = _by_thread(instructions, threads(ptx))
    starts = {label: i for i, (label, *_) in enumerate(instructions) if label}
    blocks: list[_Block] = []
    heads: dict[int, int] = {}
    pending: list[list[int | None]] = []
    fresh = True
    for i, (label, predicate, op, operands) in enumerate(instructions):
        if label or fresh:
            if blocks and not fresh:
                pending[-1].append(i)
            heads[i] = len(blocks)
            blocks.append(_Block([], []))
            pending.append([])
            fresh = False
        if label:
            continue
        if _ACCESS.match(op):
            blocks[-1].accesses.append(_access(predicate, op, operands, by_thread, threads(ptx)))
        blocks[-1].barriers += op.startswith("bar.sync")
        if op.startswith("bra"):
            target = _BRANCH.search(operands)
            assert target is not None, operands
            pending[-1].append(starts[target[0]])
            if predicate:
                pending[-1].append(i + 1)
            fresh = True
        elif op.startswith("ret"):
            if predicate:
                pending[-1].append(i + 1)
            fresh = True
    for block, targets in zip(blocks, pending, strict=True):
        block.successors = [heads[t] for t in targets if t in heads]
    return blocks


def _instructions(ptx: str) -> Iterator[tuple[str, str, str, str]]:
    """(label, predicate, operation, operands) of every line of code; a label stands alone."""
    for raw in ptx[ptx.index("\n{") :].splitlines():
        line = raw.partition("//")[0].strip()
        if label := _LABEL.match(line):
            yield label[1], "", "", ""
        elif found := _INSTRUCTION.match(line):
            yield "", found[1] or "", found[2], found[3]


def _access(predicate: str, op: str, operands: str, by_thread: Mapping[str, _Value], threads: int) -> Access:
    found = re.search(r"\[([^\]]*)\]", operands)
    assert found is not None, operands
    size, lanes = re.search(r"\.[bfsu](\d+)$", op), re.search(r"\.v(\d)", op)
    assert size is not None, op
    (address,) = [by_thread.get(register, _ALIKE) for register in _NAME.findall(found[1])]
    addresses = threads if address.offsets is None else len(np.unique(address.offsets))
    return Access(op.partition(".")[0], int(lanes[1]) if lanes else 1, int(size[1]), bool(predicate), addresses)


@dataclass(frozen=True, eq=False)
class _Value:
    """What is known of a register in the threads of a program.

    Attributes:
        offsets: one number for each thread, or one for all of them, to which a number is added that threads have in common;
            None if it is not known how threads differ.
        exact: whether that number is 0.
    """

    offsets: npt.NDArray[np.int64] | None
    exact: bool = False

    def merged(self, other: _Value) -> _Value:
        """What is known of a register that is this or the other."""
        if self.offsets is None or other.offsets is None:
            return _UNKNOWN
        apart = self.offsets - other.offsets
        if (apart != apart[0]).any():
            return _UNKNOWN
        return _Value(self.offsets, self.exact and other.exact and apart[0] == 0)


_ALIKE, _UNKNOWN = _Value(np.zeros(1, np.int64)), _Value(None)
# What is known of results, by the operation and how much it reads. An "or" adds what has no bits in common with a number.
_EXACT: dict[tuple[str, int], Callable[..., npt.NDArray[np.int64]]] = {
    ("mov", 1): operator.pos,
    ("cvt", 1): operator.pos,
    ("add", 2): operator.add,
    ("mul", 2): operator.mul,
    ("and", 2): operator.and_,
    ("or", 2): operator.or_,
    ("shr", 2): operator.rshift,
    ("shl", 2): operator.lshift,
    ("bfe", 3): lambda x, start, length: (x >> start) & ((1 << length) - 1),
}
_LINEAR = {("mov", 1): operator.pos, ("cvt", 1): operator.pos, ("add", 2): operator.add, ("or", 2): operator.add}
_SCALING = {("mul", 2), ("shl", 2)}
_NAME = re.compile(r"%\w+(?:\.\w+)?")


def _by_thread(instructions: Sequence[tuple[str, str, str, str]], threads: int) -> dict[str, _Value]:
    """What is known of registers."""
    known = {"%tid.x": _Value(np.arange(threads), exact=True), "%laneid": _Value(np.arange(threads) % 32, exact=True)}
    while True:
        before = dict(known)
        for _, _, op, operands in instructions:
            written, sources = _operands(operands)
            if op.startswith(("st.", "bra")) or not written:
                continue
            value = _result(op, [known.get(source, _ALIKE) if "%" in source else _constant(source) for source in sources])
            for name in written:
                known[name] = known[name].merged(value) if name in known else value
        if known.keys() == before.keys() and all(_same(known[name], before[name]) for name in known):
            return known


def _operands(operands: str) -> tuple[list[str], list[str]]:
    """The registers that an instruction writes, and what it reads: registers and constants."""
    written, _, read = operands.partition("}") if operands.startswith("{") else operands.partition(",")
    sources = (part for part in re.split(r"[,\[\]{}+]", read) if part.strip())
    return _NAME.findall(written), [part.strip() for part in sources]


def _constant(text: str) -> _Value:
    return _Value(np.array([int(text, 0)]), exact=True) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text) else _ALIKE


def _result(op: str, sources: Sequence[_Value]) -> _Value:
    """What is known of the result of an instruction."""
    if op.startswith("mad."):
        return _result("add", [_result("mul", sources[:2]), sources[2]])
    kind, offsets = (op.partition(".")[0], len(sources)), [source.offsets for source in sources]
    if any(o is None for o in offsets):
        return _UNKNOWN
    if kind in _EXACT and all(source.exact for source in sources):
        return _Value(_EXACT[kind](*offsets), exact=True)
    if kind in _LINEAR:
        return _Value(_LINEAR[kind](*offsets))
    if kind in _SCALING and sources[1].exact and offsets[1].size == 1:
        return _Value(_EXACT[kind](*offsets))
    return _ALIKE if all((o == o[0]).all() for o in offsets) else _UNKNOWN


def _same(value: _Value, other: _Value) -> bool:
    return value.exact == other.exact and (value.offsets is None) == (other.offsets is None)
