"""Steps whose own operations compiled code holds: in every mode of storage, and as code for a GPU, without one."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from stored_cases import CASES, MINIMUM
from torch import nn

import compiled_optim as co
from compiled_optim.lowering import inlined, list_program
from compiled_optim.memory.torch_internals import compiles_means_with_lists
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import storage
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import Graph, recording
from perf.lowering import inductor_source

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler.*")

STORED = [
    "AdamW None int8",
    "AdamW kahan int8",
    "AdamW stochastic None",
    "AdamW split16 int8",
    "AdamW master None",
    "AdamW cautious",
    "AdamW float16 split8",
    "AdamW hard",
    "AdamW mixed",
    "StableAdamW",
]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("name", STORED)
def test_no_bit_of_weights_and_state_in_few_bytes_differs_from_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MINIMUM", MINIMUM)
    case = CASES[name]
    expected = case.run("eager", whole=True)
    found = case.run("inductor", compiled=True, whole=True)
    assert found.keys() == expected.keys()
    for entry, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[entry], rtol=0, atol=0, equal_nan=True, msg=lambda m, e=entry: f"{e}: {m}"
        )


@pytest.mark.full
@pytest.mark.parametrize("size", [128, 100])
def test_the_last_elements_of_a_group_are_not_lost(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor of torch 2.13 reads 0 in place of them."""
    monkeypatch.setattr(storage, "MINIMUM", 16)
    grads, sides = torch.randn(2, size), []
    for lowering in ("inductor", "eager"):
        param = nn.Parameter(torch.ones(size))
        optimizer = co.SGD([("w", param)], lr=0.1, momentum=0.9, state_dtype="int8", lowering=lowering)
        step = torch.compile(optimizer.step, fullgraph=True) if lowering == "inductor" else optimizer.step
        for grad in grads:
            param.grad = grad
            step()
        sides.append(param.detach())
        if lowering == "inductor":
            assert (co.compile_report(optimizer).compiled_step == "its own operations") == (size == 128)
    torch.testing.assert_close(*sides, rtol=1e-5, atol=1e-6)


ROWS: list[tuple[type[co.CompiledOptimizer], dict[str, Any]]] = [
    (co.AdamW, {}),
    (co.AdamW, {"max_grad_norm": 1.0}),
    (co.ASGD, {}),
    (co.SGD, {"momentum": 0.9}),
    (co.StableAdamW, {}),
]


def _source(
    optimizer: type[co.CompiledOptimizer], options: dict[str, Any], shapes: list[tuple[int, ...]]
) -> tuple[Graph, int]:
    """The one graph that Inductor makes of a step for a GPU, and the elements of all parameters."""
    torch._dynamo.reset()
    with fake_cuda(90):
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        for param in params:
            param.grad = torch.empty_like(param)
        stepped = optimizer(params, lr=0.1, lowering="inductor", **options)
        # while Dynamo traces, the device that is none makes no tensors
        assert not engine_of(stepped).inline(range(len(params)))
        with recording("cuda") as recorder:
            torch.compile(stepped.step, fullgraph=True)()
    record = recorder.take()
    assert record.operators == []
    (graph,) = record.graphs
    return graph, sum(param.numel() for param in params)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("options", [{}, {"cautious": True}], ids=str)
@pytest.mark.parametrize("is_new", [False, True], ids=["2.11", "later"])
def test_means_are_inlined_where_inductor_compiles_them(
    is_new: bool, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch 2.11 it fails beside operations over lists, and a step with means is an operator there."""
    monkeypatch.setattr(inlined, "compiles_means_with_lists", lambda: is_new)
    with fake_cuda(90):
        params = [nn.Parameter(torch.ones(4, device=device))]
        for optimizer, has_means in ((co.StableAdamW, True), (co.AdamW, "cautious" in options)):
            made = optimizer(params, lr=0.1, lowering="inductor", **options)
            assert (not engine_of(made).inline([0])) == (is_new or not has_means or device == "cpu")


def test_parameters_on_two_devices_are_not_inlined() -> None:
    with fake_cuda(90):
        params = [nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "cuda")]
        made = co.AdamW(params, lowering="inductor")
        assert engine_of(made).inline([0, 1]) == "parameters are on several devices"


@pytest.mark.full
def test_table_of_ten_tensors_on_a_gpu() -> None:
    """Launches and bytes per parameter, by torch 2.13; no operator but the norm of the gradients, no copy and no wait."""
    lines = ["optimizer | launches | bytes"]
    for optimizer, options in ROWS if compiles_means_with_lists() else ROWS[:-1]:
        graph, elements = _source(optimizer, options, [(64, 64), (4096,), (768,), (768, 768)] * 2 + [(64, 64), (4096,)])
        module = inductor_source.read(graph.source, graph.inputs)
        norm = ["torch.ops.aten._foreach_norm.Scalar"] if "max_grad_norm" in options else []
        assert [module.externs, module.cpp, module.waits] == [norm, [], []]
        moved = module.bytes / elements
        name = " ".join([optimizer.__name__, *options])
        lines.append(f"{name} | {len(module.launches)} | {moved:.2f}")
    if not torch.__version__.startswith("2.13."):
        return
    expecttest.assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
optimizer | launches | bytes
AdamW | 3 | 28.00
AdamW max_grad_norm | 7 | 28.00
ASGD | 4 | 20.00
SGD momentum | 3 | 20.00
StableAdamW | 16 | 40.00
""",
    )


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"cautious": True}], ids=str)
@pytest.mark.parametrize("optimizer", [co.AdamW, co.Adan, co.ASGD, co.Ranger, co.SGD], ids=lambda c: c.__name__)
def test_code_for_a_gpu_computes_what_that_for_a_cpu_does(
    optimizer: type[co.CompiledOptimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With coefficients in pairs, and expressions that end in operations over lists; on a CPU."""
    monkeypatch.setattr(list_program, "fuses_lists", lambda device: True)
    torch.manual_seed(0)
    grads = [[torch.randn(shape) for shape in ((5, 3), (7,), ())] for _ in range(4)]
    sides = []
    for lowering in ("inductor", "eager"):
        torch.manual_seed(1)
        params = [nn.Parameter(torch.randn(grad.shape)) for grad in grads[0]]
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.07, "weight_decay": 0.4}]
        stepped = optimizer(groups, lr=0.2, weight_decay=0.3, lowering=lowering, **options)
        step = torch.compile(stepped.step, backend="aot_eager", fullgraph=True) if lowering == "inductor" else stepped.step
        for now in grads:
            for param, grad in zip(params, now, strict=True):
                param.grad = grad.clone()
            step()
        sides.append([*(p.detach() for p in params), *(v for p in params for v in stepped.state[p].values())])
    torch.testing.assert_close(*sides, rtol=1e-6, atol=1e-7)
