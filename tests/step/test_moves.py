"""Tensors that move between steps are followed: parameters, gradients, state and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from catalog import LOWERINGS, relative_error
from torch import nn

import compiled_optim as co

SIZES = [(3, 5), (150, 130)]


def _rebind_parameter(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    param.data = param.data.clone()


def _rebind_gradient(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    param.grad.data = param.grad.data.clone() * 2


def _transpose_gradient(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    param.grad = param.grad.t().contiguous().t()


def _drop_gradient(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    param.grad = None


def _live_lr(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return optimizer.hyperparameter("lr") if isinstance(optimizer, co.AdamW) else optimizer.param_groups[0]["lr"]


def _rebind_lr(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    lr = _live_lr(optimizer)
    lr.data = torch.tensor(0.5, dtype=lr.dtype)


def _narrow_lr(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    lr = _live_lr(optimizer)
    lr.data = torch.tensor(0.25, dtype=torch.float32)


def _replace_state(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[param]["exp_avg"] = torch.full_like(param, 0.3)


def _reset_state(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[param] = {
        "step": torch.tensor(4.0),
        "exp_avg": torch.full_like(param, 0.1),
        "exp_avg_sq": torch.full_like(param, 0.2),
    }


def _offload_state(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    for value in optimizer.state[param].values():
        value.data = value.data.clone()


MOVES = [
    _offload_state,
    _rebind_parameter,
    _rebind_gradient,
    _transpose_gradient,
    _drop_gradient,
    _rebind_lr,
    _narrow_lr,
    _replace_state,
    _reset_state,
]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("move", MOVES, ids=lambda m: m.__name__.strip("_"))
def test_followed(move: Callable[[nn.Parameter, torch.optim.Optimizer], None], lowering: str) -> None:
    values = [torch.randn(size, dtype=torch.float64) for size in SIZES]
    ours, theirs = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    optimizer = co.AdamW(ours, lr=torch.tensor(0.1, dtype=torch.float64), lowering=lowering)
    reference = torch.optim.AdamW(theirs, lr=torch.tensor(0.1, dtype=torch.float64))
    for step in range(6):
        for param, twin in zip(ours, theirs, strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        if step in (2, 4):
            for params, each in ((ours, optimizer), (theirs, reference)):
                for param in params:
                    move(param, each)
        optimizer.step()
        reference.step()
    # torch computes with a float32 learning rate in float32: observed 2e-8.
    assert relative_error(ours, theirs) < (1e-7 if move is _narrow_lr else 1e-13)


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


def test_is_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    optimizer = co.AdamW(model.named_parameters(), lr=0.1)
    assert optimizer.state[model.weight]["exp_avg"].is_meta


def test_an_assigned_module_keeps_the_old_parameters_out_of_sight() -> None:
    """``load_state_dict(assign=True)`` makes new parameters: the optimizer still holds the old ones, as in torch."""
    model = nn.Linear(2, 1)
    optimizer = co.SGD(model.named_parameters(), lr=0.1)
    held = optimizer.param_groups[0]["params"][0]
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert held is not model.weight
    optimizer.param_groups[0]["params"] = list(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.1)
