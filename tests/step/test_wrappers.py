"""The optimizer under wrappers that inherit from its class and delegate, as those of training libraries do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import compiled_optim as co


class Delegating:
    """Has nothing of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type(f"Wrapped{type(optimizer).__name__}", (type(self), type(optimizer)), {})

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Copying(Delegating):
    """Copies the attributes that are there when it is made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k not in ("state_dict", "step", "zero_grad")}
        super().__init__(optimizer)


def _trained(optimizer_class: Any, wrapper: type[Delegating]) -> tuple[list[torch.Tensor], Any, Any]:
    params = [Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2)]
    own = optimizer_class(params[:1], lr=0.1)
    wrapped = wrapper(own)
    wrapped.add_param_group({"params": params[1:], "lr": 0.05})
    scheduler = OneCycleLR(wrapped, [0.1, 0.2], total_steps=20)
    for i in range(8):
        wrapped.zero_grad()
        assert all(p.grad is None for p in params)
        for p in params:
            p.grad = torch.cos(p.detach() * i)
        wrapped.step()
        scheduler.step()
        wrapped.param_groups[1]["weight_decay"] = 0.01 * i
    return params, own, wrapped


@pytest.mark.parametrize("wrapper", [Delegating, Copying])
def test_it_is_one_optimizer(wrapper: type[Delegating]) -> None:
    ours, own, wrapped = _trained(co.AdamW, wrapper)
    theirs, _, _ = _trained(torch.optim.AdamW, wrapper)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)
    assert isinstance(wrapped, co.AdamW)
    assert wrapped.param_groups is own.param_groups
    assert wrapped.state is own.state
    assert len(wrapped.state) == 2
    assert "WrappedAdamW" in repr(wrapped)
    assert not vars(wrapped).keys() - vars(own).keys() - {"_optimizer", "_opt_called", "step"}
    saved = wrapped.state_dict()
    wrapped.param_groups[0]["lr"] = 9.0
    wrapped.load_state_dict(saved)
    assert own.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]


def _scaled(optimizer_class: Any, steps: int = 4, **attributes: Any) -> tuple[Tensor, list[bool], float]:
    """Parameter, which steps were seen, and lr, where one gradient is infinite and a schedule follows the steps."""
    param = Parameter(torch.linspace(-1, 1, 6))
    optimizer = optimizer_class([param], lr=0.1)
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    scheduler = ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *arguments: seen.append(step))
    for step in range(steps):
        scaler.scale(param.square().sum()).backward()
        if step == 1:
            param.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step in seen:
            scheduler.step()
    return param.detach(), [step in seen for step in range(steps)], float(optimizer.param_groups[0]["lr"])


def test_a_gradient_scaler_can_decide_outside_of_the_step() -> None:
    """As it does for torch.optim without ``fused``; trainers then see which steps were skipped."""
    ours = _scaled(co.AdamW, _step_supports_amp_scaling=False)
    theirs = _scaled(torch.optim.AdamW)
    assert ours[1:] == theirs[1:] == ([True, False, True, True], 0.0125)
    torch.testing.assert_close(ours[0], theirs[0])


def test_a_gradient_scaler_decides_inside_of_the_step() -> None:
    """As it does for torch.optim with ``fused``."""
    ours, seen, lr = _scaled(co.AdamW)
    assert seen == [True] * 4
    assert lr == 0.00625
    assert ours.isfinite().all()
