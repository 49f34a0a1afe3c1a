"""Tensors out of the ordinary, through the kernels: compared with eager, and as code for a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import handling
import pytest
import torch
from torch import nn

import compiled_optim as co
from perf.lowering import ptx
from perf.lowering.fake_cuda import fake_cuda
from perf.lowering.record import Launch, recording
from perf.lowering.report import cpu_in_place_of_cuda

pytest.importorskip("triton")

CASES = [f"{name} {dtype}" for name in handling.ARRANGEMENTS for dtype in (torch.float32, torch.complex64)]
CASES += list(handling.DTYPES)
# Triton rounds float64 to float16 at once, torch by way of float32.
ROUNDED_TWICE = {"float64-float32-float16"}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    program = Path(__file__).with_name("interpreted_handling.py")
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


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


def test_cpp_reaches_elements_beyond_31_bits() -> None:
    ours, expected = handling.end_of_huge(1)
    assert ours == expected


def _kernel(arch: int, offset: int = 0, grad_offset: int = 0) -> Any:
    """The compiled kernel that AdamW's step launches for a few tensors this many elements into their allocations."""
    with fake_cuda(arch):
        params = [nn.Parameter(torch.empty(4096 + offset, device="cuda")[offset:]) for _ in range(3)]
        for param in params:
            param.grad = torch.empty_like(param)
        params[1].grad = torch.empty(4096 + grad_offset, device="cuda")[grad_offset:]
        optimizer = co.AdamW(params)
        with recording("cuda") as recorder:
            optimizer.step()
            (launch,) = [launch for launch in recorder.take().launches if launch.name == "update"]
    return launch.kernel


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_unaligned_tensors_have_no_wide_access(arch: int) -> None:
    text = _kernel(arch, offset=1).asm["ptx"]
    path = [a for a in ptx.full_path(text) if a.elementwise]
    assert {a.bytes for a in path} == {4}
    assert sum(a.bytes for a in path) * ptx.threads(text) == 28 * 1024


def test_one_unaligned_gradient_is_enough() -> None:
    for offset, widths in ((0, {16}), (1, {4}), (4, {16})):
        text = _kernel(90, grad_offset=offset).asm["ptx"]
        assert {a.bytes for a in ptx.full_path(text) if a.elementwise} == widths


def test_offsets_of_elements_have_64_bits() -> None:
    text = _kernel(90).asm["ttir"]
    offsets = re.findall(r"tt\.addptr [^:]* : tensor<1024x!tt\.ptr<\w+>>, tensor<1024x(\w+)>", text)
    assert len(offsets) >= 7  # parameter, gradient and two buffers, on both paths or shared by them
    assert set(offsets) == {"i64"}


def _launches_on(devices: list[str]) -> list[Launch]:
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
