"""What hooks and wrappers keep in an optimizer's state goes where the state goes, as with torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import reference_of, registry, required
from loading import SHAPE, Uncopyable, by_name, content, freed, train, trained
from round_trips import pickled, through_a_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import compiled_optim as co
from compiled_optim.checkpoint.state_dict import known_names
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import Number, buffer, hyper

KINDS = [co.AdamW, co.SGD, co.Muon, co.LBFGS]
BESIDE = {"ema_step": 3, ("a", 1): "text", None: [torch.ones(2), None], "decay": {"value": 0.5, "step": 7}}


def _beside(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _refuses(optimizer: co.CompiledOptimizer, saved: Any, message: str) -> None:
    before, beside = content(optimizer), _beside(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert content(optimizer) == before
    assert _beside(optimizer) == beside


class TestBesideTheParameters:
    @pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
    @pytest.mark.parametrize("form", ["indexed", "named", "file"])
    def test_is_saved_and_loaded_as_by_torch(self, kind: type[co.CompiledOptimizer], form: str) -> None:
        ours = trained(kind)
        theirs = reference_of(kind)(ours.param_groups[0]["params"])
        for optimizer in (ours, theirs):
            for key, value in copy.deepcopy(BESIDE).items():
                optimizer.state[key] = value
        if not (kind is co.LBFGS and form == "named"):
            saved = {"indexed": ours.state_dict, "named": lambda: co.named_state_dict(ours), "file": ours.state_dict}[form]()
            saved = through_a_file(saved) if form == "file" else saved
            assert {key for key in saved["state"] if key in theirs.state_dict()["state"]} >= BESIDE.keys()
            resumed, reference = trained(kind), reference_of(kind)(ours.param_groups[0]["params"])
            resumed.state["old"] = reference.state["old"] = 1
            assert resumed.load_state_dict(saved) == co.LoadReport([], [], [], [])
            reference.load_state_dict(theirs.state_dict())
            assert repr(_beside(resumed)) == repr(_beside(reference)) == repr(BESIDE)
            assert resumed.state[None][0] is not ours.state[None][0]  # unlike torch, which shares it

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
    @pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
    def test_goes_with_copies_groups_and_steps(self, kind: type[co.CompiledOptimizer], duplicate: Any) -> None:
        optimizer = trained(kind)
        optimizer.state.update(copy.deepcopy(BESIDE))
        assert set(BESIDE) <= set(optimizer.state)
        twin = duplicate(optimizer)
        assert repr(_beside(twin)) == repr(BESIDE)
        twin.state = dict(twin.state)
        if kind is not co.LBFGS:
            twin.add_param_group({"params": {"z": nn.Parameter(torch.ones(2, 2))}})
        train(twin)
        assert repr(_beside(twin)) == repr(BESIDE)
        assert twin.state["new"] == {}  # as torch's defaultdict

    @pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
    def test_a_write_is_no_change_to_steps(self, kind: type[co.CompiledOptimizer]) -> None:
        """As SAM writes in each step."""
        optimizer = trained(kind)
        step = engine_of(optimizer).step
        own = optimizer.state[optimizer.param_groups[0]["params"][0]]
        for kept in (optimizer.state, own):
            kept["old_p"] = kept["count"] = 1
            kept["count"] += 1
            kept.update(count=3)
            kept.setdefault("new", 4)
            assert kept.pop("new") == 4
            del kept["old_p"]
        train(optimizer)
        assert engine_of(optimizer).step is step
        assert own["count"] == optimizer.state["count"] == 3
        name = next(iter(own))
        own[name] = own[name].clone()
        train(optimizer)
        assert engine_of(optimizer).step is not step

    def test_looks_like_no_parameters_state(self) -> None:
        """Nor does it where it has nothing, or where the optimizer that loads it has the like."""
        optimizer, resumed = trained(co.AdamW), trained(co.AdamW)
        assert optimizer.state["made by asking"] == {}
        assert not any(resumed.load_state_dict(optimizer.state_dict()))
        assert resumed.state["made by asking"] == {}
        optimizer.state["ema"] = {"step": 3}
        _refuses(resumed, optimizer.state_dict(), "unexpected: the state of 'ema'")
        resumed.state["ema"] = {"step": 0}
        assert not any(resumed.load_state_dict(optimizer.state_dict()))
        assert resumed.state["ema"] == {"step": 3}

    def test_the_state_of_a_parameter_comes_first(self) -> None:
        """torch would lose that of the first parameter."""
        optimizer = trained(co.AdamW)
        optimizer.state[0] = optimizer.state[7] = "mine"
        saved = optimizer.state_dict()["state"]
        assert saved[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert saved[7] == "mine"


def _extra(dtype: torch.dtype = torch.float64) -> dict[Any, Any]:
    return {
        "slow": torch.full((2,), 0.3, dtype=dtype),
        "count": 3,
        "flag": None,
        7: 0.5,
        "nested": {"ema": torch.full((3,), 0.7, dtype=dtype), "list": [torch.full((), 0.9, dtype=dtype), 4]},
        "mask": torch.tensor([True, False]),
        "empty": {},
    }


class TestInAParametersState:
    @pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
    @pytest.mark.parametrize("source", ["ours", "torch"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_is_loaded_as_by_torch(self, kind: type[co.CompiledOptimizer], source: str, dtype: torch.dtype) -> None:
        weight = nn.Parameter(torch.ones(2, 2, dtype=dtype))
        weight.grad = torch.full_like(weight, 0.5)
        saving = kind([weight], lowering="eager") if source == "ours" else reference_of(kind)([weight])
        saving.step(lambda: torch.ones(()))
        saving.state[weight].update(_extra())
        saved = through_a_file(saving.state_dict())
        ours, theirs = kind([weight]), reference_of(kind)([weight])
        for optimizer in (ours, theirs):
            optimizer.state[weight]["old"] = 1
            optimizer.load_state_dict(copy.deepcopy(saved))
        kept = {name: value for name, value in ours.state[weight].items() if name in _extra()}
        assert "old" not in ours.state[weight]
        assert kept.pop("mask").dtype == torch.bool  # torch makes numbers of it
        expected = {name: theirs.state[weight][name] for name in kept}
        assert repr(kept) == repr(expected)
        assert kept["slow"].dtype == kept["nested"]["list"][0].dtype == dtype
        assert kept["slow"].data_ptr() != saved["state"][0]["slow"].data_ptr()

    @pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
    def test_is_found_by_name_and_survives(self, kind: type[co.CompiledOptimizer]) -> None:
        optimizer = trained(kind, "abc")
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            optimizer.state[param]["slow"] = torch.full(SHAPE, float(i))
        resumed = trained(kind, "cab")
        assert not any(resumed.load_state_dict(through_a_file(optimizer.state_dict())))
        for twin in (resumed, copy.deepcopy(resumed), pickled(resumed)):
            if kind is not co.LBFGS:
                twin.add_param_group({"params": {"z": nn.Parameter(torch.ones(SHAPE))}})
            train(twin)
            for name, value in zip("abc", (0.0, 1.0, 2.0), strict=True):
                assert torch.equal(by_name(twin)[name]["slow"], torch.full(SHAPE, value))

    def test_before_the_first_step_of_lbfgs(self) -> None:
        """Which has no entries of its own in a state dict then."""
        optimizer, resumed = trained(co.LBFGS, steps=0), trained(co.LBFGS)
        optimizer.state[optimizer.param_groups[0]["params"][0]]["slow"] = 1
        saved = optimizer.state_dict()
        assert saved["state"] == {0: {"slow": 1}}
        assert not any(resumed.load_state_dict(saved))
        assert by_name(resumed)["a"]["slow"] == 1
        assert not resumed.state_dict()["state"][0].keys() - {"slow"}

    def test_never_costs_what_fits(self) -> None:
        """Of what another optimizer keeps under a name that a third one has, a strict load says that it is foreign."""
        source = trained(co.Adam, amsgrad=True)
        source.state[source.param_groups[0]["params"][0]]["slow"] = torch.ones(2)
        saved = copy.deepcopy(source.state_dict())
        optimizer = trained(co.Adam, steps=0)
        _refuses(optimizer, saved, "mismatched: a: the optimizer has no max_exp_avg_sq for it, b: the opt")
        report = optimizer.load_state_dict(saved, strict=False)
        assert report.mismatched[:2] == [f"{name}: the optimizer has no max_exp_avg_sq for it" for name in "ab"]
        for index, name in enumerate("ab"):
            for entry in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(by_name(optimizer)[name][entry], saved["state"][index][entry])
        assert "slow" in by_name(optimizer)["a"]
        assert "max_exp_avg_sq" not in by_name(optimizer)["a"]

    def test_is_all_that_a_frozen_parameter_may_have(self) -> None:
        """It gets no buffers by that, neither from a load nor from a step; one to be trained needs its own entries."""
        optimizer = trained(co.AdamW, frozen="b")
        frozen = optimizer.param_groups[0]["params"][1]
        optimizer.state[frozen]["old_p"] = torch.ones(2)
        train(optimizer)
        saved = through_a_file(optimizer.state_dict())
        assert saved["state"][1].keys() == {"old_p"}
        resumed = trained(co.AdamW, frozen="b")
        assert not any(resumed.load_state_dict(saved))
        train(resumed)
        assert by_name(resumed)["b"].keys() == {"old_p"}
        _refuses(trained(co.AdamW), saved, "mismatched: b: the checkpoint has no step, exp_avg, exp_avg_sq for it")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: freed(2), "has no memory"),
            (lambda: torch.ones(2, device="meta"), "is a meta tensor"),
            (lambda: [freed(2)], "has no memory"),
            (Uncopyable, "cannot be copied"),
        ],
        ids=["freed", "meta", "inside", "refuses"],
    )
    def test_what_cannot_be_copied(self, make: Callable[[], Any], message: str) -> None:
        optimizer = trained(co.NAdam)
        saved = copy.deepcopy(trained(co.NAdam).state_dict())
        saved["state"][1] |= {"slow": make(), "fast": 1}
        _refuses(optimizer, saved, f"mismatched: b: slow {message}")
        assert len(optimizer.load_state_dict(saved, strict=False).mismatched) == 1
        assert torch.equal(by_name(optimizer)["b"]["exp_avg"], saved["state"][1]["exp_avg"])
        assert by_name(optimizer)["b"]["fast"] == 1

    def test_a_state_dict_of_live_tensors(self) -> None:
        optimizer = trained(co.AdamW)
        first, second = optimizer.param_groups[0]["params"]
        optimizer.state[first]["slow"] = optimizer.state[second]["exp_avg"]
        expected = optimizer.state[second]["exp_avg"].clone()
        saved = optimizer.state_dict()
        saved["state"][1] = {**saved["state"][1], "exp_avg": torch.zeros(SHAPE)}
        optimizer.load_state_dict(saved)
        assert torch.equal(optimizer.state[first]["slow"], expected)
        assert not optimizer.state[second]["exp_avg"].any()

    @pytest.mark.parametrize("flatten", [False, True])
    def test_in_distributed_checkpoints(self, flatten: bool) -> None:
        """The optimizer that loads a flattened one must have the entry already, with torch.optim too."""
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        loaded = []
        for kind in (co.AdamW, torch.optim.AdamW):
            model = nn.Linear(2, 2)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            source, target = kind(model.parameters()), kind(model.parameters())
            for optimizer in (source, target):
                optimizer.step()
            source.state[model.weight]["slow"], target.state[model.weight]["slow"] = torch.ones(2), torch.zeros(2)
            saved = copy.deepcopy(get_optimizer_state_dict(model, source, options=options))
            set_optimizer_state_dict(model, target, saved, options=options)
            loaded.append({k: v for k, v in target.state[model.weight].items() if k not in known_names()})
        assert repr(loaded[0]) == repr(loaded[1]) == "{'slow': tensor([1., 1.])}"


def test_the_known_entries_are_those_of_this_packages_optimizers() -> None:
    assert known_names() == {name for kind in registry() for name in kind._state_names()}


def test_a_class_of_ones_own_has_known_entries() -> None:
    class Own(co.CompiledOptimizer):
        lr: Number = hyper(default=0.1)
        own_average = buffer()

        @staticmethod
        def coefficients(lr: Any) -> dict[str, Any]:
            return {"lr": lr}

        @staticmethod
        def update(param: Any, grad: Any, own_average: Any, c: Any) -> dict[str, Any]:
            return {"step": c.lr * grad, "own_average": own_average + grad}

    assert known_names(Own) - known_names() == {"own_average"}


@pytest.mark.parametrize("kind", registry(), ids=lambda k: k.__name__)
def test_every_entry_of_an_optimizer_is_known(kind: type[co.CompiledOptimizer]) -> None:
    optimizer = trained(kind)
    theirs = reference_of(kind)([nn.Parameter(torch.ones(2, 2))], **required(kind)) if kind is not co.Lion else optimizer
    for param in theirs.param_groups[0]["params"]:
        param.grad = torch.ones_like(param).to_sparse(1) if kind._gradients == "sparse" else torch.ones_like(param)
    theirs.step(lambda: torch.ones(()))
    for made in (optimizer, theirs):
        assert {name for entries in made.state.values() for name in entries} <= known_names()
        assert {name for entries in made.state_dict()["state"].values() for name in entries} <= known_names()


class Lookahead:
    """As the wrappers of that name keep their slow weights: beside the optimizer's own entries."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.state["lookahead_step"] = self.optimizer.state.get("lookahead_step", 0) + 1
        for param in self.optimizer.param_groups[0]["params"]:
            state = self.optimizer.state[param]
            if "slow" not in state:
                state["slow"] = param.detach().clone()
            elif self.optimizer.state["lookahead_step"] % 2:
                param.data.copy_(state["slow"].lerp_(param.data, 0.5))


@pytest.mark.parametrize("kind", [co.AdamW, co.SGD], ids=lambda k: k.__name__)
def test_lookahead_resumes_as_with_torch(kind: type[co.CompiledOptimizer]) -> None:
    results = []
    for made in (kind, reference_of(kind)):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        wrapped = Lookahead(made([weight], lr=0.1))
        for i in range(9):
            weight.grad = torch.tensor([0.3, -0.1 * i, 1.0], dtype=torch.float64)
            wrapped.step()
            if i == 4:
                resumed = Lookahead(made([weight], lr=0.7))
                resumed.optimizer.load_state_dict(through_a_file(wrapped.optimizer.state_dict()))
                wrapped = resumed
        results.append(weight.detach())
    assert torch.allclose(*results, rtol=1e-13, atol=0)
