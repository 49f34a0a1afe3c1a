"""The tables of blocks: which blocks of which tensors a kernel works on."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compiled_optim as co
from compiled_optim.lowering.kernels.table import blocks_of
from compiled_optim.optimizer import engine_of


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


def _instructions(shapes: list[tuple[int, ...]]) -> int:
    """Count the instructions of Python that the package takes to make the tables of tensors with these shapes."""
    instructions = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes = frame.f_code.co_filename.startswith(co.__path__[0])
        instructions += event == "opcode"
        return trace if frame.f_trace_opcodes else None

    params = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="cuda")) for shape in shapes]
    (lowering,) = engine_of(co.SGD(params)).step.lowerings
    before = sys.gettrace()
    gc.disable()  # what other tests left may end in functions of the package
    sys._getframe().f_trace_opcodes = True  # without which Python 3.12.1 traces none
    sys.settrace(trace)
    try:
        lowering.compile()
    finally:
        sys.settrace(before)
        gc.enable()
    (table,) = lowering.tables
    assert len(table.blocks) == sum(-(-p.numel() // 1024) for p in params)
    return instructions


def test_tables_of_billions_of_elements_are_made_at_once() -> None:
    """Make those of a transformer with as many instructions as those of a small one: a step makes them if tensors moved."""
    pytest.importorskip("triton")
    from compiled_optim.simulated.fake_cuda import fake_cuda

    shapes = [(4096, 4096)] * 128 + [(11008, 4096)] * 96 + [(4096,)] * 65 + [(32000, 4096)] * 2
    with fake_cuda(90):
        _instructions([(3,)])  # compiles
        few, many = _instructions([(shape[0] // 64, *shape[1:]) for shape in shapes]), _instructions(shapes)
        assert few == many > 0
