"""Symmetric products: torch operations, and the kernel that takes their place in loops on some GPUs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from in_triton import interpret
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.lowering.kernels import symmetric, triton_stacks
from compiled_optim.lowering.kernels import triton as kernels
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import gram, quadratic


def today(x: Tensor, numbers: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    a, b, c = numbers
    product = x @ x.mT
    square, wide = (product @ product).to(dtype), product.to(dtype)
    return (a * torch.eye(wide.shape[-1], dtype=dtype) + b * wide + c * square).to(x.dtype)


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (3, 64, 32), (2, 3, 9, 20)], ids=str)
def test_on_a_cpu_they_are_torch_operations(shape: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() / 8
    numbers = torch.tensor([3.4445, -4.775, 2.0315], dtype=dtype).unbind()

    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return quadratic(gram(x), a, b, c, dtype)

    found = (torch.compile(function, backend="eager", fullgraph=True) if compiled else function)(x, *numbers)
    assert torch.equal(found, today(x, numbers, dtype))


def test_derivatives_are_those_of_the_operations() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: quadratic(gram(x), 3.0, -4.0, 2.0, torch.float64), x)


@pytest.mark.parametrize(
    ("capability", "changes", "taken"),
    [
        ((9, 0), {}, True),
        *[(other, {}, False) for other in ((7, 5), (8, 0), (8, 6), (8, 9), (10, 0), (12, 0))],
        ((9, 0), {"device": torch.device("xpu")}, False),
        ((9, 0), {"device": torch.device("cpu")}, False),
        ((9, 0), {"hip": "6.4"}, False),
        ((9, 0), {"finds": False}, False),
    ],
    ids=str,
)
def test_the_tiling_depends_on_the_device_alone(
    capability: tuple[int, int], changes: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"device": torch.device("cuda"), "hip": None, "finds": True, **changes}
    monkeypatch.setattr(symmetric, "find_spec", lambda name: given["finds"] or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", given["hip"])
    assert symmetric.tiling_of(given["device"]) == (symmetric.TILINGS[capability] if taken else None)


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((768, 768), True),
        ((768, 3072), True),
        ((3072, 768), True),
        ((4, 776, 1000), True),
        ((760, 3072), False),
        ((3072, 760), False),
        ((768, 769), False),
        ((772, 1000), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", [co.Muon, co.NorMuon], ids=lambda c: c.__name__)
def test_loops_take_it_for_large_matrices_with_aligned_rows(
    optimizer: type[co.CompiledOptimizer], shape: tuple[int, ...], taken: bool
) -> None:
    """Whatever their number, so that all processes compute alike."""
    from compiled_optim.simulated.fake_cuda import fake_cuda

    found = []
    for count in (1, 3):
        with fake_cuda(90):
            params = [nn.Parameter(torch.empty(shape, device="cuda")) for _ in range(count)]
            made = optimizer([(f"w{i}", p) for i, p in enumerate(params)], stacks=["*"] if len(shape) > 2 else [])
            (stack,) = engine_of(made).step.lowerings[0].stacks
            found.append(triton_stacks.stack_source(stack.key, stack.parts[0].shape))
    assert [source.tiling for source in found] == [symmetric.TILINGS[9, 0] if taken else None] * 2
    kinds = [op.kind for op in found[0].update.ops]
    assert kinds.count("quadratic") == (5 if taken else 0)


def test_the_kernel_is_right_in_the_interpreter() -> None:
    """Against float64; symmetric in every bit; at sizes around those of a block, of batches, transposed or not."""
    pytest.importorskip("triton")
    found = interpret("interpreted_symmetric")
    assert len(found) == 80
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(("rows", "columns"), [(768, 3072), (1000, 1096)])
@pytest.mark.parametrize("numbers", ["", "same", "each"])
@pytest.mark.parametrize("capability", symmetric.TILINGS, ids=str)
def test_it_compiles_for_tensor_cores_without_spills(
    capability: tuple[int, int], numbers: str, rows: int, columns: int, is_transposed: bool
) -> None:
    """As a step launches it: tiles come through the accelerator of the memory, and two programs share a multiprocessor."""
    pytest.importorskip("triton")
    from compiled_optim.simulated.fake_cuda import fake_cuda
    from compiled_optim.simulated.ptx import resources
    from compiled_optim.simulated.record import recording

    arch, tiling, columns = capability[0] * 10 + capability[1], symmetric.TILINGS[capability], rows if numbers else columns
    with fake_cuda(arch), recording("cuda") as recorder:
        lying = torch.empty((3, columns, rows) if is_transposed else (3, rows, columns), dtype=torch.bfloat16, device="cuda")
        out = torch.empty(3, rows, rows, dtype=torch.bfloat16, device="cuda")
        given, index = [torch.zeros(3, dtype=torch.float64, device="cuda")] * 3, torch.arange(3, device="cuda")
        module = kernels.load(kernels.WORDS + symmetric.TEXT)
        multiply = symmetric.multiplier(module, tiling, lying.shape, lying.device, transposed=is_transposed, numbers=numbers)
        multiply(lying, out, given, index)
        (launch,) = recorder.take().launches
    text = launch.kernel.asm["ptx"]
    used = resources(text, arch)
    assert used.spills == 0
    assert 2 * used.registers * 32 * tiling.warps <= 65536
    assert 2 * launch.kernel.metadata.shared <= 227 << 10
    assert launch.kernel.metadata.num_warps == tiling.warps
    found = {word for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "mma.sync", "cp.async.cg") if word in text}
    assert found == {"wgmma.mma_async", "cp.async.bulk.tensor"}
    assert not re.search(r"\.extern \.func|mul\.f64|fma\.rn\.f64|st\.global\.b16|ld\.global\.b16", text)
