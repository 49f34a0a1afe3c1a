"""What groups hold, and what happens when groups come, go and change places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import relative_error
from hyperparameter_sides import (
    HYPERS,
    STOCK,
    assert_equal_params,
    classes,
    lowerings,
    pairs,
    step,
    step_both,
    tensors,
    twins,
)
from torch.nn import Parameter
from torch.optim import Optimizer

import compiled_optim as co
from compiled_optim.optimizer import engine_of

pytestmark = pytest.mark.usefixtures("one_thread")


class TestGroups:
    @classes
    @pytest.mark.parametrize("groups", [1, 2])
    @pytest.mark.parametrize("given", [float, torch.tensor], ids=["float", "tensor"])
    def test_defaults_stay_numbers(self, cls: type[Optimizer], groups: int, given: Callable[[float], Any]) -> None:
        lr = given(0.25)
        optimizer = cls([{"params": [Parameter(torch.ones(2))]} for _ in range(groups)], lr=lr)
        for key in HYPERS[cls]:
            assert all(type(v) in (int, float) for v in pairs(optimizer.defaults[key])), key
        assert optimizer.defaults["lr"] == 0.25
        step(optimizer, 0)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()
        optimizer.param_groups[0]["lr"] = 3.0
        assert optimizer.defaults["lr"] == 0.25

    @classes
    @pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
    def test_keys_are_those_of_torch(self, cls: type[Optimizer], named: bool) -> None:
        def params() -> list[Any]:
            return [("w", Parameter(torch.ones(2)))] if named else [Parameter(torch.ones(2))]

        ours, theirs = cls(params()), STOCK[cls](params())
        assert set(ours.param_groups[0]) == set(theirs.param_groups[0])
        assert ours.defaults == theirs.defaults
        assert {type(g) for g in ours.state_dict()["param_groups"]} == {dict}
        for key in set(theirs.param_groups[0]) - {"params", *HYPERS[cls]}:
            assert ours.param_groups[0][key] == theirs.param_groups[0][key], key

    @classes
    @pytest.mark.parametrize("order", ["first", "added"])
    def test_a_dict_of_the_caller_is_not_modified(self, cls: type[Optimizer], order: str) -> None:
        params = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
        group = {"params": params[:1], "lr": 0.5, "note": "mine"}
        before = dict(group)
        if order == "first":
            optimizer = cls([group])
        else:
            optimizer = cls(params[1:])
            optimizer.add_param_group(group)
        step(optimizer, 0)
        optimizer.param_groups[-1]["lr"] = 0.75
        assert group == before
        assert group["params"] is before["params"]
        assert group["params"] == params[:1]
        assert optimizer.param_groups[-1]["note"] == "mine"


class TestRegrouping:
    @lowerings
    @classes
    @pytest.mark.parametrize("way", ["append", "extend", "insert", "iadd", "slice"])
    def test_a_plain_dict_put_into_the_list(self, way: str, cls: type[Optimizer], lowering: str) -> None:
        ours, theirs = twins(cls, lowering=lowering)
        step_both(ours, theirs, 0)
        for optimizer in (ours, theirs):
            groups = optimizer.param_groups
            new = {**groups[0], "params": [Parameter(torch.ones(7, dtype=torch.float64))], "lr": 0.5}
            if way == "append":
                groups.append(new)
            elif way == "extend":
                groups.extend([new])
            elif way == "insert":
                groups.insert(0, new)
            elif way == "iadd":
                groups += [new]
            else:
                groups[1:] = [new]
        step_both(ours, theirs, 1)
        assert_equal_params(ours, theirs)
        for optimizer in (ours, theirs):
            for i, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.25 / (i + 1)
                group["weight_decay"] *= 0.5 * (i + 1)
        step_both(ours, theirs, 2)
        assert_equal_params(ours, theirs)
        assert len({t.data_ptr() for t in tensors(ours)}) == len(tensors(ours))

    @pytest.mark.parametrize("stepped", [False, True], ids=["at-once", "after-a-step"])
    def test_a_scheduler_over_a_group_made_from_another(self, stepped: bool) -> None:
        ours, theirs = twins(co.AdamW)
        step_both(ours, theirs, 0)
        rates = []
        for optimizer in (ours, theirs):
            groups = optimizer.param_groups
            groups.append({**groups[0], "params": [Parameter(torch.ones(7, dtype=torch.float64))]})
            if stepped:
                step(optimizer, 1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 0.9**t])
            for t in range(2, 5):
                step(optimizer, t)
                scheduler.step()
            rates.append([float(group["lr"]) for group in groups])
        assert rates[0] == rates[1]
        assert_equal_params(ours, theirs)

    @classes
    def test_groups_moved_and_removed(self, cls: type[Optimizer]) -> None:
        ours, theirs = twins(cls, groups=2)
        step_both(ours, theirs, 0)
        for optimizer in (ours, theirs):
            optimizer.param_groups.reverse()
        step_both(ours, theirs, 1)
        assert_equal_params(ours, theirs)
        removed = []
        for optimizer in (ours, theirs):
            removed.append(optimizer.param_groups.pop())
            optimizer.param_groups[0]["lr"] = 0.5
        step_both(ours, theirs, 2)
        assert_equal_params(ours, theirs)
        assert relative_error(removed[0]["params"], removed[1]["params"]) < 1e-14

    @classes
    def test_parameters_appended_to_a_group(self, cls: type[Optimizer]) -> None:
        ours, theirs = twins(cls)
        step_both(ours, theirs, 0)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["params"].append(Parameter(torch.ones(7, dtype=torch.float64)))
        step_both(ours, theirs, 1)
        assert_equal_params(ours, theirs)


@pytest.mark.parametrize("key", ["lr", "betas", "amsgrad", "params", "lr_scale"])
def test_a_group_that_is_cleared_takes_back_what_it_held(key: str) -> None:
    """As torch.optim.swap_in_optimizer_params_and_state does when it leaves; the entries may come in any order."""
    params = [(name, Parameter(torch.ones(3))) for name in "ab"]
    optimizer = co.AdamW(params, lr=0.2, betas=(0.5, 0.9), amsgrad=True, lr_scale={"a": 0.5})
    group, live = optimizer.param_groups[0], optimizer.hyperparameter("betas")
    before, saved = list(group), dict(group)
    twin = co.AdamW([(n, Parameter(torch.ones(3))) for n in "ab"], 0.2, (0.5, 0.9), amsgrad=True, lr_scale={"a": 0.5})
    for turn in range(3):
        for o in (optimizer, twin):
            for param in o.param_groups[0]["params"]:
                param.grad = torch.full((3,), 1.0 + turn)
            o.step()
        group.clear()
        group.update({key: saved[key], **saved} if turn else saved)
    assert sorted(group) == sorted(before)
    assert all(map(torch.equal, group["params"], twin.param_groups[0]["params"]))
    assert all(a is b for a, b in zip(optimizer.hyperparameter("betas"), live, strict=True))


def test_parameters_and_state_that_are_swapped_in_are_swapped_out_again() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = co.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fresh = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    with torch.optim.swap_in_optimizer_params_and_state(optimizer, fresh, optimizer.state_dict()):
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 2


def test_a_refused_group_leaves_the_state_that_somebody_holds() -> None:
    param = Parameter(torch.ones(3))
    optimizer = co.AdamW([param])
    held = optimizer.state[param]
    with pytest.raises(ValueError, match="it is expanded"):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(1).expand(3))]})
    assert optimizer.state[param] is held
    assert list(optimizer.state) == [param]


@pytest.mark.parametrize(
    "write", [lambda g: g.__setitem__("max_grad_norm", 1.0), lambda g: g.update(lr=0.5, lowering="eager")]
)
def test_what_belongs_to_the_whole_optimizer_is_refused_in_a_group(write: Callable[[Any], None]) -> None:
    group = co.AdamW([Parameter(torch.ones(3))], lr=0.25).param_groups[0]
    before = dict(group)
    with pytest.raises(TypeError, match=r"is an option of the whole optimizer, not of param_groups\[0\]"):
        write(group)
    assert dict(group) == before


def test_step_counts_of_regrouped_parameters_are_gathered_anew() -> None:
    """A step copies what plans share to each block."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(8)]
    kinds = [{"amsgrad": a, "cautious": c} for a in (False, True) for c in (False, True)]
    optimizer = co.AdamW([{"params": params[2 * i : 2 * i + 2], **kind} for i, kind in enumerate(kinds)])
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": [group["params"].pop() for group in optimizer.param_groups]})
    optimizer.step()
    # The first plan has its own two, which lie as they lay, and three that came from others.
    assert [len(lowering.plan.scalar_blocks) for lowering in engine_of(optimizer).step.lowerings] == [2, 1, 1, 1]
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_an_entry_of_the_users_need_not_be_true_or_false() -> None:
    optimizer = co.AdamW([torch.nn.Parameter(torch.ones(2))])
    entry = torch.ones(3)
    optimizer.param_groups[0]["mine"] = entry
    assert optimizer.param_groups[0]["mine"] is entry
