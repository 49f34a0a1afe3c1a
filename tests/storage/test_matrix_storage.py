"""Optimizers on matrices with fewer bytes: weights of 16 bits that lose nothing, and momentum in 8 or 16 bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from catalog import LOWERINGS
from simulated_graph import install
from torch import Tensor, nn

import compiled_optim as co

KINDS = [co.Muon, co.NorMuon]
SHAPE = (48, 128)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
lowerings = pytest.mark.parametrize("lowering", LOWERINGS)


def started(dtype: torch.dtype, count: int = 2) -> dict[str, nn.Parameter]:
    """Parameters that bfloat16 holds exactly; every call makes the same ones."""
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(count)]
    return {f"p{i}": nn.Parameter(t.to(dtype)) for i, t in enumerate(tensors)}


def train(optimizer: Any, params: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        shared = torch.randn(SHAPE, generator=generator)
        for p in params.values():
            p.grad = (shared + torch.randn(SHAPE, generator=generator)).bfloat16().to(p.dtype)
        optimizer.step()


def made(kind: Any, dtype: torch.dtype, steps: int = 0, **options: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    params = started(dtype)
    optimizer = kind(params, **{"lr": 1e-3, "weight_decay": 0.1, **options})
    train(optimizer, params, range(steps))
    return optimizer, params


def full(optimizer: Any, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    holder = nn.ParameterDict(params)
    return {name.removeprefix("params."): t for name, t in co.full_precision_state_dict(holder, optimizer).items()}


@pytest.mark.full
@lowerings
@kinds
def test_weights_keep_what_16_bits_lose(kind: Any, lowering: str) -> None:
    """Of steps that move a bfloat16 by less than half its unit; the same gradients in float32 are the reference."""
    _, exact = made(kind, torch.float32, 12, lowering=lowering, lr=1e-4, state_dtype=torch.float32)

    def error(weights: str | None) -> float:
        optimizer, params = made(
            kind, torch.bfloat16, 12, lowering=lowering, lr=1e-4, weights=weights, state_dtype=torch.float32
        )
        found = full(optimizer, params) if weights not in (None, "stochastic") else params
        moved = [(found[n].detach().float() - exact[n].detach()).abs().mean().item() for n in exact]
        return max(moved)

    start = started(torch.float32)
    distance = max((exact[n] - start[n]).abs().mean().item() for n in exact)
    errors = {weights: error(weights) for weights in (None, "kahan", "split8", "split16", "master")}
    assert errors[None] > 0.5 * distance
    for weights in ("split16", "master"):
        assert errors[weights] < 0.02 * distance, errors
    assert errors["kahan"] < 0.1 * distance, errors
    assert errors["split8"] < 0.2 * distance, errors


@pytest.mark.full
@kinds
def test_stochastic_rounding_is_right_on_average(kind: Any) -> None:
    _, exact = made(kind, torch.float32, 60, lr=1e-4, state_dtype=torch.float32)
    _, rounded = made(kind, torch.bfloat16, 60, lr=1e-4, weights="stochastic", state_dtype=torch.float32)
    _, lost = made(kind, torch.bfloat16, 60, lr=1e-4, state_dtype=torch.float32)
    start = started(torch.float32)
    for name, p in exact.items():
        moved = (p - start[name]).flatten()
        share = [
            ((other[name].float() - start[name]).flatten() @ moved / (moved @ moved)).item() for other in (rounded, lost)
        ]
        assert share[0] == pytest.approx(1, abs=0.15)
        assert share[1] < 0.7


@pytest.mark.parametrize("dtype", ["int8", torch.bfloat16])
@lowerings
@kinds
def test_momentum_in_fewer_bits(kind: Any, lowering: str, dtype: Any) -> None:
    optimizer, params = made(kind, torch.float32, 10, lr=0.02, lowering=lowering, state_dtype=dtype)
    other, exact = made(kind, torch.float32, 10, lr=0.02, lowering=lowering)
    start = started(torch.float32)
    for name, p in params.items():
        state = optimizer.state[p]
        if dtype == "int8":
            assert (state["momentum_buffer_int8"].dtype, state["momentum_buffer_scale"].shape) == (torch.int8, (48, 2))
            assert "momentum_buffer" not in state
        else:
            assert state["momentum_buffer"].dtype == torch.bfloat16
        distance = (exact[name] - start[name]).norm()
        assert 0 < (p - exact[name]).norm() < 0.05 * distance
    assert other.state[exact["p0"]]["momentum_buffer"].dtype == torch.float32


@pytest.mark.full
@kinds
def test_lowerings_agree(kind: Any) -> None:
    """On codes and weights, but for the last bits of products."""
    options = {"weights": "split8", "state_dtype": "int8", "lr": 0.02}
    sides = [made(kind, torch.bfloat16, 3, lowering=lowering, **options) for lowering in LOWERINGS]
    for optimizer, params in sides[1:]:
        for name, p in params.items():
            codes, others = (o.state[ps[name]]["momentum_buffer_int8"] for o, ps in ((optimizer, params), sides[0]))
            assert (codes.int() - others.int()).abs().max() <= 1
            assert (codes == others).float().mean() > 0.99
            torch.testing.assert_close(p, sides[0][1][name], rtol=1e-2, atol=1e-2)


@kinds
def test_seven_bytes_of_a_hybrid_are_saved_and_resumed(kind: Any) -> None:
    options = {"weights": "split8", "state_dtype": "int8", "lr": 0.02}
    one, params = made(kind, torch.bfloat16, 3, **options)
    saved = copy.deepcopy(one.state_dict())
    other, again = made(kind, torch.bfloat16, **options)
    assert not any(other.load_state_dict(saved)[:3])
    with torch.no_grad():
        for name, p in again.items():
            p.copy_(params[name])
    train(one, params, range(3, 6))
    train(other, again, range(3, 6))
    for name, p in params.items():
        assert torch.equal(p, again[name])
        assert all(torch.equal(v, other.state[again[name]][k]) for k, v in one.state[p].items())
    wide, converted = made(kind, torch.bfloat16, weights="split8", state_dtype=torch.float32)
    assert not any(wide.load_state_dict(saved)[:3])
    momentum = wide.state[converted["p0"]]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    assert momentum.abs().amax() == saved["state"][0]["momentum_buffer_scale"].amax()
    per_parameter = sum(v.nbytes for k, v in one.state[params["p0"]].items() if k not in ("step", "row_var"))
    assert per_parameter == pytest.approx(48 * 128 * (1 + 1 + 4 / 64))


def test_a_hybrid_compresses_both_of_its_rules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 100)).bfloat16()
    optimizer = co.MuonAdamW(model, lr=0.01, weights="split8", state_dtype="int8", exclude=("*.bias",))
    tokens = torch.arange(100).reshape(4, 25)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert {*optimizer.state[model[1].weight]} == {"step", "momentum_buffer_int8", "momentum_buffer_scale", "remainder"}
    assert {"exp_avg_int8", "exp_avg_sq_int8", "remainder"} <= {*optimizer.state[model[0].weight]}


@pytest.mark.full
@kinds
def test_captured(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    options = {"weights": "stochastic", "state_dtype": "int8", "lr": 0.02}
    one, params = made(kind, torch.bfloat16, **options)
    two, others = made(kind, torch.bfloat16, **options)
    runner = co.CUDAGraphRunner(one)
    for step in range(8):
        for p, q in zip(params.values(), others.values(), strict=True):
            p.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).bfloat16()
            q.grad = p.grad.clone()
        runner.step()
        two.step()
        assert all(torch.equal(p, others[name]) for name, p in params.items())
    assert co.compile_report(one).replays >= 4


def test_what_does_not_fit_is_refused_by_name() -> None:
    narrow = {"narrow": nn.Parameter(torch.ones(128, 48))}
    with pytest.raises(ValueError, match=r"can't optimize 'narrow' with 8-bit state: rows .* multiple of 64 .*\(128, 48\)"):
        co.Muon(narrow, state_dtype="int8")
    with pytest.raises(ValueError, match="can't optimize 'turned' with 8-bit state: rows of matrices must be contiguous"):
        co.Muon({"turned": nn.Parameter(torch.ones(128, 64).T)}, state_dtype="int8")
    excluded = co.Muon(narrow, state_dtype="int8", exclude=("narrow",))
    narrow["narrow"].grad = torch.ones(128, 48)
    excluded.step()
    assert excluded.state[narrow["narrow"]]["momentum_buffer"].dtype == torch.float32
    with pytest.raises(TypeError, match="weights"):
        co.Adafactor(narrow, weights="split8")
