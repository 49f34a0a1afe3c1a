"""Bad input: a clear error with field, value, range and name, and nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from catalog import LOWERINGS

import compiled_optim as co


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, r"Invalid learning rate: -0.1 \(the argument lr must be >= 0 and < inf\)"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": torch.tensor(-1.0)}, "Invalid learning rate: -1.0"),
        ({"lr": torch.tensor([1.0, 2.0])}, r"Tensor lr must be 1-element, got shape \(2,\)"),
        (
            {"betas": (0.9, 1.0)},
            r"Invalid beta parameter at index 1: 1.0 \(the argument betas\[1\] must be >= 0 and < 1\)",
        ),
        ({"betas": (0.9,)}, "the argument betas must have 2 elements"),
        ({"eps": -1}, "Invalid epsilon value: -1"),
        (
            {"weight_decay": float("inf")},
            r"Invalid weight_decay value: inf \(the argument weight_decay must be >= 0 and < inf\)",
        ),
        ({"lowering": "fast"}, "lowering must be one of auto, multi_tensor, inductor, eager, got 'fast'"),
    ],
)
def test_values(weight: torch.nn.Parameter, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        co.AdamW([weight], **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": "0.1"}, "the argument lr must be a number or a 1-element tensor, got '0.1'"),
        ({"betas": 0.9}, "the argument betas must be a tuple of 2 numbers, got 0.9"),
        ({"amsgrad": 1}, "amsgrad must be a bool, got 1"),
        ({"lr": torch.tensor(1j)}, "the argument lr must be real"),
        ({"learning_rate": 0.1}, "unexpected keyword argument 'learning_rate'"),
    ],
)
def test_types(weight: torch.nn.Parameter, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        co.AdamW([weight], **arguments)


def test_nesterov_needs_momentum_without_dampening(weight: torch.nn.Parameter) -> None:
    for arguments in ({}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match="Nesterov momentum requires a momentum and zero dampening"):
            co.SGD([weight], nesterov=True, **arguments)


def test_parameters() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    with pytest.raises(ValueError, match="empty parameter list"):
        co.AdamW([])
    with pytest.raises(ValueError, match="more than one parameter group: 'b' is also 'a'"):
        co.AdamW([{"params": [("a", weight)]}, {"params": [("b", weight)]}])
    with pytest.raises(TypeError, match=r"pairs are \(name, parameter\); got \(int, Parameter of shape \(3,\)\)"):
        co.AdamW([(0, weight)])
    with pytest.raises(ValueError, match=r"more than one parameter group: 'param_groups\[1\]\['params'\]\[0\]' is also"):
        co.AdamW([{"params": [weight]}, {"params": [weight]}])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor: 'w'"):
        co.AdamW([("w", weight * 2)])
    with pytest.raises(TypeError, match=r"one of the params is .*int \('w'\)"):
        co.AdamW([("w", 3)])
    with pytest.raises(TypeError, match="an iterable of Tensors or dicts"):
        co.AdamW(weight)
    with pytest.raises(TypeError, match="ordered collections"):
        co.AdamW({weight})
    with pytest.raises(ValueError, match="Some param names are missing"):
        co.AdamW([("a", weight), torch.nn.Parameter(torch.randn(1))])


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"betas": (0.5, 2.0)},
        {"eps": "small"},
        {"params": [torch.zeros(2, requires_grad=True) * 2]},
        {"lowering": "eager"},
        {"maximize": "no"},
        {"amsgrad": 1},
    ],
    ids=lambda b: next(iter(b)),
)
def test_a_refused_group_changes_nothing(bad: dict[str, Any]) -> None:
    first, second = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
    optimizer = co.AdamW([first])
    first.grad = torch.randn(3)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((ValueError, TypeError)):
        optimizer.add_param_group({"params": [second], **bad})
    after = optimizer.state_dict()
    assert len(optimizer.param_groups) == 1
    assert second not in optimizer.state
    assert after["param_groups"] == before["param_groups"]
    optimizer.step()
    assert optimizer.state[first]["step"] == 2


@pytest.mark.parametrize(
    ("optimizer", "numbers", "choice", "message"),
    [
        (co.AdamW, {}, {"maximize": "no"}, r"maximize of param_groups\[0\] must be a bool, got 'no'"),
        (co.AdamW, {"lr": 0.5}, {"amsgrad": 1}, r"amsgrad of param_groups\[0\] must be a bool, got 1"),
        (co.SGD, {}, {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        (co.SGD, {"momentum": 0.9, "dampening": 0.5}, {"nesterov": True}, "Nesterov momentum requires a momentum"),
        (co.Muon, {}, {"ns_steps": 100}, "ns_steps must be an integer >= 0 and < 100, got 100"),
        (co.Muon, {}, {"adjust_lr_fn": "none"}, "Adjust learning rate function none is not supported"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_refused_choice_changes_nothing(
    optimizer: type[co.CompiledOptimizer],
    numbers: dict[str, Any],
    choice: dict[str, Any],
    message: str,
    at_once: bool,
) -> None:
    (group,) = optimizer([torch.nn.Parameter(torch.randn(3, 2))]).param_groups
    if not at_once:
        group.update(numbers)
    before = dict(group)
    with pytest.raises((TypeError, ValueError), match=message):
        group.update(choice | numbers if at_once else choice)
    assert dict(group) == before


def test_a_refused_choice_changes_nothing_item_by_item() -> None:
    (group,) = co.SGD([torch.nn.Parameter(torch.randn(3, 2))]).param_groups
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        group["nesterov"] = True
    assert group["nesterov"] is False


def test_a_group_replaced_by_a_dict_is_checked(weight: torch.nn.Parameter) -> None:
    optimizer = co.AdamW([weight])
    optimizer.param_groups[0] = {"params": [weight], "maximize": 1}
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    with pytest.raises(TypeError, match=r"maximize of param_groups\[0\] must be a bool, got 1"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_choices_and_numbers_that_fit_each_other_are_assigned_together(weight: torch.nn.Parameter) -> None:
    optimizer = co.SGD([weight])
    optimizer.param_groups[0].update(nesterov=True, momentum=0.9)
    twin = torch.optim.SGD([weight.detach().clone()], nesterov=True, momentum=0.9)
    (other,) = twin.param_groups[0]["params"]
    for _ in range(3):
        weight.grad = other.grad = torch.ones_like(weight)
        optimizer.step()
        twin.step()
    torch.testing.assert_close(weight.detach(), other)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_sparse_gradient_changes_nothing(lowering: str) -> None:
    dense = torch.nn.Parameter(torch.randn(3))
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = co.AdamW([("dense", dense), ("table", table.weight)], lowering=lowering)
    dense.grad = torch.randn(3)
    table(torch.tensor([1, 1, 4])).sum().backward()
    before = dense.detach().clone()
    with pytest.raises(
        TypeError, match="AdamW does not support sparse gradients, please consider SparseAdam instead; 'table' has one"
    ):
        optimizer.step()
    assert torch.equal(dense, before)
    assert optimizer.state[dense]["step"] == 0
    table.weight.grad = None
    optimizer.step()
    assert optimizer.state[dense]["step"] == 1
