"""Steps by Inductor on accelerators: lists of tensors of any sizes, and the coefficients as a graph of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from catalog import Case, cases
from torch import nn

import compiled_optim as co
from compiled_optim.lowering import list_program, lists
from compiled_optim.lowering.lists import ListLowering
from compiled_optim.memory import torch_internals
from compiled_optim.optimizer import engine_of
from compiled_optim.simulated import fake_cuda as fake
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import recording
from perf.lowering import inductor_source

SHAPES = [(3,), (4, 16), (1,), (64,), (4099,), (40, 128), (4096,), (0,)]


@pytest.fixture
def on_cpu(fresh_kernels: None) -> Iterator[None]:
    """Let CPU tensors take an accelerator's lowering, in lists of two."""
    torch._dynamo.reset()
    with mock.patch.object(list_program, "fuses_lists", return_value=True), mock.patch.object(lists, "COUNT", 2):
        yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run what would be compiled."""
    with mock.patch.object(lists, "_make", lists.uncompiled):
        yield


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    dense = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    return [*map(nn.Parameter, dense), nn.Parameter(torch.randn(8, 8, dtype=dtype).t()), _with_gaps(dtype)]


def _with_gaps(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 8, dtype=dtype)[:, ::2])


def _stepped(case: Case, lowering: str, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Any]:
    """Parameters after four steps in which some gradients are absent, and their optimizer of two groups."""
    params = _parameters(dtype)
    optimizer = case.optimizer(
        [{"params": params[:3]}, {"params": params[3:], "lr": 0.03}], lowering=lowering, **{"lr": 0.02, **case.kwargs}
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for i, param in enumerate(params):
            param.grad = None if (step + i) % 4 == 1 else torch.randn(param.shape, generator=generator, dtype=dtype)
        optimizer.step()
    return params, optimizer


def _assert_alike(case: Case, dtype: torch.dtype = torch.float32) -> None:
    params, optimizer = _stepped(case, "inductor", dtype)
    wanted, reference = _stepped(case, "eager", dtype)
    assert {type(lowering) for lowering in engine_of(optimizer).step.lowerings} == {ListLowering}
    assert engine_of(optimizer).log.fallbacks == {}
    for param, other in zip(params, wanted, strict=True):
        _assert_close(case, param.detach(), other.detach(), 1e-7)
        for name, entry in reference.state[other].items():
            _assert_close(case, optimizer.state[param][name], entry, 1e-6)


def _assert_close(case: Case, found: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    """``found`` and ``expected`` are equal but for rounding, of which codes of 8 bits make a whole code in few elements."""
    if case.kwargs.get("state_dtype") == "int8":
        differs = ~torch.isclose(found, expected, rtol=2e-6, atol=atol)
        assert differs.sum() <= max(found.numel() // 1000, 1)
        torch.testing.assert_close(
            found[differs], expected[differs], rtol=0.03, atol=1.0 if found.dtype.itemsize == 1 else 1e-3
        )
    else:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=atol)


@pytest.mark.parametrize("case", cases("dense"), ids=str)
@pytest.mark.usefixtures("on_cpu", "uncompiled")
def test_lists_do_what_plain_operations_do(case: Case) -> None:
    _assert_alike(case)


MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"state_dtype": "int8"}),
    (torch.bfloat16, {"weights": "kahan", "state_dtype": "int8"}),
    (torch.bfloat16, {"weights": "stochastic"}),
    (torch.complex64, {"weight_decay": 0.3}),
    (torch.float64, {"max_grad_norm": 0.4, "maximize": True}),
]


@pytest.mark.parametrize(("dtype", "kwargs"), MODES, ids=str)
@pytest.mark.usefixtures("on_cpu", "uncompiled")
def test_lists_in_other_dtypes(dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    _assert_alike(Case(co.AdamW, tuple(kwargs.items())), dtype)


@pytest.mark.full
@pytest.mark.usefixtures("on_cpu")
def test_compiled_lists() -> None:
    _assert_alike(Case(co.AdamW, (("betas", (0.6, 0.8)), ("eps", 0.03), ("weight_decay", 0.4))))


@pytest.mark.full
@pytest.mark.usefixtures("fresh_kernels")
def test_neither_sizes_nor_numbers_nor_absent_gradients_compile_anything() -> None:
    """One graph of coefficients and one of lists, each a few launches, serve whatever an optimizer holds."""
    with fake_cuda(90):
        torch._dynamo.reset()
        params = [nn.Parameter(torch.empty(1 << 14, device="cuda")) for _ in range(37)]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = co.AdamW(params[:3], lowering="inductor")
        log = engine_of(optimizer).log
        with recording("cuda") as recorder:
            optimizer.step()
            assert len(log.compilations) == 2
            optimizer.add_param_group({"params": params[3:], "lr": 0.3})
            with co.no_recompiles():
                params[0].grad = None
                optimizer.step()
                params[5].grad = None
                optimizer.step()
            others = [nn.Parameter(torch.empty(size, device="cuda")) for size in (16, 48, 160)]
            for param in others:
                param.grad = torch.empty_like(param)
            co.AdamW(others, lr=0.5, lowering="inductor").step()
            params[0].grad, params[5].grad = torch.empty_like(params[0]), torch.empty_like(params[5])
            optimizer.step()  # the first with this pattern of gradients, which is uploaded
            recorder.take()
            optimizer.step()
            record = recorder.take()
    torch._dynamo.reset()
    modules = [inductor_source.read(graph.source, graph.inputs) for graph in record.graphs]
    assert len(log.compilations) == 2
    assert [len(module.launches) for module in modules] == [2, 1, 1, 1]
    assert sum(module.bytes or 0 for module in modules) / (37 << 14) == pytest.approx(28, abs=0.05)
    assert [module.externs + module.waits + module.cpp for module in modules] == [[]] * 4
    assert [operator.name for operator in record.operators] == ["stack", "index_select"]


@pytest.mark.usefixtures("fresh_kernels", "uncompiled")
def test_metal_has_lists_without_float64() -> None:
    made = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            found = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            made.update(t.dtype for t in found if t.device.type == "mps")
            return result

    with (
        fake._device_guard(fake._MPS),
        mock.patch.object(torch.Tensor, "data_ptr", fake._address, create=True),
        mock.patch.object(torch_internals, "is_fake", fake._is_not_fake),
        fake.FakeTensorMode(allow_non_fake_inputs=True),
        fake._RealHost(),
        Watch(),
    ):
        params = [nn.Parameter(torch.empty(size, device="mps")) for size in (3, 64, 100)]
        for param in params:
            param.grad = torch.empty_like(param)
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.1}]
        optimizer = co.StableAdamW(groups, lr=0.2, max_grad_norm=1.0, skip_nonfinite=True)
        optimizer.step()
        params[1].grad = None
        optimizer.step()
        (lowering,) = engine_of(optimizer).step.lowerings
    assert type(lowering) is ListLowering
    assert torch.float32 in made
    assert torch.float64 not in made
