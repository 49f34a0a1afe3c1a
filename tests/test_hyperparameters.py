"""Hyperparameters: what the groups hold, what assigning to them means, and that the step computes with them exactly."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from catalog import copies, give_gradients, parameters, relative_error
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import compiled_optim as co
from compiled_optim.rule.vocabulary import bias_correction

pytestmark = pytest.mark.usefixtures("one_thread")

LOWERINGS = ["multi_tensor", "inductor", "eager"]
HYPERS = {
    co.AdamW: {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2},
    co.SGD: {"lr": 0.03, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2},
}
STOCK = {co.AdamW: torch.optim.AdamW, co.SGD: torch.optim.SGD}

lowerings = pytest.mark.parametrize("lowering", LOWERINGS)
classes = pytest.mark.parametrize("cls", list(HYPERS), ids=lambda c: c.__name__)


def name_of(value: Any) -> str | None:
    return value.__name__ if callable(value) else None


def pairs(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def numbers(group: dict[str, Any], cls: type[Optimizer]) -> dict[str, Any]:
    """A group's hyperparameters as Python floats."""
    return {
        key: tuple(map(float, group[key])) if isinstance(group[key], (tuple, list)) else float(group[key])
        for key in HYPERS[cls]
    }


def tensors(optimizer: Optimizer) -> list[Tensor]:
    keys = HYPERS[type(optimizer)]
    return [t for group in optimizer.param_groups for key in keys for t in pairs(group[key])]


def twins(cls: type[Optimizer], groups: int = 1, **kwargs: Any) -> tuple[Optimizer, Optimizer]:
    """One of ours and torch's own over equal float64 parameters, one or two groups."""
    both = []
    options = {**HYPERS[cls], **{k: v for k, v in kwargs.items() if k != "lowering"}}
    for made in (cls, STOCK[cls]):
        params = [Parameter(torch.linspace(-1, 1, n, dtype=torch.float64)) for n in (6, 3, 4, 5)]
        listed = [{"params": params}] if groups == 1 else [{"params": params[:2]}, {"params": params[2:], "lr": 0.007}]
        own = {"lowering": kwargs["lowering"]} if made is cls and "lowering" in kwargs else {}
        both.append(made(listed, **options, **own))
    return both[0], both[1]


def params_of(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: Optimizer, t: int) -> None:
    for i, param in enumerate(params_of(optimizer)):
        param.grad = torch.cos(torch.arange(param.numel(), dtype=param.dtype) + t + i).view_as(param)
    optimizer.step()


def step_both(ours: Optimizer, theirs: Optimizer, *steps: int) -> None:
    for t in steps:
        step(ours, t)
        step(theirs, t)


def assert_equal_params(ours: Optimizer, theirs: Optimizer) -> None:
    mine, others = params_of(ours), params_of(theirs)
    assert len(mine) == len(others)
    assert relative_error(mine, others) < 1e-14


class TestGroups:
    @classes
    @pytest.mark.parametrize("given", [float, np.float32, torch.tensor], ids=["float", "numpy", "tensor"])
    def test_entries_are_tensors_of_their_own(self, cls: type[Optimizer], given: Callable[[float], Any]) -> None:
        params = [Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3)]
        options = {k: tuple(map(given, v)) if isinstance(v, tuple) else given(v) for k, v in HYPERS[cls].items()}
        optimizer = cls([{"params": [p]} for p in params], **options)
        entries = tensors(optimizer)
        assert all(isinstance(t, Tensor) and t.dim() == 0 and t.device == params[0].device for t in entries)
        assert {t.dtype for t in entries} == {torch.float64}
        assert len({id(t) for t in entries}) == len({t.data_ptr() for t in entries}) == len(entries)

    @classes
    def test_values_are_exact(self, cls: type[Optimizer]) -> None:
        optimizer = cls([Parameter(torch.ones(2))], **HYPERS[cls])
        assert numbers(optimizer.param_groups[0], cls) == HYPERS[cls]
        assert optimizer.hyperparameters() == [HYPERS[cls]]

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

    def test_any_key_may_be_added_without_a_recompilation(self) -> None:
        ours, theirs = twins(co.AdamW)
        step_both(ours, theirs, 0)
        with co.no_recompiles():
            for optimizer in (ours, theirs):
                optimizer.param_groups[0].update(name="decoder", lr_mult=2.0, initial_lr=0.1, tags=["a"])
            step_both(ours, theirs, 1)
        assert_equal_params(ours, theirs)
        assert ours.param_groups[0]["tags"] == ["a"]
        assert co.compile_report(ours).recompiles == 0


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


def assign(group: dict[str, Any], key: str, value: Any) -> None:
    group[key] = value


def update_with_keywords(group: dict[str, Any], key: str, value: Any) -> None:
    group.update(**{key: value})


def update_with_a_dict(group: dict[str, Any], key: str, value: Any) -> None:
    group.update({key: value})


def update_with_pairs(group: dict[str, Any], key: str, value: Any) -> None:
    group.update([(key, value)])


def or_in_place(group: dict[str, Any], key: str, value: Any) -> None:
    group |= {key: value}


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


def as_float(value: Any) -> Any:
    """What torch.optim is given: plain numbers."""
    if isinstance(value, (tuple, list)):
        return tuple(map(as_float, value))
    return float(value)


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
                assert ours.param_groups[1][key].item() == float(value)
                assert ours.param_groups[1][key].shape == ()
                step_both(ours, theirs, t + 1)
                assert_equal_params(ours, theirs)
        assert numbers(ours.param_groups[0], cls) == HYPERS[cls]
        count = len(before) // 2
        assert all(a is b for a, b in zip(before[:count], tensors(ours)[:count], strict=True))
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
            lambda t, v: t.set_(torch.tensor(v, dtype=torch.float64)),
            lambda t, v: t.numpy().fill(v),
        ],
        ids=["fill_", "copy_", "mul_add_", "set_", "numpy"],
    )
    def test_writes_into_the_tensor(self, write: Callable[..., None], cls: type[Optimizer], lowering: str) -> None:
        ours, theirs = twins(cls, groups=2, lowering=lowering)
        step_both(ours, theirs, 0)
        with co.no_recompiles():
            for t, key in enumerate(HYPERS[cls]):
                old = theirs.param_groups[0][key]
                value = tuple(b / 2 for b in old) if isinstance(old, tuple) else old / 2
                theirs.param_groups[0][key] = value
                for tensor, number in zip(pairs(ours.param_groups[0][key]), pairs(value), strict=True):
                    write(tensor, number)
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
    @pytest.mark.parametrize("way", ["assign", "assign-tensor", "fill"])
    def test_momentum_that_was_zero(self, way: str, lowering: str) -> None:
        ours, theirs = twins(co.SGD, momentum=0.0, dampening=0.0, lowering=lowering)
        step_both(ours, theirs, 0, 1)
        theirs.param_groups[0]["momentum"] = 0.75
        if way == "fill":
            ours.param_groups[0]["momentum"].fill_(0.75)
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
        assert group.setdefault("lr", 7.0) is group["lr"]
        assert group["lr"].item() == 0.5
        assert group.setdefault("initial_lr", group["lr"]).item() == 0.5
        assert group["initial_lr"] is not group["lr"]
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


class TestBadValues:
    @pytest.mark.parametrize("write", [assign, update_with_a_dict, or_in_place], ids=name_of)
    @pytest.mark.parametrize("case", BAD.values(), ids=BAD)
    def test_assignment(self, case: Any, write: Callable[..., None]) -> None:
        cls, key, value, error, shown, allowed = case
        ours, theirs = twins(cls, groups=2)
        step_both(ours, theirs, 0)
        group = ours.param_groups[1]
        before = dict(group)
        values = numbers(group, cls)
        with pytest.raises(error) as caught:
            write(group, key, value)
        message = str(caught.value)
        for part in (key, shown, allowed, "param_groups[1]"):
            assert part in message
        assert list(group) == list(before)
        assert all(group[k] is v for k, v in before.items())
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
        with pytest.raises(ValueError, match="weight_decay"):
            write(group, {"lr": 0.5, "note": "new", "weight_decay": -1.0})
        assert list(group) == list(before)
        assert all(group[k] is v for k, v in before.items())


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
        ours.param_groups[0]["lr"].fill_(0.5)
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
        rate = ours.param_groups[0]["lr"]
        get_optimizer_state_dict(model, ours)
        assert ours.param_groups[0]["lr"] is rate
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
        assert group["lr"] is rate
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
        group["lr"] = rate
        rate.fill_(0.125)
        optimizer.step()
        assert group["params"][0].tolist() == [0.125] * 3

    @pytest.mark.parametrize("arguments", [("betas", 2), ("lr", "eps")], ids=["tuple", "fields"])
    def test_a_tensor_in_two_places_is_adopted_in_the_first(self, arguments: tuple[str, Any]) -> None:
        given = torch.tensor(0.5, dtype=torch.float64)
        first, second = arguments
        options = {first: (given, given)} if second == 2 else {first: given, second: given}
        optimizer = co.Adam({"a": torch.nn.Parameter(torch.ones(2))}, **options)
        assert optimizer.param_groups[0].tensors(first)[0] is given
        values = {"lr": 0.125, "betas": (0.25, 0.75), "eps": 0.0625}
        optimizer.load_state_dict(co.Adam({"a": torch.nn.Parameter(torch.ones(2))}, **values).state_dict())
        assert {name: optimizer.hyperparameters()[0][name] for name in values} == values

    @lowerings
    def test_betas_and_others_are_adopted(self, lowering: str) -> None:
        ours, theirs = twins(co.AdamW)
        given = {k: torch.tensor(v, dtype=torch.float64) for k, v in (("lr", 0.03), ("eps", 1e-3), ("weight_decay", 0.2))}
        betas = tuple(torch.tensor(b, dtype=torch.float64) for b in (0.8, 0.95))
        ours = co.AdamW(params_of(ours), **given, betas=betas, lowering=lowering)
        assert all(ours.param_groups[0][key] is value for key, value in given.items())
        assert all(a is b for a, b in zip(ours.param_groups[0]["betas"], betas, strict=True))
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

    @pytest.mark.parametrize("place", ["constructor", "groups", "added", "both-betas"])
    def test_a_tensor_for_two_groups_is_not_shared(self, place: str) -> None:
        value = torch.tensor(0.5, dtype=torch.float64)
        params = [Parameter(torch.ones(2)) for _ in range(2)]
        if place == "constructor":
            optimizer = co.AdamW([{"params": [p]} for p in params], lr=value)
        elif place == "groups":
            optimizer = co.AdamW([{"params": [p], "lr": value} for p in params])
        elif place == "added":
            optimizer = co.AdamW(params[:1], lr=value)
            optimizer.add_param_group({"params": params[1:], "lr": value})
        else:
            optimizer = co.AdamW([{"params": [p], "betas": (value, 0.9)} for p in params])
        assert len({t.data_ptr() for t in tensors(optimizer)}) == 10
        first, second = (g["betas"][0] if place == "both-betas" else g["lr"] for g in optimizer.param_groups)
        assert first.item() == second.item() == 0.5
        second.fill_(0.25)
        assert first.item() == 0.5

    def test_views_of_one_tensor_are_not_shared(self) -> None:
        value = torch.full((1,), 0.5, dtype=torch.float64)
        optimizer = co.SGD([{"params": [Parameter(torch.ones(2))], "lr": value} for _ in range(2)])
        first, second = (group["lr"] for group in optimizer.param_groups)
        second.fill_(0.25)
        assert first.item() == 0.5

    def test_a_tensor_of_another_optimizer_keeps_both_apart(self) -> None:
        first = co.SGD([Parameter(torch.ones(2))], lr=0.5)
        second = co.SGD([Parameter(torch.ones(2))], lr=0.1)
        second.param_groups[0]["lr"] = first.param_groups[0]["lr"]
        second.param_groups[0]["lr"] *= 0.5
        assert first.param_groups[0]["lr"].item() == 0.5


def reloaded(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, reloaded, saved_and_loaded]


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
        other.param_groups[1]["lr"].fill_(0.125)
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
    def test_a_copy_of_a_copy_has_schedulers_of_its_own(self, cls: type[Optimizer]) -> None:
        ours, _ = twins(cls)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
        step(ours, 0)
        scheduler.step()
        second, second_scheduler = copy.deepcopy((ours, scheduler))
        step(second, 1)
        second_scheduler.step()
        assert second.param_groups[0]["lr"].item() == 0.03 * 0.25
        assert ours.param_groups[0]["lr"].item() == 0.03 * 0.5

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

    def test_a_rate_reads_like_a_number(self) -> None:
        rate = co.AdamW([Parameter(torch.ones(2))], lr=1e-3).param_groups[0]["lr"]
        assert f"{rate:.2e}" == "1.00e-03" == "%.2e" % rate  # noqa: UP031
        assert rate == 1e-3
        assert math.log10(rate) == math.log10(1e-3)
        assert np.mean([rate, rate]) == 1e-3


class TestRegrouping:
    @lowerings
    @classes
    def test_add_param_group_after_steps(self, cls: type[Optimizer], lowering: str) -> None:
        ours, theirs = twins(cls, lowering=lowering)
        step_both(ours, theirs, 0, 1)
        with co.no_recompiles():
            for optimizer in (ours, theirs):
                optimizer.add_param_group({"params": [Parameter(torch.ones(7, dtype=torch.float64))], "lr": 0.5})
            step_both(ours, theirs, 2)
            for optimizer in (ours, theirs):
                optimizer.param_groups[1]["lr"] = 0.25
                optimizer.param_groups[0]["weight_decay"] = 0.5
            step_both(ours, theirs, 3)
        assert_equal_params(ours, theirs)
        assert co.compile_report(ours).recompiles == 0

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

    @lowerings
    @classes
    def test_a_group_replaced_by_a_changed_copy(self, cls: type[Optimizer], lowering: str) -> None:
        ours, theirs = twins(cls, groups=2, lowering=lowering)
        step_both(ours, theirs, 0)
        for t in range(3):
            for optimizer in (ours, theirs):
                optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.25 / (t + 1), "weight_decay": 0.5}
            step_both(ours, theirs, 2 * t + 1)
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"] *= 0.5
            step_both(ours, theirs, 2 * t + 2)
            assert_equal_params(ours, theirs)
        assert co.compile_report(ours).recompiles == 0

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


class TestZeroRate:
    @lowerings
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-310, 1.0, 1e30], ids=lambda s: f"grad-{s:g}")
    @pytest.mark.parametrize(
        ("cls", "kwargs"),
        [
            (co.AdamW, {"weight_decay": 0.1}),
            (co.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
            (co.SGD, {"weight_decay": 0.1}),
            (co.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
        ],
        ids=["AdamW", "AdamW-amsgrad", "SGD", "SGD-nesterov"],
    )
    def test_changes_no_bit(
        self, cls: type[Optimizer], kwargs: dict[str, Any], scale: float, dtype: torch.dtype, lowering: str
    ) -> None:
        param = Parameter(torch.cat([torch.randn(20), torch.tensor([0.0, 1e-40, -1e-40, 1e30])]).to(dtype))
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
        before = param.detach().clone().view(integer)
        optimizer = cls([param], lr=0.0, lowering=lowering, **kwargs)
        for t in range(4):
            param.grad = (torch.randn(24, dtype=torch.float64) * scale).to(dtype)
            param.grad[t] = 0
            optimizer.step()
            assert torch.equal(param.detach().view(integer), before)
            assert all(value.isfinite().all() or scale == 1e30 for value in optimizer.state[param].values())

    @lowerings
    def test_a_warm_up_from_zero_goes_on_as_torch(self, lowering: str) -> None:
        ours, theirs = twins(co.AdamW, lr=0.0, weight_decay=0.1, lowering=lowering)
        for t in range(6):
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"] = 0.01 * t
            step_both(ours, theirs, t)
        assert_equal_params(ours, theirs)


def exact_correction(beta: float, step: int) -> Decimal:
    with localcontext() as context:
        context.prec = 80
        return 1 - Decimal(beta) ** step


def ulps(value: float, exact: Decimal, dtype: torch.dtype) -> float:
    """The distance from the exact value, in units in the last place of ``dtype`` there."""
    exponent = math.frexp(float(exact))[1]
    unit = Decimal(2) ** (exponent + round(math.log2(torch.finfo(dtype).eps)) - 1)
    return float(abs(Decimal(value) - exact) / unit)


BIAS_BETAS = [0.0, 0.5, 0.9, 0.999, 0.99999, 1 - 2**-40]
BIAS_STEPS = [1, 2, 3, 7, 10, 99, 1000, 6931, 10**4, 10**5, 10**6]


class TestBiasCorrection:
    @pytest.mark.parametrize("beta", BIAS_BETAS)
    def test_is_within_2_ulp_of_exact(self, beta: float) -> None:
        steps = [*BIAS_STEPS, *range(11, 2000, 13), 2**24 + 1, 2**30 + 1]
        results = bias_correction(torch.tensor(beta, dtype=torch.float64), torch.tensor(steps, dtype=torch.float64))
        worst = max(
            (ulps(value, exact_correction(beta, t), torch.float64), t)
            for t, value in zip(steps, results.tolist(), strict=True)
        )
        assert worst[0] <= 2, f"at step {worst[1]}"

    @lowerings
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("beta", BIAS_BETAS)
    @pytest.mark.parametrize("which", ["first", "second"])
    def test_is_within_2_ulp_in_a_step(self, which: str, beta: float, dtype: torch.dtype, lowering: str) -> None:
        """With one beta 0, eps 0 and lr 1 a parameter at 0 moves by its moment over the correction, or by its root."""
        params = [Parameter(torch.zeros(1, dtype=dtype)) for _ in BIAS_STEPS]
        betas = (beta, 0.0) if which == "first" else (0.0, beta)
        optimizer = co.AdamW(params, lr=1.0, betas=betas, eps=0.0, weight_decay=0.0, lowering=lowering)
        for param, t in zip(params, BIAS_STEPS, strict=True):
            optimizer.state[param]["step"].fill_(t - 1)
            param.grad = torch.ones_like(param)
        optimizer.step()
        for param, t in zip(params, BIAS_STEPS, strict=True):
            assert optimizer.state[param]["step"].item() == t
            correction = exact_correction(beta, t)
            with localcontext() as context:
                context.prec = 80
                if which == "first":
                    moment = Decimal(optimizer.state[param]["exp_avg"].item())
                    exact = moment / correction
                else:
                    moment = Decimal(optimizer.state[param]["exp_avg_sq"].item())
                    exact = (correction / moment).sqrt()
            # 2 for the correction, and a half for each operation around it
            assert ulps(-param.item(), exact, dtype) <= 4, f"at step {t}"

    @lowerings
    @pytest.mark.parametrize("way", ["fill", "assign-tensor", "assign-number", "load"])
    def test_the_step_count_can_be_set(self, way: str, lowering: str) -> None:
        ours, theirs = twins(co.AdamW, lowering=lowering)
        step_both(ours, theirs, 0)
        for param, twin in zip(params_of(ours), params_of(theirs), strict=True):
            theirs.state[twin]["step"].fill_(1000)
            if way == "fill":
                ours.state[param]["step"].fill_(1000)
            elif way == "assign-tensor":
                ours.state[param]["step"] = torch.tensor(1000.0)
            elif way == "assign-number":
                ours.state[param]["step"] = 1000
        if way == "load":
            ours.load_state_dict(theirs.state_dict())
        with co.no_recompiles():
            step_both(ours, theirs, 1, 2)
        assert_equal_params(ours, theirs)
        assert {ours.state[p]["step"].item() for p in params_of(ours)} == {1002}


class TestPrecision:
    @lowerings
    @pytest.mark.parametrize("given", [float, torch.tensor], ids=["float", "tensor"])
    @pytest.mark.parametrize("betas", [(0.999, 0.99), (0.9, 0.999), (0.99, 0.9999)], ids=str)
    def test_betas_are_not_rounded_to_bfloat16(
        self, betas: tuple[float, float], given: Callable[[float], Any], lowering: str
    ) -> None:
        param = Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = co.AdamW([param], lr=0.1, betas=tuple(map(given, betas)), lowering=lowering)
        exact = [float(given(beta)) for beta in betas]
        moments = [torch.zeros(3, dtype=torch.float64) for _ in betas]
        grad = torch.tensor([1.0, -0.5, 0.25])
        for _ in range(50):
            param.grad = grad.bfloat16()
            optimizer.step()
            for moment, beta, value in zip(moments, exact, (grad, grad * grad), strict=True):
                moment.copy_((beta * moment + (1 - beta) * value.double()).bfloat16())
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            torch.testing.assert_close(optimizer.state[param][name].double(), moment, rtol=2**-7, atol=0)
        assert (param != 1).all()

    @lowerings
    def test_a_float32_moment_of_a_bfloat16_parameter_is_exact(self, lowering: str) -> None:
        param = Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = co.AdamW([param], lr=1e-3, betas=(0.999, 0.9999), lowering=lowering)
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][name] = torch.zeros(3)
        for _ in range(200):
            param.grad = torch.ones(3, dtype=torch.bfloat16)
            optimizer.step()
        for name, beta in (("exp_avg", 0.999), ("exp_avg_sq", 0.9999)):
            exact = torch.full((3,), 1 - beta**200, dtype=torch.float64)
            torch.testing.assert_close(optimizer.state[param][name].double(), exact, rtol=2e-5, atol=0)

    @lowerings
    @classes
    @pytest.mark.parametrize("start", [2**24 - 1, 2**24, 2**30, 2**40])
    def test_the_step_count_does_not_saturate(self, start: int, cls: type[Optimizer], lowering: str) -> None:
        params = [Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
        optimizer = cls(params, lowering=lowering)
        for param in params:
            optimizer.state[param]["step"].fill_(start)
        for k in range(1, 4):
            step(optimizer, k)
            assert [optimizer.state[p]["step"].item() for p in params] == [start + k] * 2
        saved = optimizer.state_dict()
        assert {float(state["step"]) for state in saved["state"].values()} == {start + 3}
        other = cls([Parameter(p.detach().clone()) for p in params], lowering=lowering)
        other.load_state_dict(saved)
        step(other, 4)
        assert {other.state[p]["step"].item() for p in params_of(other)} == {start + 4}

    @lowerings
    @classes
    def test_the_default_dtype_does_not_matter(self, cls: type[Optimizer], lowering: str) -> None:
        torch.set_default_dtype(torch.bfloat16)
        try:
            param = Parameter(torch.ones(3, dtype=torch.float64))
            twin = Parameter(param.detach().clone())
            ours = cls([param], **HYPERS[cls], lowering=lowering)
            assert {t.dtype for t in tensors(ours)} == {torch.float64}
            assert numbers(ours.param_groups[0], cls) == HYPERS[cls]
            for t in range(300):
                if t == 100:
                    ours.param_groups[0]["lr"] = 0.01
                step(ours, t)
        finally:
            torch.set_default_dtype(torch.float32)
        theirs = STOCK[cls]([twin], **HYPERS[cls])
        for t in range(300):
            if t == 100:
                theirs.param_groups[0]["lr"] = 0.01
            step(theirs, t)
        assert ours.state[param]["step"].item() == 300
        assert relative_error([param], [twin]) < 1e-12


def moving(cls: type[Optimizer], t: int) -> dict[str, Any]:
    """Values for step ``t``, all unlike those of the step before."""
    wave = 1 + 0.5 * math.sin(0.7 * t)
    if cls is co.AdamW:
        return {
            "lr": 0.01 * wave,
            "betas": (0.8 * wave / 1.5, 0.99 - 0.1 * wave),
            "eps": 1e-4 * wave,
            "weight_decay": 0.1 * wave,
        }
    return {"lr": 0.01 * wave, "momentum": 0.6 * wave, "dampening": 0.3 * wave, "weight_decay": 0.1 * wave}


def fill(group: dict[str, Any], key: str, value: Any) -> None:
    for tensor, number in zip(pairs(group[key]), pairs(value), strict=True):
        tensor.fill_(number)


@pytest.mark.usefixtures("fresh_kernels")
@lowerings
@classes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_three_hundred_steps_in_which_everything_changes(dtype: torch.dtype, cls: type[Optimizer], lowering: str) -> None:
    """A hundred with a scheduler for lr and momentum or beta1, a hundred with assignments, a hundred with ``fill_``."""
    mine = parameters(dtype)
    theirs = copies(mine, torch.float64)
    ours = cls([{"params": mine[:3]}, {"params": mine[3:], "lr": 0.02}], **HYPERS[cls], lowering=lowering)
    stock = STOCK[cls]([{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.02}], **HYPERS[cls])
    schedulers = []
    for optimizer in (ours, stock):
        cycle = {"total_steps": 101, "base_momentum": 0.5, "max_momentum": 0.9}
        schedulers.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01], **cycle))

    def take(t: int) -> None:
        give_gradients(mine, theirs, t)
        ours.step()
        stock.step()
        if t < 100:
            for scheduler in schedulers:
                scheduler.step()
        for index in range(2):
            for key, value in moving(cls, t + 50 * index).items():
                if t >= 100 or key not in ("lr", "momentum", "betas"):
                    stock.param_groups[index][key] = value
                    (fill if t >= 200 else assign)(ours.param_groups[index], key, value)
                elif key == "betas":
                    for optimizer in (ours, stock):
                        group = optimizer.param_groups[index]
                        group["betas"] = (group["betas"][0], value[1])

    take(0)
    first = co.compile_report(ours)
    assert first.compiles <= len(first.kernels)
    seen = []
    with co.no_recompiles():
        for t in range(1, 300):
            take(t)
            seen.append([numbers(group, cls) for group in ours.param_groups])
            assert seen[-1] == [numbers(group, cls) for group in stock.param_groups]
    for index in range(2):
        for key in HYPERS[cls]:
            assert all(a[index][key] != b[index][key] for a, b in itertools.pairwise(seen)), key
    report = co.compile_report(ours)
    assert report.recompiles == 0
    assert report.compiles == first.compiles == (0 if lowering == "eager" else len(report.kernels))
    assert report.kernels == first.kernels
    assert report.fallbacks == ()
    assert report.steps == 300
    whole = [torch.cat([p.detach().double().flatten() for p in params]) for params in (mine, theirs)]
    assert relative_error(whole[:1], whole[1:]) < (1e-6 if dtype == torch.float32 else 1e-12)
    # a tensor of few elements has fewer rounding errors to average: torch's own float32 reaches 1e-6 in it
    assert relative_error(mine, theirs) < (3e-6 if dtype == torch.float32 else 1e-12)
