"""``weights="auto"`` is ``"kahan"`` for bfloat16 and float16 parameters, and nothing for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import compiled_optim as co


def trained(kind: Any, **options: Any) -> tuple[co.CompiledOptimizer, dict[str, Parameter]]:
    """After five steps: of matrices in three dtypes, and of one that is too small for anything but a copy."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"bfloat16": (64, 80), "float16": (64, 80), "float32": (64, 80), "small": (8, 8)}
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    drawn = [torch.randn(size, generator=generator).to(d) for size, d in zip(sizes.values(), dtypes, strict=True)]
    params = dict(zip(sizes, map(Parameter, drawn), strict=True))
    optimizer = kind(params, lr=1e-5, **options)
    for _ in range(5):
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return optimizer, params


@pytest.mark.parametrize("kind", [co.AdamW, co.Muon])
def test_it_is_kahan_where_that_can_be(kind: Any) -> None:
    auto, params = trained(kind, weights="auto")
    kahan, twins = trained(kind, weights="kahan", exclude=["float32"])
    parts = [{name for name in entries if name in ("kahan_comp", "master_param")} for entries in auto.state.values()]
    assert parts == [{"kahan_comp"}, {"kahan_comp"}, set(), {"master_param"}]
    for name, param in params.items():
        assert torch.equal(param, twins[name])
        ours, theirs = auto.state[param], kahan.state[twins[name]]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[entry], theirs[entry]) for entry in ours)
    auto.load_state_dict(kahan.state_dict())
    kahan.load_state_dict(auto.state_dict())
    assert [r["precision"].partition(" state")[0] for r in co.explain(params, auto).records] == [
        "bfloat16 kahan",
        "float16 kahan",
        "float32",
        "bfloat16 master",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_it_is_nothing_for_a_model_in_other_dtypes(dtype: torch.dtype) -> None:
    param = Parameter(torch.ones(4, 4, dtype=dtype))  # no warning that it applies to none
    assert co.SGD([param], momentum=0.9, weights="auto").state[param].keys() == {"step", "momentum_buffer"}


def test_it_goes_with_optimis_name_and_is_offered() -> None:
    param = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    for kahan_sum in (True, None, False):
        assert "kahan_comp" in co.SGD([param], weights="auto", kahan_sum=kahan_sum).state[param]
    with pytest.raises(ValueError, match=r"weights must be None or one of 'auto', 'kahan', .* got 'aut'; did you mean auto"):
        co.SGD([param], weights="aut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights='auto' of .* does not go with differentiable=True"):
        co.SGD([param], weights="auto", differentiable=True)
