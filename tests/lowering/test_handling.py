"""Tensors out of the ordinary, through the kernels: compared with eager, and as code for a GPU."""

from __future__ import annotations

import re
from typing import Any

import handling
import pytest
import torch
from in_triton import interpret
from torch import nn

import compiled_optim as co
from compiled_optim.lowering.kernels import triton as triton_lowering
from compiled_optim.optimizer import engine_of
from compiled_optim.simulated import ptx
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import TritonLaunch, recording
from perf.lowering.report import cpu_in_place_of_cuda

pytest.importorskip("triton")

CASES = [f"{name} {dtype}" for name in handling.ARRANGEMENTS for dtype in (torch.float32, torch.complex64)]
CASES += list(handling.DTYPES)
# Triton rounds float64 to float16 at once, torch by way of float32.
ROUNDED_TWICE = {"float64-float32-float16"}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = interpret("interpreted_handling")
    return found


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, float]:
    return handling.errors("multi_tensor")


@pytest.mark.parametrize("case", CASES)
def test_triton_equals_eager(case: str, interpreted: dict[str, Any]) -> None:
    assert interpreted["errors"][case] < (1e-4 if case in ROUNDED_TWICE else 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_cpp_equals_eager(case: str, on_cpu: dict[str, float]) -> None:
    assert on_cpu[case] < 1e-6


def test_every_case_ran(interpreted: dict[str, Any], on_cpu: dict[str, float]) -> None:
    assert set(CASES) == set(interpreted["errors"]) == set(on_cpu)


def test_triton_reaches_elements_beyond_31_bits(interpreted: dict[str, Any]) -> None:
    ours, expected = interpreted["huge"]
    assert ours == expected


def test_alignment_changes_no_bit(interpreted: dict[str, Any]) -> None:
    assert interpreted["alignment matters"] == []


def test_what_fills_sixteen_bytes_is_accessed_so(interpreted: dict[str, Any]) -> None:
    """Sizes of tensors; of 1030 elements, the first 1024 are a block."""
    assert interpreted["wide"] == {
        "float32": [12, 120, 1030, 2048],
        "float64": [12, 120, 1030, 2048],
        "bfloat16": [120, 1030, 2048],
        "bfloat16 gradients": [120, 1030, 2048],
    }
    assert interpreted["wide beside unaligned gradients"] == [12, 1030]


def test_rows_that_fill_sixteen_bytes_are_accessed_so(interpreted: dict[str, Any]) -> None:
    assert interpreted["wide rows"] == [4, 8, 1028]


def test_cpp_reaches_elements_beyond_31_bits() -> None:
    ours, expected = handling.end_of_huge(1)
    assert ours == expected


def _kernel(arch: int) -> Any:
    """The compiled kernel that AdamW's step launches for a few tensors."""
    with fake_cuda(arch):
        params = [nn.Parameter(torch.empty(4096, device="cuda")) for _ in range(3)]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = co.AdamW(params)
        with recording("cuda") as recorder:
            optimizer.step()
            (launch,) = [launch for launch in recorder.take().launches if launch.name == "update"]
    return launch.kernel


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_block_can_be_accessed_both_ways(arch: int) -> None:
    """All accesses are masked: those of 16 bytes are for the last block of a tensor too, where its size allows it."""
    text = _kernel(arch).asm["ptx"]
    accesses = [a for a in ptx.read(text).accesses if a.elementwise]
    assert all(a.masked for a in accesses)
    moved = {size: ptx.read(text).threads * sum(a.bytes for a in accesses if a.bytes == size) for size in (4, 16)}
    assert moved == {4: 28 * triton_lowering.NARROW, 16: 28 * triton_lowering.BLOCK}
    assert sum(moved.values()) == ptx.read(text).threads * sum(a.bytes for a in accesses)


def test_alignment_is_no_matter_of_kernels_or_graphs() -> None:
    """Gradients are unaligned in every other step, or absent; so are parameters of another optimizer."""
    keys, kernels = set(), set()
    with fake_cuda(90), recording("cuda") as recorder:
        for offset in (0, 1):
            param = nn.Parameter(torch.empty(4096 + offset, device="cuda")[offset:])
            other = nn.Parameter(torch.empty(64, device="cuda"))
            other.grad = torch.empty_like(other)
            optimizer = co.AdamW([param, other], max_grad_norm=1.0)
            for step in range(6):
                param.grad = None if step % 3 == 2 else torch.empty(4096 + step % 3, device="cuda")[step % 3 :]
                optimizer.step()
                keys.add((offset, tuple(engine_of(optimizer).step.key().items())))
                kernels |= {(launch.name, launch.kernel.hash) for launch in recorder.take().launches}
    assert len(keys) == 2
    assert sorted(name for name, _ in kernels) == ["evaluate", "square_sums", "update"]


def test_offsets_of_elements_have_64_bits() -> None:
    text = _kernel(90).asm["ttir"]
    offsets = re.findall(r"tt\.addptr [^:]* : tensor<\d+x!tt\.ptr<\w+>>, tensor<\d+x(\w+)>", text)
    assert len(offsets) >= 8  # parameter, gradient and two buffers, on both paths
    assert set(offsets) == {"i64"}


def _launches_on(devices: list[str]) -> list[TritonLaunch]:
    with fake_cuda(90):
        params = [nn.Parameter(torch.empty(64, device=d)) for d in devices]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = co.AdamW(params)
        with recording("cuda") as recorder:
            optimizer.step()
            record = recorder.take()
    assert not any(o.waits for o in record.operators)
    return record.launches


def test_each_device_has_launches_of_its_own() -> None:
    one = [launch.name for launch in _launches_on(["cuda:0"] * 4)]
    both = _launches_on(["cuda:1", "cuda:0", "cuda:1", "cuda:0"])
    assert [(launch.device, launch.name) for launch in both] == [(device, name) for device in (1, 0) for name in one]


def test_empty_tensors_alone_launch_no_update() -> None:
    with cpu_in_place_of_cuda(90), recording("cpu") as recorder:
        param = nn.Parameter(torch.zeros(0, 4))
        param.grad = torch.zeros(0, 4)
        co.AdamW([param]).step()
        assert [launch.name for launch in recorder.take().launches] == ["evaluate"]
