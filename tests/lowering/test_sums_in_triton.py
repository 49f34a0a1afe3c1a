"""Sums of Triton's kernels: what they cost in float64, and how exact they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from in_triton import interpret
from torch import nn

import compiled_optim as co
from compiled_optim.lowering.kernels import triton, triton_stacks
from compiled_optim.lowering.stacks import StackLowering
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import storage
from compiled_optim.simulated import ptx
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import recording

pytest.importorskip("triton")

STORED = {"weights": "split8", "state_dtype": "int8"}
OPERATIONS: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "LAMB": (torch.float32, {}, 2.0),
    "LAMB bfloat16": (torch.bfloat16, {}, 2.0),
    "LAMB cautious": (torch.float32, {"cautious": True}, 3.0),  # a third sum
    "LAMB stored": (torch.bfloat16, STORED, 2.0),
    "MARS": (torch.float32, {}, 1.0),
    "Prodigy": (torch.float32, {}, 2.0),
    "StableAdamW": (torch.float32, {"lr": 0.1}, 1.0),
    "AdamW cautious": (torch.float32, {"cautious": True}, 1.1),
    "Adafactor": (torch.float32, {}, 4.0),
    "Adafactor bfloat16": (torch.bfloat16, {}, 4.0),
    "Muon": (torch.float32, {}, 1.0),
    "Muon stored": (torch.bfloat16, STORED, 2.0),
    "NorMuon": (torch.float32, {}, 4.0),
    "NorMuon stored": (torch.bfloat16, STORED, 4.0),
}
"""By optimizer, the most float64 operations for an element in all its sums; ``evaluate`` and ``add`` work on few numbers."""


def _reduces(kind: type[co.CompiledOptimizer]) -> bool:
    rule = kind._rule
    statics = {s.name: s.default for s in rule.statics} | dict.fromkeys(rule.structural_hypers, True)
    return rule.granularity in ("tensor", "matrix") or bool(rule.stages(statics))


def test_all_rules_that_reduce_are_in_the_table() -> None:
    public = [value for name in co.__all__ if isinstance(value := getattr(co, name), type)]
    kinds = [kind for kind in public if issubclass(kind, co.CompiledOptimizer) and hasattr(kind, "_rule")]
    found = {kind.__name__ for kind in kinds if _reduces(kind)}
    assert found - {"MuonAdamW"} == {name.split()[0] for name in OPERATIONS} - {"AdamW"}  # one has the rules of others


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", OPERATIONS)
def test_sums_take_few_float64_operations(
    case: str, arch: int, fresh_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where all is aligned: those of a turn of a loop, and a program's others by all its elements."""
    dtype, options, most = OPERATIONS[case]
    monkeypatch.setattr(storage, "MINIMUM", 64)
    with fake_cuda(arch), recording("cuda") as recorder:
        param = nn.Parameter(torch.empty(256, 512, dtype=dtype, device="cuda"))
        param.grad = torch.empty_like(param)
        optimizer = getattr(co, case.split()[0])([("w", param)], **options)
        optimizer.step()
        kernels = {launch.name: launch.kernel for launch in recorder.take().launches}
        (lowering,) = engine_of(optimizer).step.lowerings
    assert kernels["evaluate"].metadata.num_warps == 1
    texts, operations = {name: kernel.asm["ptx"] for name, kernel in kernels.items()}, 0.0
    if isinstance(lowering, StackLowering):
        source = lowering.stacks[0].kernels[0]._source
        loops = [loop for loop in source.loops if loop.sums and {"r", "c"} <= {*loop.axes}]
        for loop in loops:
            codes = any(not source.dtypes[name].is_floating_point for name in loop.loads)
            of_turn, rest = ptx.read(texts[loop.name]).float64
            assert of_turn
            operations += of_turn / (8 if codes else 16) + rest / 128
        assert loops
    else:
        for name in (name for name in texts if name.startswith("sums")):
            of_turn, rest = ptx.read(texts[name]).float64
            operations += of_turn / 8 + rest / (triton.REDUCE_BYTES // dtype.itemsize // 128)
    used = [ptx.resources(text, arch) for text in texts.values()]
    assert max(u.registers for u in used) <= 128
    assert 0 < operations <= most


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """What one process finds."""
    found: dict[str, dict[str, float]] = interpret("interpreted_sums")
    return found


@pytest.mark.parametrize("sums", ["elements", "matrix"])
@pytest.mark.parametrize("kind", ["plain", "wide", "huge", "tiny"])
def test_sums_are_those_of_float64(kind: str, sums: str, interpreted: dict[str, dict[str, float]]) -> None:
    """Within a unit in the last place, also of numbers whose sum float32 cannot hold; float64 tensors have float64 sums."""
    for case, errors in interpreted.items():
        if case.startswith(f"{kind} "):
            assert errors[sums] <= (64 if "float64" in case else 1), case


ADDED = {"elements": triton.ROW, "rows": triton_stacks._ROW, "columns": triton_stacks._ROWS}
"""How many numbers are added up in float32 before float64, by where."""


@pytest.mark.parametrize("where", ADDED)
def test_norms_of_many_elements_are_exact(where: str) -> None:
    """However many there are: of positive numbers, each float32 addition is off by 2**-24 of the result at most.

    Float64 sums of 1e9 numbers, 4096 or fewer of which follow each other, are off by far less.
    """
    count = ADDED[where]
    assert (count - 1) * 2.0**-24 + 1e5 * 2.0**-53 < 1e-6
    squares = np.random.default_rng(7).lognormal(sigma=4, size=1 << 22).astype(np.float32) ** 2
    rows = squares.reshape(-1, count)
    sums = rows[:, 0].copy()
    for column in range(1, count):  # one after the other, which is the worst order
        sums += rows[:, column]
    assert abs(sums.astype(np.float64).sum() / squares.astype(np.float64).sum() - 1) < 1e-6
