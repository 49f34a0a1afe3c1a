"""What a checkpoint says of a group's options counts, as in torch.optim: every declared option of every optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from catalog import COMBINED, registry, required, wide_scalars
from simulated_graph import install
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

TAKEN: dict[str, Any] = {
    "adam_wd": True,
    "adjust_lr_fn": "spectral_unclamped",
    "cautious": True,
    "cautious_weight_decay": True,
    "corrected_weight_decay": True,
    "decouple_lr": True,
    "decouple_wd": True,
    "decoupled_weight_decay": True,
    "factored_dims": "largest",
    "fixed_iterations": True,
    "history_size": 2,
    "line_search_fn": "strong_wolfe",
    "max_eval": 2,
    "max_iter": 2,
    "maximize": True,
    "nesterov": True,
    "ns_coefficients": "polar_express",
    "ns_steps": 3,
    "rounding_seed": 7,
    "tolerance_change": 0.5,
    "tolerance_grad": 0.25,
}
"""Options that a load takes, each with a value that is no default."""

REFUSED = {"amsgrad": True, "centered": True}
"""Options that decide which buffers exist."""

KEPT: dict[str, Any] = {
    "exclude": ["*.other"],
    "kahan_sum": True,
    "split": {"w.*": 2},
    "stacks": ["w.*"],
    "state_dtype": torch.float32,
    "weights": "kahan",
}
"""Options that stay the constructor's, of those that a checkpoint holds."""

UNSEEN = {"capturable", "differentiable", "foreach", "fused", "lowering", "lr_scale", "max_grad_norm", "skip_nonfinite"}
"""Run-time flags, and what no checkpoint holds."""


def kinds() -> list[type[CompiledOptimizer]]:
    return [*registry(), *COMBINED]


def options_of(kind: type[CompiledOptimizer]) -> list[str]:
    fixed = [h.name for h in kind._declaration.hypers if h.fixed]
    arguments = inspect.signature(kind).parameters
    return [f.name for f in kind._options() if f.name in arguments and not f.name.startswith("adamw")] + fixed


def pairs(table: Any) -> list[tuple[type[CompiledOptimizer], str]]:
    return [(kind, name) for kind in kinds() for name in options_of(kind) if name in table]


def other_than(kind: type[CompiledOptimizer], name: str) -> Any:
    default = inspect.signature(kind).parameters[name].default
    return (not default) if isinstance(default, bool) else {**TAKEN, **REFUSED, **KEPT}[name]


def made(kind: type[CompiledOptimizer], name: str = "", **kwargs: Any) -> tuple[CompiledOptimizer, list[nn.Parameter]]:
    dtype = torch.bfloat16 if name in KEPT and name not in ("stacks", "split") else torch.float32
    shapes = [(6, 4)] if kind._granularity == "matrix" or kind in COMBINED else [(6, 4, 3), (5,)]
    params = [nn.Parameter(torch.linspace(-1, 1, torch.Size(s).numel()).view(s).to(dtype)) for s in shapes]
    momentum = {"momentum": 0.6} if kind is co.SGD else {}  # for nesterov
    apart = name in ("cautious_weight_decay", "corrected_weight_decay") and "decouple_wd" in kind._all_fields
    momentum |= {"decouple_wd": True, "weight_decay": 0.3} if apart else {}
    arguments = {**required(kind), **momentum, **({"max_lr": 0.3} if kwargs.get("decouple_lr") else {}), **kwargs}
    named = {f"w.{i}": param for i, param in enumerate(params)}
    if kind is co.LBFGS:
        arguments = {"max_iter": 3, **arguments}
    return kind(named, **arguments), params


def step(optimizer: CompiledOptimizer, params: list[nn.Parameter], number: int) -> None:
    if isinstance(optimizer, co.SparseAdam):
        for param in params:
            row = torch.tensor([[number % 5]])
            value = torch.full((1, *param.shape[1:]), 0.3 * number)
            param.grad = torch.sparse_coo_tensor(row, value, param.shape, check_invariants=False)
        optimizer.step()
        return

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(((param.float() - 0.1 * number).sin() * param.float()).sum() for param in params)
        loss.backward()
        return loss

    optimizer.step(closure)


def steps(optimizer: CompiledOptimizer, params: list[nn.Parameter], numbers: range) -> None:
    for number in numbers:
        step(optimizer, params, number)


def equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) if isinstance(a, (list, tuple)) else bool(a == b)


def test_each_declared_option_is_in_one_table() -> None:
    tables = [{*TAKEN}, {*REFUSED}, {*KEPT}, UNSEEN]
    for kind in kinds():
        for name in options_of(kind):
            assert sum(name in table for table in tables) == 1, (kind, name)


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice on unusual options
@pytest.mark.parametrize("back", [False, True], ids=["to-another", "to-the-default"])
@pytest.mark.parametrize(("kind", "name"), pairs(TAKEN), ids=str)
def test_the_checkpoints_option_is_taken_and_named(kind: type[CompiledOptimizer], name: str, back: bool) -> None:
    value = other_than(kind, name)
    ours, theirs = ({}, {name: value}) if not back else ({name: value}, {})
    (saver, source), (loader, target) = made(kind, name, **theirs), made(kind, name, **ours)
    steps(saver, source, range(1, 4))
    steps(loader, target, range(7, 9))
    wanted = saver.param_groups[0].get(name, inspect.signature(kind).parameters[name].default)
    report = loader.load_state_dict(copy.deepcopy(saver.state_dict()))
    assert report[:3] == ([], [], [])
    follows = {"param_groups[0]: max_eval"} if name == "max_iter" else set()  # its default does
    assert {said.split(" is ")[0] for said in report.changed} - follows == {f"param_groups[0]: {name}"}
    assert equal(loader.param_groups[0][name], wanted)
    for param, other in zip(target, source, strict=True):
        param.data.copy_(other.data)
    for number in range(4, 7):
        for optimizer, params in ((saver, source), (loader, target)):
            step(optimizer, params, number)
        assert all(map(torch.equal, source, target))
    assert loader.load_state_dict(copy.deepcopy(saver.state_dict())) == co.LoadReport([], [], [], [])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "name"), pairs(TAKEN), ids=str)
def test_an_option_stays_where_the_load_keeps_hyperparameters(kind: type[CompiledOptimizer], name: str) -> None:
    saver, _ = made(kind, name, **{name: other_than(kind, name)})
    loader, _ = made(kind, name)
    before = dict(loader.param_groups[0])
    is_strict = name != "factored_dims"  # then the state has other shapes
    assert loader.load_state_dict(saver.state_dict(), is_strict, hyperparameters="keep").changed == []
    assert dict(loader.param_groups[0]) == before


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("kind", "name"), pairs(REFUSED), ids=str)
def test_an_option_that_decides_which_buffers_exist_is_refused(kind: Any, name: str, back: bool, stepped: bool) -> None:
    (saver, source), (loader, target) = made(kind, **{name: not back}), made(kind, **{name: back})
    if stepped:
        steps(saver, source, range(1, 3))
    steps(loader, target, range(1, 2))
    before = copy.deepcopy(loader.state_dict())
    with pytest.raises(ValueError, match=rf"param_groups\[0\]: {name}, which decides which buffers exist, is {not back}"):
        loader.load_state_dict(copy.deepcopy(saver.state_dict()))
    assert str(loader.state_dict()) == str(before)
    report = loader.load_state_dict(copy.deepcopy(saver.state_dict()), strict=False)
    assert any(name in said for said in report.mismatched)
    assert loader.param_groups[0][name] is back
    steps(loader, target, range(2, 4))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("kind", "name"), pairs(KEPT), ids=str)
def test_what_the_constructor_decides_stays_and_is_named(kind: type[CompiledOptimizer], name: str, back: bool) -> None:
    saver, _ = made(kind, name, **{name: KEPT[name]})
    loader, _ = made(kind, name)
    if back:  # groups leave out a default
        saver, loader = loader, saver
    before = loader.param_groups[0].get(name)
    report = loader.load_state_dict(saver.state_dict(), strict=False)
    assert all("the optimizer has no master_param" in said for said in report.mismatched)
    assert [said.split(" is ")[0] for said in report.changed] == ([] if back else [f"param_groups[0]: {name}"])
    assert loader.param_groups[0].get(name) == before


@pytest.fixture
def wide() -> Iterator[None]:
    """Let torch.optim keep its scalars in float64."""
    with wide_scalars():
        yield


TORCHS = [
    ("SGD", {"nesterov": True, "momentum": 0.6}, {"momentum": 0.6}),
    ("SGD", {"maximize": True}, {}),
    ("SGD", {}, {"maximize": True}),
    *((name, {"maximize": True}, {}) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")),
    *((name, {}, {"maximize": True}) for name in ("Adadelta", "Adagrad", "Adafactor")),
    *((name, {"decoupled_weight_decay": True}, {}) for name in ("Adam", "NAdam", "RAdam")),
    *((name, {}, {"decoupled_weight_decay": True}) for name in ("Adam", "NAdam", "RAdam")),
]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("name", "theirs", "ours"), TORCHS, ids=str)
def test_torchs_option_is_taken_as_torch_takes_it(name: str, theirs: Any, ours: Any) -> None:
    runs: list[Any] = []
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    decay = {} if name == "Rprop" else {"weight_decay": 0.3}
    saver = getattr(torch.optim, name)([param := weight.clone().requires_grad_()], lr=0.05, **decay, **theirs)
    for number in range(3):
        param.grad = (weight + number).sin()
        saver.step()
    for module in (torch.optim, co):
        twin = param.detach().clone().requires_grad_()
        optimizer = getattr(module, name)([twin], lr=0.2, **ours)
        optimizer.load_state_dict(copy.deepcopy(saver.state_dict()))
        runs.append((optimizer, twin))
    for number in range(3, 6):
        for optimizer, twin in runs:
            twin.grad = (weight + number).sin()
            optimizer.step()
        torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-12, atol=1e-13)


def test_two_optimizers_go_on_in_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 6))
    named = list(model.named_parameters())
    muon = co.Muon([(n, p) for n, p in named if p.ndim == 2], lr=0.02)
    adamw = co.AdamW([(n, p) for n, p in named if p.ndim < 2])
    x = torch.randn(16, 12)
    twin = copy.deepcopy(model)

    def train(module: nn.Module, *optimizers: Any) -> None:
        module(x).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    train(model, muon, adamw)
    whole = co.MuonAdamW(twin, adamw="*bias*")
    report = co.load_named_state_dict(whole, co.named_state_dict([muon, adamw]))
    assert report[:3] == ([], [], [])
    assert report.changed == ["param_groups[0]: adjust_lr_fn is None as in the checkpoint, was 'match_rms_adamw'"]
    twin.load_state_dict(model.state_dict())
    for _ in range(3):
        train(model, muon, adamw)
        train(twin, whole)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other)
    assert co.load_named_state_dict([muon, adamw], co.named_state_dict(whole)).changed == []


def test_groups_with_other_options_cannot_become_one() -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [("a", first)], "nesterov": True}, {"params": [("b", second)]}]
    saved = co.SGD(groups, momentum=0.5).state_dict()
    loader = co.SGD([("a", first), ("b", second)], momentum=0.5)
    with pytest.raises(ValueError, match=r"its parameters were in groups with different nesterov: \[True, False\]"):
        loader.load_state_dict(saved)
    assert not loader.param_groups[0]["nesterov"]


def test_options_that_do_not_fit_each_other_stay() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    saved = co.Muon([weight], ns_coefficients=[(3.0, -4.0, 1.8)] * 5, nesterov=False).state_dict()
    saved["param_groups"][0]["adjust_lr_fn"] = "bogus"
    loader = co.Muon([weight])
    with pytest.raises(ValueError, match=r"the checkpoint's .*adjust_lr_fn.* cannot be taken: .*bogus is not supported"):
        loader.load_state_dict(saved)
    report = loader.load_state_dict(saved, strict=False)
    assert len(report.mismatched) == 1
    assert report.changed == []
    assert loader.state_dict()["param_groups"] == co.Muon([weight]).state_dict()["param_groups"]
    saved["param_groups"][0]["nesterov"] = "yes"
    with pytest.raises(ValueError, match=r"nesterov of param_groups\[0\] is not a number"):
        loader.load_state_dict(saved, strict=False)


@pytest.mark.parametrize("true", [1, True, torch.tensor(True), np.bool_(True), 1.0], ids=str)
def test_options_are_taken_with_the_numbers_of_the_checkpoint(true: Any) -> None:
    """Nesterov's needs momentum, which the optimizer has not, and torch.optim takes any truth value."""
    weight = nn.Parameter(torch.ones(3))
    saved = torch.optim.SGD([weight], momentum=0.5, nesterov=True).state_dict()
    saved["param_groups"][0]["nesterov"] = true
    loader = co.SGD([weight])
    assert loader.load_state_dict(saved)[:3] == ([], [], [])
    assert loader.param_groups[0]["nesterov"] is True
    saved["param_groups"][0]["nesterov"] = None
    loader.load_state_dict(saved)
    assert loader.param_groups[0]["nesterov"] is False


def test_a_choice_in_lists_is_the_same_choice() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = co.Muon([weight], ns_coefficients=[(3.0, -4.0, 1.8)] * 5)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["ns_coefficients"] = [[3.0, -4.0, 1.8]] * 5
    assert optimizer.load_state_dict(saved) == co.LoadReport([], [], [], [])


def test_a_schedule_in_the_step_keeps_its_numbers() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = co.Muon([weight])
    optimizer.schedule(ns_coefficients=lambda step: (3.0, -4.0, 1.8))
    saved = co.Muon([weight], ns_coefficients="polar_express").state_dict()
    with pytest.raises(ValueError, match=r"cannot be taken: opt.schedule sets ns_coefficients"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("left_out", ["absent", "damaged", "frozen"])
def test_what_takes_no_state_begins_anew_under_an_option_that_reshapes_it(left_out: str) -> None:
    (saver, source), (loader, target) = made(co.Adafactor, factored_dims="largest"), made(co.Adafactor)
    steps(saver, source, range(1, 4))
    steps(loader, target, range(1, 4))
    saved = copy.deepcopy(saver.state_dict())
    if left_out == "absent":
        saved["param_groups"][0] |= {"params": [1], "param_names": ["w.1"]}
        del saved["state"][0]
    elif left_out == "damaged":
        saved["state"][0]["row_var"] = "no tensor"
    else:
        target[0].requires_grad_(False)
        del saved["state"][0]
    loader.load_state_dict(saved, strict=False)
    target[0].requires_grad_(True)
    fresh, twins = made(co.Adafactor, factored_dims="largest")
    twins[0].data.copy_(target[0].data)
    step(loader, target, 1)
    step(fresh, twins, 1)
    assert torch.equal(target[0], twins[0])


@pytest.mark.parametrize("option", ["cautious", "cautious_weight_decay", "corrected_weight_decay", "decouple_lr"])
def test_options_go_through_torchs_distributed_state_dicts(option: str) -> None:
    models = [nn.Linear(3, 2, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    saver = co.AdamW(models[0].named_parameters(), weight_decay=1e-4, **{option: True})
    loader = co.AdamW(models[1].named_parameters(), weight_decay=1e-4)
    pairs = list(zip((saver, loader), models, strict=True))
    for optimizer, model in pairs:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], loader, copy.deepcopy(get_optimizer_state_dict(models[0], saver)))
    assert loader.param_groups[0][option] is True
    for optimizer, model in pairs:
        model.weight.grad = torch.arange(6.0).view(2, 3).sin()
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)


FOREIGN = {"use_gram_newton_schulz": True, "gram_newton_schulz_config": "x", "caution": torch.tensor(1.0), "trust_clip": 1}


@pytest.mark.parametrize(("name", "value"), FOREIGN.items())
def test_an_option_of_others_that_changes_steps_is_refused(name: str, value: Any) -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    theirs = torch.optim.Muon([weight])
    saved = theirs.state_dict()
    saved["param_groups"][0][name] = value
    loader = co.Muon([weight])
    with pytest.raises(ValueError, match=rf"param_groups\[0\]: the checkpoint's {name}=.* has no counterpart"):
        loader.load_state_dict(saved)
    (said,) = loader.load_state_dict(saved, strict=False).mismatched
    assert name in said
    assert name not in loader.param_groups[0]
    theirs.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"{name}=.* has no counterpart in Muon"):
        co.from_torch(theirs)
    for off in (False, None, 0, "", np.bool_(False), torch.tensor(False)):
        saved["param_groups"][0][name] = off
        assert loader.load_state_dict(saved) == co.LoadReport([], [], [], [])


def test_what_schedulers_and_users_keep_in_groups_is_loaded() -> None:
    weight = nn.Parameter(torch.ones(3))
    own = {
        "initial_lr": 0.5,
        "base_momentum": 0.8,
        "max_momentum": 0.9,
        "max_lr": 0.3,
        "min_lr": 0.1,
        "swa_lr": 0.2,
        "mine": "x",
    }
    saved = torch.optim.SGD([{"params": [weight], **own}], lr=0.1).state_dict()
    loader = co.SGD([weight], lr=0.2)
    assert loader.load_state_dict(saved) == co.LoadReport([], [], [], [])
    assert {key: loader.param_groups[0][key] for key in own} == own


def scheduled(optimizer: Any, name: str) -> Any:
    if name == "StepLR":
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    cycles = not {"momentum", "betas"}.isdisjoint(optimizer.defaults)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=12, cycle_momentum=cycles)


@pytest.mark.quick
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad"])
def test_a_resumed_run_goes_on_as_torchs(name: str, schedule: str, tmp_path: Any) -> None:
    """Saved with a scheduler and a key of the user's own, loaded strictly into a new optimizer with other numbers."""
    options = {"momentum": 0.6} if name in ("SGD", "RMSprop") else {}
    runs = []
    for module in (torch.optim, co):
        kind = getattr(module, name)
        param = torch.linspace(-1, 1, 10, dtype=torch.float64).requires_grad_()

        def run(optimizer: Any, scheduler: Any, param: Tensor, numbers: range) -> list[Any]:
            seen = []
            for number in numbers:
                param.grad = torch.arange(10, dtype=torch.float64).add(number).cos()
                optimizer.step()
                scheduler.step()
                seen.append({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
            return seen

        first = kind([param], lr=0.1, weight_decay=0.2, **options)
        first.param_groups[0]["mine"] = [1, "two"]
        scheduler = scheduled(first, schedule)
        run(first, scheduler, param, range(5))
        path = tmp_path / f"{module.__name__}.pt"
        torch.save([first.state_dict(), scheduler.state_dict(), param.detach()], path)
        saved, times, weight = torch.load(path, weights_only=True)
        second = kind([weight.requires_grad_()], lr=0.9, **options)
        later = scheduled(second, schedule)
        second.load_state_dict(saved)
        later.load_state_dict(times)
        seen = run(second, later, weight, range(5, 10))
        state = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in second.state[weight].items()}
        runs.append((seen, later.get_last_lr(), state, weight.detach()))
    (theirs, ours) = runs
    for a, b in zip(theirs[0], ours[0], strict=True):
        assert a.keys() <= b.keys()
        for key, value in a.items():
            assert b[key] == pytest.approx(value, rel=1e-12) if isinstance(value, float) else b[key] == value, key
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12)
    assert theirs[2].keys() == ours[2].keys() - ({"step"} if name == "SGD" else set())
    for key, value in theirs[2].items():
        torch.testing.assert_close(ours[2][key], value, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(ours[3], theirs[3], rtol=1e-12, atol=1e-15)


@pytest.mark.quick
@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor", "eager"])
def test_a_compiled_step_is_renewed_once(lowering: str) -> None:
    weight = torch.ones(3, dtype=torch.float64).requires_grad_()
    saver = torch.optim.SGD([weight], momentum=0.5, nesterov=True, maximize=True)
    weight.grad = torch.full_like(weight, 0.5)
    saver.step()
    pairs = []
    for module in (torch.optim, co):
        param = torch.ones(3, dtype=torch.float64).requires_grad_()
        options = {"lowering": lowering} if module is co else {}
        pairs.append((module.SGD([param], momentum=0.5, **options), param))
    counter = CompileCounter()
    ours = torch.compile(pairs[1][0].step, backend=counter)
    for number in range(7):
        if number == 3:
            for optimizer, _ in pairs:
                optimizer.load_state_dict(copy.deepcopy(saver.state_dict()))
        if number == 5:  # changes nothing
            assert pairs[1][0].load_state_dict(pairs[1][0].state_dict()).changed == []
        for _, param in pairs:
            param.grad = torch.full_like(param, 0.3 * number)
        pairs[0][0].step()
        ours()
        if number == 2:
            before = counter.frame_count
    assert counter.frame_count == before + (lowering == "inductor")  # another lowering reads options when it is called
    torch.testing.assert_close(pairs[1][1], pairs[0][1], rtol=1e-12, atol=0)


@pytest.mark.quick
def test_a_captured_step_is_captured_again_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    sides = []
    for _ in range(2):
        optimizer, params = made(co.SGD, momentum=0.5)
        sides.append((optimizer, params))
    saver, source = made(co.SGD, momentum=0.5, nesterov=True)
    steps(saver, source, range(1, 3))
    runner = co.CUDAGraphRunner(sides[0][0], warmup=1)
    for number in range(10):
        if number in (4, 8):
            for optimizer, _ in sides:
                optimizer.load_state_dict(copy.deepcopy(saver.state_dict()))
        for _, params in sides:
            for param in params:
                param.grad = torch.full_like(param, 0.1 * number) if param.grad is None else param.grad.fill_(0.1 * number)
        runner.step()
        sides[1][0].step()
        assert all(map(torch.equal, sides[0][1], sides[1][1]))
    report = co.compile_report(sides[0][0])
    assert report.recaptures == 1
    assert "param_groups[0]['nesterov'] was written" in str(report)
