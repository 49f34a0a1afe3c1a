"""The report of what training takes: bytes by kind, and the figures that low precision promises."""

from __future__ import annotations

import dataclasses
from typing import Any

import expecttest
import pytest
import torch
from catalog import ruled
from torch.nn import Parameter

import compiled_optim as co

# As in GPT-2, with fewer tokens and layers: nearly all numbers are in matrices.
_LAYER = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,), *[(768,)] * 4]
GPT2 = [(8192, 768), (1024, 768), *_LAYER * 2, (768,), (768,)]


def report(dtype: torch.dtype, **options: Any) -> co.MemoryReport:
    """Of AdamW on GPT-2's shapes after a step."""
    params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in GPT2]
    made = co.AdamW(params, **options)
    for param in params:
        param.grad = torch.zeros_like(param)
    made.step()
    found = co.memory_report(made)
    made.zero_grad()
    without = co.memory_report(made)
    assert without.gradients == 0
    assert found.total - without.total == found.gradients == sum(p.numel() for p in params) * dtype.itemsize
    return found


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (torch.float32, {}, 16.01),
        (torch.bfloat16, {"weights": "kahan"}, 10.02),
        (torch.bfloat16, {"weights": "stochastic"}, 8.02),
        (torch.bfloat16, {"weights": "split16", "state_dtype": "int8"}, 8.2),
        (torch.bfloat16, {"weights": "split8", "state_dtype": "int8"}, 7.2),  # without gradients 5.2
        (torch.bfloat16, {"weights": "stochastic", "state_dtype": "int8"}, 6.2),
    ],
    ids=str,
)
def test_adamw_on_gpt2(dtype: torch.dtype, options: dict[str, Any], most: float) -> None:
    found = report(dtype, **options)
    assert most - 0.1 < found.per_parameter <= most
    assert (found.total - found.gradients) / found.elements <= most - dtype.itemsize
    assert found.weights == found.elements * dtype.itemsize
    assert found.tables < 0.01 * found.elements
    assert found.total == found.weights + found.gradients + sum(found.state.values()) + found.tables


def test_remainders_and_scales_are_listed() -> None:
    param = Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    found = co.memory_report(co.AdamW([param], weights="split8", state_dtype="int8"))
    exact = {"step": 8, "exp_avg_int8": 4096, "exp_avg_sq_int8": 4096, "remainder": 4096}
    assert found.state == {**exact, "exp_avg_scale": 256, "exp_avg_sq_scale": 256}
    assert found.remainders == 4096
    assert found.gradients == 0
    lines = str(found).splitlines()
    assert lines[0] == f"AdamW: {found.per_parameter:.2f} bytes for each of 4,096 parameters"
    assert lines[1].split() == ["weights", "2.000", "8,192", "bytes"]
    assert lines[-1].split()[0] == "total"


def test_of_a_small_model_all_bytes_are_told() -> None:
    found = co.memory_report(co.SGD([Parameter(torch.zeros(8))], momentum=0.9))
    text = str(dataclasses.replace(found, tables=744))
    expecttest.assert_expected_inline(
        text,
        """\
SGD: small model, 816 bytes in all for 8 parameters
  weights                       32 bytes
  step                           8 bytes
  momentum_buffer               32 bytes
  gradients                      0 bytes
  tables                       744 bytes
  total                        816 bytes""",
    )


def test_groups_and_absent_gradients_are_added_up() -> None:
    one, two, frozen = Parameter(torch.zeros(10)), Parameter(torch.zeros(6).double()), torch.zeros(4)
    made = co.SGD([{"params": [one, frozen]}, {"params": [two], "momentum": 0.9}])
    two.grad = torch.zeros_like(two)
    found = co.memory_report(made)
    assert (found.elements, found.weights, found.gradients) == (20, 40 + 48 + 16, 48)
    assert found.state["momentum_buffer"] == 48


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
def test_tables_are_those_of_the_lowering(lowering: str) -> None:
    param = Parameter(torch.zeros(100))
    made = co.AdamW([param], lowering=lowering)
    param.grad = torch.zeros_like(param)
    made.step()
    assert 0 < co.memory_report(made).tables < 1 << 24


def test_sparse_gradients_and_histories() -> None:
    param = Parameter(torch.zeros(10, 4))
    param.grad = torch.sparse_coo_tensor([[1, 2]], torch.ones(2, 4), (10, 4), check_invariants=True)
    made = co.SparseAdam([param])
    made.step()
    assert co.memory_report(made).gradients == 2 * 8 + 8 * 4
    lbfgs = co.LBFGS([Parameter(torch.zeros(10))], history_size=7)
    found = co.memory_report(lbfgs)
    assert found.elements == 10
    assert sum(found.state.values()) >= 2 * 7 * 10 * 4


@pytest.mark.usefixtures("one_process")
def test_of_dtensors_this_process_has_its_part() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    param = Parameter(distribute_tensor(torch.zeros(64, 128), init_device_mesh("cpu", (1,)), [Shard(0)]))
    param.grad = torch.zeros_like(param)
    made = co.AdamW([param], state_dtype="int8")
    made.step()
    found = co.memory_report(made)
    assert (found.elements, found.weights, found.gradients) == (8192, 32768, 32768)
    assert found.state["exp_avg_int8"] == 8192
    assert found.tables < 4096


@pytest.mark.parametrize("optimizer", ruled("dense"), ids=lambda c: c.__name__)
def test_of_every_optimizer(optimizer: type[co.CompiledOptimizer]) -> None:
    found = co.memory_report(optimizer([Parameter(torch.zeros(5))], lr=1e-3))
    assert found.weights == 20
    assert found.state["step"] == 8
