"""optimi's checkpoints in both directions: optimi itself loads ours, we load its, and both go on as the other does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import registry, relative_error, required
from loading import SHAPE, freed, refuses, trained
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim import rule

optimi = pytest.importorskip("optimi")

LOOPS = {"foreach": False, "triton": False}
ADAM = {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # what both, we, and optimi get
    "SGD": ("SGD", {"lr": 0.07, "weight_decay": 0.4}, {}, {}),
    "SGD momentum": ("SGD", {"lr": 0.07, "momentum": 0.7, "weight_decay": 0.4}, {}, {}),
    "SGD dampening": (
        "SGD",
        {"lr": 0.07, "momentum": 0.7, "weight_decay": 0.4},
        {"dampening": 0.7},
        {"dampening": True, "torch_init": True},
    ),
    "Adam": ("Adam", ADAM, {}, {}),
    "Adam decoupled": ("Adam", ADAM, {"decoupled_weight_decay": True}, {"decouple_wd": True}),
    "AdamW": ("AdamW", ADAM, {}, {}),
    "RAdam": ("RAdam", {**ADAM, "eps": 0.0, "betas": (0.6, 0.95)}, {}, {}),
    "RAdam decoupled": (
        "RAdam",
        {**ADAM, "eps": 0.0, "betas": (0.6, 0.95)},
        {"decoupled_weight_decay": True},
        {"decouple_wd": True},
    ),
    "Lion": ("Lion", {"lr": 0.07, "betas": (0.6, 0.8), "weight_decay": 0.4}, {}, {}),
    "Adan": ("Adan", {**ADAM, "betas": (0.6, 0.7, 0.8)}, {}, {}),
    "StableAdamW": ("StableAdamW", ADAM, {}, {}),
    "Ranger": ("Ranger", {**ADAM, "betas": (0.6, 0.95), "k": 4, "alpha": 0.3}, {}, {}),
    "Ranger L2": ("Ranger", {**ADAM, "betas": (0.6, 0.95), "k": 5, "alpha": 0.9, "decouple_wd": False}, {}, {}),
}
BY_LR = {"decouple_lr": True, "max_lr": 0.09}
CASES |= {
    "SGD decoupled": ("SGD", {"lr": 0.07, "momentum": 0.7, "weight_decay": 0.4, "decouple_wd": True}, {}, {}),
    "Adam decouple_wd": ("Adam", {**ADAM, "decouple_wd": True}, {}, {}),
    **{
        f"{case} by lr": (CASES[case][0], {**CASES[case][1], **BY_LR}, *CASES[case][2:])
        for case in ("SGD dampening", "Adam", "AdamW", "RAdam", "Lion", "Adan", "StableAdamW", "Ranger")
    },
}
SHAPES = {"fc.weight": (4, 3), "fc.bias": (4,), "scale": (), "late": (5,)}


def _model() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return {n: nn.Parameter(torch.randn(s, dtype=torch.float64, generator=generator)) for n, s in SHAPES.items()}


def _twin(model: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(param.detach().clone()) for name, param in model.items()}


def _groups(model: dict[str, nn.Parameter], plain: bool) -> list[dict[str, Any]]:
    """Three groups that differ. The parameter of the last gets no gradient at first."""
    names = [["fc.weight", "fc.bias"], ["scale"], ["late"]]
    groups = [{"params": [model[n] for n in some] if plain else {n: model[n] for n in some}} for some in names]
    return [groups[0], {**groups[1], "lr": 0.03, "weight_decay": 0.9}, {**groups[2], "weight_decay": 0.2}]


def _pair(case: str) -> tuple[Any, Any]:
    """What makes our optimizer, and optimi's, of a model."""
    name, both, own, theirs = CASES[case]
    return (
        lambda model: getattr(co, name)(_groups(model, False), **both, **own),
        lambda model: getattr(optimi, name)(_groups(model, True), **both, **theirs, **LOOPS),
    )


def _train(optimizer: Any, model: dict[str, nn.Parameter], steps: range, without: tuple[str, ...] = ()) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group, base in zip(optimizer.param_groups, (0.07, 0.03, 0.07), strict=True):
            group["lr"] = base / (1 + step % 3)
        for name, param in model.items():
            grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
            param.grad = None if name in without else grad
        optimizer.step()


def _same_future(a: tuple[Any, Any], b: tuple[Any, Any], without: tuple[str, ...] = ()) -> None:
    for optimizer, model in (a, b):
        _train(optimizer, model, range(10, 30), without)
    for name in SHAPES:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:You are using weight_decay")
@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("case", CASES)
class TestEveryOptimizer:
    def test_optimi_goes_on_as_ours(self, case: str, steps: int) -> None:
        ours, theirs = _pair(case)
        model = _model()
        first = ours(model)
        _train(first, model, range(steps), without=("late",))
        twin = _twin(model)
        second = theirs(twin)
        saved = co.optimi_state_dict(first)
        second.load_state_dict(saved)
        _same_future((first, model), (second, twin))

    def test_ours_goes_on_as_optimi(self, case: str, steps: int) -> None:
        """But for a parameter that got no gradient yet: optimi counts it as old as its group, where it counts steps."""
        ours, theirs = _pair(case)
        model = _model()
        first = theirs(model)
        _train(first, model, range(steps), without=("late",))
        twin = _twin(model)
        second = ours(twin)
        assert second.load_state_dict(copy.deepcopy(first.state_dict()))[:3] == ([], [], [])
        assert second.state[twin["late"]]["step"] == 0
        _same_future((first, model), (second, twin), ("late",) if steps and "eps" in CASES[case][1] else ())

    def test_there_and_back(self, case: str, steps: int) -> None:
        ours, _ = _pair(case)
        model = _model()
        first = ours(model)
        _train(first, model, range(steps), without=("late",))
        second = ours(_twin(model))
        assert not any(second.load_state_dict(co.optimi_state_dict(first))[:3])
        assert second.hyperparameters() == first.hyperparameters()
        for own, other in zip(first.state.values(), second.state.values(), strict=True):
            assert own.keys() == other.keys()
            for key in own.keys() - ({"step"} if "SGD" in case or "Lion" in case else set()):
                torch.testing.assert_close(own[key], other[key], rtol=1e-15, atol=0)

    def test_groups_and_state_have_optimis_keys(self, case: str, steps: int) -> None:
        ours, theirs = _pair(case)
        model, twin = _model(), _model()
        first, second = ours(model), theirs(twin)
        for optimizer, params in ((first, model), (second, twin)):
            _train(optimizer, params, range(steps), without=("late",))
        saved, expected = co.optimi_state_dict(first), second.state_dict()
        for param, entries in expected["state"].items():
            assert saved["state"].get(param, {"exp_avg": None, "kahan_comp": None}).keys() == entries.keys()
        for mine, group in zip(saved["param_groups"], expected["param_groups"], strict=True):
            assert mine.keys() - {"step", "param_names"} == group.keys() - {"step"}
            differing = {key for key in group.keys() & mine.keys() - {"step"} if mine[key] != group[key]}
            assert differing <= {"kahan_sum", "torch_init", "setup"}
            is_late = mine["params"] == [3]
            assert is_late or "step" not in group or mine["step"] == group["step"]


def test_radams_eps_is_alike_once_the_correction_is_1() -> None:
    """Before that, optimi adds it to the corrected root, and torch to the root itself."""
    model = _model()
    options = {**ADAM, "betas": (0.6, 0.8)}
    first = co.RAdam(_groups(model, False), **options)
    _train(first, model, range(180))
    twin = _twin(model)
    second = optimi.RAdam(_groups(twin, True), **options, **LOOPS)
    second.load_state_dict(co.optimi_state_dict(first))
    _same_future((first, model), (second, twin))


@pytest.mark.parametrize("case", ["Adan", "SGD momentum", "Ranger", "Lion"])
def test_shares_no_memory(case: str) -> None:
    model = _model()
    first = _pair(case)[0](model)
    _train(first, model, range(3))
    before = copy.deepcopy(first.state_dict())
    for entries in co.optimi_state_dict(first)["state"].values():
        for value in entries.values():
            if isinstance(value, Tensor):
                value.fill_(9)
    after = first.state_dict()
    for index, entries in before["state"].items():
        assert all(torch.equal(after["state"][index][k], v) for k, v in entries.items())


def test_what_schedulers_keep_goes_along() -> None:
    model = _model()
    first = co.AdamW(_groups(model, False), **ADAM)
    torch.optim.lr_scheduler.StepLR(first, 3)
    _train(first, model, range(3))
    saved = co.optimi_state_dict(first)
    assert [group["initial_lr"] for group in saved["param_groups"]] == [0.07, 0.03, 0.07]
    assert [group["param_names"] for group in saved["param_groups"]] == [["fc.weight", "fc.bias"], ["scale"], ["late"]]


@pytest.mark.parametrize("case", ["AdamW", "StableAdamW", "Ranger", "Adan", "Lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes_are_taken(case: str, dtype: torch.dtype) -> None:
    """Without Kahan summation. A step in 16 bits differs: optimi computes in them."""
    name, both, own, theirs = CASES[case]
    weight = nn.Parameter(torch.linspace(-1, 1, 12, dtype=dtype).view(4, 3))
    first = getattr(optimi, name)([weight], **both, **theirs, **LOOPS, kahan_sum=False)
    weight.grad = torch.linspace(-2, 3, 12, dtype=dtype).view(4, 3)
    first.step()
    second = getattr(co, name)([nn.Parameter(weight.detach().clone())], **both, **own)
    assert not any(second.load_state_dict(copy.deepcopy(first.state_dict())))
    third = getattr(optimi, name)([nn.Parameter(weight.detach().clone())], **both, **theirs, **LOOPS)
    third.load_state_dict(co.optimi_state_dict(second))
    for key, value in first.state[weight].items():
        if value is not None:
            loaded = next(iter(third.state.values()))[key]
            assert loaded.dtype == dtype
            torch.testing.assert_close(loaded, value, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_gradient_release_is_read() -> None:
    """There each parameter counts its steps, and its state holds the group."""
    model = _model()
    del model["scale"]  # of a 0-dim tensor optimi asks for the length
    first = optimi.AdamW(model.values(), **ADAM, **LOOPS, gradient_release=True)
    generator = torch.Generator().manual_seed(1)
    for count, param in enumerate(model.values(), 2):
        for _ in range(count):
            param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
            first.step(param=param)
    saved = first.state_dict()
    second = co.AdamW(_twin(model).items(), **ADAM)
    assert not any(second.load_state_dict(saved))
    assert [entries["step"].item() for entries in second.state.values()] == [2, 3, 4]
    debiased = [entries["exp_avg"] / (1 - 0.6 ** entries["step"]) for entries in second.state.values()]
    assert relative_error(debiased, [first.state[param]["exp_avg"] for param in model.values()]) < 1e-15


def test_placeholders_of_triton_are_dropped() -> None:
    model = _model()
    first = optimi.StableAdamW(_groups(model, True), **ADAM, **LOOPS, kahan_sum=True)
    _train(first, model, range(2))
    saved = copy.deepcopy(first.state_dict())
    for entries in saved["state"].values():
        entries["kahan_comp"] = torch.zeros(1, dtype=torch.uint8)
        entries["mean_square"] = torch.zeros(1)
    assert not any(co.StableAdamW(_groups(_twin(model), False), **ADAM).load_state_dict(saved))


LACKING = [kind for kind in registry() if not hasattr(optimi, kind.__name__)]


@pytest.mark.parametrize("kind", LACKING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("steps", [0, 1])
def test_optimizers_that_optimi_lacks_are_refused(kind: type[co.CompiledOptimizer], steps: int) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([weight], **required(kind))
    for _ in range(steps):
        weight.grad = torch.ones(2, 2).to_sparse() if kind._gradients == "sparse" else torch.ones(2, 2)
        optimizer.step(lambda: weight.sum())
    with pytest.raises(ValueError, match=f"optimi has no {kind.__name__}"):
        co.optimi_state_dict(optimizer)


def test_an_optimizer_of_ones_own_is_refused() -> None:
    class Other(co.Lion):
        @staticmethod
        def update(param: Any, grad: Any, c: Any, exp_avg: Any) -> Any:
            return {"step": c.lr * grad, "exp_avg": exp_avg}

    class Further(co.Lion):
        floor = rule.hyper(default=0.0, ge=0, doc="a further number")

        @staticmethod
        def coefficients(lr: Any, betas: Any, weight_decay: Any, floor: Any) -> Any:
            return {**co.Lion.coefficients(lr, betas, weight_decay), "floor": floor}

    class Same(co.Lion):
        """optimi's, under another name."""

    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="optimi has no Other"):
        co.optimi_state_dict(Other([weight], lr=0.1))
    with pytest.raises(ValueError, match="optimi has no Further"):
        co.optimi_state_dict(Further([weight], lr=0.1))
    assert co.optimi_state_dict(Same([weight], lr=0.1))["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            co.AdamW,
            {"amsgrad": True},
            r"param_groups\[0\] has 'amsgrad', 'max_exp_avg_sq', which has no counterpart in optimi",
        ),
        (co.AdamW, {"maximize": True}, r"param_groups\[0\] has 'maximize', which has no counterpart"),
        (co.Lion, {"cautious": True}, r"param_groups\[0\] has 'cautious', which has no counterpart"),
        (co.SGD, {"nesterov": True, "momentum": 0.9}, r"param_groups\[0\] has 'nesterov', which has no counterpart"),
        (co.SGD, {"dampening": 0.5, "momentum": 0.9}, r"dampening 0.5; optimi knows 0 and the momentum"),
        (co.Adan, {"adam_wd": True, "weight_decay": 0.1}, r"adam_wd=True, which has no effect in optimi"),
        (co.AdamW, {"decouple_lr": True, "max_lr": 0.0}, r"param_groups\[0\] has max_lr=0.0, by which optimi divides"),
        (co.SGD, {"decouple_lr": True, "weight_decay": 0.1, "decouple_wd": False}, "optimi decouples"),
        (co.Ranger, {"k": 2.5}, r"k of param_groups\[0\] must be a whole number, got 2.5"),
    ],
)
def test_what_has_no_counterpart_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2))], **{**required(kind), **options})
    with pytest.raises(ValueError, match=message):
        co.optimi_state_dict(optimizer)


@pytest.mark.filterwarnings("ignore:You are using weight_decay")
@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("SGD", {"decouple_wd": True}, {}),
        ("SGD", {}, {"decouple_wd": True}),
        ("Adam", {"decouple_wd": True}, {}),
        ("Adam", {}, {"decoupled_weight_decay": True}),
        ("Ranger", {}, {"decouple_wd": False}),
        ("AdamW", {"decouple_lr": True}, {}),
        ("Lion", {"decouple_lr": True}, {}),
    ],
)
def test_another_way_of_decay_is_taken(name: str, theirs: Any, ours: Any) -> None:
    def steps(optimizer: Any, param: Tensor, numbers: range) -> None:
        for number in numbers:
            param.grad = torch.arange(4, dtype=torch.float64).add(number).sin()
            optimizer.step()

    one = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))
    first = getattr(optimi, name)([one], lr=0.1, weight_decay=0.4, **theirs, **LOOPS)
    steps(first, one, range(3))
    other = nn.Parameter(one.detach().clone())
    second = getattr(co, name)([other], lr=0.2, weight_decay=0.3, **ours)
    report = second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert report[:3] == ([], [], [])
    assert "decouple" in report.changed[0]
    for optimizer, param in ((first, one), (second, other)):
        steps(optimizer, param, range(3, 6))
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:You are using weight_decay")
def test_a_way_of_decay_that_the_checkpoint_does_not_tell_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    saved = torch.optim.SGD([weight], lr=0.1, weight_decay=0.4).state_dict()
    optimizer = co.SGD([weight], lr=0.2, weight_decay=0.3, decouple_wd=True)
    with pytest.raises(ValueError, match=r"mismatched: param_groups\[0\]: decouple_wd is False in the checkpoint"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert not any(optimizer.load_state_dict(saved, hyperparameters="keep"))


@pytest.mark.parametrize("kind", [co.AdamW, co.Adan, co.Ranger])
def test_different_step_counts_in_a_group_are_refused(kind: Any) -> None:
    model = _model()
    optimizer = kind(model.items(), **required(kind))
    for name in ("fc.weight", "fc.bias", "scale"):
        model[name].grad = torch.ones_like(model[name])
    optimizer.step()
    with pytest.raises(ValueError, match=r"different numbers of steps, 'fc.weight' 1 and 'late' 0; optimi counts per group"):
        co.optimi_state_dict(optimizer)


def test_what_hooks_keep_is_refused() -> None:
    optimizer = co.AdamW({"w": nn.Parameter(torch.ones(2))})
    optimizer.state["ema"] = 3
    with pytest.raises(ValueError, match="the state holds 'ema', which is no parameter's"):
        co.optimi_state_dict(optimizer)
    del optimizer.state["ema"]
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    next(iter(optimizer.state.values()))["slow"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has 'slow', which has no counterpart in optimi"):
        co.optimi_state_dict(optimizer)


@pytest.mark.parametrize("scale", [{"w": 2.0}, lambda name, param: 2.0])
def test_a_scale_per_parameter_is_refused(scale: Any) -> None:
    """But for one number in a group, which is the user's own, as timm's."""
    optimizer = co.AdamW({"w": nn.Parameter(torch.ones(2))})
    optimizer.param_groups[0]["lr_scale"] = 0.5
    assert co.optimi_state_dict(optimizer)["param_groups"][0]["lr_scale"] == 0.5
    optimizer.param_groups[0]["lr_scale"] = scale
    with pytest.raises(ValueError, match=r"param_groups\[0\] has 'lr_scale', which has no counterpart in optimi"):
        co.optimi_state_dict(optimizer)


def test_complex_numbers_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    weight.grad = torch.ones_like(weight)
    optimizer = co.AdamW({"w": weight})
    optimizer.step()
    with pytest.raises(ValueError, match="the exp_avg in the state of 'w' is complex, which"):
        co.optimi_state_dict(optimizer)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g, s: s.update(exp_avg=freed(*SHAPE)), "exp_avg of .* has no memory"),
        (lambda g, s: s.update(exp_avg="x"), "exp_avg of .* is not a tensor"),
        (lambda g, s: g.update(step=torch.ones(2)), "step of .* is not a number"),
        (lambda g, s: g.update(beta1=freed(1)), "beta1 of .* has no memory"),
        (lambda g, s: g.update(decouple_wd=freed(1)), "decouple_wd of .* has no memory"),
        (lambda g, s: g.update(kahan_sum=torch.ones(2)), "kahan_sum of .* is not a number"),
        (lambda g, s: g.pop("beta2"), "cannot be read|has no betas"),
    ],
)
def test_a_value_is_checked_before_it_is_computed_with(spoil: Callable[[Any, Any], Any], message: str) -> None:
    theirs = optimi.AdamW([nn.Parameter(torch.ones(SHAPE)) for _ in "ab"], lr=0.1, **LOOPS)
    for param in theirs.param_groups[0]["params"]:
        param.grad = torch.ones(SHAPE)
    theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    spoil(saved["param_groups"][0], saved["state"][1])
    refuses(trained(co.AdamW), saved, message)


@pytest.mark.parametrize("choice", ["cautious_weight_decay", "corrected_weight_decay"])
def test_optimi_decays_all_elements_by_the_rate(choice: str) -> None:
    optimizer = co.AdamW([torch.nn.Parameter(torch.ones(2))], **{choice: True})
    with pytest.raises(ValueError, match=f"{choice}.* has no counterpart in optimi"):
        co.optimi_state_dict(optimizer)
