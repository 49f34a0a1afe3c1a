"""How fast clipping reads gradients, reckoned from the machine code of its kernel, without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import compiled_optim as co
from compiled_optim.simulated import ptx
from compiled_optim.simulated.record import recording
from perf.lowering.report import cpu_in_place_of_cuda

triton = pytest.importorskip("triton")

# An H200.
BYTES_PER_SECOND = 4.8e12
MULTIPROCESSORS = 132
REGISTERS = 65536  # of a multiprocessor
THREADS = 2048
SECONDS = 1.6e-6 / 3  # from a load to its use while the memory is busy: an estimate

_INSTRUCTION = re.compile(r"^\s*/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


def _machine_code(cubin: bytes, place: Path) -> str:
    file = place / "kernel.cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _turn(code: str) -> list[tuple[str, str]]:
    """The instructions of a turn of the loop that loads 16 bytes at a time, from its first load on."""
    lines = code.splitlines()
    loads = [i for i, line in enumerate(lines) if "LDG" in line]
    wide = [i for i in loads if "LDG.E.128" in lines[i]]
    end = next(i for i in range(wide[-1], len(lines)) if " BRA " in lines[i] and "@" not in lines[i])
    found = (_INSTRUCTION.match(line) for line in lines[loads[0] : end])
    return [(match[1], match[2]) for match in found if match]


def _registers(op: str, operands: str) -> Iterator[int]:
    """The numbers of all that an instruction reads and writes."""
    for i, (name, width) in enumerate(re.findall(r"\bR(\d+)(?:\.reuse)?(\.64)?", operands)):
        count = _bytes(op) // 4 if op.startswith("LDG") and i == 0 else 2 if width else 1
        yield from range(int(name), int(name) + count)


def _bytes(load: str) -> int:
    bits = re.search(r"\.(64|128)\b", load)
    return int(bits[1]) // 8 if bits else 4


def _seconds(turn: list[tuple[str, str]]) -> float:
    """How long a turn takes where all but waiting for memory takes no time."""
    now, ready = 0.0, dict[int, float]()
    for op, operands in turn:
        used = list(_registers(op, operands))
        now = max([now, *(ready.pop(r) for r in used if r in ready)])
        if op.startswith("LDG"):
            ready |= dict.fromkeys(used[: _bytes(op) // 4], now + SECONDS)
    return max([now, *ready.values()])


def _programs(registers: int, threads: int) -> int:
    """How many programs a multiprocessor holds; each warp has a multiple of 256 registers."""
    warp = -(-registers * 32 // 256) * 256
    return min(REGISTERS // (warp * threads // 32), THREADS // threads)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_asks_for_more_than_the_memory_gives(dtype: torch.dtype, tmp_path: Path) -> None:
    """Twice as much, since programs begin and end, and wait longer than on average, without each other's knowledge."""
    with cpu_in_place_of_cuda(90), recording("cpu") as recorder:
        param = nn.Parameter(torch.zeros(1 << 16, dtype=dtype))
        param.grad = torch.zeros_like(param)
        co.SGD([param], max_grad_norm=1.0).step()
        (kernel,) = [launch.kernel for launch in recorder.take().launches if launch.name == "square_sums"]
    turn = _turn(_machine_code(kernel.asm["cubin"], tmp_path))
    threads = ptx.read(kernel.asm["ptx"]).threads
    programs = _programs(ptx.resources(kernel.asm["ptx"], 90).registers, threads)
    moved = sum(_bytes(op) for op, _ in turn if op.startswith("LDG") and _bytes(op) == 16) * threads
    assert moved * programs * MULTIPROCESSORS / _seconds(turn) >= 2 * BYTES_PER_SECOND
