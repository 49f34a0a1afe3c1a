"""What a compiled kernel does, read from its PTX: the memory traffic of one program, and what the assembler makes of it.

Accesses whose address depends on the thread belong to elements; the others read a table, once per program. The path that
counts is the one with the fewest masked accesses, on which a program finds a whole chunk of elements, well aligned.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(\$\w+):")
_INSTRUCTION = re.compile(r"^(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s*([^;]*);")
_BRANCH = re.compile(r"\$L\w*BB\w+")
_REGISTER = re.compile(r"%(?!p\d)\w+(?:\.\w+)?")
_ACCESS = re.compile(r"^(ld|st|atom|red)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*$")


@dataclass(frozen=True)
class Access:
    """One global memory access of a thread.

    Attributes:
        kind: ``ld``, ``st``, ``atom`` or ``red``.
        lanes: registers it moves.
        bits: size of each.
        masked: whether it is predicated.
        elementwise: whether its address differs between threads.
    """

    kind: str
    lanes: int
    bits: int
    masked: bool
    elementwise: bool

    @property
    def bytes(self) -> int:
        """Bytes moved."""
        return self.lanes * self.bits // 8

    def __str__(self) -> str:
        return f"{self.kind}.v{self.lanes}.b{self.bits}" if self.lanes > 1 else f"{self.kind}.b{self.bits}"


@dataclass
class _Block:
    accesses: list[Access]
    successors: list[int]


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
    return [a for i in ways[max(ways)][2] for a in blocks[i].accesses]


def accesses(ptx: str) -> list[Access]:
    """All global memory accesses in the text."""
    return [a for block in _blocks(ptx) for a in block.accesses]


def _blocks(ptx: str) -> list[_Block]:
    instructions = list(_instructions(ptx))
    by_thread = _dependent_on_thread(instructions)
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
            blocks[-1].accesses.append(_access(predicate, op, operands, by_thread))
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


def _access(predicate: str, op: str, operands: str, by_thread: set[str]) -> Access:
    found = re.search(r"\[([^\]]*)\]", operands)
    assert found is not None, operands
    size, lanes = re.search(r"\.[bfsu](\d+)$", op), re.search(r"\.v(\d)", op)
    assert size is not None, op
    elementwise = any(r in by_thread for r in _REGISTER.findall(found[1]))
    return Access(op.partition(".")[0], int(lanes[1]) if lanes else 1, int(size[1]), bool(predicate), elementwise)


def _dependent_on_thread(instructions: Sequence[tuple[str, str, str, str]]) -> set[str]:
    """The registers whose value depends on the thread's index."""
    dependent = {"%tid.x", "%laneid"}
    while True:
        before = len(dependent)
        for _, _, op, operands in instructions:
            if not op or op.startswith(("st.", "bra")):
                continue
            names = _REGISTER.findall(operands)
            group = re.match(r"\s*\{([^}]*)\}", operands)
            written = _REGISTER.findall(group[1]) if group else names[:1]
            if any(n in dependent for n in names[len(written) :]):
                dependent.update(written)
        if len(dependent) == before:
            return dependent
