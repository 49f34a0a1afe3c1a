"""Gradients through the step, to parameters, gradients, state and hyperparameters."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from catalog import Case, cases, ruled

import compiled_optim as co
from compiled_optim.rule.fields import Hyper


def _leaf(*values: float) -> torch.Tensor:
    tensor = torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)
    return tensor.requires_grad_()


def _given(case: Case) -> list[Hyper]:
    """The hyperparameters that have a value of their own."""
    return [h for h in case.optimizer._declaration.hypers if h.name in case.kwargs or h.default is not None]


def _elements(case: Case) -> dict[tuple[str, int], float]:
    """The hyperparameters of ``case`` by name and index, but for those so near 0 that gradcheck would step out of range."""
    return {
        (hyper.name, index): value
        for hyper in _given(case)
        for index, value in enumerate(hyper.elements(case.kwargs.get(hyper.name, hyper.default), "the case"))
        if abs(value) > 1e-5
    }


def _arguments(case: Case, elements: dict[tuple[str, int], Any]) -> dict[str, Any]:
    """The constructor's arguments with ``elements`` in their places."""
    result = dict(case.kwargs)
    for hyper in _given(case):
        given = hyper.elements(case.kwargs.get(hyper.name, hyper.default), "the case")
        values = tuple(elements.get((hyper.name, index), value) for index, value in enumerate(given))
        result[hyper.name] = values if hyper.is_tuple else values[0]
    return result


def _steps(
    optimizer: type[co.CompiledOptimizer], param: torch.Tensor, grad: torch.Tensor, count: int, **arguments: Any
) -> tuple[torch.Tensor, ...]:
    """The parameter and the state after ``count`` differentiable steps; the gradient changes its sign on the way."""
    param = param.clone()
    made = optimizer([param], differentiable=True, **arguments)
    for step in range(count):
        param.grad = grad * math.cos(step)
        made.step()
    return param, *(v for v in made.state[param].values() if v.shape == param.shape)


CASES = [case for case in cases("dense") if not case.optimizer._rule.has_totals()]  # which autograd does not see
FAR = [case for case in CASES if case.arguments]


@pytest.mark.parametrize("case", FAR, ids=str)
def test_to_parameter_gradient_and_hyperparameters(case: Case) -> None:
    """Through two steps, and through as many as RAdam needs until it rectifies."""
    elements = _elements(case)
    inputs = (_leaf(0.3, -1.2), _leaf(0.7, 1.9), *map(_leaf, elements.values()))
    for count in (2, 8):

        def step(param, grad, *values, count=count):
            return _steps(case.optimizer, param, grad, count, **_arguments(case, dict(zip(elements, values, strict=True))))

        assert torch.autograd.gradcheck(step, inputs)


@pytest.mark.parametrize("optimizer", dict.fromkeys(case.optimizer for case in CASES), ids=lambda c: c.__name__)
def test_every_hyperparameter_was_differentiated(optimizer: type[co.CompiledOptimizer]) -> None:
    expected = {(h.name, i) for h in optimizer._declaration.hypers for i in range(h.length)}
    assert set().union(*(_elements(case) for case in FAR if case.optimizer is optimizer)) == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zero_gradients_make_no_nan(case: Case) -> None:
    """Where a root or a quotient has no derivative, torch.optim's are NaN in most optimizers."""
    inputs = _leaf(0.3, -1.2, 0.0, 0.0), _leaf(0.7, 0.0, 1.9, 0.0)
    param, *_ = _steps(case.optimizer, *inputs, 3, **case.kwargs)
    assert all(g.isfinite().all() for g in torch.autograd.grad(param.sum(), inputs))


def test_to_a_beta_of_zero() -> None:
    betas = _leaf(0.0, 0.0)
    param, *_ = _steps(co.Adam, _leaf(0.3, -1.2), _leaf(0.7, 1.9), 2, lr=0.1, betas=tuple(betas.unbind()))
    assert torch.autograd.grad(param.sum(), betas)[0].isfinite().all()


def test_through_given_state() -> None:
    def step(param, grad, exp_avg, exp_avg_sq):
        param = param.clone()
        optimizer = co.AdamW([param], lr=0.1, betas=(0.6, 0.8), eps=0.1, differentiable=True)
        optimizer.state[param].update(step=torch.tensor(3.0), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        param.grad = grad
        optimizer.step()
        return param, optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]

    assert torch.autograd.gradcheck(step, (_leaf(0.3, -1.2), _leaf(0.7, 1.9), _leaf(0.1, 0.2), _leaf(0.5, 0.4)))


def test_a_learning_rate_is_learned() -> None:
    lr = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    meta = torch.optim.SGD([lr], lr=2e-4)
    losses = []
    for _ in range(30):
        weight = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True).clone()
        inner = co.SGD([weight], lr=lr, differentiable=True)
        for _ in range(3):
            held = weight.clone()  # the step writes into weight, and the graph needs its old value
            (weight.grad,) = torch.autograd.grad((held**2).sum(), held, create_graph=True)
            inner.step()
        loss = (weight**2).sum()
        meta.zero_grad()
        loss.backward()
        meta.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_differentiable_is_eager_and_reported() -> None:
    param = torch.randn(3, requires_grad=True).clone()
    assert co.compile_report(co.AdamW([param], differentiable=True)).lowering == "eager"


@pytest.mark.parametrize("optimizer", ruled("sparse"), ids=lambda c: c.__name__)
def test_sparse_gradients_are_refused(optimizer: type[co.CompiledOptimizer]) -> None:
    with pytest.raises(
        ValueError, match=f"differentiable=True needs dense gradients; {optimizer.__name__} takes sparse ones"
    ):
        optimizer([torch.zeros(3, 2)], differentiable=True)


def _is_torchs(case: Case) -> bool:
    theirs = getattr(torch.optim, case.optimizer.__name__, None)
    return theirs is not None and case.kwargs.keys() <= inspect.signature(theirs).parameters.keys()


@pytest.mark.parametrize("case", [case for case in FAR if _is_torchs(case)], ids=str)
def test_to_state_that_the_caller_put_there(case: Case) -> None:
    """Where torch.optim has a gradient."""
    theirs = getattr(torch.optim, case.optimizer.__name__)
    start, grad = _leaf(0.3, -1.2).detach(), _leaf(0.7, 1.9).detach()
    source = torch.nn.Parameter(start.clone())
    before = theirs([source], **case.kwargs)
    for step in range(7):
        source.grad = grad * math.cos(step)
        before.step()
    found = []
    for kind in (theirs, case.optimizer):
        param = start.clone().requires_grad_().clone()
        param.grad = grad.clone()
        optimizer = kind([param], differentiable=True, **case.kwargs)
        names = [name for name in before.state[source] if name != "step"]
        leaves = {name: torch.as_tensor(before.state[source][name]).double().requires_grad_() for name in names}
        optimizer.state[param].update({name: leaf.clone() for name, leaf in leaves.items()})
        if "step" in before.state[source]:
            optimizer.state[param]["step"] = before.state[source]["step"].double()  # else torch's corrections are float32
        optimizer.step()
        found.append(torch.autograd.grad(param.sum(), list(leaves.values()), allow_unused=True) if leaves else ())
    for theirs_of_one, ours_of_one in zip(*found, strict=True):
        if theirs_of_one is not None and theirs_of_one.any():
            torch.testing.assert_close(ours_of_one, theirs_of_one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_mu_product_and_a_fractional_step(dtype: torch.dtype) -> None:
    leaves = [torch.tensor(value, dtype=dtype, requires_grad=True) for value in (0.9, 10.0)]
    param = _leaf(0.3, -1.2).clone()
    param.grad = _leaf(0.7, 1.9).detach()
    optimizer = co.NAdam([param], differentiable=True)
    optimizer.state[param].update(mu_product=leaves[0].clone(), step=leaves[1].clone())
    for _ in range(2):
        optimizer.step()
    assert all(g.abs() > 0 for g in torch.autograd.grad(param.square().sum(), leaves))
