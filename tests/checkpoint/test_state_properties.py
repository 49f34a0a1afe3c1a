"""Loading, for any pair of models: what both have is copied bit for bit, and what one lacks is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_trips import through_a_file
from torch import nn

import compiled_optim as co

NAMES = ("a.weight", "a.bias", "b.weight", "module_list.0", "module_list.1", "head")
SHAPES = ((2, 3), (3, 2), (4,), (), (0, 2), (2, 3, 2, 2))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
PREFIXES = ("", "module.", "_orig_mod.module.", "_checkpoint_wrapped_module.")
OPTIMIZERS: tuple[tuple[type[co.CompiledOptimizer], dict[str, Any]], ...] = (
    (co.AdamW, {}),
    (co.AdamW, {"amsgrad": True}),
    (co.SGD, {"momentum": 0.9}),
    (co.SGD, {}),
)


@st.composite
def models(draw: st.DrawFn, dtypes: dict[str, torch.dtype]) -> list[dict[str, Any]]:
    """Parameter groups: some of the names in any order, each name with a shape, a prefix and perhaps frozen."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    groups: list[dict[str, Any]] = [{"params": [], "lr": draw(st.floats(0, 1))}]
    for name in names:
        if groups[-1]["params"] and draw(st.booleans()):
            groups.append({"params": [], "lr": draw(st.floats(0, 1))})
        usual = SHAPES[NAMES.index(name)]
        shape = draw(st.sampled_from(SHAPES)) if draw(st.integers(0, 5)) == 0 else usual
        param = nn.Parameter(torch.zeros(shape, dtype=dtypes[name]), requires_grad=draw(st.integers(0, 4)) > 0)
        groups[-1]["params"].append((name, param))
    prefix = draw(st.sampled_from(PREFIXES))
    return [{**g, "params": [(prefix + n, p) for n, p in g["params"]]} for g in groups]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[co.CompiledOptimizer, co.CompiledOptimizer]:
    """Two optimizers of one class over two models."""
    dtypes = {name: draw(st.sampled_from(DTYPES)) for name in NAMES}
    cls, options = draw(st.sampled_from(OPTIMIZERS))
    lowerings = st.sampled_from(("auto", "eager"))
    first, second = (cls(draw(models(dtypes)), **options, lowering=draw(lowerings)) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    for optimizer in (first, second):
        for entries in optimizer.state.values():
            for name, entry in entries.items():
                if name == "step":
                    entry.fill_(draw(st.integers(1, 2**40)))
                else:
                    entry.copy_(torch.randn(entry.shape, dtype=entry.dtype, generator=generator))
    return first, second


def _by_name(optimizer: co.CompiledOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The state of every parameter, as copies."""
    named = co.named_state_dict(optimizer)
    names = [name for group in named["param_groups"] for name in group["params"]]
    return {name: {k: v.clone() for k, v in named["state"].get(name, {}).items()} for name in names}


def _shapes(optimizer: co.CompiledOptimizer) -> dict[str, torch.Size]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {name: p.shape for name, p in zip(_by_name(optimizer), params, strict=True)}


def _addresses(optimizer: co.CompiledOptimizer) -> list[tuple[int, int]]:
    return [(id(v), v.data_ptr()) for entries in optimizer.state.values() for v in entries.values()]


def _shown(optimizer: co.CompiledOptimizer) -> dict[str, str]:
    """The names that the optimizer was given, by those without what a wrapper put before them."""
    given = [name for group in optimizer.param_groups for name in group["param_names"]]
    return dict(zip(_by_name(optimizer), given, strict=True))


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@settings(max_examples=150)
@given(pair=pairs(), named=st.booleans())
def test_save_load_save_is_the_identity_on_the_intersection(
    pair: tuple[co.CompiledOptimizer, co.CompiledOptimizer], named: bool
) -> None:
    source, target = pair
    saved = through_a_file(co.named_state_dict(source) if named else source.state_dict())
    theirs, before, numbers = _by_name(source), _by_name(target), target.hyperparameters()
    shapes, own_shapes = _shapes(source), _shapes(target)
    addresses = _addresses(target)
    both = [name for name in before if name in theirs]
    unlike = [name for name in both if theirs[name] and shapes[name] != own_shapes[name] and len(theirs[name]) > 1]

    expected = co.LoadReport([n for n in before if n not in theirs], [n for n in theirs if n not in before], unlike, [])
    if any(expected):
        with pytest.raises(ValueError, match="does not match the optimizer") as raised:
            target.load_state_dict(saved, hyperparameters="keep")
        assert all(name in str(raised.value) for names in expected for name in names)
        assert all(_same(entries, before[name]) for name, entries in _by_name(target).items())
    report = target.load_state_dict(saved, strict=False, hyperparameters="keep")
    ours, saved_as = _shown(target), {n: n for n in theirs} if named else _shown(source)
    assert report.missing == [ours[name] for name in expected.missing]
    assert report.unexpected == [saved_as[name] for name in expected.unexpected]
    assert [problem.partition(":")[0] for problem in report.mismatched] == [ours[name] for name in unlike]
    assert target.hyperparameters() == numbers
    after = _by_name(target)
    for name, entries in after.items():
        if name in both and name not in unlike and theirs[name]:
            assert _same(entries, theirs[name])
        elif name in both and name not in unlike:  # it never took a step: nor has it here
            assert not any(v.any() for v in entries.values())
        else:
            assert _same(entries, before[name])
    grown = [name for name in both if not before[name] and theirs[name]]
    assert grown or _addresses(target) == addresses
