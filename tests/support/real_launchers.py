"""Launches kernels with Triton's own launchers, whose C code calls a driver that only notes what it is given.

A process of its own, since it loads that driver as ``libcuda.so.1``. Tensors on the CPU are on a GPU of compute capability
9.0 to it. Every launch of a step is done once more in Triton's own way. Prints, for each case, the names of the kernels that
were launched, and what is wrong. Arguments name the cases to run; the first one is a folder for the compiled driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

DRIVER = """
#include <stdint.h>
#include <string.h>
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream, *attrs; unsigned attributes; } Config;
typedef struct { unsigned numbers[8]; uint64_t stream, function; char given[4096]; } Launch;
Launch last;
int launches, parameters, sizes[256];
int cuLaunchKernelEx(const Config* c, void* function, void** given, void** extra) {
  memset(&last, 0, sizeof last);
  memcpy(last.numbers, c, 7 * sizeof(unsigned));
  last.numbers[7] = c->attributes, last.stream = (uint64_t)c->stream, last.function = (uint64_t)function;
  char* to = last.given;
  for (int i = 0; i < parameters; to += sizes[i++]) memcpy(to, given[i], sizes[i]);
  launches++;
  return 0;
}
int cuTensorMapEncodeTiled(char* map, int type, unsigned rank, void* address, uint64_t* sizes, uint64_t* strides,
                           unsigned* box, unsigned* steps, int interleaved, int swizzle, int promotion, int fill) {
  int numbers[] = {type, rank, interleaved, swizzle, promotion, fill};
  memset(map, 0, 128);
  memcpy(map, &address, 8), memcpy(map + 8, numbers, 24), memcpy(map + 32, sizes, 8 * rank);
  memcpy(map + 72, box, 4 * rank), memcpy(map + 92, strides, 8 * (rank - 1));
  return 0;
}
int cuPointerGetAttribute(void* to, int attribute, uint64_t pointer) { *(uint64_t*)to = pointer; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "of the driver that does nothing"; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = 227 << 10; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)1; return 0; }
int cuModuleLoadData(void** module, const void* data) { *module = (void*)2; return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  static uint64_t made = 16; *function = (void*)made++; return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) { *value = attribute ? 32 : 1024; return 0; }
"""


class _Launch(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_uint * 8), ("stream", ctypes.c_uint64), ("function", ctypes.c_uint64)]
    _fields_ += [("given", ctypes.c_char * 4096)]


folder = Path(sys.argv[1])
needed = Path(find_spec("triton").origin).with_name("backends") / "nvidia" / "driver.c"
others = {*re.findall(r"\bcu[A-Z]\w+(?=\()", needed.read_text())} - {*re.findall(r"\bcu[A-Z]\w+(?=\()", DRIVER)}
(folder / "driver.c").write_text(DRIVER + "".join(f"int {name}() {{ return 0; }}\n" for name in sorted(others)))
command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", folder / "driver.c"]
subprocess.run(command, check=True)
stub = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # before Triton asks for one of that name
os.environ["TRITON_LIBCUDA_PATH"] = str(folder)

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from triton import JITFunction  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.runtime import driver as triton_driver  # noqa: E402

import compiled_optim as co  # noqa: E402
from compiled_optim.lowering import coefficients, stack_loops  # noqa: E402
from compiled_optim.lowering.kernels import symmetric, triton_stacks  # noqa: E402
from compiled_optim.lowering.kernels import triton as lowering  # noqa: E402
from compiled_optim.rule import storage  # noqa: E402

STREAM = 77
MATRICES = [(64, 128), (65, 64), (130, 64), (64, 128)]
SYMMETRIC = [(768, 768), (768, 768), (768, 1024)]  # rows of numbers begin at odd multiples of 8 bytes, too
STORED = {"weights": "split8", "state_dtype": "int8"}
CASES: dict[str, tuple[type[co.CompiledOptimizer], torch.dtype, list[tuple[int, ...]], dict[str, Any]]] = {
    "AdamW": (co.AdamW, torch.float32, MATRICES, {}),
    "AdamW clipped": (co.AdamW, torch.bfloat16, MATRICES, {"max_grad_norm": 1.0}),
    "AdamW stored": (co.AdamW, torch.bfloat16, MATRICES, STORED),
    "LAMB": (co.LAMB, torch.float32, MATRICES, {"skip_nonfinite": True}),
    "Prodigy": (co.Prodigy, torch.float32, MATRICES, {}),
    "Adafactor": (co.Adafactor, torch.float32, [*MATRICES, (3, 70, 9), (100,)], {}),
    "Muon": (co.Muon, torch.float32, MATRICES, {}),
    "Muon in parts": (co.Muon, torch.bfloat16, MATRICES, {"split": {"w0": (30, 20, 14), "w2": 2}}),
    "Muon symmetric": (co.Muon, torch.float32, SYMMETRIC, {}),
    "NorMuon stored": (co.NorMuon, torch.bfloat16, MATRICES, {"split": {"w2": (100, 30)}, **STORED}),
}


class Launched(NamedTuple):
    """What the driver was given, and what the kernel was compiled for."""

    name: str
    numbers: tuple[int, ...]  # grid, block, shared memory, number of attributes
    stream: int
    function: int
    given: list[bytes]  # each parameter, then addresses of scratch memory
    compiled: Any
    arguments: tuple[Any, ...]


last: list[Launched] = []
wrong: list[str] = []
names: list[str] = []


def sizes_of(signature: dict[Any, Any]) -> Iterator[int]:
    """The bytes of each parameter."""
    for kind in signature.values():
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") :].count(",") + 1 if "[" in kind else 0
            yield from (128, *[4] * rank, *[8] * rank)
        elif kind != "constexpr":
            yield 8 if kind.startswith("*") else int(re.sub(r"\D", "", kind)) // 8
    yield from (8, 8)


def noting(kind: type) -> type:
    """A launcher of Triton's ``kind`` that says what the driver was given."""

    class Noting(kind):  # type: ignore[misc]
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self.source = source

        def __call__(self, *given: Any) -> None:
            sizes = list(sizes_of(self.source.signature))
            ctypes.c_int.in_dll(stub, "parameters").value = len(sizes)
            (ctypes.c_int * 256).in_dll(stub, "sizes")[: len(sizes)] = sizes
            before = ctypes.c_int.in_dll(stub, "launches").value
            super().__call__(*given)
            assert ctypes.c_int.in_dll(stub, "launches").value == before + 1
            found = _Launch.in_dll(stub, "last")
            data, ends = ctypes.string_at(ctypes.addressof(found) + _Launch.given.offset, 4096), [0]
            for size in sizes:
                ends.append(ends[-1] + size)
            parameters = [data[a:b] for a, b in itertools.pairwise(ends)]
            name = self.source.fn.__name__
            last[:] = [Launched(name, (*found.numbers,), found.stream, found.function, parameters, self.source, given[9:])]

    return Noting


def check(launch: Launched) -> None:
    """Note where a parameter is not what the kernel was compiled for."""
    source = launch.compiled
    bytes_of = iter(launch.given)
    for place, (argument, kind) in enumerate(zip(source.fn.arg_names, source.signature.values(), strict=True)):
        if kind == "constexpr":
            taken = source.constants[(place,)]
            if launch.arguments[place] != taken:
                wrong.append(f"{launch.name}: {argument} is {launch.arguments[place]}, compiled for {taken}")
            continue
        value = int.from_bytes(next(bytes_of)[:8], "little")
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") :].count(",") + 1
            for _ in range(2 * rank):
                next(bytes_of)
        unit = dict(source.attrs.get((place,), ())).get("tt.divisibility", 1)
        if value % unit:
            wrong.append(f"{launch.name}: {argument} is at {value % unit} modulo {unit}")


def both_ways(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The package's ``launcher``, whose launches are compared with Triton's own, which follow them."""

    def made(function: Any, grid: Any, types: Any, counts: Any, device: Any, **options: Any) -> Callable[..., None]:
        launch = launcher(function, grid, types, counts, device, **options)
        own = {name: value for name, value in options.items() if name != "addresses"}

        def twice(tensors: Any, counts: Any) -> None:
            with mock.patch.object(JITFunction, "run", side_effect=AssertionError("Triton looks at arguments")):
                launch(tensors, counts)
            (ours,) = last
            function[grid](*tensors, *counts, **(lowering.OPTIONS | own))
            (its,) = last
            names.append(ours.name)
            # Scratch memory aside, which nobody needs.
            pairs = {"grid, block, shared": (ours.numbers, its.numbers), "stream": (ours.stream, its.stream)}
            pairs |= {f"parameter {i}": pair for i, pair in enumerate(zip(ours.given, its.given, strict=True))}
            wrong.extend(f"{ours.name}: {what} {a!r}, not {b!r}" for what, (a, b) in pairs.items() if a != b)
            if ours.stream != STREAM:
                wrong.append(f"{ours.name}: on stream {ours.stream}")
            check(ours)

        return twice

    return made


def parameters(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Of which the third does not begin at a multiple of 16 bytes, and gradients do not at others."""
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    if len(shapes) > 2:
        params[2] = nn.Parameter(torch.zeros(1 + params[2].numel(), dtype=dtype)[1:].view(shapes[2]))
    for i, param in enumerate(params):
        memory: Tensor = torch.zeros(param.numel() + i % 2, dtype=dtype)
        param.grad = memory[i % 2 :].view(param.shape)
    return params


def found_in(case: str) -> dict[str, Any]:
    """What one case launched in two steps, the second without one of the gradients, and what was wrong."""
    kind, dtype, shapes, options = CASES[case]
    params = parameters(dtype, shapes)
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    optimizer = kind(named, **options)
    names.clear()
    wrong.clear()
    optimizer.step()
    params[1].grad = None
    optimizer.step()
    return {"launches": names[:], "wrong": sorted({*wrong})}


def main() -> None:
    storage.MINIMUM = 64
    coefficients.BACKENDS["cpu"] = lowering.TritonKernel
    stack_loops.LOOPS["cpu"] = stack_loops.LOOPS["cuda"]
    triton_stacks.tiling_of = lambda device: symmetric.TILINGS[9, 0]
    for module in (lowering, triton_stacks, symmetric):
        module.launcher = both_ways(module.launcher)
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        driver = CudaDriver()
    driver.get_current_stream, driver.get_current_device = (lambda index: STREAM), (lambda: 0)
    driver.get_device_capability = lambda device=0: (9, 0)
    driver.launcher_cls = noting(driver.launcher_cls)
    triton_driver._active = driver
    with contextlib.redirect_stdout(sys.stderr):
        found = {case: found_in(case) for case in sys.argv[2:] or CASES}
    print(json.dumps({"obstacle": lowering.obstacle(), "triton": triton.__version__, "cases": found}))


if __name__ == "__main__":
    main()
