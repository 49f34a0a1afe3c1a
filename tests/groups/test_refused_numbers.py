"""Values that a group refuses: in words that name the number, its range and its group, and changing nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hyperparameter_sides import (
    assert_equal_params,
    assign,
    name_of,
    numbers,
    or_in_place,
    step_both,
    twins,
    update_with_a_dict,
)
from torch.nn import Parameter
from torch.optim import Optimizer

import compiled_optim as co

pytestmark = pytest.mark.usefixtures("one_thread")


BAD: dict[str, tuple[type[Optimizer], str, Any, type[Exception], str, str]] = {
    "negative-lr": (co.AdamW, "lr", -0.1, ValueError, "-0.1", ">= 0"),
    "negative-lr-tensor": (co.SGD, "lr", torch.tensor(-0.5), ValueError, "-0.5", ">= 0"),
    "nan-lr": (co.AdamW, "lr", math.nan, ValueError, "nan", ">= 0"),
    "nan-lr-tensor": (co.AdamW, "lr", torch.tensor(math.nan), ValueError, "nan", ">= 0"),
    "string-lr": (co.AdamW, "lr", "fast", TypeError, "fast", "number"),
    "number-in-a-string": (co.AdamW, "lr", "0.1", TypeError, "0.1", "number"),
    "none-lr": (co.SGD, "lr", None, TypeError, "None", "number"),
    "list-lr": (co.AdamW, "lr", [0.1], TypeError, "0.1", "number"),
    "two-element-lr": (co.AdamW, "lr", torch.ones(2), ValueError, "(2,)", "1-element"),
    "empty-lr": (co.AdamW, "lr", torch.ones(0), ValueError, "(0,)", "1-element"),
    "numpy-vector-lr": (co.AdamW, "lr", np.array([0.1, 0.2]), (TypeError, ValueError), "0.2", ""),
    "complex-lr": (co.AdamW, "lr", 1j, TypeError, "1j", "number"),
    "negative-eps": (co.AdamW, "eps", -1e-9, ValueError, "-1e-09", ">= 0"),
    "negative-decay": (co.SGD, "weight_decay", -2, ValueError, "-2", ">= 0"),
    "negative-momentum": (co.SGD, "momentum", -0.3, ValueError, "-0.3", ">= 0"),
    "beta1-of-1": (co.AdamW, "betas", (1.0, 0.9), ValueError, "1.0", "< 1"),
    "beta2-of-1": (co.AdamW, "betas", (0.9, 1), ValueError, "1", "< 1"),
    "negative-beta": (co.AdamW, "betas", (-0.1, 0.9), ValueError, "-0.1", ">= 0"),
    "beta-tensor-of-1": (co.AdamW, "betas", (torch.tensor(1.0), 0.9), ValueError, "1.0", "< 1"),
    "one-beta": (co.AdamW, "betas", (0.9,), ValueError, "0.9", "2"),
    "three-betas": (co.AdamW, "betas", (0.9, 0.9, 0.99), ValueError, "0.99", "2"),
    "betas-a-number": (co.AdamW, "betas", 0.9, TypeError, "0.9", "2"),
    "beta-a-string": (co.AdamW, "betas", (0.9, "x"), TypeError, "x", "number"),
    "two-element-beta": (co.AdamW, "betas", (0.9, torch.ones(2)), ValueError, "(2,)", "1-element"),
}


REFUSED = {name: case for name, case in BAD.items() if not name.startswith("negative-lr")}  # of which steps warn


class TestBadValues:
    @pytest.mark.parametrize("write", [assign, update_with_a_dict, or_in_place], ids=name_of)
    @pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
    def test_assignment(self, case: Any, write: Callable[..., None]) -> None:
        """What is no number is refused; a number out of range is stored, as schedulers may write it, and no step uses it."""
        cls, key, value, error, shown, allowed = case
        ours, theirs = twins(cls, groups=2)
        step_both(ours, theirs, 0)
        group = ours.param_groups[1]
        before, values = dict(group), numbers(group, cls)
        params = [p.detach().clone() for p in group["params"]]
        is_stored = allowed in (">= 0", "< 1")
        if is_stored:
            write(group, key, value)
            ours.state_dict()
        with pytest.raises(error) as caught:
            ours.step() if is_stored else write(group, key, value)
        message = str(caught.value)
        for part in (key, shown, allowed, "param_groups[1]"):
            assert part in message
        assert all(map(torch.equal, params, group["params"]))
        if is_stored:
            write(group, key, before[key])
        assert list(group) == list(before)
        assert dict(group) == before
        assert numbers(group, cls) == values
        with co.no_recompiles():
            step_both(ours, theirs, 1)
        assert_equal_params(ours, theirs)

    @pytest.mark.parametrize("case", BAD.values(), ids=BAD)
    def test_constructor(self, case: Any) -> None:
        cls, key, value, error, shown, _ = case
        with pytest.raises(error) as caught:
            cls([Parameter(torch.ones(2))], **{key: value})
        assert shown in str(caught.value)
        assert key in str(caught.value)

    @pytest.mark.parametrize("case", BAD.values(), ids=BAD)
    def test_group_of_its_own(self, case: Any) -> None:
        cls, key, value, error, shown, _ = case
        optimizer = cls([Parameter(torch.ones(2))])
        with pytest.raises(error) as caught:
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))], key: value})
        for part in (key, shown, "param_groups[1]"):
            assert part in str(caught.value)
        assert len(optimizer.param_groups) == 1

    @pytest.mark.parametrize("write", [lambda g, v: g.update(v), lambda g, v: g.__ior__(v)], ids=["update", "or"])
    def test_an_update_happens_whole_or_not_at_all(self, write: Callable[..., Any]) -> None:
        ours, _ = twins(co.AdamW)
        group = ours.param_groups[0]
        before = dict(group)
        with pytest.raises(TypeError, match="weight_decay"):
            write(group, {"lr": 0.5, "note": "new", "weight_decay": "none"})
        assert list(group) == list(before)
        assert dict(group) == before
