"""What a step lowers to on a GPU, without one: pinned for every optimizer, and the counting itself under test."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import expecttest
import pandas as pd
import pytest
import torch
from catalog import cases, ruled
from new_process import printed_by
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import compiled_optim as co
from compiled_optim.lowering.kernels import cpp
from compiled_optim.lowering.kernels import triton as lowering
from compiled_optim.memory import cache, torch_internals
from compiled_optim.optimizer import engine_of
from compiled_optim.plan.compilations import kernel_key
from compiled_optim.simulated import ptx
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import Decisions, recording
from perf.competitors import exported
from perf.lowering import __main__ as command
from perf.lowering import inductor_source
from perf.lowering import report as report_module
from perf.lowering.report import (
    KernelReport,
    Report,
    Workload,
    cpu_in_place_of_cuda,
    elementwise,
    lower,
)

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler.*")

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 90, 100)
REGISTERS = 80  # at 128 threads a program, six programs fit a multiprocessor of 65536 registers
SPILLED = 20  # bytes that the assembler puts aside around a division, though it has registers
ARRAYS = 4  # with which six programs fit: of parameters, gradients and two buffers


def _table(rows: list[tuple[Any, ...]]) -> str:
    return "\n".join(" | ".join(map(str, row)) for row in rows) + "\n"


def _accesses(report: Report) -> str:
    kernels = [k for k in report.kernels if k.widths]
    masked = " masked" if any(k.masked for k in kernels) else ""
    return " ".join(sorted({w for k in kernels for w in k.widths})) + masked


def _registers(kernel: KernelReport, dtype: torch.dtype) -> int:
    """How many registers a kernel may take.

    A thread of an update holds eight values of each array. Where arrays are more than four, fewer programs fit, each with
    more loads on their way: with six arrays (96 registers) five programs have 30 arrays in flight, in place of 24.
    """
    accesses = (kernel.bytes_per_param or 0) / dtype.itemsize
    arrays = (accesses + 1) / 2  # each is read, and each but the gradient is written
    return REGISTERS + 8 * max(0, int(arrays) - ARRAYS)


def test_every_elementwise_rule_is_reported() -> None:
    assert {exported()[name] for name in elementwise()} == {c for c in ruled("dense") if c._granularity == "element"}


@pytest.mark.full
def test_multi_tensor_table() -> None:
    """Launches, operators in a steady step and in one with moved gradients, bytes per parameter, width of the accesses."""
    rows: list[tuple[Any, ...]] = []
    for name in sorted(name for name in elementwise() if not exported()[name]._rule.has_totals()):
        reports = [lower("multi_tensor", Workload(name, 10), 90)]
        reports += [lower("multi_tensor", Workload(name, 10), arch, stand_in=True) for arch in ARCHITECTURES]
        reports += [
            lower("multi_tensor", Workload(name, 10, dtype=torch.bfloat16), arch, stand_in=True) for arch in ARCHITECTURES
        ]
        for report in reports:
            assert report.graphs == report.cpp == report.waits == report.operators == 0
            for kernel in report.kernels:
                assert kernel.resources.spills == 0, kernel
                assert kernel.resources.registers <= _registers(kernel, report.workload.dtype), kernel
                assert kernel.extern == ()
        (single,) = {(r.launches, _accesses(r)) for r in reports}
        moved = f"{reports[0].moved_operators} ({reports[0].uploads} upload)"
        wide, narrow = (
            {r.bytes_per_param for r in reports if r.workload.dtype == d} for d in (torch.float32, torch.bfloat16)
        )
        rows.append((name, single[0], moved, *wide, *narrow, single[1]))
    heading = ("optimizer", "launches", "with moved gradients", "bytes float32", "bytes bfloat16", "accesses")
    expecttest.assert_expected_inline(
        _table([heading, *rows]),
        """\
optimizer | launches | with moved gradients | bytes float32 | bytes bfloat16 | accesses
adadelta | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
adagrad | 2 | 1 (1 upload) | 20.0 | 10.0 | v4.b32 masked
adam | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
adamax | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
adamw | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
adamwschedulefree | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
adan | 2 | 1 (1 upload) | 44.0 | 22.0 | v4.b32 masked
ademamix | 2 | 1 (1 upload) | 36.0 | 18.0 | v4.b32 masked
adopt | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
asgd | 2 | 1 (1 upload) | 20.0 | 10.0 | v4.b32 masked
lamb | 4 | 1 (1 upload) | 44.0 | 22.0 | v4.b32 masked
lion | 2 | 1 (1 upload) | 20.0 | 10.0 | v4.b32 masked
mars | 4 | 1 (1 upload) | 44.0 | 22.0 | v4.b32 masked
nadam | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
radam | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
ranger | 2 | 1 (1 upload) | 36.0 | 18.0 | v4.b32 masked
rmsprop | 2 | 1 (1 upload) | 20.0 | 10.0 | v4.b32 masked
rprop | 2 | 1 (1 upload) | 28.0 | 14.0 | v4.b32 masked
sgd | 2 | 1 (1 upload) | 20.0 | 10.0 | v4.b32 masked
signum | 2 | 1 (1 upload) | 20.0 | 10.0 | v4.b32 masked
stableadamw | 4 | 1 (1 upload) | 36.0 | 18.0 | v4.b32 masked
""",
    )


@pytest.mark.parametrize("tensors", [10, 1000])
def test_sums_over_all_parameters_take_operators_whose_number_does_not_grow(tensors: int) -> None:
    """Those that add up the sums of the tensors, and adapt the scalars that they share; none waits."""
    report = lower("multi_tensor", Workload("prodigy", tensors), 90, stand_in=True)
    assert (report.launches, report.operators, report.bytes_per_param) == (4, 21, 60.0)
    assert report.graphs == report.cpp == report.waits == 0
    assert all(kernel.resources.spills == 0 and kernel.extern == () for kernel in report.kernels)


@pytest.mark.full
def test_table_of_cautious_steps() -> None:
    """Two launches more, which read what the step depends on once more; the same for any number of tensors."""
    rows: list[tuple[Any, ...]] = []
    for name in ("adamw", "lion", "sgd"):
        options = (("cautious", True),)
        reports = [lower("multi_tensor", Workload(name, 10, options=options), arch) for arch in ARCHITECTURES]
        reports.append(lower("multi_tensor", Workload(name, 1000, groups=8, options=options), 90))
        reports.append(lower("multi_tensor", Workload(name, 10, options=(*options, ("max_grad_norm", 1.0))), 90))
        for report in reports:
            assert report.graphs == report.cpp == report.waits == report.operators == 0
            for kernel in report.kernels:
                assert kernel.resources.spills == 0, kernel
                assert kernel.extern == ()
        *plain, clipped = reports
        ((launches, found),) = {(r.launches, r.bytes_per_param) for r in plain}
        rows.append((name, launches, clipped.launches, found, _accesses(plain[0])))
    heading = ("optimizer", "launches", "with clipping", "bytes float32", "accesses")
    expecttest.assert_expected_inline(
        _table([heading, *rows]),
        """\
optimizer | launches | with clipping | bytes float32 | accesses
adamw | 4 | 5 | 40.0 | v4.b32 masked
lion | 4 | 5 | 28.0 | v4.b32 masked
sgd | 4 | 5 | 32.0 | v4.b32 masked
""",
    )


@pytest.mark.full
def test_table_of_the_other_optimizers() -> None:
    """Launches and operators of a steady step, among them library calls, whatever the number of tensors.

    Where new gradients are found by their addresses, a step uploads these.
    """
    rows: list[tuple[Any, ...]] = []
    for name in sorted(set(exported()) - set(elementwise())):
        reports = [lower("auto", Workload(name, tensors), 90) for tensors in (2, 40)]
        reports.append(lower("auto", Workload(name, 2), 80))
        for report in reports:
            assert report.cpp == report.waits == 0
            assert report.moved_operators == report.operators + report.uploads
            spills = sum(kernel.resources.spills for kernel in report.kernels)
            assert spills <= (SPILLED if (name, report.arch) == ("adafactor", "sm_80") else 0)
            assert all(kernel.extern == () for kernel in report.kernels)
        (single,) = {(r.launches, r.operators, r.uploads) for r in reports}
        rows.append((name, *single))
    expecttest.assert_expected_inline(
        _table([("optimizer", "launches", "operators", "uploads"), *rows]),
        """\
optimizer | launches | operators | uploads
adafactor | 13 | 0 | 1
lbfgs | 0 | 70 | 0
muon | 10 | 15 | 1
normuon | 15 | 15 | 1
sparseadam | 2 | 15 | 0
""",
    )


@pytest.mark.full
@pytest.mark.parametrize("groups", [1, 6])
def test_groups_of_another_rule_are_two_launches_beside_muons(groups: int, fresh_kernels: None) -> None:
    """Whatever their number and their learning rates: Muon's coefficients, and AdamW's with its update."""
    with fake_cuda(90), recording("cuda") as recorder:
        matrices = [torch.zeros(32, 32, device="cuda", requires_grad=True) for _ in range(4)]
        others = [torch.zeros(32 + i, device="cuda", requires_grad=True) for i in range(groups)]
        given = [{"params": [p], "rule": co.AdamW, "lr": 0.1 * (i + 1)} for i, p in enumerate(others)]
        optimizer = co.Muon([{"params": matrices}, *given])
        for param in (*matrices, *others):
            param.grad = torch.zeros_like(param)
        optimizer.step()
        recorder.take()
        optimizer.step()
        steady = recorder.take()
    names = Counter(re.sub(r"loop\d+|add", "Muon's", launch.name) for launch in steady.launches)
    assert names == {"evaluate": 2, "update": 1, "Muon's": 9}


def launches(workload: Workload) -> list[str]:
    """The Triton kernels that one step of the multi-tensor lowering launches, in order; CPU tensors stand in for a GPU's."""
    with cpu_in_place_of_cuda(90):
        optimizer = report_module._optimizer(workload, "multi_tensor", "cpu")  # of which nothing need be recorded
        with recording("cpu") as recorder:
            optimizer.step()
        return [launch.name for launch in recorder.take().launches]


@pytest.mark.parametrize("tensors", [10, 148, 1000, 20_000])
@pytest.mark.parametrize("name", sorted(elementwise()))
def test_launches_are_two_for_any_number_of_tensors_and_groups(name: str, tensors: int) -> None:
    """And two more where the rule reduces. The most tensors, which take seconds, are in 8 groups with every other rule."""
    means = ["sums0", "average"] if hasattr(exported()[name], "reduce") else []
    several = sorted(elementwise()).index(name) % 2
    for groups in (1, 8) if tensors <= 1000 else (8 if several else 1,):
        assert launches(Workload(name, tensors, groups, numel=4)) == ["evaluate", *means, "update"]


def test_launches_are_two_for_any_scales_of_the_learning_rate() -> None:
    numbers = iter(range(1, 10_000))
    workload = Workload("adamw", 300, options=(("lr_scale", lambda name, param: next(numbers) / 7),))
    assert launches(workload) == ["evaluate", "update"]
    assert next(numbers) > 300
    report = lower("multi_tensor", workload, 90, stand_in=True)
    assert (report.launches, report.operators, report.bytes_per_param) == (2, 0, 28.0)


def test_coefficients_are_evaluated_once_whatever_the_dtypes() -> None:
    with cpu_in_place_of_cuda(90), recording("cpu") as recorder:
        params = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
        for param in params:
            param.grad = torch.ones_like(param)
        co.AdamW(params).step()
        assert [launch.name for launch in recorder.take().launches] == ["evaluate", "update", "update", "update"]


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "moved"), [(torch.float32, 32.0), (torch.bfloat16, 16.0)])
def test_clipping_is_one_launch_and_one_read_of_the_gradients_more(dtype: torch.dtype, moved: float) -> None:
    workload = Workload("adamw", 10, 8, dtype=dtype, options=(("max_grad_norm", 1.0),))
    reports = [lower("multi_tensor", workload, arch, stand_in=True) for arch in ARCHITECTURES]
    reports.append(lower("multi_tensor", workload, 90))  # setting the norm must not wait for the device either
    for report in reports:
        assert report.launches == 3
        assert report.bytes_per_param == moved
        assert report.waits == report.operators == 0
        assert all(k.resources.spills == 0 for k in report.kernels)


def _first_step(tensors: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, str]]:
    """Return the kernels that Triton compiles for the first step: names, whether the cache has them, and texts."""
    compiled = []

    def listen(*, src: Any, metadata: Any, metadata_group: dict[str, str], times: Any, cache_hit: bool) -> None:
        compiled.append((src.name, cache_hit, Path(metadata_group[f"{src.name}.ptx"]).read_text()))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    for module in [m for m in sys.modules if m.startswith("compiled_optim_kernel_")]:
        monkeypatch.delitem(sys.modules, module)
    params = [nn.Parameter(torch.zeros(4)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.ones_like(param)
    with cpu_in_place_of_cuda(90), recording("cpu"):
        co.AdamW(params).step()
    return compiled


@pytest.mark.full
def test_compile_time_does_not_grow_with_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same texts are compiled, and later found in the cache."""
    few, many = (_first_step(tensors, tmp_path / str(tensors), monkeypatch) for tensors in (10, 1024))
    assert few == many
    assert [(name, cached) for name, cached, _ in few] == [("evaluate", False), ("update", False)]
    for tensors in (10, 1024):
        again = _first_step(tensors, tmp_path / "1024", monkeypatch)
        assert again == [(name, True, text) for name, _, text in few]


def test_a_launch_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    step = lowering.TritonKernel.step

    def twice(kernel: Any, *tables: Any) -> None:
        step(kernel, *tables)
        step(kernel, *tables)

    monkeypatch.setattr(lowering.TritonKernel, "step", twice)
    assert len(launches(Workload("sgd", 2))) == 4


def test_an_operator_and_a_wait_are_seen() -> None:
    with fake_cuda(90), recording("cuda") as recorder:
        x = torch.zeros(3, device="cuda")
        x.add_(1)
        torch.ones(3, device="cpu").to("cuda:0")
        with pytest.raises(Exception, match="_local_scalar_dense"):
            x[0].item()
        x.view(3, 1)
    record = recorder.take()
    assert [(o.name, o.bytes, o.crosses) for o in record.operators] == [
        ("zeros", 12, False),
        ("add_", 24, False),
        ("_to_copy", 24, True),
    ]


def test_a_bound_on_the_host_is_taken_over_without_a_copy() -> None:
    with fake_cuda(90), recording("cuda") as recorder:
        param = torch.empty(8, device="cuda", requires_grad=True)
        param.grad = torch.empty_like(param)
        bound = torch.tensor(0.5, device="cpu")
        optimizer = co.SGD([param], max_grad_norm=bound, lowering="multi_tensor")
        optimizer.step()
        recorder.take()
        optimizer.step()
        steady = recorder.take()
        assert [(o.name, o.waits, o.crosses) for o in steady.operators] == [("fill_", False, False)]
        with mock.patch.dict(torch_internals.CAPTURING, {"cuda": lambda: True}):
            (own,) = engine_of(optimizer).step.lowerings
            own.coefficients.hypers.refresh()  # as in a runner's capture, which does so outside too
            assert recorder.take().operators == []
            with pytest.raises(RuntimeError, match="max_grad_norm is a tensor on another device; take one step"):
                optimizer.step()  # captured by hand


PTX = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
.reqntid 128
{
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 16;
	add.s64 	%rd3, %rd1, %rd2;
	ld.global.b64 { %rd4 }, [ %rd1 + 0 ];
	setp.eq.b64 	%p1, %rd4, 0;
	@%p1 bra 	$L__BB0_2;
	ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd3 + 0 ];
	st.global.v2.b64 [ %rd3 + 0 ], { %rd4, %rd4 };
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	@%p2 ld.global.b32 { %r2 }, [ %rd3 + 0 ];
	@%p2 st.global.L1::evict_last.b32 [ %rd3 + 0 ], { %r2 };
	@%p2 st.global.b32 [ %rd3 + 4 ], { %r2 };
$L__BB0_3:
	ret;
}
"""


def test_ptx_is_read_along_its_full_path() -> None:
    path = ptx.read(PTX).full_path
    assert [(str(a), a.bytes, a.masked, a.elementwise) for a in path] == [
        ("ld.b64", 8, False, False),
        ("ld.v4.b32", 16, False, True),
        ("st.v2.b64", 16, False, True),
    ]
    masked = [a for a in ptx.read(PTX).accesses if a.masked]
    assert [str(a) for a in masked] == ["ld.b32", "st.b32", "st.b32"]
    assert ptx.read(PTX).threads == 128


def test_a_loop_in_ptx_counts_as_one_turn() -> None:
    looped = PTX.replace("bra.uni 	$L__BB0_3;", "@%p3 bra 	$L__BB0_1;\n	bra.uni 	$L__BB0_3;").replace(
        "	ld.global.v4", "$L__BB0_1:\n	ld.global.v4"
    )
    assert ptx.read(looped).full_path == ptx.read(PTX).full_path


def test_what_threads_share_is_moved_once() -> None:
    """Eight threads after each other load one number, in place of 16 bytes each; and wait for each other."""
    shared = PTX.replace(
        "	ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd3 + 0 ];",
        """	bfe.u32 	%r6, %r1, 3, 4;
	mad.wide.u32 	%rd5, %r6, 4, %rd1;
	ld.global.b32 { %r2 }, [ %rd5 + 0 ];
	bar.sync 	0;""",
    )
    moved = [[access.program_bytes for access in ptx.read(text).full_path] for text in (PTX, shared)]
    assert moved == [[8, 128 * 16, 128 * 16], [8, 16 * 4, 128 * 16]]
    assert [ptx.read(text).barriers for text in (PTX, shared)] == [0, 1]


@pytest.mark.full
def test_inductor_table() -> None:
    """torch.compile's own route: graphs, launches, operators, bytes per parameter, spilled bytes, width of the accesses."""
    rows: list[tuple[Any, ...]] = []
    names = ("adagrad", "adamw", "adan", "sgd", "stableadamw")
    for name, kind in [(name, "inductor") for name in names] + [("adamw", "torch"), ("sgd", "torch")]:
        report = lower(kind, Workload(name, 10), 90)
        assert report.cpp == report.waits == report.uploads == 0
        spills = max(k.resources.spills for k in report.kernels)
        moved = f"{report.bytes_per_param:.2f}"
        rows.append((name, kind, report.graphs, report.launches, report.operators, moved, spills, _accesses(report)))
    heading = ("optimizer", "lowering", "graphs", "launches", "operators", "bytes", "spills", "accesses")
    expecttest.assert_expected_inline(
        _table([heading, *rows]),
        """\
optimizer | lowering | graphs | launches | operators | bytes | spills | accesses
adagrad | inductor | 2 | 4 | 2 | 20.17 | 16 | b64 b8 v4.b32 masked
adamw | inductor | 2 | 3 | 2 | 28.18 | 0 | b64 b8 v4.b32 masked
adan | inductor | 2 | 18 | 2 | 60.30 | 0 | b64 b8 v2.b32 v4.b32 masked
sgd | inductor | 2 | 4 | 2 | 20.20 | 0 | b64 b8 v4.b32 masked
stableadamw | inductor | 3 | 4 | 36 | 44.37 | 0 | b64 b8 v4.b32 masked
adamw | torch | 1 | 2 | 0 | 28.00 | 0 | v4.b32
sgd | torch | 1 | 1 | 0 | 20.00 | 0 | v4.b32
""",
    )


@pytest.mark.full
def test_table_of_steps_in_functions_that_users_compile() -> None:
    """As one operator, as operations, and torch.optim's: launches, operators, and what Inductor's CUDA graphs hold."""
    rows: list[tuple[Any, ...]] = []
    for name in ("operator", "inlined", "torch"):
        report = lower(name, Workload("adamw", 8, shapes="mixed"), 90)
        assert report.cpp == report.waits == report.uploads == 0
        assert report.graphs == 1
        assert report.moved_operators == report.operators
        assert all(k.resources.spills == 0 for k in report.kernels)
        moved = f"{report.bytes_per_param:.2f}"
        decided = (report.partitions, report.cuda_graph, report.copied)
        rows.append((name, report.launches, report.operators, moved, *decided))
    expecttest.assert_expected_inline(
        _table([("form", "launches", "operators", "bytes", "CUDA graphs", "hold", "copied"), *rows]),
        """\
form | launches | operators | bytes | CUDA graphs | hold | copied
operator | 2 | 1 | 28.00 | 1 | all | 8
inlined | 3 | 0 | 28.00 | 1 | all | 8
torch | 2 | 0 | 28.00 | 1 | all | 9
""",
    )


def test_the_table_of_steps_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = lower("multi_tensor", Workload("sgd", 2), 90, stand_in=True)
    command._show([replace(report, lowering=name) for name in command.LOWERINGS], 1, save=False)
    steps = capsys.readouterr().out.partition("\n\n")[0]
    assert "launches" in steps
    assert max(map(len, steps.splitlines())) <= 80


def test_mixed_shapes_and_gpt2s_are_those() -> None:
    assert Workload("adamw", 6, shapes="mixed").sizes[3:] == [(768, 768), (64, 64), (4096,)]
    gpt2 = Workload("adamw", 148, shapes="gpt2")
    assert (len(gpt2.sizes), gpt2.elements) == (148, 124_439_808)
    assert Workload("muon", 2).sizes == [(64, 64)] * 2


@pytest.mark.full
@pytest.mark.parametrize("crosses", [False, True])
def test_what_cuda_graphs_do_not_hold_is_counted(crosses: bool) -> None:
    with fake_cuda(90), recording("cuda") as recorder:
        x = torch.zeros(64, device="cuda")
        host = torch.zeros(64, device="cpu")

        @torch.compile(mode="reduce-overhead")
        def step() -> None:
            x.add_(1)
            if crosses:
                host.add_(1)
            x.sin_()

        step()
        (graph,) = recorder.take().graphs
    module = inductor_source.read(graph.source, None)
    assert (module.outside > 0) == crosses
    assert report_module._decision([graph.decisions], module.outside) == ("all but 1 calls" if crosses else "all")


def test_reasons_without_cuda_graphs_are_named_once() -> None:
    decided = [Decisions(skipped=["skipping cudagraphs due to a reason"])] * 2
    assert report_module._decision(decided, 3) == "skipping cudagraphs due to a reason"


def test_traffic_of_inductor_counts_every_access() -> None:
    """A step that writes its update to memory before applying it moves four bytes more, both ways."""
    with fake_cuda(90), recording("cuda") as recorder:
        param, grad, update = (torch.zeros(1 << 14, device="cuda") for _ in range(3))

        @torch.compile
        def step() -> None:
            update.copy_(grad * 0.1)
            param.sub_(update)

        step()
        (graph,) = recorder.take().graphs
    assert inductor_source.read(graph.source, graph.inputs).bytes / (1 << 14) == 16


def _calls(source: str) -> list[str]:
    """The operator's calls in a module of Inductor: their text."""
    return re.findall(r"torch\.ops\.compiled_optim\.step(?:_in_graph)?\.default\(.*\)", source)


@pytest.mark.full
def test_a_step_in_a_users_region_is_one_call_in_place() -> None:
    with fake_cuda(90):
        torch._dynamo.reset()
        params = [nn.Parameter(torch.empty(64, device="cuda")) for _ in range(148)]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = co.AdamW(params)
        assert engine_of(optimizer).preallocate_for_graphs()  # on such a device Dynamo cannot make anything while it traces
        with recording("cuda") as recorder:
            torch.compile(optimizer.step, fullgraph=True)()
            (graph,) = recorder.take().graphs
    module = inductor_source.read(graph.source, None)
    assert module.externs == ["torch.ops.compiled_optim.step_in_graph.default"]
    assert module.launches == module.cpp == module.waits == []
    (call,) = _calls(graph.source)
    assert len(set(re.findall(r"\barg\d+_1\b", call))) == 2 * 148  # the graph's own inputs, no copy of any


@pytest.mark.full
def test_a_thousand_tensors_in_eight_groups_are_one_graph() -> None:
    torch._dynamo.reset()
    params = [nn.Parameter(torch.zeros(4)) for _ in range(1000)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = co.AdamW([{"params": params[i::8], "lr": 0.1 * (i + 1)} for i in range(8)], weight_decay=0.0)
    counter = CompileCounterWithBackend("eager")
    torch.compile(optimizer.step, backend=counter, fullgraph=True)()
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [c for c in calls if c is not torch._C._set_grad_enabled] == [torch.ops.compiled_optim.step]
    assert [round(p[0].item(), 4) for p in params[:8]] == [round(-0.1 * (i + 1), 4) for i in range(8)]


@pytest.mark.full
def test_a_whole_training_step_updates_in_place() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    optimizer = co.AdamW(model.parameters(), lowering="multi_tensor")

    def train_step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        _, sources = run_and_get_code(torch.compile(train_step, fullgraph=True))
    (source,) = [s for s in sources if _calls(s)]
    (call,) = _calls(source)
    given = call[call.index("[") : call.index("]")]
    assert len(re.findall(r"\barg\d+_1\b", given)) == 6
    assert "buf" not in given
    after = source[source.index(call) + len(call) : source.index("return (", source.index(call))]
    assert set(re.findall(r"\S.*", after)) == {f"del {name}" for name in re.findall(r"\barg\d+_1\b", given)}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "lowering.csv"
    monkeypatch.setattr(command, "PATH", path)
    return path


def test_command_prints_the_table_and_the_source(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["lowering", "adamw", "--workload", "10", "--groups", "8", "--arch", "sm_80", "--lowering", "multi_tensor"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--source", "--save"])
    assert command.main() == 0
    printed = capsys.readouterr().out
    assert "28.00" in printed
    assert "v4.b32" in printed
    assert "def update(" in printed
    assert "28.0" in results.read_text()
    monkeypatch.setattr(sys, "argv", ["lowering", "adamw", "--workload", "1000"])
    monkeypatch.setattr(report_module, "lower", lambda name, *args, **kwargs: lower("multi_tensor", Workload("sgd", 1), 90))
    assert command.main() == 0
    assert "ask with --lowering torch" in capsys.readouterr().out


def test_command_reports_the_median_of_repeats_in_turn(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, str, int]] = []
    seconds = iter([9.0, 9.0, 5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 9.0, 9.0])

    def timed(name: str, workload: Workload, *args: Any, counted: bool, **kwargs: Any) -> Report:
        turns.append((name, workload.optimizer, workload.tensors))
        taken = lower("multi_tensor", Workload("sgd", 1), 90, counted=counted)
        return replace(taken, lowering=name, seconds=next(seconds))

    monkeypatch.setattr(report_module, "lower", timed)
    monkeypatch.setattr(command, "in_a_fork", lambda function, *args, **kwargs: function(*args, **kwargs))
    arguments = ["lowering", "sgd", "--lowering", "operator", "torch", "--repeats", "3", "--save"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 0
    assert turns == [
        *(("torch", "adam", 2), ("operator", "adam", 2)),  # loads the compilers, and compiles nothing that is measured
        *((name, "sgd", 10) for name in ("operator", "torch", "torch", "operator", "operator", "torch")),
        *(("torch", "sgd", 10), ("operator", "sgd", 10)),  # in which calls are counted
    ]
    table = pd.read_csv(results)
    assert list(zip(table["lowering"], table["seconds"], table["repeats"], strict=True)) == [
        ("operator", 4.0, 3),  # of 5, 2 and 4
        ("torch", 3.0, 3),  # of 1, 3 and 6
    ]
    assert (table["calls"] > 1000).all()


def test_a_fork_is_a_process_with_caches_of_its_own() -> None:
    pid, cache = command.in_a_fork(_process_and_cache)  # type: ignore[arg-type,misc]
    assert pid != os.getpid()
    assert cache != os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert not Path(cache).exists()


def _process_and_cache() -> tuple[int, str]:
    return os.getpid(), os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_command_names_what_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lowering", "adamv"])
    assert command.main() == 2
    assert "adamw" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["lowering", "adamw", "--shapes", "gpt2"])
    assert command.main() == 2
    assert "148" in capsys.readouterr().err


def test_torch_is_not_compared_where_it_lacks_the_option() -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        lower("torch", Workload("adamw", 1, options=(("max_grad_norm", 1.0),)), 90)


def test_command_answers_mistakes_before_installing(tmp_path: Path) -> None:
    """In a copy of what it needs for that, beside which nobody else makes environments."""
    for folder in ("perf", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    arguments = [sys.executable, tmp_path / "tools" / "lowering", "adamw", "--arch", "sm_1"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sm_90" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"perf", "tools"}


def test_nothing_of_the_fake_device_is_left_behind() -> None:
    before = torch.utils._triton.has_triton()
    with fake_cuda(90):
        assert torch.utils._triton.has_triton()
        assert torch.empty(2, device="cuda").data_ptr() % 16 == 0
    assert torch.Tensor.data_ptr is torch._C.TensorBase.data_ptr
    assert torch.utils._triton.has_triton() == before
    with contextlib.nullcontext() if torch.cuda.is_available() else pytest.raises((AssertionError, RuntimeError)):
        assert type(torch.empty(2, device="cuda")) is torch.Tensor


ONE_PROCESSOR = {"x86_64": "-march=haswell", "aarch64": "-march=armv8.2-a"}


@pytest.mark.full
@pytest.mark.skipif("g++" not in str(cache.compiler()), reason="asks g++ what it did")
@pytest.mark.parametrize("optimizer", ruled("dense"), ids=lambda c: c.__name__)
def test_every_elementwise_loop_is_vectorized_on_a_cpu(optimizer: type[co.CompiledOptimizer], tmp_path: Path) -> None:
    texts = set()
    for case in cases("dense"):
        if case.optimizer is optimizer:
            plan = engine_of(optimizer([nn.Parameter(torch.ones(4))], **case.kwargs)).step.lowerings[0].plan
            texts.add(cpp.source(kernel_key(plan, plan.members[0], torch.float32, "multi-tensor")))
    for text in texts:
        path = tmp_path / "kernel.cpp"
        path.write_text(text)
        command = [
            *cache.compiler(),
            *(flag for flag in cache._FLAGS if flag != "-march=native"),
            ONE_PROCESSOR[platform.machine()],
            "-c",
            "-fopt-info-vec-optimized",
            str(path),
            "-o",
            "/dev/null",
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        lines = text.splitlines()
        update = lines.index(next(line for line in lines if "static void update_block" in line))
        loop = 1 + next(i for i in range(update, len(lines)) if "for (int64_t i" in lines[i])
        assert re.search(rf"kernel\.cpp:{loop}:\d+: optimized: loop vectorized", report), lines[loop - 1 : loop + 30]


@pytest.mark.full
def test_a_further_tensor_costs_an_inlined_step_no_more_calls_than_torchs() -> None:
    """Of functions in Dynamo and Inductor, on a CPU and for a GPU: seconds depend on the process, these do not."""
    for counts in json.loads(printed_by("counted_calls", PYTHONHASHSEED="0")).values():
        added = {way: most - least for way, (least, most) in counts.items()}
        assert added["inlined"] <= added["torch"]
