"""What was read stays as it was, and a tensor that was given is the group's own."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hyperparameter_sides import (
    HYPERS,
    as_float,
    assert_equal_params,
    classes,
    lowerings,
    name_of,
    numbers,
    pairs,
    params_of,
    step,
    step_both,
    twins,
)
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import compiled_optim as co

pytestmark = pytest.mark.usefixtures("one_thread")


def base_rates(o: Optimizer) -> list[float]:
    base = [group["lr"] for group in o.param_groups]
    for i in range(4):
        for group, rate in zip(o.param_groups, base, strict=True):
            group["lr"] = rate * 0.5**i
        step(o, i)
    return [float(b) for b in base]


def float_of_base_rates(o: Optimizer) -> list[float]:
    base = [float(group["lr"]) for group in o.param_groups]
    for i in range(4):
        for group, rate in zip(o.param_groups, base, strict=True):
            group["lr"] = rate * 0.5**i
        step(o, i)
    return base


def initial_rate(o: Optimizer) -> list[float]:
    for group in o.param_groups:
        group["initial_lr"] = group["lr"]
    for i in range(4):
        for group in o.param_groups:
            group["lr"] = group["initial_lr"] * (1 - i / 5)
        step(o, i)
    return [float(group["initial_lr"]) for group in o.param_groups]


def initial_rate_and_in_place(o: Optimizer) -> list[float]:
    for group in o.param_groups:
        group.update(initial_lr=group["lr"], base_betas=tuple(map(float, group.get("betas", ()))))
    for i in range(4):
        for group in o.param_groups:
            group["lr"] *= 0.5
        step(o, i)
    for group in o.param_groups:
        group["lr"] = group["initial_lr"]
    step(o, 4)
    return [float(group["initial_lr"]) for group in o.param_groups]


def timm_cosine(o: Optimizer) -> list[float]:
    for group in o.param_groups:
        group.setdefault("initial_lr", group["lr"])
    base = [group["initial_lr"] for group in o.param_groups]
    warmup, total, minimum = 2, 6, 1e-5
    slopes = [(value - 1e-4) / warmup for value in base]
    seen = []
    for group in o.param_groups:
        group["lr"] = 1e-4
    for t in range(8):
        step(o, t)
        if t < warmup:
            rates = [1e-4 + t * slope for slope in slopes]
        elif t < total:
            rates = [minimum + 0.5 * (value - minimum) * (1 + math.cos(math.pi * t / total)) for value in base]
        else:
            rates = base  # the same objects, assigned again and again
        for group, rate in zip(o.param_groups, rates, strict=True):
            group["lr"] = rate * group["lr_scale"] if "lr_scale" in group else rate
        seen += [float(group["lr"]) for group in o.param_groups]
    for group in o.param_groups:
        group["lr"] = 0.4
    step(o, 8)
    return seen + [float(value) for value in base]


def save_zero_restore(o: Optimizer) -> list[float]:
    step(o, 0)
    saved = [group["lr"] for group in o.param_groups]
    for group in o.param_groups:
        group["lr"] = 0.0
    step(o, 1)
    for group, rate in zip(o.param_groups, saved, strict=True):
        group["lr"] = rate
    step(o, 2)
    return [float(rate) for rate in saved]


def save_zero_tensor_restore(o: Optimizer) -> list[float]:
    """What torch.distributed.checkpoint does to get at state that does not exist yet."""
    saved = [group["lr"] for group in o.param_groups]
    for group in o.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
    step(o, 0)
    for group, rate in zip(o.param_groups, saved, strict=True):
        group["lr"] = rate
    step(o, 1)
    return [float(rate) for rate in saved]


def state_dict_then_assignment(o: Optimizer) -> list[float]:
    step(o, 0)
    snapshot = o.state_dict()
    for group in o.param_groups:
        group["lr"] = 0.5
    step(o, 1)
    return [float(group["lr"]) for group in snapshot["param_groups"]]


def state_dict_then_in_place(o: Optimizer) -> list[float]:
    step(o, 0)
    snapshot = o.state_dict()
    for group in o.param_groups:
        group["lr"] *= 0.5
    step(o, 1)
    return [float(group["lr"]) for group in snapshot["param_groups"]]


def swap_groups(o: Optimizer) -> list[float]:
    first, last = o.param_groups[0], o.param_groups[-1]
    first["lr"], last["lr"] = last["lr"], first["lr"]
    step(o, 0)
    first["lr"] *= 0.5
    step(o, 1)
    return []


def one_rate_for_all(o: Optimizer) -> list[float]:
    for group in o.param_groups:
        group["lr"] = o.param_groups[0]["lr"]
    step(o, 0)
    o.param_groups[0]["lr"] *= 0.5
    step(o, 1)
    return []


def one_tensor_for_all(o: Optimizer) -> list[float]:
    rate = torch.tensor(0.25, dtype=torch.float64) if isinstance(o, co.CompiledOptimizer) else 0.25
    for group in o.param_groups:
        group["lr"] = rate
    step(o, 0)
    o.param_groups[0]["lr"] *= 0.5
    step(o, 1)
    return [float(rate)]


def history_of_assigned(o: Optimizer) -> list[float]:
    history = []
    for i in range(4):
        for group in o.param_groups:
            group["lr"] = group["lr"] * 0.5
            history.append(group["lr"])
        step(o, i)
    return [float(rate) for rate in history]


def copied_groups(o: Optimizer) -> list[float]:
    saved = [dict(group) for group in o.param_groups] + [group.copy() for group in o.param_groups]
    for group in o.param_groups:
        group["lr"] = 0.5
    step(o, 0)
    for group, old in zip(o.param_groups, saved, strict=False):
        group.update({k: v for k, v in old.items() if k != "params"})
    step(o, 1)
    return [float(group["lr"]) for group in saved]


IDIOMS = [
    base_rates,
    float_of_base_rates,
    initial_rate,
    initial_rate_and_in_place,
    timm_cosine,
    save_zero_restore,
    save_zero_tensor_restore,
    state_dict_then_assignment,
    state_dict_then_in_place,
    swap_groups,
    one_rate_for_all,
    one_tensor_for_all,
    history_of_assigned,
    copied_groups,
]


class TestIdioms:
    @lowerings
    @classes
    @pytest.mark.parametrize("groups", [1, 2])
    @pytest.mark.parametrize("idiom", IDIOMS, ids=name_of)
    def test_equals_torch(self, idiom: Callable[..., Any], groups: int, cls: type[Optimizer], lowering: str) -> None:
        ours, theirs = twins(cls, groups, lowering=lowering)
        assert idiom(ours) == idiom(theirs)
        assert [numbers(g, cls) for g in ours.param_groups] == [numbers(g, cls) for g in theirs.param_groups]
        assert_equal_params(ours, theirs)
        assert co.compile_report(ours).recompiles == 0

    @classes
    def test_assignment_changes_nothing_that_was_read(self, cls: type[Optimizer]) -> None:
        ours, _ = twins(cls)
        group = ours.param_groups[0]
        read = {key: group[key] for key in HYPERS[cls]}
        for t in range(3):
            for key, value in HYPERS[cls].items():
                group[key] = tuple(v / 2 for v in value) if isinstance(value, tuple) else value / 2
            step(ours, t)
        assert {k: as_float(v) for k, v in read.items()} == HYPERS[cls]

    @classes
    def test_assignment_changes_no_tensor_passed_in(self, cls: type[Optimizer]) -> None:
        given = torch.tensor(0.25, dtype=torch.float64)
        ours, theirs = twins(cls)
        for value in (given, given):
            ours.param_groups[0]["lr"] = value
        step(ours, 0)
        ours.hyperparameter("lr").fill_(0.5)
        ours.param_groups[0]["lr"] = 0.75
        step(ours, 1)
        assert given.item() == 0.25
        theirs.param_groups[0]["lr"] = 0.25
        step(theirs, 0)
        theirs.param_groups[0]["lr"] = 0.75
        step(theirs, 1)
        assert_equal_params(ours, theirs)

    def test_asking_for_the_distributed_state_leaves_training_alone(self) -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        model, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        twin.load_state_dict(model.state_dict())
        ours = co.AdamW(model.parameters(), lr=0.25)
        before = copy.deepcopy(model.state_dict())
        rate = ours.hyperparameter("lr")
        get_optimizer_state_dict(model, ours)
        assert ours.hyperparameter("lr") is rate
        assert rate.item() == 0.25
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        theirs = torch.optim.AdamW(twin.parameters(), lr=0.25)
        step_both(ours, theirs, 0, 1)
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-6, atol=1e-6)


class TestAdoption:
    @lowerings
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("place", ["constructor", "group", "only-heir", "added"])
    def test_a_tensor_for_one_group_is_adopted(self, place: str, dtype: torch.dtype, lowering: str) -> None:
        rate = torch.tensor(0.5, dtype=dtype)
        params = [Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
        index = 0
        if place == "constructor":
            optimizer = co.SGD(params, lr=rate, lowering=lowering)
        elif place == "group":
            optimizer = co.SGD([{"params": params, "lr": rate}], lr=0.1, lowering=lowering)
        elif place == "only-heir":
            groups = [{"params": params[:1], "lr": 0.125}, {"params": params[1:]}]
            optimizer = co.SGD(groups, lr=rate, lowering=lowering)
            index = 1
        else:
            optimizer = co.SGD(params[:1], lr=0.125, lowering=lowering)
            optimizer.add_param_group({"params": params[1:], "lr": rate})
            index = 1
        group = optimizer.param_groups[index]
        assert optimizer.hyperparameter("lr", index) is rate
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        rate.fill_(0.25)
        optimizer.step()
        assert group["params"][0].tolist() == [0.25] * 3
        if index:
            assert params[0].tolist() == [0.75] * 3
        group["lr"] = 4.0
        assert rate.item() == 0.25
        rate.fill_(0.125)
        assert group["lr"] == 4.0
        optimizer.step()
        assert group["params"][0].tolist() == [-3.75] * 3
        group["lr"] = rate  # takes its value
        rate.fill_(7.0)
        optimizer.step()
        assert group["params"][0].tolist() == [-3.875] * 3

    def test_a_later_group_adopts_what_the_constructor_got(self) -> None:
        sides = []
        for optim in (co, torch.optim):
            rate = torch.tensor(0.5)
            optimizer = optim.SGD([Parameter(torch.ones(3))], lr=rate)
            optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
            rate.fill_(0.25)
            sides.append([group["lr"].item() for group in optimizer.param_groups])
        assert sides == [[0.25, 0.25]] * 2

    def test_a_later_group_takes_a_default_that_was_changed(self) -> None:
        rates = []
        for optim in (co, torch.optim):
            optimizer = optim.SGD([Parameter(torch.ones(3))], lr=torch.tensor(0.5))
            optimizer.defaults["lr"] = 0.125
            optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
            rates.append(float(optimizer.param_groups[1]["lr"]))
        assert rates == [0.125, 0.125]

    @pytest.mark.parametrize("write", [operator.setitem, lambda group, key, value: group.update({key: value})])
    def test_an_adopted_tensor_that_is_written_back_stays_adopted(self, write: Callable[[Any, str, Any], None]) -> None:
        rate = torch.tensor(0.5, dtype=torch.float64)
        optimizer = co.SGD([Parameter(torch.ones(3))], lr=rate)
        write(optimizer.param_groups[0], "lr", rate)
        rate.fill_(0.25)
        assert optimizer.param_groups[0]["lr"] == 0.25

    @pytest.mark.parametrize("arguments", [("betas", 2), ("lr", "eps")], ids=["tuple", "fields"])
    def test_a_tensor_in_two_places_is_adopted_in_both(self, arguments: tuple[str, Any]) -> None:
        given = torch.tensor(0.5, dtype=torch.float64)
        first, second = arguments
        options = {first: (given, given)} if second == 2 else {first: given, second: given}
        optimizer = co.Adam({"a": torch.nn.Parameter(torch.ones(2))}, **options)
        given.fill_(0.75)
        assert all(optimizer.hyperparameters()[0][name] in (0.75, (0.75, 0.75)) for name in options)
        values = {"lr": 0.125, "betas": (0.25, 0.75), "eps": 0.0625}
        optimizer.load_state_dict(co.Adam({"a": torch.nn.Parameter(torch.ones(2))}, **values).state_dict())
        assert {name: optimizer.hyperparameters()[0][name] for name in values} == values

    @lowerings
    def test_betas_and_others_are_adopted(self, lowering: str) -> None:
        ours, theirs = twins(co.AdamW)
        given = {k: torch.tensor(v, dtype=torch.float64) for k, v in (("lr", 0.03), ("eps", 1e-3), ("weight_decay", 0.2))}
        betas = tuple(torch.tensor(b, dtype=torch.float64) for b in (0.8, 0.95))
        ours = co.AdamW(params_of(ours), **given, betas=betas, lowering=lowering)
        assert all(ours.hyperparameter(key) is value for key, value in given.items())
        assert all(a is b for a, b in zip(ours.hyperparameter("betas"), betas, strict=True))
        step_both(ours, theirs, 0)
        for key, value in given.items():
            value.mul_(2)
            theirs.param_groups[0][key] *= 2
        for beta in betas:
            beta.mul_(0.5)
        theirs.param_groups[0]["betas"] = (0.4, 0.475)
        with co.no_recompiles():
            step_both(ours, theirs, 1, 2)
        assert_equal_params(ours, theirs)

    @lowerings
    @pytest.mark.parametrize("shape", [(1,), (1, 1, 1)], ids=str)
    def test_one_element_of_any_shape(self, shape: tuple[int, ...], lowering: str) -> None:
        param = Parameter(torch.ones(3))
        rate = torch.full(shape, 0.5)
        optimizer = co.SGD([param], lr=rate, lowering=lowering)
        assert optimizer.param_groups[0]["lr"].shape == ()
        param.grad = torch.ones(3)
        rate.fill_(0.25)
        optimizer.step()
        assert param.tolist() == [0.75] * 3

    @lowerings
    @pytest.mark.parametrize("write", ["assign", "fill_", "scheduler", "load"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("place", ["constructor", "groups", "added", "views", "betas"])
    def test_a_tensor_for_two_groups_is_shared_until_one_is_written(
        self, place: str, dtype: torch.dtype, write: str, lowering: str
    ) -> None:
        value = torch.full((1,) if place == "views" else (), 0.5, dtype=dtype)
        params = [Parameter(torch.ones(2)) for _ in range(2)]
        own: dict[str, Any] = {"lowering": lowering}
        if place == "constructor":
            optimizer = co.AdamW([{"params": [p]} for p in params], lr=value, **own)
        elif place in ("groups", "views"):
            optimizer = co.AdamW([{"params": [p], "lr": value} for p in params], **own)
        elif place == "added":
            optimizer = co.AdamW(params[:1], lr=value, **own)
            optimizer.add_param_group({"params": params[1:], "lr": value})
        else:
            optimizer = co.AdamW([{"params": [p], "betas": (value, 0.9)} for p in params], **own)
        key = "betas" if place == "betas" else "lr"
        fixed = {key: (0.25, 0.9) if place == "betas" else 0.25}
        theirs = torch.optim.AdamW([{"params": [Parameter(torch.ones(2))]} for _ in range(2)], **fixed)

        def read() -> list[float]:
            return [float(pairs(g[key])[0]) for g in optimizer.param_groups]

        assert read() == [0.5, 0.5]
        value.fill_(0.25)
        assert read() == [0.25, 0.25]
        step_both(optimizer, theirs, 0)
        new = (0.125, 0.9) if place == "betas" else 0.125
        if write == "assign":
            optimizer.param_groups[1][key] = new
        elif write == "fill_":
            pairs(optimizer.param_groups[1][key])[0].fill_(0.125)
        elif write == "scheduler":
            if place == "betas":
                optimizer.schedule(1, betas=lambda _: new)
            else:
                torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5])
        else:
            saved = optimizer.state_dict()
            saved["param_groups"][1][key] = new
            optimizer.load_state_dict(saved)
        both_written = write == "fill_" or (write, key) == ("scheduler", "lr")  # as in torch.optim, whose groups share it
        for group in theirs.param_groups[0 if both_written else 1 :]:
            group[key] = new
        step_both(optimizer, theirs, 1)
        assert read() == [0.125 if both_written else 0.25, 0.125]
        assert value.item() == (0.125 if both_written or write == "load" else 0.25)
        torch.testing.assert_close(params_of(optimizer), params_of(theirs), rtol=1e-6, atol=1e-6)
        if write != "load":
            value.fill_(0.375)
            for group in theirs.param_groups[: 2 if both_written else 1]:
                group[key] = (0.375, 0.9) if place == "betas" else 0.375
            step_both(optimizer, theirs, 2)
            torch.testing.assert_close(params_of(optimizer), params_of(theirs), rtol=1e-6, atol=1e-6)

    def test_a_tensor_of_another_optimizer_keeps_both_apart(self) -> None:
        first = co.SGD([Parameter(torch.ones(2))], lr=0.5)
        second = co.SGD([Parameter(torch.ones(2))], lr=0.1)
        second.param_groups[0]["lr"] = first.param_groups[0]["lr"]
        second.param_groups[0]["lr"] *= 0.5
        assert first.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("number", [0.003, 0.25])
def test_a_loaded_number_is_the_checkpoints(number: float) -> None:
    """The group gets a tensor of its own where the user's, in float32, cannot hold it; else what holds the tensor stays."""
    given = torch.tensor(0.5)
    optimizer = co.AdamW([Parameter(torch.ones(2))], lr=given)
    before = optimizer.hyperparameter("lr")
    saved = co.AdamW([Parameter(torch.ones(2))], lr=number).state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == number
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.state_dict()["param_groups"][0]["lr"] == number
    assert (optimizer.hyperparameter("lr") is before) == (number == 0.25)
    assert given == (0.5 if number == 0.003 else number)
