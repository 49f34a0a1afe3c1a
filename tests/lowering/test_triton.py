"""The Triton kernels without a GPU: compiled for one, and run by Triton's interpreter."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from typing import Any

import pytest
import torch
from catalog import cases
from in_triton import interpret

from compiled_optim.lowering.kernels import triton as lowering
from compiled_optim.plan.compilations import KernelKey

triton = pytest.importorskip("triton")


def _compile(rule: Any, statics: dict[str, Any], dtype: str, arch: int) -> dict[str, Any]:
    """Registers, spills and memory instructions of the kernels, from Triton's own assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    dtypes = (getattr(torch, dtype),) * (2 + len(rule.present_buffers(statics)))
    signature = KernelKey(rule, tuple(statics.items()), "cuda", "multi-tensor", dtypes)
    module = lowering.load(lowering.source(signature))
    numbers = {"coefficients": "*fp64", "out": "*fp64", "sums": "*fp64", "outcome": "*fp64"}
    sizes = dict.fromkeys(("count", "columns", "sum_count", "leads", "block_count", "first"), "i32")
    result: dict[str, Any] = {}
    stages = rule.stages(statics)
    of_stages = [*(f"sums{stage}" for stage in stages), "average"] if stages else []
    for name in ("square_sums", "evaluate", "update", *of_stages):
        function = getattr(module, name)
        types = {name: {**numbers, **sizes}.get(name, "*i64") for name in function.arg_names}
        source = ASTSource(function, types, constexprs={}, attrs={})
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=lowering.OPTIONS)
        result[function.__name__] = _assembled(kernel.asm["ptx"], arch)
    return result


@functools.cache
def _assembled(ptx: str, arch: int) -> dict[str, int]:
    """What the assembler says of a text, which is the same for some kernels of several rules."""
    from triton.backends.nvidia.compiler import get_ptxas

    command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{'a' * (arch >= 90)}", "-o", os.devnull, "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used = re.search(r"Used (\d+) registers", done.stderr)
    assert used
    return {
        "registers": int(used[1]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr))),
        "wide loads": len(re.findall(r"ld\.global\.v4", ptx)),
        "wide stores": len(re.findall(r"st\.global\.v4", ptx)),
        "extern": len(re.findall(r"^\.extern \.func", ptx, re.MULTILINE)),
    }


def _statics(case: Any) -> dict[str, Any]:
    rule = case.optimizer._rule
    values = {s.name: case.kwargs.get(s.name, s.default) for s in rule.statics}
    return values | {name: bool(case.kwargs.get(name, 0)) for name in rule.structural_hypers}


def _compiled_apart() -> list[Any]:
    """One of the cases for each text of kernels: hyperparameters' values are data, which the compiler never sees."""
    return [*{(c.optimizer, *_statics(c).items()): c for c in reversed(cases())}.values()][::-1]


COVERED = [
    (case, dtype, arch)
    for number, case in enumerate(_compiled_apart())
    for dtype, arch in zip(("float32", "bfloat16"), (80, 90) if number % 2 else (90, 80), strict=True)
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "dtype", "arch"), COVERED, ids=str)
def test_compiles_without_spills_and_with_wide_accesses(case: Any, dtype: str, arch: int) -> None:
    """Every text in both dtypes and for both architectures, and an optimizer's texts by turns in all four pairs of them."""
    statics = _statics(case)
    kernels = _compile(case.optimizer._rule, statics, dtype, arch)
    per_thread = lowering.BLOCK // (32 * lowering.WARPS)
    words = per_thread * (4 if dtype == "float32" else 2) // 16  # 16-byte accesses for one tensor's share of a block
    buffers = len(case.optimizer._rule.present_buffers(statics))
    assert kernels["update"]["wide loads"] == words * (2 + buffers)
    assert kernels["update"]["wide stores"] == words * (1 + buffers)
    for kernel in kernels.values():
        assert kernel["spills"] == 0
        assert kernel["extern"] == 0
        assert kernel["registers"] <= 128


@pytest.fixture(scope="module")
def interpreted_errors(request: pytest.FixtureRequest) -> dict[str, float]:
    """By case and dtype: of the cases that this run takes, in float32 alone unless it is a full one."""
    own = (item for item in request.session.items if item.originalname == "test_interpreted_kernels_equal_eager")
    wanted = [str(item.callspec.params["case"]) for item in own]
    dtypes = "all" if request.config.getoption("--full") else "float32"
    found: dict[str, float] = interpret("interpreted_catalogue", dtypes, *wanted)
    return found


OF_EACH_OPTIMIZER = {case.optimizer: case for case in reversed(cases())}.values()


@pytest.mark.quick
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in OF_EACH_OPTIMIZER else [pytest.mark.full]) for c in cases()], ids=str
)
def test_interpreted_kernels_equal_eager(case: Any, interpreted_errors: dict[str, float]) -> None:
    errors = {name: error for name, error in interpreted_errors.items() if name.startswith(f"{case}-")}
    assert errors
    for name, error in errors.items():
        assert error < (1e-14 if name.endswith("float64") else 1e-6), name
