"""Checkpoints: by name, whole or not at all, into live tensors, and to and from torch.optim."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, Case, cases, copies, relative_error, required, wide_scalars
from data import make
from kept_memory import MostAlive
from round_trips import pickled, through_a_file
from torch import nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of


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


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_loads_into_live_tensors(lowering: str) -> None:
    model = _model("ab")
    optimizer = co.AdamW(list(model.items()), lr=0.05, lowering=lowering)
    _train(optimizer, model, 2)
    saved = through_a_file(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.values()]
    _train(optimizer, model, 4, first=2)
    after_six = [p.detach().clone() for p in model.values()]
    group = optimizer.param_groups[0]
    group["lr"] = 9.0
    held = {"lr": optimizer.hyperparameter("lr"), "beta": optimizer.hyperparameter("betas")[0]}
    read = group["lr"]
    addresses = [v.data_ptr() for s in optimizer.state.values() for v in s.values()]
    objects = [id(v) for s in optimizer.state.values() for v in s.values()]
    with co.no_recompiles():
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0] is group
        assert optimizer.hyperparameter("lr") is held["lr"]
        assert read == 9.0
        assert group["lr"] == 0.05
        assert optimizer.hyperparameter("betas")[0] is held["beta"]
        assert [v.data_ptr() for s in optimizer.state.values() for v in s.values()] == addresses
        assert [id(v) for s in optimizer.state.values() for v in s.values()] == objects
        for param, weight in zip(model.values(), weights, strict=True):
            param.data.copy_(weight)
        _train(optimizer, model, 4, first=2)
    for param, expected in zip(model.values(), after_six, strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_interchange_with_torch(case: Case) -> None:
    ours = case.parameters(torch.float64)
    theirs = copies(ours, torch.float64)
    optimizer, reference = case.optimizer(ours, **case.kwargs), case.reference(theirs, **case.kwargs)
    for step in range(3):
        case.give_gradients(ours, theirs, step)
        optimizer.step()
        with wide_scalars():
            reference.step()
    own = {"maximize": case.kwargs.get("maximize", False), **_statics(case), **required(case.optimizer)}
    to_ours = case.optimizer(copies(theirs, torch.float64), **own)
    to_ours.load_state_dict(through_a_file(reference.state_dict()))
    to_torch = case.reference(copies(ours, torch.float64), **required(case.optimizer))
    to_torch.load_state_dict(through_a_file(optimizer.state_dict()))
    for group in to_torch.param_groups:
        group["maximize"] = case.kwargs.get("maximize", False)
    first, second = to_ours.param_groups[0]["params"], to_torch.param_groups[0]["params"]
    for step in range(3, 8):
        case.give_gradients(ours, theirs, step)
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
    rule = case.optimizer._rule
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
    optimizer.load_state_dict(through_a_file(saved))
    assert optimizer.param_groups[0]["foreach"] is None
    assert optimizer.param_groups[0]["capturable"] is False
    _train(optimizer, ours, 1, first=2)
    assert optimizer.state[ours["a"]]["step"] == 3


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


class TestNamesOfTheCheckpoint:
    """Either side's names stay, as in torch.optim; where both have some, the optimizer's own do."""

    @pytest.mark.parametrize("kind", [co.AdamW, torch.optim.AdamW], ids=["ours", "torch"])
    @pytest.mark.parametrize("hyperparameters", ["checkpoint", "keep"])
    def test_are_taken_over_by_an_optimizer_without(self, kind: Any, hyperparameters: Any) -> None:
        model = _model("ab")
        saved = through_a_file(kind([{"params": [("a", model["a"])]}, {"params": [("b", model["b"])]}]).state_dict())
        twins = [[{"params": [p]} for p in _model("xy").values()] for _ in range(2)]
        ours, theirs = co.AdamW(twins[0]), torch.optim.AdamW(twins[1])
        ours.load_state_dict(saved, hyperparameters=hyperparameters)
        theirs.load_state_dict(saved)
        for optimizer in (ours, theirs):
            assert [g["param_names"] for g in optimizer.state_dict()["param_groups"]] == [["a"], ["b"]]
        assert [g["params"] for g in co.named_state_dict(ours)["param_groups"]] == [["a"], ["b"]]
        later = pickled(ours)
        assert later.load_state_dict(saved) == co.LoadReport([], [], [], [])
        ours.load_state_dict(co.AdamW([{"params": [p]} for p in model.values()]).state_dict())
        assert [g["param_names"] for g in ours.param_groups] == [["a"], ["b"]]

    def test_stand_in_messages(self) -> None:
        model = _model("ab")
        optimizer = co.AdamW(list(_model("xy").values()))
        x, y = optimizer.param_groups[0]["params"]
        optimizer.step()
        step = engine_of(optimizer).step
        optimizer.load_state_dict(co.AdamW(model).state_dict())
        assert engine_of(optimizer).current() is step  # a graph of it stays valid
        y.grad = torch.ones_like(y).to_sparse()
        with pytest.raises(TypeError, match=r"sparse gradients.*; 'b' has one"):
            optimizer.step()
        y.grad, optimizer.state[x]["exp_avg"] = None, torch.ones(1)
        with pytest.raises(ValueError, match="state 'exp_avg' of 'a' must have shape"):
            optimizer.step()

    def test_of_tied_parameters(self) -> None:
        model = _model(["embed"])
        saved = co.SGD({**model, "head": model["embed"]}).state_dict()
        optimizer = co.SGD(_model("x").values())
        optimizer.load_state_dict(saved)
        other = co.SGD(_model(["head"]))
        assert not any(co.load_named_state_dict(other, co.named_state_dict(optimizer)))

    def test_own_names_stay(self) -> None:
        saved = co.AdamW({f"module.{n}": p for n, p in _model("ab").items()}).state_dict()
        optimizer = co.AdamW(_model("ba"))
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["param_names"] == ["b", "a"]

    def test_of_some_groups_only_are_not(self) -> None:
        """All groups have names, or none."""
        saved = co.AdamW(_groups(_model("ab"), "a", "b")).state_dict()
        del saved["param_groups"][0]["param_names"]
        optimizer = co.AdamW([{"params": [p]} for p in _model("xy").values()])
        optimizer.load_state_dict(saved)
        assert not any("param_names" in group for group in optimizer.param_groups)

    def test_of_a_parameter_that_is_listed_twice_stay(self) -> None:
        p, q = _model("xy").values()
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = co.AdamW([p, q, p])
        with pytest.warns(UserWarning, match="duplicate"):
            theirs = torch.optim.AdamW([("a", p), ("b", q), ("c", p)])
        optimizer.load_state_dict(theirs.state_dict())
        optimizer.param_groups[0]["maximize"] = True  # the step is made anew
        optimizer.step()
        assert optimizer.param_groups[0]["param_names"] == theirs.param_groups[0]["param_names"]

    def test_stay_with_their_parameters_when_the_list_is_edited(self) -> None:
        model = _model("abc")
        optimizer = co.AdamW(_model("xyz").values())
        optimizer.load_state_dict(co.AdamW(model).state_dict())
        params = optimizer.param_groups[0]["params"]
        params.append(nn.Parameter(torch.ones(2, 3)))
        params.pop(0)
        twins = dict(zip(("b", "c", "param_groups[0]['params'][2]"), params, strict=True))
        _train(optimizer, twins, 2)
        assert co.named_state_dict(optimizer)["param_groups"][0]["params"] == list(twins)
        params[:2] = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))  # as those who shard parameters do
        del params[2]
        optimizer.step()
        assert co.named_state_dict(optimizer)["param_groups"][0]["params"] == ["b", "c"]

    def test_a_refused_checkpoint_gives_none(self) -> None:
        saved = co.AdamW(_model("ab")).state_dict()
        saved["state"][1]["exp_avg"] = torch.zeros(3, 2)
        optimizer = co.AdamW(_model("xy").values())
        with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[1\]: exp_avg has shape"):
            optimizer.load_state_dict(saved)
        assert "param_names" not in optimizer.param_groups[0]


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
    twin.load_state_dict(through_a_file(wide.state_dict()))
    assert torch.equal(twin.state[model["a"]]["exp_avg"], wide.state[model["a"]]["exp_avg"])


@pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {}), ("Adagrad", {"initial_accumulator_value": 0.5}), ("NAdam", {})]
)
def test_what_was_saved_before_the_first_step_starts_anew(name: str, options: dict[str, Any]) -> None:
    """As in torch.optim also if nobody copied it, and its buffers are those that steps change: searches for a rate do so."""
    models = []
    for optim in (co, torch.optim):
        model = _model("ab")
        optimizer = getattr(optim, name)(list(model.values()), lr=0.1, **options)
        start, weights = optimizer.state_dict(), {n: p.detach().clone() for n, p in model.items()}
        for _ in range(2):
            _train(optimizer, model, 3)
            optimizer.load_state_dict(start)
            with torch.no_grad():
                for n, p in model.items():
                    p.copy_(weights[n])
        _train(optimizer, model, 3)
        models.append(model)
    if name == "Adagrad":  # torch's has state from construction, in the state dict as it is
        models[1] = _model("ab")
        _train(torch.optim.Adagrad(list(models[1].values()), lr=0.1, **options), models[1], 3)
    assert relative_error(list(models[0].values()), list(models[1].values())) < 1e-6


def test_frozen_state_survives_and_untrained_state_is_reset() -> None:
    model = _model("ab")
    optimizer = co.AdamW(list(model.items()))
    _train(optimizer, model, 2)
    model["a"].requires_grad_(False)
    saved = through_a_file(optimizer.state_dict())
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


@pytest.mark.parametrize("named", [False, True], ids=["indexed", "named"])
def test_a_changed_model_goes_on_where_it_was(named: bool) -> None:
    """Two layers of one shape swapped, groups cut elsewhere, one layer added and one removed."""
    straight = _model(["in", "first", "second", "gone", "out"])
    items = list(straight.items())
    optimizer = co.AdamW([{"params": items[:2]}, {"params": items[2:]}], lr=0.05, eps=1e-3)
    _train(optimizer, straight, 3)
    saved = through_a_file(co.named_state_dict(optimizer) if named else optimizer.state_dict())

    changed = _model(["in", "second", "first", "new", "out"])
    common = ["in", "first", "second", "out"]
    for name in common:
        changed[name].data.copy_(straight[name])
    items = list(changed.items())
    resumed = co.AdamW([{"params": items[:3]}, {"params": items[3:]}], lr=0.05, eps=1e-3)
    with pytest.raises(ValueError, match=r"\(AdamW\); missing: new; unexpected: gone$"):
        resumed.load_state_dict(saved)
    assert resumed.load_state_dict(saved, strict=False) == co.LoadReport(["new"], ["gone"], [], [])
    for name in common:
        for key, value in optimizer.state[straight[name]].items():
            assert torch.equal(resumed.state[changed[name]][key], value)
    for step in range(3, 8):
        _train(optimizer, straight, 1, first=step)
        _train(resumed, changed, 1, first=step)
        assert all(torch.equal(straight[name], changed[name]) for name in common), step


class TestNamed:
    def test_form(self) -> None:
        model = _model(["linear0.weight", "linear0.bias"])
        optimizer = co.AdamW([(f"module._orig_mod.{n}", p) for n, p in model.items()], lr=0.1)
        _train(optimizer, model, 1)
        saved = through_a_file(co.named_state_dict(optimizer))
        assert list(saved["state"]) == ["linear0.weight", "linear0.bias"]
        assert set(saved["state"]["linear0.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
        assert saved["param_groups"][0]["params"] == ["linear0.weight", "linear0.bias"]
        assert saved["param_groups"][0]["lr"] == 0.1
        assert "param_names" not in saved["param_groups"][0]

    def test_several_models_in_one_optimizer(self) -> None:
        models = {name: nn.Linear(2, 2) for name in ("generator", "critic")}
        named = {f"{prefix}.{n}": p for prefix, model in models.items() for n, p in model.named_parameters()}
        optimizer = co.AdamW(named)
        _train(optimizer, named, 2)
        other = co.AdamW({n: nn.Parameter(p.detach().clone()) for n, p in reversed(named.items())})
        assert not any(co.load_named_state_dict(other, through_a_file(co.named_state_dict(optimizer))))
        for name, param in zip(other.param_groups[0]["param_names"], other.param_groups[0]["params"], strict=True):
            assert torch.equal(other.state[param]["exp_avg"], optimizer.state[named[name]]["exp_avg"])

    def test_names_are_needed_on_both_sides(self) -> None:
        model = _model("ab")
        named, unnamed = co.AdamW(model), co.AdamW(model.values())
        with pytest.raises(ValueError, match="the parameters have no names"):
            co.named_state_dict(unnamed)
        with pytest.raises(ValueError, match="the optimizer's parameters have no names"):
            co.load_named_state_dict(unnamed, co.named_state_dict(named))
        with pytest.raises(ValueError, match=r"no names for the parameters of param_groups\[0\]"):
            co.load_named_state_dict(named, unnamed.state_dict())

    def test_keep_and_strict(self) -> None:
        model = _model("ab")
        saved = co.named_state_dict(co.AdamW(_model("ac"), lr=0.5))
        optimizer = co.AdamW(model, lr=0.125)
        with pytest.raises(ValueError, match="missing: b; unexpected: c"):
            co.load_named_state_dict(optimizer, saved)
        report = co.load_named_state_dict(optimizer, saved, strict=False, hyperparameters="keep")
        assert report == co.LoadReport(["b"], ["c"], [], [])
        assert optimizer.hyperparameters()[0]["lr"] == 0.125


class TestTied:
    """A tensor under several names is one parameter, and its state is found under every one of them."""

    def _pair(self, *names: str) -> dict[str, nn.Parameter]:
        weight = nn.Parameter(torch.ones(2, 3))
        return dict.fromkeys(names, weight)

    def test_it_is_updated_once(self) -> None:
        tied = self._pair("embed.weight", "head.weight")
        optimizer = co.SGD(tied, lr=0.5)
        assert optimizer.param_groups[0]["param_names"] == ["embed.weight"]
        tied["embed.weight"].grad = torch.ones(2, 3)
        optimizer.step()
        assert torch.equal(tied["head.weight"], torch.full((2, 3), 0.5))

    def test_a_module_lists_its_tied_parameters(self) -> None:
        model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
        model["head"].weight = model["embed"].weight
        optimizer = co.AdamW(model.named_parameters(remove_duplicate=False))
        assert co.named_state_dict(optimizer)["aliases"] == {"head.weight": "embed.weight"}

    @pytest.mark.parametrize(
        ("saved_names", "names"),
        [
            (("embed.weight", "head.weight"), ("head.weight",)),
            (("head.weight",), ("embed.weight", "head.weight")),
            (("embed.weight", "head.weight"), ("head.weight", "embed.weight")),
            (("module.embed.weight", "module.head.weight"), ("head.weight", "out.weight")),
        ],
    )
    @pytest.mark.parametrize("named", [False, True])
    def test_either_name_finds_it(self, saved_names: tuple[str, ...], names: tuple[str, ...], named: bool) -> None:
        source = self._pair(*saved_names)
        optimizer = co.AdamW(source)
        _train(optimizer, dict(list(source.items())[:1]), 2)
        saved = through_a_file(co.named_state_dict(optimizer) if named else optimizer.state_dict())
        target = self._pair(*names)
        resumed = pickled(co.AdamW(target))
        assert resumed.load_state_dict(saved) == co.LoadReport([], [], [], [])
        (state,), (expected,) = resumed.state.values(), optimizer.state.values()
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert state["step"] == 2

    def test_an_alias_never_takes_what_another_parameter_owns(self) -> None:
        untied = {name: nn.Parameter(torch.ones(2, 3)) for name in ("embed.weight", "head.weight")}
        optimizer = co.AdamW(untied)
        _train(optimizer, untied, 2)
        tied = co.AdamW(self._pair("embed.weight", "head.weight"))
        with pytest.raises(ValueError, match=r"; unexpected: head.weight$"):
            tied.load_state_dict(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"; missing: head.weight$"):
            optimizer.load_state_dict(tied.state_dict())


def test_a_module_that_is_named_like_a_wrapper() -> None:
    """Removing "module." would make both names one."""
    model = _model(["weight", "module.weight"])
    optimizer = co.AdamW(model)
    _train(optimizer, model, 2)
    other = _model(["module.weight", "weight"])
    resumed = co.AdamW(other)
    assert resumed.load_state_dict(through_a_file(optimizer.state_dict())) == co.LoadReport([], [], [], [])
    for name, param in model.items():
        assert torch.equal(resumed.state[other[name]]["exp_avg"], optimizer.state[param]["exp_avg"])


@pytest.mark.parametrize(
    ("saved_names", "names", "expected"),
    [
        (["enc.module.w"], ["enc.module.w", "enc.w"], {"enc.module.w": "enc.module.w"}),
        (["enc.module.w", "enc.w"], ["enc.module.w"], {"enc.module.w": "enc.module.w"}),
        (["enc.w"], ["enc.module.w", "enc.w"], {"enc.w": "enc.w"}),
        (["module.enc.w"], ["enc.module.w", "enc.w"], {}),
        (["module.enc.module.w", "module.enc.w"], ["enc.w"], {}),
        (["module.module.w", "module.w"], ["module.w", "w"], {"module.w": "module.w"}),
        (["module.w", "v"], ["v", "_orig_mod.w"], {"v": "v", "_orig_mod.w": "module.w"}),
    ],
    ids=str,
)
def test_a_name_as_it_is_comes_before_one_without_prefixes(
    saved_names: list[str], names: list[str], expected: dict[str, str]
) -> None:
    """What could be either of two parameters is neither."""
    source, target = _model(saved_names), _model(names)
    optimizer, resumed = co.AdamW(source), co.AdamW(target)
    _train(optimizer, source, 1)
    report = resumed.load_state_dict(optimizer.state_dict(), strict=False)
    missing = [name for name in names if name not in expected]
    assert report == co.LoadReport(missing, [name for name in saved_names if name not in expected.values()], [], [])
    for name, other in expected.items():
        assert torch.equal(resumed.state[target[name]]["exp_avg"], optimizer.state[source[other]]["exp_avg"])
    assert not any(resumed.state[target[name]]["step"] for name in missing)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (lambda m: m.values(), [None]),
        (lambda m: iter(m.items()), [["a", "b"]]),
        (dict, [["a", "b"]]),
        (lambda m: [{"params": m.values()}], [None]),
        (lambda m: [{"params": p} for p in m.values()], [None, None]),
        (lambda m: [{"params": [item]} for item in m.items()], [["a"], ["b"]]),
        (lambda m: [{"params": {n: p}} for n, p in m.items()], [["a"], ["b"]]),
        (lambda m: [{"params": {"a": m["a"]}}, {"params": iter([("b", m["b"])])}], [["a"], ["b"]]),
    ],
)
def test_constructor_forms(form: Any, names: list[Any]) -> None:
    model = _model("ab")
    optimizer = co.AdamW(form(model))
    assert [p for g in optimizer.param_groups for p in g["params"]] == list(model.values())
    assert [g.get("param_names") for g in optimizer.param_groups] == names


@pytest.mark.parametrize(
    "params",
    [
        lambda m: [("a", m["a"]), m["b"]],
        lambda m: [m["a"], ("b", m["b"])],
        lambda m: [{"params": [("a", m["a"])]}, {"params": [m["b"]]}],
        lambda m: [{"params": [m["a"]]}, {"params": {"b": m["b"]}}],
    ],
)
def test_names_for_some_parameters_only_are_an_error(params: Any) -> None:
    model = _model("ab")
    with pytest.raises(ValueError, match="should be with/without names"):
        co.AdamW(params(model))


def test_the_hook_of_torchs_documentation() -> None:
    """It reorders the state by name before the load, for an optimizer that goes by position."""

    def names_matching(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        adapted = copy.deepcopy(optimizer.state_dict())
        for own, loaded in zip(adapted["param_groups"], state_dict["param_groups"], strict=True):
            own.update({k: v for k, v in loaded.items() if k not in ("params", "param_names")})
            for index, name in zip(own["params"], own["param_names"], strict=True):
                loaded_index = loaded["params"][loaded["param_names"].index(name)]
                adapted["state"][index] = copy.deepcopy(state_dict["state"][loaded_index])
        return adapted

    model, other = _model("abc"), _model("cab")
    optimizer, resumed = co.AdamW(model, lr=0.5), co.AdamW(other)
    _train(optimizer, model, 2)
    resumed.register_load_state_dict_pre_hook(names_matching)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.hyperparameters() == optimizer.hyperparameters()
    for name, param in model.items():
        assert torch.equal(resumed.state[other[name]]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_what_is_loaded_is_not_kept() -> None:
    model = _model("a")
    saved = co.AdamW(model).state_dict()
    saved["param_groups"][0]["initial_lr"] = torch.tensor(0.5)
    optimizer = co.AdamW(model)
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["initial_lr"].fill_(9.0)
    assert optimizer.param_groups[0]["initial_lr"] == 0.5


@pytest.mark.parametrize("case", make.FIRST)
@pytest.mark.parametrize("version", [1])
def test_stored_checkpoints_of_every_format_version(version: int, case: str) -> None:
    path = Path(make.__file__).parent / f"format_version_{version}.pt"
    stored = torch.load(path, weights_only=True)[case]
    assert stored["state_dict"]["format_version"] == version
    params = {name: nn.Parameter(value) for name, value in stored["params"].items()}
    optimizer = make.first_optimizer(case, dict(reversed(params.items())))
    assert optimizer.load_state_dict(stored["state_dict"]) == co.LoadReport([], [], [], [])
    make.first_train(optimizer, params, 3, 6)
    for name, param in params.items():
        assert torch.allclose(param, stored["after"][name], rtol=1e-12, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_less_memory_than_the_largest_tensor(dtype: str) -> None:
    params = {f"layer{i}": nn.Parameter(torch.zeros(1 << 20)) for i in range(4)}
    optimizer = co.AdamW(params)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    for index, entries in saved["state"].items():
        saved["state"][index] = {
            k: v.to(getattr(torch, dtype), copy=True) if v.dim() else v.clone() for k, v in entries.items()
        }
    with MostAlive() as alive:
        optimizer.load_state_dict(saved)
    assert alive.bytes < params["layer0"].nbytes


@pytest.mark.parametrize("optimizer", [co.SGD, co.RMSprop], ids=lambda c: c.__name__)
class TestMomentumOfZero:
    """A buffer is there or not, as momentum is or once was another number than 0."""

    @staticmethod
    def _trained(cls: Any, *momenta: float) -> tuple[nn.Parameter, Any]:
        weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        made = cls([weight], lr=0.1, momentum=momenta[0])
        for i, momentum in enumerate(momenta):
            made.param_groups[0]["momentum"] = momentum
            weight.grad = torch.tensor([0.3, i + 1.0], dtype=torch.float64)
            made.step()
        return weight, made

    @pytest.mark.parametrize("momenta", [(0.9, 0.0), (0.0, 0.0), (0.9, 0.9), (0.0, 0.9)], ids=str)
    @pytest.mark.parametrize("own", [0.0, 0.5])
    @pytest.mark.parametrize("source", ["ours", "torch"])
    def test_loads_and_goes_on_as_torch(
        self, optimizer: type[co.CompiledOptimizer], momenta: tuple[float, ...], own: float, source: str
    ) -> None:
        reference = getattr(torch.optim, optimizer.__name__)
        fails = momenta == (0.0, 0.9) and optimizer is co.RMSprop  # in torch, where momentum is raised from 0
        weight, trained = self._trained(optimizer if source == "ours" or fails else reference, *momenta)
        saved = copy.deepcopy(trained.state_dict())
        sides = []
        for cls in (optimizer, reference):
            param = nn.Parameter(weight.detach().clone())
            made = cls([param], lr=0.7, momentum=own)
            if cls is optimizer:
                assert not any(made.load_state_dict(saved))
            else:
                made.load_state_dict(saved)
            for i in range(3):
                param.grad = torch.tensor([0.2, 0.1 * i], dtype=torch.float64)
                made.step()
            sides.append(param)
        assert relative_error(sides[:1], sides[1:]) < 1e-14

    def test_into_itself(self, optimizer: type[co.CompiledOptimizer]) -> None:
        weight, made = self._trained(optimizer, 0.9, 0.0)
        before = copy.deepcopy(made.state_dict())
        made.load_state_dict(copy.deepcopy(before))
        after = made.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])
        weight.grad = torch.ones(2, dtype=torch.float64)
        made.step()


@pytest.mark.parametrize("lr", [0.0, -1e-18, -1e-17])
@pytest.mark.parametrize("optimizer", [co.AdamW, co.SparseAdam, co.LBFGS], ids=lambda c: c.__name__)
def test_a_learning_rate_that_a_scheduler_rounded_to_its_bound(optimizer: type[co.CompiledOptimizer], lr: float) -> None:
    made = optimizer([nn.Parameter(torch.ones(2, 2))], lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 2 * lr)
    saved = copy.deepcopy(made.state_dict())
    assert saved["param_groups"][0]["lr"] == lr
    made.load_state_dict(saved)
    twin = copy.deepcopy(made)
    twin.load_state_dict(saved)
    assert twin.param_groups[0]["lr"] == lr
