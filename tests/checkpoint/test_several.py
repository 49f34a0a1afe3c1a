"""One named state dict of several optimizers for different parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loading import content
from round_trips import through_a_file, through_a_folder
from torch import nn

import compiled_optim as co

SHAPES = {"a.weight": (4, 3), "b.weight": (3, 4), "a.bias": (4,), "norm": (3,), "scale": ()}


def _model() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return {n: nn.Parameter(torch.randn(s, dtype=torch.float64, generator=generator)) for n, s in SHAPES.items()}


def _train(optimizers: Any, model: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.values():
            param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def _pair(model: dict[str, nn.Parameter], lr: float = 0.05) -> list[co.CompiledOptimizer]:
    """Muon for the matrices, and AdamW with two groups for the rest."""
    muon = co.Muon({n: model[n] for n in ("a.weight", "b.weight")}, lr=2 * lr, momentum=0.7, weight_decay=0.3)
    groups = [
        {"params": {n: model[n] for n in ("a.bias", "norm")}, "weight_decay": 0.4},
        {"params": {"scale": model["scale"]}},
    ]
    return [muon, co.AdamW(groups, lr=lr, betas=(0.6, 0.8), eps=0.03)]


def _adamws(model: dict[str, nn.Parameter], *names: tuple[str, ...], **options: Any) -> list[co.CompiledOptimizer]:
    return [co.AdamW({n: model[n] for n in some}, **{"lr": 0.05, "betas": (0.6, 0.8), **options}) for some in names]


def _values(optimizer: co.CompiledOptimizer) -> tuple[Any, ...]:
    """State and hyperparameters, without addresses and in an order of their own."""
    saved = co.named_state_dict(optimizer)
    state = {name: {k: v.tolist() for k, v in entries.items()} for name, entries in saved["state"].items()}
    return state, saved["param_groups"]


def _same_future(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    for optimizers, model in (first, second):
        _train(optimizers, model, range(10, 13))
    for name in SHAPES:
        assert torch.equal(first[1][name], second[1][name])


class TestThereAndBack:
    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    @pytest.mark.parametrize("way", [through_a_file, through_a_folder, lambda saved, target, path: copy.deepcopy(saved)])
    def test_through_files(self, way: Callable[..., Any], tmp_path: Any) -> None:
        model = _model()
        pair = _pair(model)
        _train(pair, model, range(3))
        twin = {n: nn.Parameter(p.detach().clone()) for n, p in model.items()}
        others = _pair(twin, lr=0.9)
        saved = way(co.named_state_dict(pair), others, tmp_path)
        assert co.load_named_state_dict(others, saved) == co.LoadReport([], [], [], [])
        _same_future((pair, model), (others, twin))

    def test_each_group_tells_its_optimizer(self) -> None:
        saved = co.named_state_dict(_pair(_model()))
        assert saved["optimizers"] == ["Muon", "AdamW"]
        assert [(group["optimizer"], group["params"]) for group in saved["param_groups"]] == [
            (0, ["a.weight", "b.weight"]),
            (1, ["a.bias", "norm"]),
            (1, ["scale"]),
        ]
        assert set(saved["state"]) == set(SHAPES)
        assert saved["state"]["scale"].keys() == {"step", "exp_avg", "exp_avg_sq"}

    def test_a_list_of_one_is_like_one(self) -> None:
        model = _model()
        [one] = _adamws(model, tuple(SHAPES))
        _train([one], model, range(3))
        saved = co.named_state_dict([one])
        [other] = _adamws(_model(), tuple(SHAPES), lr=0.9)
        assert not any(co.load_named_state_dict(other, saved))
        assert _values(other) == _values(one)
        assert "optimizer" not in other.param_groups[0]
        [third] = _adamws(_model(), tuple(SHAPES), lr=0.9)
        assert not any(co.load_named_state_dict([third], co.named_state_dict(one)))
        assert _values(third) == _values(one)

    def test_order_prefixes_and_ties(self) -> None:
        model = _model()
        tied = nn.Parameter(torch.ones(2, dtype=torch.float64))
        first = [co.AdamW([("module.x", tied), ("module.y", tied)], lr=0.5), *_pair(model)]
        _train(first, {**model, "x": tied}, range(3))
        saved = copy.deepcopy(co.named_state_dict(first))
        assert saved["aliases"] == {"y": "x"}
        other = nn.Parameter(torch.ones(2, dtype=torch.float64))
        second = [*_pair(_model(), lr=0.9)[::-1], co.AdamW({"_orig_mod.y": other}, lr=0.9)]
        assert not any(co.load_named_state_dict(second, saved))
        assert _values(second[0]) == _values(first[2])
        assert second[2].param_groups[0]["lr"] == 0.5
        assert torch.equal(second[2].state[other]["exp_avg"], first[0].state[tied]["exp_avg"])

    def test_lbfgs_beside_another(self) -> None:
        def made(model: dict[str, nn.Parameter]) -> list[co.CompiledOptimizer]:
            lbfgs = co.LBFGS({n: model[n] for n in ("a.weight", "norm")}, lr=0.1, max_iter=3)
            return [*_adamws(model, ("scale",)), lbfgs]

        def trained(optimizers: Any, model: dict[str, nn.Parameter]) -> None:
            def loss() -> Any:
                optimizers[1].zero_grad()
                total = sum(((p - 1) ** 2).sum() for p in (model["a.weight"], model["norm"]))
                total.backward()
                return total

            optimizers[1].step(loss)

        model = _model()
        first = made(model)
        trained(first, model)
        saved = copy.deepcopy(co.named_state_dict(first))
        twin = {n: nn.Parameter(p.detach().clone()) for n, p in model.items()}
        second = made(twin)
        assert not any(co.load_named_state_dict(second, saved))
        trained(first, model)
        trained(second, twin)
        assert torch.equal(model["a.weight"], twin["a.weight"])


class TestOtherSplits:
    def test_state_goes_where_its_parameter_is_now(self) -> None:
        model = _model()
        first = _adamws(model, ("a.weight", "a.bias", "norm"), ("b.weight", "scale"))
        _train(first, model, range(3))
        saved = copy.deepcopy(co.named_state_dict(first))
        twin = {n: nn.Parameter(p.detach().clone()) for n, p in model.items()}
        second = _adamws(twin, ("scale", "a.weight"), ("norm",), ("b.weight", "a.bias"), lr=0.9)
        assert not any(co.load_named_state_dict(second, saved))
        _same_future((first, model), (second, twin))

    @pytest.mark.parametrize("order", [1, -1])
    def test_state_changes_places(self, order: int) -> None:
        """The sources are live tensors, which are written too, some of them before they are read."""
        model = {name: nn.Parameter(torch.ones(3, dtype=torch.float64)) for name in "abc"}
        optimizers = _adamws(model, ("a", "b"), ("c",))[::order]
        _train(optimizers, model, range(2))
        saved = co.named_state_dict(optimizers)
        before = copy.deepcopy(saved["state"])
        moved = {"a": "c", "b": "a", "c": "b"}
        saved["state"] = {name: saved["state"][source] for name, source in moved.items()}
        assert not any(co.load_named_state_dict(optimizers, saved))
        after = co.named_state_dict(optimizers)["state"]
        for name, source in moved.items():
            assert all(torch.equal(after[name][key], before[source][key]) for key in ("exp_avg", "exp_avg_sq"))
            assert not torch.equal(after[name]["exp_avg"], before[name]["exp_avg"])

    def test_hyperparameters_that_disagree_are_refused(self) -> None:
        model = _model()
        first = _adamws(model, ("a.weight", "a.bias", "norm"), ("b.weight", "scale"))
        first[1].param_groups[0]["lr"] = 0.25
        saved = copy.deepcopy(co.named_state_dict(first))
        second = _adamws(_model(), ("a.weight", "a.bias"), ("norm", "b.weight", "scale"))
        before = list(map(content, second))
        with pytest.raises(
            ValueError, match=r"optimizers\[1\].param_groups\[0\]: its parameters were in groups with differ"
        ):
            co.load_named_state_dict(second, saved)
        assert list(map(content, second)) == before
        assert not any(co.load_named_state_dict(second, saved, hyperparameters="keep"))

    def test_another_kind_is_refused(self) -> None:
        model = _model()
        first = _pair(model)
        _train(first, model, range(2))
        second = [
            co.Muon({"a.weight": nn.Parameter(torch.ones(4, 3))}),
            co.AdamW({n: nn.Parameter(torch.ones(s)) for n, s in SHAPES.items() if n != "a.weight"}),
        ]
        before = list(map(content, second))
        with pytest.raises(
            ValueError, match=r"\(Muon, AdamW\); mismatched: b.weight: the checkpoint has no exp_avg, exp_avg_sq"
        ):
            co.load_named_state_dict(second, co.named_state_dict(first))
        assert list(map(content, second)) == before

    def test_one_of_several_takes_its_part_only(self) -> None:
        model = _model()
        first = _pair(model)
        _train(first, model, range(2))
        saved = copy.deepcopy(co.named_state_dict(first))
        second = _pair(_model(), lr=0.9)[1]
        with pytest.raises(ValueError, match=r"does not match .*\(AdamW\); unexpected: a.weight, b.weight"):
            co.load_named_state_dict(second, saved)
        report = co.load_named_state_dict(second, saved, strict=False)
        assert report == co.LoadReport([], ["a.weight", "b.weight"], [], [])
        assert "optimizer" not in second.param_groups[0]
        assert _values(second) == _values(first[1])


class TestAllOrNothing:
    def test_an_unreadable_group_names_its_optimizer(self) -> None:
        first = _pair(_model())
        saved = copy.deepcopy(co.named_state_dict(first))
        saved["param_groups"][1]["lr"] = "high"
        before = list(map(content, first))
        with pytest.raises(ValueError, match=r"optimizers\[1\] \(AdamW\): lr of param_groups\[0\] is not a number"):
            co.load_named_state_dict(first, saved)
        assert list(map(content, first)) == before

    def test_hooks_run_around_it(self) -> None:
        first, seen = _pair(_model()), []
        for index, optimizer in enumerate(first):
            optimizer.register_load_state_dict_pre_hook(lambda o, saved, i=index: seen.append((i, len(saved["state"]))))
            optimizer.register_load_state_dict_post_hook(lambda o, i=index: seen.append(i))
        co.load_named_state_dict(first, co.named_state_dict(first))
        assert seen == [(0, 2), (1, 3), 0, 1]


class TestMistakes:
    def test_a_parameter_in_two_optimizers(self) -> None:
        model = _model()
        both = _adamws(model, ("a.weight", "norm"), ("norm", "scale"))
        for call in (co.named_state_dict, lambda o: co.load_named_state_dict(o, co.named_state_dict(o[0]))):
            with pytest.raises(
                ValueError, match=r"optimizers\[0\] \(AdamW\) and optimizers\[1\] \(AdamW\) both have the param.*'norm'"
            ):
                call(both)
        with pytest.raises(ValueError, match=r"both have the parameter 'a.weight'"):
            co.named_state_dict([both[0], both[0]])

    def test_two_parameters_of_one_name(self) -> None:
        pair = [co.AdamW({"w": nn.Parameter(torch.ones(2))}), co.SGD({"module.w": nn.Parameter(torch.ones(2))})]
        with pytest.raises(
            ValueError, match=r"optimizers\[0\] \(AdamW\) and optimizers\[1\] \(SGD\) both have a parameter 'w'"
        ):
            co.named_state_dict(pair)

    def test_no_names(self) -> None:
        pair = [co.AdamW({"w": nn.Parameter(torch.ones(2))}), co.SGD([nn.Parameter(torch.ones(2))])]
        with pytest.raises(ValueError, match=r"optimizers\[1\] \(SGD\): the parameters have no names"):
            co.named_state_dict(pair)
        with pytest.raises(ValueError, match=r"optimizers\[1\] \(SGD\)'s parameters have no names"):
            co.load_named_state_dict(pair, co.named_state_dict(pair[0]))

    def test_what_is_no_parameters(self) -> None:
        pair = _pair(_model())
        saved = co.named_state_dict(pair)
        pair[1].state["ema"] = 3
        with pytest.raises(ValueError, match=r"optimizers\[1\] \(AdamW\): the state holds 'ema', which is no parameter's"):
            co.named_state_dict(pair)
        saved["state"]["lost"] = 3
        with pytest.raises(ValueError, match=r"the state holds 'lost', which is no parameter's"):
            co.load_named_state_dict(pair, saved)

    def test_an_entry_of_the_same_name(self) -> None:
        pair = _pair(_model())
        pair[1].param_groups[1]["optimizer"] = "mine"
        with pytest.raises(ValueError, match=r"optimizers\[1\] \(AdamW\): a group has an entry 'optimizer', which"):
            co.named_state_dict(pair)
        assert co.named_state_dict(pair[1])["param_groups"][1]["optimizer"] == "mine"
        assert pair[1].param_groups[1]["optimizer"] == "mine"

    @pytest.mark.parametrize(
        "call", [co.named_state_dict, lambda o: co.load_named_state_dict(o, {"state": {}, "param_groups": []})]
    )
    def test_what_is_no_optimizer(self, call: Callable[..., Any]) -> None:
        theirs = torch.optim.SGD([nn.Parameter(torch.ones(2))])
        for wrong in (theirs, [theirs], {"a": theirs}, None):
            with pytest.raises(TypeError, match="an optimizer of this package, or a list of some, is needed"):
                call(wrong)
        with pytest.raises(ValueError, match="the list of optimizers is empty"):
            call([])

    def test_strict_and_hyperparameters_are_checked(self) -> None:
        pair = _pair(_model())
        with pytest.raises(ValueError, match="hyperparameters must be 'checkpoint' or 'keep', got 'all'"):
            co.load_named_state_dict(pair, co.named_state_dict(pair), hyperparameters="all")
