"""Copies of groups and optimizers, and how they look."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import copies, relative_error
from hyperparameter_sides import (
    HYPERS,
    assert_equal_params,
    classes,
    lowerings,
    numbers,
    params_of,
    step_both,
    tensors,
    twins,
)
from round_trips import pickled, through_a_file
from torch.optim import Optimizer

import compiled_optim as co

pytestmark = pytest.mark.usefixtures("one_thread")


COPIES = [copy.deepcopy, pickled, functools.partial(through_a_file, weights_only=False)]


class TestCopies:
    @classes
    @pytest.mark.parametrize(
        "make",
        [copy.copy, lambda g: g.copy(), dict, lambda g: {**g}, lambda g: g | {}, *COPIES],
        ids=["copy", "method", "dict", "stars", "or", "deepcopy", "pickle", "torch.save"],
    )
    def test_a_copy_of_a_group_is_a_dict_of_its_own(self, make: Callable[[Any], Any], cls: type[Optimizer]) -> None:
        ours, theirs = twins(cls)
        step_both(ours, theirs, 0)
        group = ours.param_groups[0]
        copied = make(group)
        assert isinstance(copied, dict)
        assert list(copied) == list(group)
        assert numbers(copied, cls) == HYPERS[cls]
        copied["lr"] = 100.0
        copied["note"] = "mine"
        del copied["weight_decay"]
        assert "note" not in group
        step_both(ours, theirs, 1)
        assert_equal_params(ours, theirs)

    @lowerings
    @classes
    @pytest.mark.parametrize("make", COPIES, ids=["deepcopy", "pickle", "torch.save"])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_optimizer_with_its_parameters(
        self, make: Callable[[Any], Any], when: str, cls: type[Optimizer], lowering: str
    ) -> None:
        ours, theirs = twins(cls, groups=2, lowering=lowering)
        if when == "after":
            step_both(ours, theirs, 0, 1)
        before = copies(params_of(ours), torch.float64)
        other_params, other = make((params_of(ours), ours))
        assert all(a is b for a, b in zip(params_of(other), other_params, strict=True))
        assert not {id(t) for t in tensors(other)} & {id(t) for t in tensors(ours)}
        assert len({t.data_ptr() for t in tensors(other)}) == len(tensors(other))
        assert type(other) is cls
        other.param_groups[0]["lr"] = 0.25
        other.hyperparameter("lr", 1).fill_(0.125)
        reference = copy.deepcopy(theirs)
        reference.param_groups[0]["lr"], reference.param_groups[1]["lr"] = 0.25, 0.125
        step_both(other, reference, 2, 3)
        assert_equal_params(other, reference)
        assert relative_error(params_of(ours), before) == 0
        step_both(ours, theirs, 2, 3)
        assert_equal_params(ours, theirs)
        assert [numbers(g, cls) for g in ours.param_groups] == [numbers(g, cls) for g in theirs.param_groups]
        assert co.compile_report(other).lowering == lowering

    @pytest.mark.parametrize("make", COPIES, ids=["deepcopy", "pickle", "torch.save"])
    def test_a_model_and_its_optimizer(self, make: Callable[[Any], Any]) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
        ours = co.AdamW(model.named_parameters(), lr=0.03)
        twin = copy.deepcopy(model)
        theirs = torch.optim.AdamW(twin.named_parameters(), lr=0.03)
        step_both(ours, theirs, 0)
        model, ours = make((model, ours))
        assert ours.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        for module, optimizer in ((model, ours), (twin, theirs)):
            for _ in range(3):
                optimizer.zero_grad()
                module(torch.ones(5, 3, dtype=torch.float64)).square().sum().backward()
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.step()
        assert relative_error(list(model.parameters()), list(twin.parameters())) < 1e-14

    @classes
    def test_a_shallow_copy_steps_the_same_parameters(self, cls: type[Optimizer]) -> None:
        ours, theirs = twins(cls)
        step_both(ours, theirs, 0)
        ours, theirs = copy.copy(ours), copy.copy(theirs)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.25
        step_both(ours, theirs, 1, 2)
        assert_equal_params(ours, theirs)

    @classes
    def test_repr(self, cls: type[Optimizer]) -> None:
        ours, theirs = twins(cls, groups=2)
        text = repr(ours)
        assert text.startswith(f"{cls.__name__} (")
        for part in ("Parameter Group 0", "Parameter Group 1", *HYPERS[cls]):
            assert part in text
        assert "0.007" in text
        assert "0.03" in text
        step_both(ours, theirs, 0)
        ours.param_groups[0]["lr"] = 0.625
        assert "0.625" in repr(ours)
        assert "0.625" in repr(ours.param_groups[0])


@pytest.mark.parametrize(
    ("key", "number"), [("momentum", -0.1), ("lr", math.nan), ("lr", math.inf), ("lr", -math.inf)], ids=str
)
def test_a_copy_refuses_a_number_that_a_scheduler_left_out_of_range(key: str, number: float) -> None:
    optimizer = co.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.5)
    optimizer.param_groups[0][key] = number
    for made in (optimizer, copy.deepcopy(optimizer), pickled(optimizer)):
        (param,) = made.param_groups[0]["params"]
        param.grad = torch.ones(2)
        with pytest.raises(ValueError, match=rf"Invalid .*: {number} \({key} of param_groups\[0\] must be >= 0"):
            made.step()
        assert torch.equal(param, torch.ones(2))
        made.param_groups[0][key] = 0.5
        made.step()
        assert torch.equal(param, torch.full((2,), 0.5))


def test_what_was_pickled_when_groups_held_tensors_goes_on() -> None:
    """The file was written when what was read from a group was a 0-dim tensor, also for schedulers."""
    kept = torch.load(Path(__file__).parents[1] / "data" / "pickled_optimizer.pt", weights_only=False)
    assert isinstance(kept["group"]["lr"], torch.Tensor)
    ours: Any = kept["optimizer"]
    twin = torch.nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64)), torch.nn.Parameter(torch.ones(2).double())
    theirs = torch.optim.AdamW([{"params": twin[:1]}, {"params": twin[1:], "lr": 0.25}], lr=0.5, betas=(0.5, 0.75))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]
    for count, optimizer, scheduler in ((2, ours, schedulers[0]), (4, theirs, schedulers[1])):
        if optimizer is ours:
            scheduler.load_state_dict(kept["scheduler"])
        for _ in range(count):
            for param in params_of(optimizer):
                param.grad = torch.ones_like(param)
            optimizer.step()
            scheduler.step()
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups] == [0.5**5, 0.25 * 0.5**4]
    assert type(ours.param_groups[0]["lr"]) is float
    assert relative_error(params_of(ours), params_of(theirs)) < 1e-14
