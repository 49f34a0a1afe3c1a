"""Stacks on a GPU that need not be there: Inductor's code for them, memory and the work of a program, nothing run.

Where a test says that Inductor compiles, loops of our own are put aside, which serve most plans.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catalog import stacked as stacked_optimizers
from inductor_module import Runs, running
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.lowering import lists, stack_code, stack_loops
from compiled_optim.lowering.kernels import symmetric
from compiled_optim.lowering.stacks import CodeStack, LoopStack
from compiled_optim.optimizer import engine_of
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import recording
from perf.competitors import OURS, TORCH_PRODUCTS, competitor
from perf.workloads import WORKLOADS

pytest.importorskip("triton")

GIB = 1 << 30
GPT2 = WORKLOADS["gpt2-124m"]()
LLAMA_LAYER = [(4096, 4096)] * 4 + [(11008, 4096)] * 3
LLAMA_EMBEDDINGS = [(32000, 4096)] * 2
FEW_LAYERS = 4  # of 32, all alike


def _parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, device: str = "cuda") -> list[Any]:
    params = [nn.Parameter(torch.empty(s, dtype=dtype, device=device)) for s in shapes]
    for param in params:
        param.grad = torch.empty_like(param)
    return params


@pytest.fixture
def by_inductor(monkeypatch: pytest.MonkeyPatch, fresh_kernels: None) -> None:
    """Let Inductor compile stacks that loops serve too, as it does transposed ones."""
    monkeypatch.setattr(stack_loops, "LOOPS", {})


@contextlib.contextmanager
def _gpu() -> Iterator[Runs]:
    torch._dynamo.reset()
    with fake_cuda(90), running() as runs:
        yield runs


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "lowering"),
    [(co.Adafactor, "auto"), (co.Muon, "auto"), (co.AdamW, "auto")],
    ids=str,
)
def test_code_of_inductor_is_for_one_device(optimizer: type[co.CompiledOptimizer], lowering: str, by_inductor: None) -> None:
    """Inductor writes the device's number into its code."""
    shapes = [(64, 32), (64, 32), (200, 200)][2 * (optimizer is co.Muon) :]
    for index in (1, 0):
        with _gpu() as runs:
            optimizer(_parameters(shapes, device=f"cuda:{index}"), lowering=lowering).step()
        guards = {int(n) for source in runs.sources for n in re.findall(r"(?:_DeviceGuard|set_device)\((\d+)\)", source)}
        assert guards == (set() if optimizer is co.AdamW and lowering == "auto" else {index})
    devices = {signature.device for cache in (stack_code._kernels, lists._kernels) for signature in cache}
    assert devices == ({"cuda:0", "cuda:1"} if runs.sources else set())


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "shapes"), [(co.Adafactor, GPT2), (co.Muon, [(768, 3072)] * 12)], ids=["Adafactor", "Muon"]
)
def test_no_program_walks_a_large_tensor_alone(
    optimizer: type[co.CompiledOptimizer], shapes: list[tuple[int, ...]], by_inductor: None
) -> None:
    with _gpu() as runs:
        subject = optimizer(_parameters(shapes))
        subject.step()
        runs.start()
        subject.step()
    walked = {launch.name: launch.walked for launch in runs.launches}
    assert max(walked.values()) <= 64 << 10, walked
    stacks = sum(len(lowering.stacks) for lowering in engine_of(subject).step.lowerings)
    assert len(runs.launches) <= 11 * stacks, len(runs.launches) / stacks


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "name", "peer", "launches", "operations"),
    [
        (90, "muon", OURS, 57, 1.159e12),
        (90, "normuon", OURS, 77, 1.159e12),
        (90, "muon", TORCH_PRODUCTS, 37, 1.522e12),
        (100, "muon", OURS, 37, 1.522e12),
    ],
)
def test_launches_and_products_of_gpt2(
    arch: int, name: str, peer: str, launches: int, operations: float, fresh_kernels: None
) -> None:
    """Of four stacks, all together; nearly half of a product is left out where it is symmetric.

    One iteration is two symmetric products and another one, and nothing else. A launch fills 132 multiprocessors.
    """
    with fake_cuda(arch), recording("cuda") as recorder, _Products() as products:
        subject = competitor(name, peer).make(_parameters(WORKLOADS["gpt2-matrices"]()))
        subject.step()
        recorder.take()
        products.operations.clear()
        subject.step()
        taken = recorder.take()
    (lowering,) = engine_of(subject).step.lowerings
    assert [len(stack.positions) for stack in lowering.stacks] == [12] * 4
    assert len(taken.launches) == launches
    own = [launch for launch in taken.launches if launch.name == "symmetric_product"]
    assert len(products.operations) + len(own) == 4 * 15
    assert len(own) == (40 if operations < 1.5e12 else 0)
    tiling = symmetric.TILINGS[9, 0]
    tiles, height = -(-768 // tiling.block), tiling.block**2
    programs = 12 * tiles * (tiles + 1) // 2
    assert programs > 132
    gram = [step for stack in lowering.stacks for step in (min(stack.parts[0].shape), max(stack.parts[0].shape)) * 5]
    done = sum(products.operations) + (sum(2 * programs * height * depth for depth in gram) if own else 0)
    assert done == pytest.approx(operations, rel=1e-3)


class _Products(TorchDispatchMode):
    """Notes the operations on numbers of each of torch's products of stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.out:
            self.operations.append(2 * args[0].numel() * args[1].shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.full
@pytest.mark.parametrize("way", ["loops", "Inductor"])
@pytest.mark.parametrize("optimizer", stacked_optimizers(), ids=lambda c: c.__name__)
def test_memory_beside_a_large_model(
    optimizer: type[co.CompiledOptimizer], way: str, fresh_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of LLaMA-7B, whose embeddings are not for Muon, in the first step, which compiles, and in later ones."""
    if way == "Inductor":
        monkeypatch.setattr(stack_loops, "LOOPS", {})
    shapes = LLAMA_LAYER * FEW_LAYERS + (LLAMA_EMBEDDINGS if optimizer is co.Adafactor else [])
    with _gpu() as runs:
        subject = optimizer(_parameters(shapes), max_grad_norm=1.0)
        runs.start()
        subject.step()
        first = runs.peak
        runs.start()
        subject.step()
    kinds = {type(stack) for lowering in engine_of(subject).step.lowerings for stack in lowering.stacks}
    assert kinds == {CodeStack if way == "Inductor" else LoopStack}
    assert 1 << 20 < runs.peak <= GIB, runs.peak / GIB
    assert first <= GIB, first / GIB


def test_stacks_are_bounded(by_inductor: None) -> None:
    """In bytes, of the widest tensor; what is larger is alone."""
    shapes = [(4096, 4096)] * 5 + [(32000, 4096)] * 2 + [(768, 768)] * 100
    expected = {torch.float32: [2, 2, 1, 1, 1, 56, 44], torch.bfloat16: [4, 1, 1, 1, 100]}
    for dtype, counts in expected.items():
        with fake_cuda(90):
            (lowering,) = engine_of(co.Adafactor(_parameters(shapes, dtype))).step.lowerings
        assert [len(stack.positions) for stack in lowering.stacks] == counts


@pytest.mark.full
@pytest.mark.parametrize(("optimizer", "lowering"), [(co.Adafactor, "auto"), (co.Adafactor, "inductor")])
def test_more_elements_than_32_bits_count_run_eager_and_say_so(
    optimizer: type[co.CompiledOptimizer], lowering: str, fresh_kernels: None
) -> None:
    with _gpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = _parameters([(1 << 16, (1 << 15) + 1), (300, 300)])
        subject = optimizer(zip(["large", "small"], params, strict=True), lowering=lowering)
        for _ in range(2):
            subject.step()
    (message,) = [str(w.message) for w in caught if "compiled_optim" in str(w.message)]
    assert "'large' is updated with plain torch operations" in message
    assert co.compile_report(subject).compiles > 0


def _stacked_elements(shapes: list[tuple[int, ...]]) -> int:
    with fake_cuda(90), recording("cuda") as recorder:
        subject = co.Adafactor(_parameters(shapes), max_grad_norm=1.0)
        subject.step()
        recorder.take()
        subject.step()
        return sum(o.bytes for o in recorder.take().operators if o.name == "stack") // 8  # read and written


@pytest.mark.full
@pytest.mark.parametrize("shapes", [[(768, 768)] * 10, [(4096, 4096)] * 6, [(32000, 4096)] * 2], ids=str)
def test_clipping_stacks_no_gradient_twice(shapes: list[tuple[int, ...]], by_inductor: None) -> None:
    copied = sum(torch.Size(s).numel() for s in shapes) if shapes[0] != (32000, 4096) else 0
    norms = _stacked_elements(shapes) - 2 * copied  # parameters and gradients; and a number for each norm at most
    assert 0 <= norms <= len(shapes) * 10
