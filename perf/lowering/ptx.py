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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

_LINE = re.compile(r"(\$\w+):|(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s*([^;]*);")  # a label, or predicate, operation, operands
_ACCESS = re.compile(r"(ld|st|atom|red)\.(?:[\w:]+\.)*?global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)$")
_NAME = re.compile(r"%\w+(?:\.\w+)?")


class Access(NamedTuple):
    """One global memory access of a thread."""

    kind: str  # ``ld``, ``st``, ``atom`` or ``red``
    width: str  # of what it moves: ``v4.b32``
    bytes: int  # that a thread moves
    masked: bool  # whether it is predicated
    addresses: int  # how many different ones the threads of a program access

    @property
    def elementwise(self) -> bool:
        """Whether its address differs between threads."""
        return self.addresses > 1

    @property
    def program_bytes(self) -> int:
        """Bytes that a program moves between memory and all its threads: what threads share counts once."""
        return self.bytes * self.addresses

    def __str__(self) -> str:
        return f"{self.kind}.{self.width}"


class Resources(NamedTuple):
    """What the assembler gives one kernel."""

    registers: int  # of a thread
    spills: int  # in bytes
    shared: int  # bytes of shared memory


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
    counted = ("registers", "bytes spill", "bytes smem")
    return Resources(*(sum(map(int, re.findall(rf"(\d+) {what}", done.stderr))) for what in counted))


class Kernel(NamedTuple):
    """What the text of a kernel says. A loop is on the full path once: it counts as one turn."""

    threads: int  # of one program
    accesses: list[Access]  # all to global memory
    full_path: list[Access]  # those on the path with element accesses and the fewest masked ones
    barriers: int  # how often the threads of a program wait for each other on that path, as to exchange numbers
    extern: tuple[str, ...]  # functions that it calls and does not contain


@functools.lru_cache(maxsize=1024)
def read(ptx: str) -> Kernel:
    """Read a kernel's PTX."""
    (threads,) = map(int, re.findall(r"\.reqntid (\d+)", ptx))
    blocks = _blocks(ptx, threads)
    path = _full_path(blocks)
    accesses, on_path = ([access for block in some for access in block.accesses] for some in (blocks, path))
    extern = re.findall(r"^\.extern \.func.*?(\w+)\s*$", ptx, re.MULTILINE)
    return Kernel(threads, accesses, on_path, sum(block.barriers for block in path), tuple(extern))


@dataclass
class _Block:
    """Instructions without a jump into them or out of them, where they lead, and whether to the next block too."""

    label: str = ""
    accesses: list[Access] = field(default_factory=list)
    barriers: int = 0
    target: str = ""
    goes_on: bool = True


def _full_path(blocks: list[_Block]) -> list[_Block]:
    places = {block.label: i for i, block in enumerate(blocks)}
    known: dict[int, tuple[bool, int, int, list[int]]] = {}

    def best(i: int) -> tuple[bool, int, int, list[int]]:
        """The way from block ``i`` on: with element accesses, then with the fewest masked ones, then with most bytes."""
        if i not in known:
            known[i] = (False, 0, 0, [])  # of an edge back to this block
            following = [places[blocks[i].target]] if blocks[i].target else []
            following += [i + 1] if blocks[i].goes_on and i + 1 < len(blocks) else []
            has, unmasked, moved, path = max(map(best, following), default=known[i])
            own = [a for a in blocks[i].accesses if a.elementwise]
            unmasked, moved = unmasked - sum(a.masked for a in own), moved + sum(a.bytes for a in own)
            known[i] = (has or bool(own), unmasked, moved, [i, *path])
        return known[i]

    return [blocks[i] for i in best(0)[-1]]


def _blocks(ptx: str, threads: int) -> list[_Block]:
    lines = [line.partition("//")[0].strip() for line in ptx[ptx.index("\n{") :].splitlines()]
    found = [match.groups("") for match in map(_LINE.match, lines) if match]
    blocks = [_Block()]
    values = {"%tid.x": np.arange(threads), "%laneid": np.arange(threads) % 32}
    for *_, op, operands in found:  # the text may read what it writes further down
        _write(op, operands, values)
    for label, predicate, op, operands in found:
        if label:
            blocks.append(_Block(label))
        elif op.startswith(("bra", "ret")):
            blocks[-1].target, blocks[-1].goes_on = (*re.findall(r"\$\w+", operands), "")[0], bool(predicate)
            blocks.append(_Block())
        elif access := _ACCESS.match(op):
            (address,) = _NAME.findall(operands[operands.index("[") : operands.index("]")])
            value = values.get(address, _ALIKE)
            addresses = threads if value is None else len(np.unique(value))
            kind, lanes, bits = access[1], int(access[2] or 1), int(access[3])
            width = f"v{lanes}.b{bits}" if lanes > 1 else f"b{bits}"
            blocks[-1].accesses.append(Access(kind, width, lanes * bits // 8, bool(predicate), addresses))
        blocks[-1].barriers += op.startswith("bar.sync")
        _write(op, operands, values)
    return blocks


_ALIKE = np.zeros(1, np.int64)  # what all threads have alike and nobody knows: it is as well aligned as 0
_OPERATIONS: dict[tuple[str, int], Callable[..., Any]] = {
    ("mov", 1): operator.pos,
    ("cvt", 1): operator.pos,
    ("add", 2): operator.add,
    ("mul", 2): operator.mul,
    ("mad", 3): lambda x, y, z: x * y + z,
    ("and", 2): operator.and_,
    ("or", 2): operator.or_,
    ("shr", 2): operator.rshift,
    ("shl", 2): operator.lshift,
    ("bfe", 3): lambda x, start, length: (x >> start) & ((1 << length) - 1),
}


def _write(op: str, operands: str, values: dict[str, Any]) -> None:
    """Note what an instruction writes: an array with a number for each thread, or with one for all; None if unknown."""
    if not op or op.startswith(("st.", "bra")):
        return
    written, _, read = operands.partition("}" if operands.startswith("{") else ",")
    names = [part.strip() for part in re.split(r"[,\[\]{}+]", read) if part.strip()]
    constants = {name: np.array([int(name, 0)]) for name in names if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", name)}
    sources = [constants.get(name, values.get(name, _ALIKE)) for name in names]
    if any(source is None for source in sources):
        result = None
    elif compute := _OPERATIONS.get((op.partition(".")[0], len(sources))):
        result = compute(*sources)
    else:
        result = _ALIKE if all((source == source[0]).all() for source in sources) else None
    values.update(dict.fromkeys(_NAME.findall(written), result))
