"""Tensors that users replace between steps, also by others of another shape: followed, or refused before a step."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, registry, relative_error, required, ruled, stacked
from round_trips import copied
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer, engine_of


def _pair(optimizer: str, **kwargs: Any) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    values = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    ours, theirs = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    reference = {key: value for key, value in kwargs.items() if key != "lowering"}
    return ours, getattr(co, optimizer)(ours, **kwargs), theirs, getattr(torch.optim, optimizer)(theirs, **reference)


def _step(*sides: tuple[list[nn.Parameter], Any]) -> None:
    for params, optimizer in sides:
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, 0.5 + i)
        optimizer.step()


def _sparse(rows: list[int], shape: tuple[int, int]) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(True):
        return torch.sparse_coo_tensor([rows], torch.ones(len(rows), shape[1]), shape)


class TestShapes:
    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("optimizer", [co.SGD, co.Adam, co.Adafactor, co.Muon], ids=lambda c: c.__name__)
    def test_a_gradient_of_another_shape(self, optimizer: type[CompiledOptimizer], lowering: str) -> None:
        weight = nn.Parameter(torch.ones(4, 3))
        made = optimizer([("weight", weight)], lowering=lowering, **required(optimizer))
        weight.grad = torch.ones(4, 3)
        made.step()
        kept, steps = weight.grad, engine_of(made).steps
        weight.data = torch.ones(400, 300)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'weight' .* shape .*\(4, 3\).*|state .* of 'weight' must have shape"):
                made.step()
        assert torch.equal(weight, torch.ones(400, 300))
        assert engine_of(made).steps == steps
        weight.data = torch.ones(4, 3)
        assert weight.grad is kept
        made.step()

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_a_gradient_of_another_shape_that_state_does_not_notice(self, lowering: str) -> None:
        weight = nn.Parameter(torch.ones(6))
        optimizer = co.SGD([("weight", weight)], lowering=lowering)
        weight.grad = torch.ones(6)
        optimizer.step()
        weight.data = torch.ones(3)
        with pytest.raises(ValueError, match=r"the gradient of 'weight' has shape \(6,\), the parameter \(3,\)"):
            optimizer.step()
        weight.grad = None
        weight.grad = torch.ones(3)
        optimizer.step()

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_a_parameter_of_another_shape_whose_state_was_reset(self, lowering: str) -> None:
        ours, optimizer, theirs, reference = _pair("Adam", lr=0.1, lowering=lowering)
        for params, each in ((ours, optimizer), (theirs, reference)):
            _step((params, each))
            each.state.clear()
            for param in params:
                param.grad = None
                param.data = torch.ones(50, 2, dtype=torch.float64)
            _step((params, each))
        assert relative_error(ours, theirs) < 1e-14

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (torch.zeros(3), r"state 'exp_avg' of 'weight' must have shape \(1000,\), got shape \(3,\)"),
            (torch.zeros(1000, dtype=torch.complex64), "state 'exp_avg' of 'weight' is torch.complex64 for a parameter of"),
            (torch.zeros(1000, dtype=torch.int64), "state 'exp_avg' of 'weight' is torch.int64 for a parameter of"),
            (0.0, r"state 'exp_avg' of 'weight' must have shape \(1000,\), got 0.0"),
        ],
    )
    def test_state_that_does_not_fit(self, value: Any, message: str, lowering: str) -> None:
        weight = nn.Parameter(torch.ones(1000))
        optimizer = co.Adam([("weight", weight)], lowering=lowering)
        weight.grad = torch.ones(1000)
        optimizer.step()
        before, fitting = weight.detach().clone(), optimizer.state[weight]["exp_avg"]
        optimizer.state[weight]["exp_avg"] = value
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                optimizer.step()
        assert torch.equal(weight, before)
        optimizer.state[weight]["exp_avg"] = fitting
        optimizer.step()

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("coalesced", [True, False])
    def test_a_sparse_gradient_of_another_shape(self, coalesced: bool, lowering: str) -> None:
        table = nn.Parameter(torch.ones(1000, 4))
        optimizer = co.SparseAdam([("table", table)], lowering=lowering)
        grad = _sparse([990, 3], (1000, 4))
        table.grad = grad.coalesce() if coalesced else grad
        optimizer.step()
        table.data = torch.ones(10, 4)
        optimizer.state.clear()
        with pytest.raises(ValueError, match=r"the gradient of 'table' has shape \(1000, 4\), the parameter \(10, 4\)"):
            optimizer.step()
        assert torch.equal(table, torch.ones(10, 4))


class TestGroups:
    @pytest.mark.parametrize("optimizer", registry(), ids=lambda c: c.__name__)
    @copied
    def test_a_copy_takes_groups(self, optimizer: type[CompiledOptimizer], copied: Callable[[Any], Any]) -> None:
        first, second = (optimizer([nn.Parameter(torch.ones(2, 2))], **required(optimizer)) for _ in range(2))
        twin = copied(first)
        assert twin.defaults.keys() == second.defaults.keys()
        if optimizer is co.LBFGS:
            return
        twin.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        assert len(twin.param_groups) == 2

    def test_an_unknown_argument_names_the_class(self) -> None:
        with pytest.raises(TypeError, match=r"RAdam\(\) got an unexpected keyword argument 'foo'"):
            co.RAdam([nn.Parameter(torch.ones(1))], foo=1)


class TestState:
    @pytest.mark.parametrize("wrap", [dict, lambda entries: list(entries.items())], ids=["mapping", "pairs"])
    def test_mappings_made_anew_of_their_own_type(self, wrap: Callable[[Any], Any]) -> None:
        """As libraries do that move whatever mapping of tensors they meet."""
        ours, optimizer, theirs, reference = _pair("AdamW", lr=0.1)
        _step((ours, optimizer), (theirs, reference))
        for param, entries in optimizer.state.items():
            optimizer.state[param] = type(entries)(wrap({name: value.clone() for name, value in entries.items()}))
        _step((ours, optimizer), (theirs, reference))
        optimizer.state = type(optimizer.state)(wrap(optimizer.state))
        _step((ours, optimizer), (theirs, reference))
        assert relative_error(ours, theirs) < 1e-14
        assert all(entries["step"] == 3 for entries in optimizer.state.values())

    def test_assigned_from_another(self) -> None:
        ours, optimizer, theirs, reference = _pair("Adam", lr=0.1)
        _step((ours, optimizer), (theirs, reference))
        optimizer.state = dict(zip(ours, map(dict, reference.state.values()), strict=True))
        for state, own in zip(reference.state.values(), optimizer.state.values(), strict=True):
            assert own["exp_avg"] is state["exp_avg"]
        reference.state = copy.deepcopy(reference.state)
        reference.state = collections.defaultdict(dict, zip(theirs, reference.state.values(), strict=True))
        _step((ours, optimizer), (theirs, reference))
        assert relative_error(ours, theirs) < 1e-14


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_another_dtype_and_cleared_state(lowering: str) -> None:
    module = nn.Linear(4, 3)
    optimizer = co.AdamW(module.named_parameters(), lr=0.1, lowering=lowering)
    module.double()
    optimizer.state.clear()
    twin = nn.Linear(4, 3).double()
    twin.load_state_dict(module.state_dict())
    reference = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for _ in range(2):
        for model, each in ((module, optimizer), (twin, reference)):
            model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            each.step()
            each.zero_grad()
    assert relative_error(list(module.parameters()), list(twin.parameters())) < 1e-14


def _stale_graph(optimizer: Callable[[list[Tensor]], Any]) -> None:
    """Run backward through a weight that a step has changed since."""
    weight, x = nn.Parameter(torch.full((2, 2), 2.0)), torch.ones(2, 2, requires_grad=True)
    hidden = weight * x
    first, second = hidden.sum(), (hidden * weight).sum()
    first.backward(retain_graph=True)
    optimizer([weight]).step()
    second.backward()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("optimizer", [*ruled("dense"), *stacked()], ids=lambda c: c.__name__)
def test_autograd_learns_of_every_step(optimizer: type[CompiledOptimizer], lowering: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _stale_graph(lambda params: optimizer(params, lowering=lowering, **required(optimizer)))


@pytest.mark.parametrize("optimizer", [co.SGD, co.Adafactor, co.Muon], ids=lambda c: c.__name__)
def test_a_parameter_without_gradient_counts_no_version(optimizer: type[CompiledOptimizer]) -> None:
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    made = optimizer(params, lr=0.5)
    params[1].grad = torch.ones(3, 2)
    versions = [p._version for p in params]
    made.step()
    assert [p._version - before for p, before in zip(params, versions, strict=True)] == [0, 1, 0]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_sparse_steps_count_versions(lowering: str) -> None:
    tables = [nn.Parameter(torch.ones(5, 2)) for _ in range(2)]
    optimizer = co.SparseAdam(tables, lowering=lowering)
    tables[1].grad = _sparse([1, 1], (5, 2))
    versions = [t._version for t in tables]
    optimizer.step()
    assert tables[0]._version == versions[0]
    assert tables[1]._version > versions[1]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_after_create_graph(set_to_none: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    weight.grad = grad
    co.SGD([weight]).zero_grad(set_to_none)
    assert weight.grad is (None if set_to_none else grad)
    assert set_to_none or (not grad.requires_grad and (grad == 0).all())
