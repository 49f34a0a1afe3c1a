"""The tables of blocks: which blocks of which tensors a kernel works on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import compiled_optim as co
from compiled_optim.lowering.kernels.table import blocks_of
from compiled_optim.optimizer import engine_of
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.step import processor_seconds


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # times are the machine's
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 9))
def test_every_element_is_in_one_block(numels: list[int], size: int) -> None:
    names = [7 * t + 3 for t in range(len(numels))]
    expected = [[name, start // size] for name, numel in zip(names, numels, strict=True) for start in range(0, numel, size)]
    table, ranges = blocks_of(names, numels, size)
    assert table.tolist() == expected
    assert table.shape == (len(expected), 2)
    assert table.dtype == ranges.dtype == np.int64
    assert [{t for t, _ in expected[start:end]} for start, end in ranges] == [
        {n} if k else set() for n, k in zip(names, numels, strict=True)
    ]


def _seconds(shapes: list[tuple[int, ...]]) -> float:
    """How long processors take to make the tables of tensors with these shapes."""
    params = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="cuda")) for shape in shapes]
    (lowering,) = engine_of(co.SGD(params)).step.lowerings
    started = processor_seconds()
    lowering.compile()
    seconds = processor_seconds() - started
    (table,) = lowering.tables
    assert len(table.blocks) == sum(-(-p.numel() // 1024) for p in params)
    return seconds


def test_tables_of_billions_of_elements_are_made_at_once() -> None:
    """Of a transformer with seven billion; a step makes them anew where tensors moved."""
    pytest.importorskip("triton")
    shapes = [(4096, 4096)] * 128 + [(11008, 4096)] * 96 + [(4096,)] * 65 + [(32000, 4096)] * 2
    with fake_cuda(90):
        _seconds([(3,)])  # compiles
        assert _seconds(shapes) < 1
