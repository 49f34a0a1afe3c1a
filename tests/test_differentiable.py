"""Gradients through the step, to parameters, gradients, state and hyperparameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_optim as co


def _step(optimizer: type[co.CompiledOptimizer], param: torch.Tensor, grad: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Two differentiable steps from ``param``; returns the result."""
    param = param.clone()
    made = optimizer([param], differentiable=True, **arguments)
    for scale in (1.0, 0.5):
        param.grad = grad * scale
        made.step()
    return param


def _leaf(*values: float) -> torch.Tensor:
    tensor = torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)
    return tensor.requires_grad_()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw(amsgrad: bool) -> None:
    def step(param, grad, lr, beta1, beta2, eps, weight_decay):
        return _step(co.AdamW, param, grad, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)

    inputs = (_leaf(0.3, -1.2), _leaf(0.7, 1.9), _leaf(0.1), _leaf(0.6), _leaf(0.8), _leaf(0.2), _leaf(0.3))
    assert torch.autograd.gradcheck(step, inputs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov: bool) -> None:
    def step(param, grad, lr, momentum, weight_decay):
        return _step(co.SGD, param, grad, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    assert torch.autograd.gradcheck(step, (_leaf(0.3, -1.2), _leaf(0.7, 1.9), _leaf(0.1), _leaf(0.6), _leaf(0.3)))


def test_sgd_dampening() -> None:
    def step(param, grad, momentum, dampening):
        return _step(co.SGD, param, grad, lr=0.1, momentum=momentum, dampening=dampening)

    assert torch.autograd.gradcheck(step, (_leaf(0.3, -1.2), _leaf(0.7, 1.9), _leaf(0.6), _leaf(0.3)))


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
