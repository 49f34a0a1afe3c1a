"""The contents of a module that Inductor wrote, read from its text: calls, waits, and bytes that Triton kernels move."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Inputs: TypeAlias = Sequence[int | tuple[int, ...]]
"""Shapes of a graph's inputs, or sizes."""

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)^'''", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"^\s+(\w+)\.run\(", re.MULTILINE)
_EXTERN = re.compile(r"^\s+(?:\w+ = )?((?:extern_kernels\.|torch\.ops\.|aten\.)[\w.]+|\w+\.copy_)\(", re.MULTILINE)
_CPP = re.compile(r"^\s+(cpp_\w+)\(", re.MULTILINE)
_WAIT = re.compile(r"\.item\(\)|\.tolist\(\)|\.cpu\(\)|\.synchronize\(\)")
_ACCESS = re.compile(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\)(?:, |\)$)")  # a pointer and an index
_SIZE = r"(?:\w+, )*\w+,? = args|\w+_size = \w+|(?:s\d+|\w+_xnumel(?:_\d+)?) = .*"
_SIZES = re.compile(rf"^\s+(?:({_SIZE})$|(\w+)\.run\((.*), stream=)", re.MULTILINE)
_PARTITION = re.compile(r"^def partition_\d+\(", re.MULTILINE)


class Module(NamedTuple):
    """One graph's module."""

    launches: list[str]  # Triton kernels in the order of their launches
    externs: list[str]  # library calls, operators and copies
    cpp: list[str]  # calls of C++ kernels
    waits: list[str]  # statements in which the host reads a value of the device
    kernels: Mapping[str, str]  # text of each Triton kernel
    bytes: float | None  # moved by all launches together; None if they were not counted
    outside: int  # number of launches, externs and C++ kernels outside of partitions for CUDA graphs


def read(source: str, inputs: Inputs | None) -> Module:
    """Read a module. Without ``inputs`` bytes are not counted."""
    kernels = dict(_KERNEL.findall(source))
    partition = _PARTITION.search(source)
    outer = source[source.index("def call(") :]
    calls = outer if partition is None else source[partition.start() :]
    launches = [name for name in _RUN.findall(calls) if name in kernels]
    outside = sum(len(pattern.findall(outer)) for pattern in (_RUN, _EXTERN, _CPP))
    moved = None if inputs is None else sum(_kernel_bytes(kernels[n], sizes) for n, sizes in _sizes(calls, kernels, inputs))
    return Module(launches, _EXTERN.findall(calls), _CPP.findall(calls), _WAIT.findall(calls), kernels, moved, outside)


def _sizes(calls: str, kernels: Mapping[str, str], inputs: Inputs) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield each launch of a kernel, with the sizes that its text does not have."""
    known: dict[str, Any] = {"args": inputs}
    for assignment, kernel, values in _SIZES.findall(calls.replace(".size()", "")):
        with contextlib.suppress(ValueError):  # arguments of a part of the graph, whose sizes are in its text
            exec(assignment, {}, known)
        if kernel in kernels:
            (parameters,) = re.findall(rf"^def {kernel}\((.*)\):", kernels[kernel], re.MULTILINE)
            pairs = zip(parameters.split(", "), values.split(", "), strict=False)
            yield kernel, {name: eval(text, {}, known) for name, text in pairs if name.startswith("xnumel")}


def _kernel_bytes(text: str, sizes: Mapping[str, int]) -> float:
    """Return the bytes that one launch moves: each load and store once, over the elements of its section."""
    body = text[text.index("\ndef ") :]
    count: float = sizes.get("xnumel", 0)
    indices: dict[str, float] = {}
    moved, accesses = 0.0, 0
    for line in body.splitlines():
        if size := re.search(r"(?:^\s+xnumel = |xmask = xindex < )(xnumel_\d+|\d+)$", line):
            count = int(size[1]) if size[1].isdigit() else sizes[size[1]]
        if index := re.match(r"\s+(x\d+) = (.*)$", line):
            indices[index[1]] = _distinct(index[2], count)
        for pointer, used in _ACCESS.findall(line):
            accesses += 1
            values = math.prod(indices[name] for name in re.findall(r"\bx\d+\b", used) if name in indices)
            moved += itemsize(text, pointer) * min(values, count)
    assert accesses == len(re.findall(r"\btl\.(?:load|store|atomic_\w+)\(", body)), "an access was not understood"
    return moved


def itemsize(text: str, pointer: str) -> int:
    """Return the bytes of an element behind one of a kernel's pointers."""
    bits = re.findall(rf"'{pointer}': '\*[a-z]+(\d*)", text)[0]
    return max(1, int(bits or 1) // 8)


def _distinct(expression: str, count: float) -> float:
    """Return the number of values of an index over ``count`` elements."""
    if part := re.match(r"x\w* (//|%) (\d+)$", expression):
        return count / int(part[2]) if part[1] == "//" else int(part[2])
    assert re.match(r"\(?x\w+", expression), expression
    return count
