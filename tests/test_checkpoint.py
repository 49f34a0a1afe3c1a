"""Checkpoints: by name, whole or not at all, into live tensors, and to and from torch.optim."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from catalog import Case, cases, copies, give_gradients, parameters, relative_error, wide_scalars
from torch import nn

import compiled_optim as co


def _file(value: Any) -> Any:
    """``value`` written and read as users write and read checkpoints."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _model(names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Parameters of one shape, their values a function of their names."""
    return {n: nn.Parameter(torch.full((2, 3), float(sum(map(ord, n))) / 100)) for n in names}


def _train(optimizer: co.CompiledOptimizer, model: dict[str, nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for name, param in model.items():
            generator = torch.Generator().manual_seed(step * 1000 + sum(map(ord, name)))
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def _groups(model: dict[str, nn.Parameter], *parts: str, **options: Any) -> list[dict[str, Any]]:
    return [{"params": [(n, model[n]) for n in part], **options} for part in parts]


def test_layout_is_torchs() -> None:
    ours, theirs = _model("ab"), _model("ab")
    optimizer = co.AdamW(list(ours.items()), lr=0.1, foreach=True, capturable=True)
    reference = torch.optim.AdamW(list(theirs.items()), lr=0.1)
    _train(optimizer, ours, 2)
    _train(reference, theirs, 2)
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["param_groups"] == expected["param_groups"]  # Python floats, names, and no run-time flag of ours
    assert {i: set(s) for i, s in saved["state"].items()} == {i: set(s) for i, s in expected["state"].items()}
    assert saved["state"][0]["step"] == 2


def test_by_name_in_another_order_and_grouping() -> None:
    straight = _model("abcdeX")
    optimizer = co.AdamW(_groups(straight, "abc", "deX"), lr=0.05)
    _train(optimizer, straight, 3)
    saved = _file(optimizer.state_dict())
    weights = {n: p.detach().clone() for n, p in straight.items()}

    changed = _model("ebdacN")
    for name in "abcde":
        changed[name].data.copy_(weights[name])
    resumed = co.AdamW(_groups(changed, "eb", "daNc"), lr=0.05)
    report = resumed.load_state_dict(saved, strict=False)
    assert report == co.LoadReport(missing=["N"], unexpected=["X"], mismatched=[])
    with pytest.raises(ValueError, match=r"missing: N; unexpected: X"):
        co.AdamW(_groups(changed, "eb", "daNc")).load_state_dict(saved)
    for name in "abcde":
        for key, value in optimizer.state[straight[name]].items():
            assert torch.equal(resumed.state[changed[name]][key], value)
    assert resumed.state[changed["N"]]["step"] == 0
    _train(optimizer, straight, 5, first=3)
    _train(resumed, changed, 5, first=3)
    for name in "abcde":
        assert torch.equal(straight[name], changed[name])


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor", "eager"])
def test_loads_into_live_tensors(lowering: str) -> None:
    model = _model("ab")
    optimizer = co.AdamW(list(model.items()), lr=0.05, lowering=lowering)
    _train(optimizer, model, 2)
    saved = _file(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.values()]
    _train(optimizer, model, 4, first=2)
    after_six = [p.detach().clone() for p in model.values()]
    group = optimizer.param_groups[0]
    group["lr"] = 9.0
    held = {"lr": group["lr"], "beta": group["betas"][0]}
    addresses = [v.data_ptr() for s in optimizer.state.values() for v in s.values()]
    objects = [id(v) for s in optimizer.state.values() for v in s.values()]
    with co.no_recompiles():
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0] is group
        assert group["lr"] is held["lr"]
        assert group["lr"] == 0.05
        assert group["betas"][0] is held["beta"]
        assert [v.data_ptr() for s in optimizer.state.values() for v in s.values()] == addresses
        assert [id(v) for s in optimizer.state.values() for v in s.values()] == objects
        for param, weight in zip(model.values(), weights, strict=True):
            param.data.copy_(weight)
        _train(optimizer, model, 4, first=2)
    for param, expected in zip(model.values(), after_six, strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_interchange_with_torch(case: Case) -> None:
    ours = parameters(torch.float64)
    theirs = copies(ours, torch.float64)
    optimizer, reference = case.optimizer(ours, **case.kwargs), case.reference(theirs, **case.kwargs)
    for step in range(3):
        give_gradients(ours, theirs, step)
        optimizer.step()
        with wide_scalars():
            reference.step()
    to_ours = case.optimizer(copies(theirs, torch.float64), maximize=case.kwargs.get("maximize", False), **_statics(case))
    to_ours.load_state_dict(_file(reference.state_dict()))
    to_torch = case.reference(copies(ours, torch.float64))
    to_torch.load_state_dict(_file(optimizer.state_dict()))
    for group in to_torch.param_groups:
        group["maximize"] = case.kwargs.get("maximize", False)
    first, second = to_ours.param_groups[0]["params"], to_torch.param_groups[0]["params"]
    for step in range(3, 8):
        give_gradients(ours, theirs, step)
        for group in (first, second):
            for param, source in zip(group, ours, strict=True):
                param.grad = source.grad.clone()
        for each in (optimizer, to_ours):
            each.step()
        with wide_scalars():
            reference.step()
            to_torch.step()
    assert relative_error(first, theirs) < 1e-14
    assert relative_error(second, theirs) < 1e-14


def _statics(case: Case) -> dict[str, Any]:
    """What decides the structure and is therefore the optimizer's own, not the checkpoint's."""
    rule = case.optimizer.rule
    statics = {s.name: case.kwargs[s.name] for s in rule.statics if s.name in case.kwargs}
    return statics | {name: 0.5 for name in rule.structural_hypers if case.kwargs.get(name)}


@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_run_time_flags_stay_behind(flags: dict[str, bool]) -> None:
    theirs, ours = _model("ab"), _model("ab")
    reference = torch.optim.AdamW(list(theirs.items()), **({} if "capturable" in flags else flags))
    _train(reference, theirs, 2)
    saved = reference.state_dict()
    for group in saved["param_groups"]:
        group.update(flags)
    optimizer = co.AdamW(list(ours.items()))
    optimizer.load_state_dict(_file(saved))
    assert optimizer.param_groups[0]["foreach"] is None
    assert optimizer.param_groups[0]["capturable"] is False
    _train(optimizer, ours, 1, first=2)
    assert optimizer.state[ours["a"]]["step"] == 3


def test_wrapper_prefixes_do_not_matter() -> None:
    model = _model("ab")
    optimizer = co.SGD([(f"module._orig_mod.net.{n}", p) for n, p in model.items()], momentum=0.9)
    _train(optimizer, model, 2)
    other = co.SGD([(f"net._checkpoint_wrapped_module.{n}", p) for n, p in _model("ba").items()], momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    states = {n: s for n, s in zip("ba", other.state.values(), strict=True)}
    for name, param in model.items():
        assert torch.equal(states[name]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])


def test_without_names_by_position() -> None:
    model = _model("ab")
    optimizer = co.AdamW(list(model.items()))
    _train(optimizer, model, 2)
    other = co.AdamW(list(_model("xy").values()))
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    with pytest.raises(ValueError, match=r"different number of parameter groups \(1 instead of 2\)"):
        co.AdamW([{"params": [p]} for p in _model("xy").values()]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"doesn't match the size .*param_groups\[0\] has 2 parameters instead of 3"):
        co.AdamW(list(_model("xyz").values())).load_state_dict(optimizer.state_dict())


def test_hyperparameters_are_kept_on_request() -> None:
    model = _model("ab")
    saved = co.AdamW(list(model.items()), lr=0.5, weight_decay=0.25).state_dict()
    optimizer = co.AdamW(list(model.items()), lr=0.125)
    optimizer.load_state_dict(saved, hyperparameters="keep")
    assert optimizer.hyperparameters()[0]["lr"] == 0.125
    optimizer.load_state_dict(saved)
    assert optimizer.hyperparameters()[0]["lr"] == 0.5
    assert optimizer.hyperparameters()[0]["weight_decay"] == 0.25
    with pytest.raises(ValueError, match="hyperparameters must be 'checkpoint' or 'keep', got 'mine'"):
        optimizer.load_state_dict(saved, hyperparameters="mine")


def test_regrouped_parameters_with_unlike_hyperparameters_are_a_conflict() -> None:
    model = _model("ab")
    saved = co.AdamW([*_groups(model, "a", lr=0.1), *_groups(model, "b", lr=0.2)]).state_dict()
    optimizer = co.AdamW(list(model.items()), lr=0.5)
    with pytest.raises(
        ValueError, match=r"param_groups\[0\]: its parameters were in groups with different lr: \[0.1, 0.2\]"
    ):
        optimizer.load_state_dict(saved)
    report = optimizer.load_state_dict(saved, strict=False)
    assert len(report.mismatched) == 1
    assert optimizer.hyperparameters()[0]["lr"] == 0.5


def _drop(saved: dict[str, Any]) -> None:
    del saved["state"][1]["exp_avg"]


def _reshape(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg"] = torch.zeros(3, 2)


def _foreign(saved: dict[str, Any]) -> None:
    saved["state"][1]["momentum_buffer"] = torch.zeros(2, 3)


def _negative(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["lr"] = -1.0


def _future(saved: dict[str, Any]) -> None:
    saved["format_version"] = 99


def _no_groups(saved: dict[str, Any]) -> None:
    del saved["param_groups"]


def _text(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg"] = "zeros"


def _twice(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["param_names"] = ["b", "b"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, "b: the checkpoint has no exp_avg for it"),
        (_reshape, r"b: exp_avg has shape \(3, 2\) instead of \(2, 3\)"),
        (_foreign, "b: the optimizer has no momentum_buffer for it"),
        (_negative, r"Invalid learning rate: -1.0 \(lr of param_groups\[0\] must be >= 0\)"),
        (_future, "format_version 99; this release reads up to 1"),
        (_no_groups, "must be a dict with 'state' and 'param_groups'"),
        (_text, "b: exp_avg is not a tensor"),
        (_twice, "names parameter 'b' twice"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(damage: Any, message: str) -> None:
    model = _model("ab")
    optimizer = co.AdamW(list(model.items()))
    _train(optimizer, model, 2)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    _train(optimizer, model, 1, first=2)
    before = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entries in before["state"].items():
        assert all(torch.equal(after["state"][index][k], v) for k, v in entries.items())


def test_another_optimizers_checkpoint_is_refused() -> None:
    model = _model("ab")
    adamw = co.AdamW(list(model.items()))
    _train(adamw, model, 1)
    with pytest.raises(ValueError, match="the checkpoint has no momentum_buffer for it"):
        co.SGD(list(model.items()), momentum=0.9).load_state_dict(adamw.state_dict())


def test_state_dtypes_are_the_optimizers_own() -> None:
    model = {"a": nn.Parameter(torch.randn(4, dtype=torch.bfloat16))}
    wide = co.AdamW(list(model.items()))
    wide.state[model["a"]].update(exp_avg=torch.zeros(4), exp_avg_sq=torch.zeros(4))
    model["a"].grad = torch.randn(4, dtype=torch.bfloat16)
    wide.step()
    narrow = co.AdamW(list(model.items()))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.state[model["a"]]["exp_avg"].dtype == torch.bfloat16
    assert wide.state[model["a"]]["exp_avg"].dtype == torch.float32
    twin = co.AdamW(list(model.items()))
    twin.state[model["a"]].update(exp_avg=torch.zeros(4), exp_avg_sq=torch.zeros(4))
    twin.load_state_dict(_file(wide.state_dict()))
    assert torch.equal(twin.state[model["a"]]["exp_avg"], wide.state[model["a"]]["exp_avg"])


def test_a_snapshot_of_numbers_does_not_move() -> None:
    model = _model("a")
    optimizer = co.AdamW(list(model.items()), lr=0.1)
    _train(optimizer, model, 1)
    snapshot = optimizer.state_dict()
    optimizer.param_groups[0]["lr"].fill_(5.0)
    _train(optimizer, model, 3, first=1)
    assert snapshot["param_groups"][0]["lr"] == 0.1
    assert snapshot["state"][0]["step"] == 1


def test_frozen_state_survives_and_untrained_state_is_reset() -> None:
    model = _model("ab")
    optimizer = co.AdamW(list(model.items()))
    _train(optimizer, model, 2)
    model["a"].requires_grad_(False)
    saved = _file(optimizer.state_dict())
    other = _model("ab")
    other["a"].requires_grad_(False)
    resumed = co.AdamW(list(other.items()))
    assert not resumed.state.get(other["a"])
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state[other["a"]]["exp_avg"], optimizer.state[model["a"]]["exp_avg"])
    del saved["state"][1]
    resumed.load_state_dict(saved)
    assert resumed.state[other["b"]]["step"] == 0
    assert not resumed.state[other["b"]]["exp_avg"].any()


def test_hooks_run_in_torchs_order() -> None:
    model = _model("a")
    optimizer = co.AdamW(list(model.items()), lr=0.1)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, sd: {**sd, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda o, sd: {**sd, "param_groups": [{**g, "lr": 0.7} for g in sd["param_groups"]]}
    )
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(f"loaded {o.hyperparameters()[0]['lr']}"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert saved["param_groups"][0]["lr"] == 0.1
    assert seen == ["save", "loaded 0.7"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("stepped", [False, True])
def test_copies_are_independent_and_go_on(duplicate: Any, stepped: bool) -> None:
    model = _model("ab")
    optimizer = co.AdamW(list(model.items()), lr=0.1, amsgrad=True)
    if stepped:
        _train(optimizer, model, 2)
    twin_model, twin = duplicate((model, optimizer))
    _train(optimizer, model, 3, first=2)
    _train(twin, twin_model, 3, first=2)
    for name in "ab":
        assert torch.equal(model[name], twin_model[name])
        assert model[name] is not twin_model[name]
    twin.param_groups[0]["lr"].fill_(0.0)
    assert optimizer.hyperparameters()[0]["lr"] == 0.1
