"""Every way to write to a group, every kind of value, and the values that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hyperparameter_sides import (
    HYPERS,
    as_float,
    assert_equal_params,
    assign,
    classes,
    lowerings,
    name_of,
    numbers,
    or_in_place,
    pairs,
    step_both,
    tensors,
    twins,
    update_with_a_dict,
    update_with_keywords,
    update_with_pairs,
)
from torch.nn import Parameter
from torch.optim import Optimizer

import compiled_optim as co

pytestmark = pytest.mark.usefixtures("one_thread")


VALUES: dict[str, Any] = {
    "float": 0.0625 + 2**-40,
    "int": 1,
    "bool": True,
    "numpy-float64": np.float64(0.3),
    "numpy-float32": np.float32(0.3),
    "numpy-float16": np.float16(0.3),
    "numpy-int64": np.int64(1),
    "numpy-0d": np.array(0.3),
    "float64-0d": torch.tensor(0.3, dtype=torch.float64),
    "float32-0d": torch.tensor(0.3),
    "bfloat16-0d": torch.tensor(0.3, dtype=torch.bfloat16),
    "int64-0d": torch.tensor(1),
    "float64-1d": torch.tensor([0.3], dtype=torch.float64),
    "float32-111": torch.tensor([[[0.3]]]),
    "float64-111": torch.tensor([[[0.3]]], dtype=torch.float64),
    "parameter": Parameter(torch.tensor(0.3), requires_grad=False),
}


def add_in_place(group: dict[str, Any], key: str, value: Any) -> None:
    group[key] += value


def multiply_in_place(group: dict[str, Any], key: str, value: Any) -> None:
    group[key] *= value


def divide_in_place(group: dict[str, Any], key: str, value: Any) -> None:
    group[key] /= value


def subtract_and_assign(group: dict[str, Any], key: str, value: Any) -> None:
    group[key] = abs(group[key] - value)


def delete_and_setdefault(group: dict[str, Any], key: str, value: Any) -> None:
    old = group.pop(key)
    group.setdefault(key, old)
    group[key] = value


WRITES = [
    assign,
    update_with_keywords,
    update_with_a_dict,
    update_with_pairs,
    or_in_place,
    add_in_place,
    multiply_in_place,
    divide_in_place,
    subtract_and_assign,
    delete_and_setdefault,
]

BETAS: dict[str, Callable[[tuple[Any, Any]], Any]] = {
    "floats": lambda old: (0.5, 0.75),
    "ints": lambda old: (0, 0),
    "list": lambda old: [0.5, 0.75],
    "first-new": lambda old: (0.5, *old[1:]),
    "second-new": lambda old: (old[0], 0.75),
    "swapped": lambda old: (old[1], old[0]),
    "tensor-float": lambda old: (torch.tensor(0.5), 0.75),
    "numpy-tensor": lambda old: (np.float32(0.5), torch.tensor([[[0.75]]], dtype=torch.float64)),
    "the-same-tensor-twice": lambda old: (torch.tensor(0.5),) * 2,
    "scaled": lambda old: tuple(0.5 * b for b in old),
}


class TestAssignment:
    @classes
    @pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
    def test_every_kind_of_number(self, cls: type[Optimizer], value: Any) -> None:
        keys = [k for k in HYPERS[cls] if k != "betas"]
        ours, theirs = twins(cls, groups=2)
        step_both(ours, theirs, 0)
        before = tensors(ours)
        with co.no_recompiles():
            for t, key in enumerate(keys):
                ours.param_groups[1][key] = value
                theirs.param_groups[1][key] = as_float(value)
                assert float(ours.param_groups[1][key]) == float(value)
                assert isinstance(ours.param_groups[1][key], torch.Tensor) == isinstance(value, torch.Tensor)
                step_both(ours, theirs, t + 1)
                assert_equal_params(ours, theirs)
        assert numbers(ours.param_groups[0], cls) == HYPERS[cls]
        assert all(a is b for a, b in zip(before, tensors(ours), strict=True))
        assert {t.dtype for t in tensors(ours)} == {torch.float64}
        assert co.compile_report(ours).recompiles == 0

    @lowerings
    @classes
    @pytest.mark.parametrize("write", WRITES, ids=name_of)
    def test_every_way_to_write(self, write: Callable[..., None], cls: type[Optimizer], lowering: str) -> None:
        ours, theirs = twins(cls, groups=2, lowering=lowering)
        step_both(ours, theirs, 0)
        with co.no_recompiles():
            for t, key in enumerate(k for k in HYPERS[cls] if k != "betas"):
                for optimizer in (ours, theirs):
                    write(optimizer.param_groups[0], key, 0.625)
                assert numbers(ours.param_groups[0], cls) == numbers(theirs.param_groups[0], cls)
                step_both(ours, theirs, 2 * t + 1, 2 * t + 2)
                assert_equal_params(ours, theirs)
        assert numbers(ours.param_groups[1], cls) == {**HYPERS[cls], "lr": 0.007}
        assert co.compile_report(ours).recompiles == 0

    @lowerings
    @pytest.mark.parametrize("write", [assign, update_with_a_dict, or_in_place], ids=name_of)
    @pytest.mark.parametrize("form", BETAS)
    def test_betas(self, form: str, write: Callable[..., None], lowering: str) -> None:
        ours, theirs = twins(co.AdamW, groups=2, lowering=lowering)
        step_both(ours, theirs, 0)
        with co.no_recompiles():
            for t in range(1, 4):
                for optimizer in (ours, theirs):
                    group = optimizer.param_groups[1]
                    value = BETAS[form](group["betas"])
                    write(group, "betas", value if optimizer is ours else as_float(value))
                assert numbers(ours.param_groups[1], co.AdamW) == numbers(theirs.param_groups[1], co.AdamW)
                assert type(ours.param_groups[1]["betas"]) is tuple
                step_both(ours, theirs, t)
                assert_equal_params(ours, theirs)
        assert len({id(t) for t in tensors(ours)}) == len(tensors(ours))
        assert co.compile_report(ours).recompiles == 0

    @lowerings
    @classes
    @pytest.mark.parametrize(
        "write",
        [
            lambda t, v: t.fill_(v),
            lambda t, v: t.copy_(torch.tensor([v], dtype=torch.float64)[0]),
            lambda t, v: t.mul_(0).add_(v),
            lambda t, v: t.data.fill_(v),
            lambda t, v: torch._foreach_add_(torch._foreach_mul_([t], 0.0) or [t], v),
            lambda t, v: torch.add(torch.tensor(v, dtype=torch.float64), 0, out=t),
            lambda t, v: t.set_(torch.tensor(v, dtype=torch.float64)),
            lambda t, v: t.numpy().fill(v),
        ],
        ids=["fill_", "copy_", "mul_add_", "data", "foreach", "out", "set_", "numpy"],
    )
    def test_writes_into_the_tensor(self, write: Callable[..., None], cls: type[Optimizer], lowering: str) -> None:
        ours, theirs = twins(cls, groups=2, lowering=lowering)
        step_both(ours, theirs, 0)
        with co.no_recompiles():
            for t, key in enumerate(HYPERS[cls]):
                old = theirs.param_groups[0][key]
                value = tuple(b / 2 for b in old) if isinstance(old, tuple) else old / 2
                theirs.param_groups[0][key] = value
                for tensor, number in zip(pairs(ours.hyperparameter(key)), pairs(value), strict=True):
                    write(tensor, number)
                assert numbers(ours.param_groups[0], cls) == numbers(theirs.param_groups[0], cls)
                step_both(ours, theirs, t + 1, t + 2)
                assert_equal_params(ours, theirs)
        assert co.compile_report(ours).recompiles == 0

    @classes
    def test_assigning_what_was_read_is_bit_equal(self, cls: type[Optimizer]) -> None:
        ours, theirs = twins(cls, lr=1 / 3)
        step_both(ours, theirs, 0)
        group = ours.param_groups[0]
        for key in HYPERS[cls]:
            group[key] = group[key]
        assert numbers(group, cls) == {**HYPERS[cls], "lr": 1 / 3}
        step_both(ours, theirs, 1)
        assert_equal_params(ours, theirs)

    @lowerings
    @pytest.mark.parametrize("way", ["assign", "assign-tensor", "fill", "fill-uncounted"])
    def test_momentum_that_was_zero(self, way: str, lowering: str) -> None:
        ours, theirs = twins(co.SGD, momentum=0.0, dampening=0.0, lowering=lowering)
        step_both(ours, theirs, 0, 1)
        theirs.param_groups[0]["momentum"] = 0.75
        if way == "fill":
            ours.hyperparameter("momentum").fill_(0.75)
        elif way == "fill-uncounted":
            ours.hyperparameter("momentum").data.fill_(0.75)
        else:
            ours.param_groups[0]["momentum"] = 0.75 if way == "assign" else torch.tensor(0.75)
        step_both(ours, theirs, 2, 3, 4)
        assert_equal_params(ours, theirs)

    @pytest.mark.usefixtures("fresh_kernels")
    @lowerings
    def test_momentum_that_was_zero_compiles_nothing_again(self, lowering: str) -> None:
        ours, theirs = twins(co.SGD, momentum=0.0, dampening=0.0, lowering=lowering)
        step_both(ours, theirs, 0)
        with co.no_recompiles():
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["momentum"] = 0.75
            step_both(ours, theirs, 1, 2)
        assert_equal_params(ours, theirs)
        assert co.compile_report(ours).recompiles == 0

    def test_setdefault(self) -> None:
        group = co.AdamW([Parameter(torch.ones(2))], lr=0.5).param_groups[0]
        assert group.setdefault("lr", 7.0) == group["lr"]
        assert group["lr"] == 0.5
        assert group.setdefault("initial_lr", group["lr"]) == 0.5
        group["lr"] = 0.25
        assert group["initial_lr"] == 0.5
        assert group.setdefault("new") is None


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
