"""The outputs of an update that are no arrays: a bit for each weight whose bits change, and sums over each parameter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from in_triton import interpret
from output_cases import OutputCase, compare, output_cases

import compiled_optim as co
from compiled_optim.plan.output_memory import OutputMemory
from compiled_optim.rule import Number, buffer, hyper, storage
from compiled_optim.rule.outputs import Outputs
from compiled_optim.step import engine


@pytest.mark.parametrize("case", [*output_cases()], ids=str)
def test_outputs_equal_comparisons_before_and_after_steps(case: OutputCase) -> None:
    compare(case)


@pytest.mark.parametrize(
    ("param", "served"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float32, torch.float64)],
)
def test_weights_are_served_in_dtypes_that_they_convert_to(param: torch.dtype, served: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"weights in {param} can be served in one of torch.float32.*got {served}"):
        Outputs(served).check(param)


CUT = torch.float64, torch.bfloat16
"""A cast that the interpreter does not round."""
NAMES = [str(case) for case in output_cases() if (case.dtype, case.served) != CUT]


@pytest.mark.parametrize("names", [NAMES[::24], pytest.param(NAMES, marks=pytest.mark.full)], ids=["some", "all"])
def test_outputs_of_triton_equal_comparisons(names: list[str]) -> None:
    pytest.importorskip("triton")
    assert interpret("output_cases", *names) == names


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, None), *((torch.bfloat16, weights) for weights in (None, "kahan", "split16", "master"))],
)
def test_a_word_of_changed_bits_is_loaded_and_stored_once(dtype: torch.dtype, weights: str | None) -> None:
    """Threads exchange the bits of a word by shuffles: no barrier, and a load and a store of 4 bytes for 32 elements."""
    pytest.importorskip("triton")
    from perf.lowering.report import Workload, lower

    workload, reports = Workload("adamw", 10, dtype=dtype, options=(("weights", weights),)), []
    for served in (None, torch.bfloat16):
        with mock.patch.object(engine, "NO_OUTPUTS", OutputMemory(Outputs(served), torch.device("cpu"))):
            reports.append(lower("multi_tensor", workload, 90, stand_in=True))
    plain, marked = reports
    assert marked.launches == plain.launches
    assert marked.bytes_per_param == plain.bytes_per_param + 2 * 4 / 32
    (before,), (after,) = ([k for k in report.kernels if k.name == "update"] for report in (plain, marked))
    assert after.barriers == before.barriers == 0
    assert after.resources.spills == 0
    assert after.resources.registers <= 80  # six programs fit a multiprocessor


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
def test_the_value_before_rounding_takes_no_name_from_buffers(lowering: str) -> None:
    class Heavy(co.CompiledOptimizer):
        lr: Number = hyper(ge=0)
        exact = buffer()

        @staticmethod
        def coefficients(lr):
            return dict(lr=lr)

        @staticmethod
        def update(param, grad, c, exact):
            new = 0.5 * exact + grad
            return dict(step=c.lr * new, exact=new)

    param = torch.nn.Parameter(torch.ones(storage.MINIMUM, dtype=torch.bfloat16))
    optimizer = Heavy([param], lr=0.25, weights="kahan", lowering=lowering)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert optimizer.state[param]["exact"].unique().tolist() == [1.5]
    assert param.detach().unique().tolist() == [1 - 0.25 - 0.375]
