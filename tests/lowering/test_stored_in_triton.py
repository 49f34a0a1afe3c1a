"""Weights and state in few bytes, by Triton's kernels without a GPU: compiled for one, and run by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from in_triton import interpret
from stored_cases import CASES, MODES

from compiled_optim.rule.symbols import PLAIN
from compiled_optim.simulated.step import KernelReport
from perf.competitors import exported
from perf.lowering.report import Report, Workload, elementwise, lower

pytest.importorskip("triton")

SMALLEST = ("split8", "int8")
REGISTERS = 80  # of a thread: six programs fit a multiprocessor, as of AdamW in float32
OPERATIONS = 50  # for each element, so that a step waits for memory and not for arithmetic
OPERATIONS_OF_INT8 = 70
ROWS: list[tuple[str, Any, Any]]
ROWS = [("adamw", mode, None) for mode in MODES if mode] + [("adamw", None, "int8"), ("adamw", "split8", "int8")]
ROWS += [("adamw", "master", torch.float32)]
ROWS += [(name, *kind) for name in ("lion", "sgd") for kind in (("kahan", None), ("split8", "int8"))]


def _lowered(optimizer: str, arch: int, weights: str | None, state_dtype: Any) -> Report:
    """What a step of tensors in bfloat16 lowers to."""
    options = {"weights": weights, "state_dtype": state_dtype} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    workload = Workload(optimizer, 10, dtype=torch.bfloat16, options=tuple(options.items()))
    return lower("multi_tensor", workload, arch, stand_in=True)


def _update(report: Report) -> KernelReport:
    return next(kernel for kernel in report.kernels if kernel.name == "update")


@pytest.mark.full
def test_table_of_stored_formats() -> None:
    """Launches, bytes per parameter and widths of accesses. Threads exchange no elements by way of shared memory."""
    lines = ["optimizer | weights | state | launches | bytes | accesses"]
    for row in ROWS:
        report = _lowered(row[0], 90, *row[1:])
        kernel = _update(report)
        assert kernel.resources.spills == kernel.barriers == 0, row
        assert kernel.resources.registers <= REGISTERS, row
        widths = " ".join(kernel.widths)
        lines.append(" | ".join(map(str, (*row, report.launches, report.bytes_per_param, widths))))
    expecttest.assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
optimizer | weights | state | launches | bytes | accesses
adamw | kahan | None | 2 | 18.0 | v4.b32
adamw | stochastic | None | 2 | 14.0 | v4.b32
adamw | split8 | None | 2 | 16.0 | v2.b32 v4.b32
adamw | split16 | None | 2 | 18.0 | v4.b32
adamw | master | None | 2 | 22.0 | v2.b32 v4.b32
adamw | None | int8 | 2 | 10.25 | b32 v2.b32 v4.b32
adamw | split8 | int8 | 2 | 12.25 | b32 v2.b32 v4.b32
adamw | master | torch.float32 | 2 | 30.0 | v2.b32 v4.b32
lion | kahan | None | 2 | 14.0 | v4.b32
lion | split8 | int8 | 2 | 10.125 | b32 v2.b32 v4.b32
sgd | kahan | None | 2 | 14.0 | v4.b32
sgd | split8 | int8 | 2 | 10.125 | b32 v2.b32 v4.b32
""",
    )


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_step_in_the_fewest_bytes(arch: int) -> None:
    """A step of AdamW in float32 moves 28 bytes per parameter."""
    report = _lowered("adamw", arch, *SMALLEST)
    kernel = _update(report)
    assert report.bytes_per_param == 12.25
    assert report.launches == 2
    assert kernel.resources.spills == kernel.barriers == 0
    assert kernel.resources.registers <= REGISTERS
    assert kernel.extern == ()


@pytest.mark.parametrize("name", sorted(elementwise()))
def test_every_optimizer_has_a_kernel_of_the_smallest_formats(name: str) -> None:
    holds_codes = any(buffer.int8 for buffer in exported()[name]._rule.buffers)
    report = _lowered(name, 90, "split8", "int8" if holds_codes else None)
    assert report.launches == (4 if hasattr(exported()[name], "reduce") else 2)
    for kernel in report.kernels:
        assert kernel.resources.spills == 0
        assert kernel.extern == ()
    assert _update(report).barriers == 0


@pytest.mark.full
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "int8"], ids=str)
@pytest.mark.parametrize("weights", [None, *filter(None, MODES)])
def test_operations_for_each_element(weights: str | None, state_dtype: Any) -> None:
    kernel = _update(_lowered("adamw", 90, weights, state_dtype))
    assert kernel.operations is not None
    assert 10 < kernel.operations <= (OPERATIONS_OF_INT8 if state_dtype == "int8" else OPERATIONS)
    assert kernel.resources.spills == 0
    assert kernel.resources.registers <= (64 if (weights, state_dtype) == SMALLEST else REGISTERS)


def test_buffers_are_coded_in_the_order_of_their_declaration() -> None:
    """In the order of a set, which differs between processes, each process would have to compile kernels of its own."""
    rule = exported()["adan"]._rule
    coded = tuple(buffer.name for buffer in rule.buffers if buffer.int8)
    statics = {static.name: static.default for static in rule.statics}
    update = rule.written({**statics, "state_dtype": tuple((name, "int8") for name in coded)}, PLAIN)[-1]
    names = [statement.name for statement in update.statements]
    places = [names.index(update.results[f"{name}_int8"]) for name in coded]
    assert len(places) == 4
    assert places == sorted(places)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = interpret("interpreted_storage")
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_equal_eager_bit_by_bit(case: str, interpreted: dict[str, Any]) -> None:
    assert interpreted["differences"][case] == {}


@pytest.mark.full
def test_weight_and_remainder_hold_numbers_of_every_exponent(interpreted: dict[str, Any]) -> None:
    halves = ("bfloat16", "float16")
    assert interpreted["broken promises"] == {f"{mode} {half}": {} for mode in ("split8", "split16") for half in halves}
