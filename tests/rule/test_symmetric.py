"""Symmetric products: torch operations, and the kernel that takes their place where Inductor compiles for a GPU."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from new_process import printed_by
from torch import Tensor

from compiled_optim.rule import gram, quadratic, symmetric
from perf.lowering.ptx import resources


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
    ("capability", "rows", "changes", "taken"),
    [
        ((9, 0), 768, {}, True),
        ((9, 0), 767, {}, False),
        ((8, 0), 1024, {}, True),
        ((8, 0), 1023, {}, False),
        *[(other, 4096, {}, False) for other in ((7, 5), (8, 6), (8, 9), (10, 0), (12, 0))],
        ((9, 0), 768, {"dtype": torch.float32}, False),
        ((9, 0), 768, {"device": torch.device("xpu")}, False),
        ((9, 0), 768, {"dims": 2}, False),
        ((9, 0), 768, {"hip": "6.4"}, False),
        ((9, 0), 768, {"traced": False}, False),
        ((9, 0), 768, {"requires_grad": True}, False),
        ((9, 0), 768, {"finds": False}, False),
    ],
    ids=str,
)
def test_the_choice_depends_on_device_and_shape_alone(
    capability: tuple[int, int], rows: int, changes: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "dims": 3, "hip": None, "traced": True}
    given |= {"requires_grad": False, "finds": True, **changes}
    monkeypatch.setattr(symmetric, "find_spec", lambda name: given["finds"] or None)
    monkeypatch.setattr(symmetric, "is_traced", lambda: given["traced"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", given["hip"])
    monkeypatch.setattr(symmetric, "Tensor", SimpleNamespace)
    facts = {name: given[name] for name in ("dtype", "device", "requires_grad")}
    x: Any = SimpleNamespace(**facts, dim=lambda: given["dims"], shape=(2, rows, 2048))
    assert symmetric._tiling(x) == (symmetric.TILINGS[capability] if taken else None)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda a, b, c: (a, b, c), True),
        (lambda a, b, c: (1.0, 2.0, 3.0), True),
        (lambda a, b, c: (a, b[:1], c), False),
        (lambda a, b, c: (a, b, torch.ones(2, 3)[:, :1].unsqueeze(-1)), False),
        (lambda a, b, c: (a, 2.0, c), False),
        (lambda a, b, c: (a, b, c.to("meta")), False),
    ],
    ids=["alike", "floats", "one for all", "other strides", "mixed", "other device"],
)
def test_the_kernel_gets_numbers_that_it_can_read(
    change: Callable[..., Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step from one tensor's number to the next is the same for all three."""
    x, numbers = torch.ones(2, 4, 4), change(*(torch.ones(2, 1, 1) for _ in range(3)))
    tiling, used = symmetric.TILINGS[9, 0], []
    monkeypatch.setattr(symmetric, "_tiling", lambda *_: tiling)
    monkeypatch.setattr(symmetric, "_multiplied", lambda *given: used.append(given) or x)
    with contextlib.suppress(RuntimeError):  # torch's way does not mix devices
        quadratic(x, *numbers, torch.float32)
    assert bool(used) == taken


def test_the_kernel_is_right_in_the_interpreter() -> None:
    """Against float64; symmetric in every bit; at sizes around those of a block, of batches, turned or not."""
    pytest.importorskip("triton")
    found = json.loads(printed_by("interpreted_symmetric", TRITON_INTERPRET="1"))
    assert len(found) == 108
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("is_turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize(("rows", "columns"), [(768, 3072), (1000, 1100)])
@pytest.mark.parametrize("numbers", ["", "*fp32", "*fp64", "fp64"])
@pytest.mark.parametrize("capability", symmetric.TILINGS, ids=str)
def test_it_compiles_for_tensor_cores_without_spills(
    capability: tuple[int, int], numbers: str, rows: int, columns: int, is_turned: bool
) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from compiled_optim.rule.symmetric_kernel import symmetric_product

    if numbers:
        columns = rows
    arch, tiling, names = capability[0] * 10 + capability[1], symmetric.TILINGS[capability], symmetric_product.arg_names
    constants: dict[str, Any] = {"rows": rows, "columns": columns, "matrices": 2, "is_quadratic": bool(numbers)}
    constants |= {"down": 1, "right": rows} if is_turned else {"down": columns, "right": 1}
    constants |= {"step": 1 if numbers.startswith("*") else None, "block": tiling.block, "depth": tiling.depth}
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("x", "out"), "*bf16") | dict.fromkeys("abc", numbers or "*bf16")
    types |= dict.fromkeys(constants, "constexpr")
    aligned = ["x", "out", *(["x_step"] if rows * columns % 16 == 0 else [])]
    source = triton.compiler.ASTSource(
        symmetric_product,
        types,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, most = kernel.asm["ptx"], {(8, 0): 163 << 10, (9, 0): 227 << 10}
    used = resources(ptx, arch)
    assert used.spills == 0
    assert used.registers * 32 * tiling.warps <= 65536
    assert kernel.metadata.shared <= most[capability]
    assert re.search("wgmma.mma_async" if capability >= (9, 0) else "mma.sync", ptx)
    assert not re.search(r"\.extern \.func|mul\.f64|fma\.rn\.f64", ptx)
    assert re.search(r"st\.global\.v4", ptx)
    assert not re.search(r"st\.global\.b16", ptx)
