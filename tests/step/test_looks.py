"""Kernels that look at watched steps on a GPU: they see what torch's operations see, in two launches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from in_triton import interpret
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.optimizer import engine_of
from compiled_optim.simulated.ptx import resources
from perf import no_device

pytest.importorskip("triton")


@pytest.mark.full
def test_they_see_what_operations_see() -> None:
    """In Triton's interpreter: all forms and dtypes, no gradients, skipped steps, numbers that change, and replays."""
    found = interpret("interpreted_samples")
    assert len(found) == 13
    assert found.pop("gaps") == [""]
    assert found == {case: ["look note"] for case in found}


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("captured", [False, True], ids=["called", "captured"])
def test_the_host_does_nothing_for_each_parameter(captured: bool) -> None:
    """No operator, and a tensor is asked nothing; a replayed step is not even told that it is watched."""
    with no_device.simulated_gpu():
        params = [torch.zeros(16, requires_grad=True) for _ in range(3)]
        for param in params:
            param.grad = torch.zeros(16)
        optimizer = co.AdamW(params, lowering="multi_tensor")
        optimizer.watch_health()
        step = co.CUDAGraphRunner(optimizer, warmup=1).step if captured else optimizer.step
        for _ in range(3):
            step()
        (looks,) = engine_of(optimizer).step._looks.values()
        with (
            Operators() as operators,
            mock.patch.object(looks, "begin", wraps=looks.begin) as begin,
            mock.patch.object(looks, "end", wraps=looks.end) as end,
            mock.patch.object(torch.Tensor, "data_ptr", side_effect=AssertionError("a tensor is asked for its address")),
        ):
            step()
        assert operators.count == 0
        assert [begin.call_count, end.call_count] == [1 - captured] * 2


@pytest.mark.parametrize("wide", ["fp32", "fp64"])
@pytest.mark.parametrize("name", ["look", "note"])
@pytest.mark.parametrize("arch", [80, 90])
def test_they_compile_without_spills(arch: int, name: str, wide: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from compiled_optim.lowering.kernels.triton import OPTIONS
    from compiled_optim.step import sample_kernels, watch

    function = getattr(sample_kernels, name)
    types = dict.fromkeys(function.arg_names, "*i64") | dict.fromkeys(("before", "table"), f"*{wide}") | {"outcome": "*fp64"}
    constants = {"elements": watch.ELEMENTS, "steps": watch.STEPS}
    types = {argument: "constexpr" if argument in constants else types[argument] for argument in function.arg_names}
    source = triton.compiler.ASTSource(function, types, constexprs={k: v for k, v in constants.items() if k in types})
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=OPTIONS)
    used = resources(kernel.asm["ptx"], arch)
    assert used.spills == 0
    assert used.registers <= 64
    assert ".extern .func" not in kernel.asm["ptx"]
