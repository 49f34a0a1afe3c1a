"""Muon's coefficients and scales."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catalog import LOWERINGS
from reference import muon, naive
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizers import newton_schulz

TRIPLES = ((3.0, -4.0, 1.8), (2.5, -2.2, 0.8), (2.0, -1.5, 0.5), (1.9, -1.2, 0.3))
SHAPES = [(20, 50), (50, 20), (8, 8), (20, 50)]
FAR: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.7, "momentum": 0.6, "eps": 0.01}


def parameters(shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def moved(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 3) -> list[Tensor]:
    """How far ``params`` go in some steps, in float64."""
    start = [p.detach().double().clone() for p in params]
    for step in range(steps):
        give(params, step)
        optimizer.step()
    return [p.detach().double() - s for p, s in zip(params, start, strict=True)]


def assert_near(ours: list[Tensor], theirs: list[Tensor], share: float = 0.006) -> None:
    """The iteration is in bfloat16, with a precision of 2**-9; a wrong coefficient moves more than this share."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < share * b.norm()


def reference(params: list[nn.Parameter], **options: Any) -> list[Tensor]:
    twins = [nn.Parameter(p.detach().double()) for p in params]
    return moved(naive(co.Muon)(twins, **options), twins)


def test_polar_express_is_the_papers() -> None:
    expected = muon.polar_express(9)
    found = newton_schulz.iterations((0, 0, 0), "polar_express", 9)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0)
    assert found[0] == pytest.approx((8.28721201814563 / 1.01, -23.595886519098837 / 1.01**3, 17.300387312530933 / 1.01**5))


@pytest.mark.full
@pytest.mark.parametrize(("steps", "least"), [(5, 0.84), (6, 0.99), (9, 0.99)])
def test_polar_express_makes_singular_values_equal(steps: int, least: float) -> None:
    (param,) = parameters([(30, 60)])
    optimizer = co.Muon([param], lr=1.0, weight_decay=0.0, ns_coefficients="polar_express", ns_steps=steps)
    (step,) = moved(optimizer, [param], 1)
    values = torch.linalg.svdvals(step)
    assert least < values.min()
    assert values.max() < 2 - least


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"ns_coefficients": "polar_express", "ns_steps": 3},
        {"ns_coefficients": TRIPLES},
        {"ns_coefficients": [list(triple) for triple in TRIPLES[:2]], "ns_steps": 2, "nesterov": False},
    ],
    ids=["polar_express", "triples", "lists"],
)
def test_equals_a_loop_in_float64(options: dict[str, Any], lowering: str) -> None:
    params = parameters()
    expected = reference(params, **FAR, **options)
    share = 0.02 if options["ns_coefficients"] == "polar_express" else 0.006  # whose first polynomial enlarges roundings
    assert_near(moved(co.Muon(params, lowering=lowering, **FAR, **options), params), expected, share)


def test_the_order_of_triples_counts() -> None:
    """The bounds of the test above tell."""
    params = parameters()
    papers = muon.polar_express(3)
    unsafe = [(a * 1.01, b * 1.01**3, c * 1.01**5) for a, b, c in papers]
    for right, wrong, share in ((TRIPLES, TRIPLES[::-1], 0.006), (papers, papers[::-1], 0.02), (papers, unsafe, 0.02)):
        expected, other = (reference(params, **FAR, ns_coefficients=chosen) for chosen in (right, wrong))
        for ours, theirs in zip(other, expected, strict=True):
            with pytest.raises(AssertionError):
                assert_near([ours], [theirs], share)


@pytest.mark.full
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_repeated_triple_is_the_triple(lowering: str) -> None:
    triple = (3.0, -4.0, 1.8)
    one, two = parameters(), parameters()
    moved(co.Muon(one, lowering=lowering, ns_coefficients=triple, ns_steps=3), one)
    moved(co.Muon(two, lowering=lowering, ns_coefficients=[triple] * 3), two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_numbers_and_sequences_take_turns(lowering: str) -> None:
    """An assignment holds from the next step on, whatever stood there; numbers are live once more."""
    params, twins = parameters(), parameters()
    one, other = (co.Muon(p, lowering=lowering, **FAR) for p in (params, twins))
    chosen: list[Any] = ["polar_express", (3.0, -4.0, 1.8), [TRIPLES[1]] * 5, (2.0, -1.5, 0.5), (3.0, -4.0, 1.8)]
    for step, value in enumerate(chosen):
        one.param_groups[0]["ns_coefficients"] = value
        assert one.param_groups[0]["ns_coefficients"] == (tuple(value) if isinstance(value, list) else value)
        # The other one gets what it says as one triple or as several, the other way round.
        name, triples = isinstance(value, str), newton_schulz.sequence(value)
        other.param_groups[0]["ns_coefficients"] = (
            newton_schulz.iterations((), value, 5) if name else triples[0] if triples else [value] * 5
        )
        for p in (params, twins):
            give(p, step)
        one.step()
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_a_sequence_is_saved_and_loaded() -> None:
    """It is an option, like ``nesterov``: a checkpoint's counts, and may be numbers as well."""
    params = parameters()
    optimizer, plain = co.Muon(params, ns_coefficients=TRIPLES), co.Muon(parameters())
    moved(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["ns_coefficients"] == TRIPLES
    assert plain.state_dict()["param_groups"][0]["ns_coefficients"] == (3.4445, -4.775, 2.0315)
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["ns_coefficients"] == TRIPLES
    theirs = torch.optim.Muon(parameters(), ns_coefficients=(3.0, -4.0, 1.8))
    for each in (optimizer, plain):
        each.load_state_dict(theirs.state_dict())
        assert each.param_groups[0]["ns_coefficients"] == (3.0, -4.0, 1.8)


def test_groups_differ_in_their_sequences() -> None:
    params = parameters()
    chosen: list[Any] = ["polar_express", TRIPLES, (3.0, -4.0, 1.8), TRIPLES]
    expected = [reference([p], **FAR, ns_coefficients=c)[0] for p, c in zip(params, chosen, strict=True)]
    groups = [{"params": [p], "ns_coefficients": c} for p, c in zip(params, chosen, strict=True)]
    # A reference starts with the first gradients anew for each parameter, so each gets its own here.
    for param, group, theirs in zip(params, groups, expected, strict=True):
        (ours,) = moved(co.Muon([group], **FAR), [param])
        assert_near([ours], [theirs])
    together = co.Muon([{**group, "params": parameters([tuple(p.shape)])} for group, p in zip(groups, params, strict=True)])
    assert [group["ns_coefficients"] for group in together.param_groups] == chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ns_coefficients": "polar"},
            "ns_coefficients must be 'polar_express', three numbers or a sequence .*, got 'polar'",
        ),
        ({"ns_coefficients": [(1, 2)]}, r"ns_coefficients\[0\] must be three finite numbers, got \(1, 2\)"),
        ({"ns_coefficients": [TRIPLES[0], 3.0]}, r"ns_coefficients\[1\] must be three finite numbers, got 3.0"),
        ({"ns_coefficients": [(1, 2, math.inf)]}, r"ns_coefficients\[0\] must be three finite numbers"),
        ({"ns_coefficients": TRIPLES, "ns_steps": 3}, "ns_steps must be 4, as many as triples, .* default 5, got 3"),
        ({"ns_coefficients": "polar_express", "ns_steps": 100}, "ns_steps must be an integer >= 0 and < 100"),
    ],
)
def test_what_a_sequence_must_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        co.Muon(parameters(), **options)
    with pytest.raises(ValueError, match=message):
        co.Muon([{"params": parameters(), **options}])
    optimizer = co.Muon(parameters())
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=message):
        optimizer.param_groups[0].update(options)
    assert dict(optimizer.param_groups[0]) == before


def test_a_sequence_has_no_tensors() -> None:
    optimizer = co.Muon(parameters(), ns_coefficients="polar_express")
    message = r"ns_coefficients of param_groups\[0\] is 'polar_express', which is compiled in: assign 3 numbers first"
    with pytest.raises(ValueError, match=message):
        optimizer.hyperparameter("ns_coefficients")
    with pytest.raises(ValueError, match=message):
        optimizer.schedule(ns_coefficients=lambda step: (step, step, step))
    optimizer.param_groups[0]["ns_coefficients"] = (3.0, -4.0, 1.8)
    optimizer.schedule(ns_coefficients=lambda step: (3.0 + 0 * step, -4.0, 1.8))
    with pytest.raises(ValueError, match=r"opt.schedule sets ns_coefficients of param_groups\[0\]: end that"):
        optimizer.param_groups[0]["ns_coefficients"] = TRIPLES


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((None, "original", "shape_scaling"), {(20, 50): 1.0, (50, 20): math.sqrt(2.5)}),
        (("match_rms_adamw", "spectral"), {(20, 50): 0.2 * math.sqrt(50), (50, 20): 0.2 * math.sqrt(50)}),
        (("spectral_unclamped", "unit_rms_norm"), {(20, 50): math.sqrt(0.4), (50, 20): math.sqrt(2.5)}),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_the_names_of_scales(names: tuple[str, ...], expected: dict[tuple[int, int], float]) -> None:
    options = {**FAR, "weight_decay": 0.0, "ns_coefficients": TRIPLES}
    h = SimpleNamespace(eps=FAR["eps"], ns_coefficients=TRIPLES)
    found = []
    for name in names:
        params = parameters([*expected])
        steps = moved(
            co.Muon(params, adjust_lr_fn=name, momentum=0.0, **{k: v for k, v in options.items() if k != "momentum"}),
            params,
            1,
        )
        grads = [p.grad.double() for p in params if p.grad is not None]
        wanted = [-0.3 * scale * muon.orthogonalized(g, h) for g, scale in zip(grads, expected.values(), strict=True)]
        assert_near(steps, wanted)
        found.append(steps)
    assert all(torch.equal(a, b) for steps in found for a, b in zip(steps, found[0], strict=True))


def test_a_scale_must_have_a_name() -> None:
    with pytest.raises(ValueError, match="must be None, 'original', 'shape_scaling', 'match_rms_adamw', 'spectral', "):
        co.Muon(parameters(), adjust_lr_fn="rms")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nesterov", [False, True])
def test_normuon_is_the_one_of_pytorch_optimizer_in_its_papers_mode(nesterov: bool) -> None:
    theirs = pytest.importorskip("pytorch_optimizer")
    params, twins = parameters(), parameters()
    shared = {"lr": 0.3, "weight_decay": 0.4, "eps": 0.05, "nesterov": nesterov}
    ours = moved(co.NorMuon(params, betas=(0.6, 0.7), **shared), params)
    group = {"params": twins, "use_muon": True}
    other = theirs.NorMuon([group], momentum=0.6, beta2=0.7, update_scale="match_rms", foreach=False, **shared)
    assert_near(ours, moved(other, twins), 0.02)


@pytest.mark.filterwarnings("ignore")
def test_muon_is_the_one_of_pytorch_optimizer() -> None:
    theirs = pytest.importorskip("pytorch_optimizer")
    params, twins = parameters(), parameters()
    shared = {"lr": 0.3, "weight_decay": 0.4, "momentum": 0.6, "nesterov": False}
    ours = moved(co.Muon(params, adjust_lr_fn="spectral", ns_coefficients=TRIPLES, **shared), params)
    group = {"params": twins, "use_muon": True}
    other = theirs.Muon([group], use_adjusted_lr=True, ns_coeffs=TRIPLES, ns_steps=4, foreach=False, **shared)
    assert_near(ours, moved(other, twins), 0.02)


def test_every_row_of_normuon_moves_as_much() -> None:
    """After the first step, in which the averages are of this step alone, and all elements have the size 0.2."""
    (param,) = parameters([(20, 50)])
    optimizer = co.NorMuon([param], lr=1.0, weight_decay=0.0, eps=0.0)
    (step,) = moved(optimizer, [param], 1)
    torch.testing.assert_close(step.square().mean(1).sqrt(), torch.full((20,), 0.2, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [co.Muon, co.NorMuon])
def test_no_gradient_moves_nothing(kind: type[co.CompiledOptimizer]) -> None:
    (param,) = parameters([(20, 50)])
    optimizer = kind([param], weight_decay=0.0)
    param.grad = torch.zeros_like(param)
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param, before)
