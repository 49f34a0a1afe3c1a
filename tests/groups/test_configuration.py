"""Options as configuration libraries write them: sequences, mappings and numbers of other classes."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from catalog import registry
from round_trips import through_a_file

import compiled_optim as co


class Listed(Sequence):
    """A sequence that is neither list nor tuple, as OmegaConf's is."""

    def __init__(self, values):
        self.values = tuple(values)

    def __getitem__(self, index):
        return self.values[index]

    def __len__(self):
        return len(self.values)


CONTAINERS = {
    "list": list,
    "sequence": Listed,
    "deque": deque,
    "user list": UserList,
    "array": np.array,
    "tensor": lambda v: torch.tensor(v, dtype=torch.float64),
    "numbers": lambda v: tuple(np.float64(x) for x in v),
}
SCALARS = [np.float64, np.float32, np.float16, np.int64, np.uint8, np.array]
WAYS = ["constructor", "group", "assignment", "update", "load"]


def made(kind: type, way: str, name: str, value: Any, **more: Any) -> Any:
    """An optimizer that got ``value`` in a ``way``."""
    names = {"split": "qkv", "stacks": "experts", "exclude": "layer.bias"}
    params = [(names.get(name, "weight"), torch.nn.Parameter(torch.ones(64, 64)))]
    if name != "lr":
        more.setdefault("lr", 0.01)
    if way == "constructor":
        return kind(params, **{**more, name: value})
    if way == "group":
        return kind([{"params": params, name: value}], **{"lr": 0.01, **more})
    opt = kind(params, **{"lr": 0.01, **more})
    if way == "assignment":
        opt.param_groups[0][name] = value
    elif way == "update":
        opt.param_groups[0].update({name: value})
    else:
        saved = opt.state_dict()
        saved["param_groups"][0][name] = value
        opt.load_state_dict(saved)
    return opt


def reread(opt: Any) -> dict[str, Any]:
    """The first group, of what ``torch.save`` wrote and a safe load reads."""
    return through_a_file(opt.state_dict())["param_groups"][0]


def is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in (int, float, bool, str, type(None), torch.dtype)


TUPLES = [(k, h.name) for k in registry() for h in k._declaration.hypers if h.is_tuple]
NUMBERS = [(k, h.name) for k in registry() for h in k._declaration.hypers if not h.is_tuple]
BOOLS = [
    (k, c.name)
    for k in registry()
    for c in k._options()
    if type(c.default) is bool and c.name in ("nesterov", "amsgrad", "centered", "maximize", "cautious", "decouple_lr")
]


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "name"), TUPLES, ids=lambda v: getattr(v, "__name__", v))
def test_any_sequence_is_taken_for_a_tuple_and_kept_as_one(kind, name):
    default = next(h.default for h in kind._declaration.hypers if h.name == name)
    value = tuple(1e-3 if d is None else d * 0.75 if d < 1 else d for d in default)
    for label, convert in CONTAINERS.items():
        for way in WAYS:
            opt = made(kind, way, name, convert(value))
            kept = opt.param_groups[0][name]
            assert kept == value, (label, way, kept)
            assert type(kept) is tuple
            assert is_plain(kept), (label, way, kept)
            assert tuple(reread(opt)[name]) == value, (label, way)


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda v: getattr(v, "__name__", v))
def test_numpy_numbers_are_kept_as_pythons(kind, name):
    hyper = next(h for h in kind._declaration.hypers if h.name == name)
    least, most = hyper.span
    number = next(n for n in (1, 0, 0.5, -1, -0.5) if least <= n <= most and (n or hyper.when is None))
    for scalar in SCALARS if number in (0, 1) else [np.float64, np.float32, np.array]:
        for way in WAYS:
            more = dict.fromkeys(hyper.readers[:1], True) if hyper.readers else {name: 0.5} if name == "momentum" else {}
            opt = made(kind, way, name, scalar(number), **more)
            kept = opt.param_groups[0][name]
            assert kept == number, (scalar, way, kept)
            assert is_plain(kept), (scalar, way, kept)
            assert reread(opt)[name] == number, (scalar, way)


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "name"), BOOLS, ids=lambda v: getattr(v, "__name__", v))
def test_numpy_bools_are_kept_as_pythons(kind, name):
    for way in WAYS:
        default = next(c.default for c in kind._options() if c.name == name)
        opt = made(kind, way, name, np.bool_(default))
        assert type(opt.param_groups[0].get(name, default)) is bool, way
        reread(opt)


@pytest.mark.parametrize("kind", registry(), ids=lambda k: k.__name__)
@pytest.mark.parametrize("name", ["fused", "foreach", "capturable"])
def test_a_group_may_hold_what_other_code_writes_for_torch(kind, name):
    for value in (True, False, None, "anything"):
        for way in WAYS[1:]:
            made(kind, way, name, value)


class Mapped(UserDict, Mapping):
    """A mapping that is no dict."""


@pytest.mark.parametrize("way", WAYS[:4])
@pytest.mark.parametrize("sequence", [Listed, deque, UserList, np.array, "tensor"])
def test_options_by_name_are_kept_plain(way, sequence):
    triple = torch.tensor if sequence == "tensor" else sequence
    sequence = Listed if sequence == "tensor" else sequence
    options = {
        "exclude": (co.AdamW, sequence(["*.bias"])),
        "state_dtype": (co.AdamW, Mapped({"exp_avg": torch.bfloat16})),
        "lr_scale": (co.AdamW, Mapped({"weight": np.float64(0.5)})),
        "stacks": (co.Muon, sequence(["*experts*"])),
        "split": (co.Muon, Mapped({"*qkv*": sequence([32, 32])})),
        "ns_coefficients": (co.Muon, Listed([triple([3.0, -4.0, 2.0]), triple([2.0, -1.5, 0.5])])),
    }
    for name, (kind, value) in options.items():
        opt = made(kind, way, name, value, **({"ns_steps": 2} if name == "ns_coefficients" else {}))
        kept = opt.param_groups[0][name]
        assert is_plain(list(kept.values()) if isinstance(kept, dict) else kept), (name, kept)
        reread(opt)


def test_options_of_the_whole_optimizer_are_kept_plain():
    opt = co.AdamW([torch.nn.Parameter(torch.ones(3))], skip_nonfinite=np.bool_(True), max_grad_norm=np.float32(0.5))
    assert (opt.skip_nonfinite, opt.max_grad_norm) == (True, 0.5)
    opt.skip_nonfinite, opt.max_grad_norm = np.bool_(False), np.float64(2)
    assert [type(opt.skip_nonfinite), type(opt.max_grad_norm)] == [bool, float]


def test_a_vector_that_requires_a_gradient_passes_it_on() -> None:
    betas = torch.tensor([0.6, 0.8], dtype=torch.float64, requires_grad=True)
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = co.AdamW([param], lr=0.1, betas=betas, differentiable=True)
    weight = param.clone()
    optimizer.param_groups[0]["params"][0] = weight
    for _ in range(2):
        weight.grad = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) * weight.detach() ** 2
        optimizer.step()
    (gradient,) = torch.autograd.grad(weight.sum(), betas)
    assert gradient.count_nonzero() == 2
