"""Parameters that hold several matrices: stacks of them, and fused projections."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, registry
from reference import naive
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule import Number, buffer, hyper

ON_MATRICES = [kind for kind in registry() if kind._granularity == "matrix"]
OPTIONS: dict[str, Any] = {"stacks": ("*experts*|filter",), "split": {"qkv|*q_proj": 3, "grouped": (12, 4, 4)}}
FAR: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.02, "momentum": 0.6}
OWN: dict[str, dict[str, Any]] = {"Muon": FAR, "NorMuon": {"lr": 0.3, "weight_decay": 0.02, "betas": (0.6, 0.7)}}
SHAPES = {
    "experts": (3, 6, 10),
    "filter": (2, 3, 4, 5),
    "qkv": (12, 10),
    "grouped": (20, 8),
    "experts.q_proj": (2, 12, 8),
    "plain": (6, 10),
    "experts.router": (5, 7),
}


def _parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def _parts(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices that a parameter, or what lies like it, stands for: written out by hand."""
    by_name: dict[str, Callable[[Tensor], list[Tensor]]] = {
        "experts": lambda t: [t[0], t[1], t[2]],
        "filter": lambda t: [t[0, 0], t[0, 1], t[0, 2], t[1, 0], t[1, 1], t[1, 2]],
        "qkv": lambda t: [t[:4], t[4:8], t[8:]],
        "grouped": lambda t: [t[:12], t[12:16], t[16:]],
        "experts.q_proj": lambda t: [t[i, j : j + 4] for i in (0, 1) for j in (0, 4, 8)],
    }
    return by_name.get(name, lambda t: [t])(tensor)


def _all_parts(tensors: dict[str, Any]) -> list[Tensor]:
    return [part for name, tensor in tensors.items() for part in _parts(name, tensor)]


def _give(params: dict[str, nn.Parameter], twins: list[nn.Parameter], seed: int, absent: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    grads = _all_parts({name: param.grad for name, param in params.items()})
    for twin, grad in zip(twins, grads, strict=True):
        twin.grad = grad.to(twin.dtype, copy=True)
    names = [name for name, param in params.items() for _ in _parts(name, param)]
    for name in ("experts", "grouped") if absent else ():
        params[name].grad = None
        for twin in (twin for twin, of in zip(twins, names, strict=True) if of == name):
            twin.grad = None


def _assert_near(params: dict[str, nn.Parameter], twins: list[nn.Parameter], share: float) -> None:
    """Matrices differ by less than a share of the way from where parameters start."""
    for ours, theirs, start in zip(_all_parts(params), twins, _all_parts(_parameters()), strict=True):
        assert (ours - theirs).norm() < share * (theirs - start).norm()


def _twins(params: dict[str, nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(part.detach().to(dtype, copy=True)) for part in _all_parts(params)]


# For Inductor to compile every shape takes a minute for each.
@pytest.mark.parametrize(
    ("kind", "lowering"), [(kind, lw) for kind in ON_MATRICES for lw in LOWERINGS if kind is co.Muon or lw != "inductor"]
)
def test_each_matrix_is_updated_as_one_alone(kind: type[CompiledOptimizer], lowering: str) -> None:
    params = _parameters()
    twins, own = _twins(params, torch.float32), OWN[kind.__name__]
    one, other = kind(params, lowering=lowering, **own, **OPTIONS), kind(twins, lowering=lowering, **own)
    for step in range(4):
        _give(params, twins, step, absent=step == 1)
        one.step()
        other.step()
    _assert_near(params, twins, 0.03 if lowering == "multi_tensor" else 1e-5)  # whose loops round products elsewhere
    for name in (b.name for b in kind._declaration.buffers if b.name in other.state[twins[0]]):
        ours = _all_parts({n: one.state[p][name] for n, p in params.items()})
        torch.testing.assert_close(ours, [other.state[twin][name] for twin in twins], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("kind", ON_MATRICES, ids=lambda kind: kind.__name__)
def test_equals_a_loop_over_the_matrices_in_float64(kind: type[CompiledOptimizer]) -> None:
    params = _parameters()
    twins, own = _twins(params, torch.float64), OWN[kind.__name__]
    one, other = kind(params, **own, **OPTIONS), naive(kind)(twins, **own)
    for step in range(3):
        _give(params, twins, step)
        one.step()
        other.step()
    _assert_near(params, twins, 0.05)  # products are in bfloat16


@pytest.mark.full
def test_parts_are_rounded_by_random_numbers_of_their_own() -> None:
    param = nn.Parameter(torch.ones(96, 64, dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    co.Muon({"qkv": param}, lr=0.03, weight_decay=0.05, split={"qkv": (32, 64)}, weights="stochastic").step()
    assert len(param.unique()) == 2
    assert not torch.equal(param[:32], param[32:64])


STORED: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
    "state in 8 bits": ({"state_dtype": "int8"}, torch.float32, torch.float32),
    "weights in parts": ({"weights": "split8", "state_dtype": "int8"}, torch.bfloat16, torch.bfloat16),
    "gradients of another dtype": ({}, torch.float32, torch.bfloat16),
    "transposed memory": ({}, torch.float32, torch.float32),
}
"""Options, and the dtypes of parameter and gradient."""


@pytest.mark.parametrize("how", STORED)
def test_parts_of_several_sizes_however_they_are_stored(how: str) -> None:
    """As each of them alone."""
    (options, dtype, grad_dtype), sizes = STORED[how], (96, 48, 48)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(192, 128, generator=generator).to(dtype) for _ in range(2)]
    whole = [nn.Parameter(s.t().contiguous().t() if "transposed" in how else s.clone()) for s in start]
    parts = [nn.Parameter(part.clone()) for s in start for part in s.split(sizes)]
    one, other = (
        co.Muon({"a": whole[0], "b": whole[1]}, **FAR, **options, split={"*": sizes}),
        co.Muon(parts, **FAR, **options),
    )
    for step in range(3):
        grads = [torch.randn(192, 128, generator=generator).to(grad_dtype) for _ in whole]
        for params, own in ((whole, grads), (parts, [part for g in grads for part in g.split(sizes)])):
            for param, grad in zip(params, own, strict=True):
                param.grad_dtype = None
                param.grad = None if step == 1 and any(param is p for p in (whole[0], *parts[:3])) else grad.clone()
        one.step()
        other.step()
    for old, param, own in zip(start, whole, (parts[:3], parts[3:]), strict=True):
        assert (param - torch.cat(own)).norm() < 0.05 * (param - old).norm()


@pytest.mark.full
def test_experts_in_parts_of_several_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(2, 12, 8, generator=generator)) for _ in range(2)]
    params[1].data.copy_(params[0])
    for param, lowering in zip(params, ("auto", "eager"), strict=True):
        param.grad = param.detach().sin()
        co.Muon({"experts": param}, lr=0.3, stacks=("*",), split={"*": (8, 4)}, lowering=lowering, ns_steps=2).step()
    torch.testing.assert_close(*params, rtol=0, atol=0.01)


def test_without_the_options_a_whole_matrix_is_updated() -> None:
    """So the tests above would tell."""
    params = {"qkv": _parameters()["qkv"]}
    whole, split = ({n: nn.Parameter(p.detach().clone()) for n, p in params.items()} for _ in range(2))
    for each, options in ((whole, {}), (split, {"split": {"qkv": 3}})):
        optimizer = co.Muon(each, **FAR, **options)
        _give(each, _twins(each, torch.float32), 0)
        optimizer.step()
    assert (whole["qkv"] - split["qkv"]).norm() > 0.1 * (whole["qkv"] - params["qkv"]).norm()


@pytest.mark.parametrize("options", [{}, {"stacks": ("other",)}], ids=["none", "another"])
def test_what_is_no_matrix_is_refused_by_name(options: dict[str, Any]) -> None:
    advice = "or name in stacks= what holds matrices in its last two dimensions"
    with pytest.raises(ValueError, match=rf"size: torch.Size\(\[3, 6, 10\]\) \('experts'\); .*{advice}"):
        co.Muon(_parameters(), **options)
    with pytest.raises(ValueError, match=r"size: torch.Size\(\[7\]\) \('experts.bias'\); give .* optimizer$"):
        co.Muon({"experts.bias": nn.Parameter(torch.ones(7))}, stacks=("*",))


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        ({"w": 5}, ValueError, r"split\['w'\]=5 does not fit 'w' of shape \(12, 4\): 12 rows are not 5 equal parts"),
        ({"w": (3, 3)}, ValueError, r"split\['w'\]=\(3, 3\) does not fit 'w' of shape .*: it has 12 rows, the parts 6"),
        ({"w": 2, "*": 3}, ValueError, r"split: 'w' matches both 'w' and '\*', which differ"),
        (
            {"w": 0},
            ValueError,
            r"'w' of the argument split must be a number of equal parts, or a tuple with the rows of each part, got 0",
        ),
        ({"w": (6, -6, 12)}, ValueError, r"'w' of the argument split must be a number of equal parts"),
        ({"w": 1.5}, ValueError, r"'w' of the argument split must be a number of equal parts"),
        ({"w": True}, ValueError, r"'w' of the argument split must be a number of equal parts"),
        (3, TypeError, r"the argument split must be a dict pattern -> parts, such as \{'\*qkv\*': 3\}, got 3"),
    ],
    ids=str,
)
def test_what_a_split_must_be(split: Any, error: type[Exception], message: str) -> None:
    params = {"w": nn.Parameter(torch.ones(12, 4))}
    with pytest.raises(error, match=message):
        co.Muon(params, split=split)
    optimizer = co.Muon(params)
    with pytest.raises(error, match=message.replace("the argument split", r"split of param_groups\[0\]")):
        optimizer.param_groups[0]["split"] = split
    assert "split" not in optimizer.param_groups[0]


def test_patterns_need_names_and_matches() -> None:
    with pytest.raises(TypeError, match="stacks must be a sequence of patterns of names"):
        co.Muon(_parameters(), stacks="experts")
    with pytest.raises(ValueError, match=r"has no name for the pattern 'qkv'"):
        co.Muon([nn.Parameter(torch.ones(12, 4))], split={"qkv": 3})
    with pytest.warns(UserWarning, match="split: the pattern 'kv' matches no parameter"):
        co.Muon({"qkv": nn.Parameter(torch.ones(12, 4))}, split={"qkv|kv": 3})
    with pytest.warns(UserWarning, match="stacks: the pattern 'expert' matches no parameter"):
        co.Muon({"qkv": nn.Parameter(torch.ones(12, 4))}, stacks=("expert",))


def test_an_assigned_split_holds_from_the_next_step_on() -> None:
    models = [{"qkv": nn.Parameter(torch.arange(120.0).view(12, 10).sin())} for _ in range(2)]
    late, early = co.Muon(models[0], **FAR), co.Muon(models[1], **FAR, split={"qkv": 3})
    late.param_groups[0]["split"] = {"qkv": 3}
    for model, optimizer in zip(models, (late, early), strict=True):
        _give(model, _twins(model, torch.float32), 0)
        optimizer.step()
    assert torch.equal(models[0]["qkv"], models[1]["qkv"])


def test_state_is_saved_as_of_a_whole_parameter() -> None:
    """So a checkpoint loads with any choice, and under names of module wrappers."""
    params, others = _parameters(), _parameters()
    one = co.Muon({f"module.{name}": param for name, param in params.items()}, **FAR, **OPTIONS)
    _give(params, _twins(params, torch.float32), 0)
    one.step()
    saved = copy.deepcopy(one.state_dict())
    assert [tuple(s["momentum_buffer"].shape) for s in saved["state"].values()] == [*SHAPES.values()]
    other = co.Muon(others, **FAR, stacks=("*experts*|filter",))
    other.load_state_dict(saved)
    assert "split" not in other.param_groups[0]
    for a, b in zip(params.values(), others.values(), strict=True):
        assert torch.equal(one.state[a]["momentum_buffer"], other.state[b]["momentum_buffer"])


def test_equal_parts_are_one_product() -> None:
    """Twelve heads are one batch, not twelve launches."""
    params = {"q_proj": nn.Parameter(torch.randn(48, 16))}
    optimizer = co.Muon(params, split={"q_proj": 12}, lowering="eager", ns_steps=1)
    _give(params, _twins(params, torch.float32), 0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::bmm") == 3


class Centered(CompiledOptimizer, granularity="matrix"):
    """A rule with state of the parameter's rows, and one of its columns."""

    lr: Number = hyper(ge=0)
    rows = buffer(shape=lambda shape: (*shape[:-1], 1))

    @staticmethod
    def coefficients(lr: Any) -> dict[str, Any]:
        return dict(lr=lr)

    @staticmethod
    def update(param: Any, grad: Any, c: Any, rows: Any) -> dict[str, Any]:
        rows = rows + grad.mean(-1, keepdim=True)
        return dict(step=c.lr * (grad - grad.mean((-2, -1), keepdim=True)) + rows, rows=rows)


class ByColumns(CompiledOptimizer, granularity="matrix"):
    """A rule whose state has no rows to split."""

    lr: Number = hyper(ge=0)
    columns = buffer(shape=lambda shape: (*shape[:-2], 1, shape[-1]))

    @staticmethod
    def coefficients(lr: Any) -> dict[str, Any]:
        return dict(lr=lr)

    @staticmethod
    def update(param: Any, grad: Any, c: Any, columns: Any) -> dict[str, Any]:
        columns = columns + grad.mean(-2, keepdim=True)
        return dict(step=c.lr * columns, columns=columns)


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
def test_any_rule_on_matrices_has_the_options(lowering: str) -> None:
    params = _parameters(torch.float64)
    start = {name: param.detach().clone() for name, param in params.items()}
    optimizer = Centered(params, lr=0.5, lowering=lowering, **OPTIONS)
    _give(params, _twins(params, torch.float64), 0)
    optimizer.step()
    for name, param in params.items():
        for new, old, grad in zip(*(_parts(name, t) for t in (param, start[name], param.grad)), strict=True):
            expected = old - 0.5 * (grad - grad.mean()) - grad.mean(1, keepdim=True)
            torch.testing.assert_close(new.data, expected, rtol=1e-12, atol=1e-12)


def test_a_rule_without_state_by_rows_has_no_split() -> None:
    with pytest.raises(TypeError, match="split"):
        ByColumns({"w": nn.Parameter(torch.ones(6, 4))}, lr=0.1, split={"w": 2})  # type: ignore[call-arg]
    params = {"experts": nn.Parameter(torch.zeros(2, 6, 4))}
    optimizer = ByColumns(params, lr=0.5, stacks=("experts",))
    params["experts"].grad = torch.ones(2, 6, 4)
    optimizer.step()
    assert torch.equal(params["experts"], torch.full((2, 6, 4), -0.5))
    assert optimizer.state[params["experts"]]["columns"].shape == (2, 1, 4)


def test_elementwise_rules_have_neither() -> None:
    for option in ({"stacks": ("w",)}, {"split": {"w": 2}}):
        with pytest.raises(TypeError, match=next(iter(option))):
            co.AdamW({"w": nn.Parameter(torch.ones(4, 4))}, **option)


def test_lr_scale_and_skipping_hold_for_all_parts() -> None:
    params = _parameters()
    twins = _twins(params, torch.float32)
    scales = {name: 0.1 * (i + 1) for i, name in enumerate(params)}
    by_part = [scales[name] for name, param in params.items() for _ in _parts(name, param)]
    numbered = {f"p{i}": twin for i, twin in enumerate(twins)}
    one = co.Muon(params, lr_scale=scales, skip_nonfinite=True, **FAR, **OPTIONS)
    other = co.Muon(numbered, lr_scale={f"p{i}": s for i, s in enumerate(by_part)}, **FAR)
    _give(params, twins, 0)
    one.step()
    other.step()
    _assert_near(params, twins, 0.03)
    before = [part.clone() for part in _all_parts(params)]
    params["qkv"].grad[0, 0] = float("nan")  # type: ignore[index]
    one.step()
    assert all(torch.equal(a, b) for a, b in zip(_all_parts(params), before, strict=True))
    assert engine_of(one).clipping.measures_norm


def test_muon_adamw_gives_named_stacks_to_muon() -> None:
    """And splits what is fused; its groups for AdamW know neither option."""
    params = {**_parameters(), "experts.bias": nn.Parameter(torch.ones(3, 6, 1)), "bias": nn.Parameter(torch.ones(7))}
    optimizer = co.MuonAdamW(params, **OPTIONS)
    by_muon, by_adamw = ({*group["param_names"]} for group in optimizer.param_groups)
    assert by_muon == {*SHAPES}
    assert by_adamw == {"experts.bias", "bias"}  # which the name of a bias keeps from Muon
    assert "split" not in optimizer.param_groups[1]
    without = co.MuonAdamW(_parameters() | {"bias": nn.Parameter(torch.ones(7))})
    assert {*without.param_groups[1]["param_names"]} == {"experts", "filter", "experts.q_proj", "bias"}
