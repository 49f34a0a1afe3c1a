"""Sums over all parameters, and the scalars that they share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import naive
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.rule import Number, absolute, hyper, mean, scalar, total

LOWERINGS = ["eager", "multi_tensor", "inductor"]
OPTIONS: dict[str, Any] = {"lr": 0.7, "betas": (0.6, 0.8), "eps": 0.03, "d0": 1e-4, "weight_decay": 0.3}


class Shared(co.CompiledOptimizer):
    """Steps over the mean size of all gradients so far; the largest of a tensor's mean is a total's neighbour."""

    lr: Number = hyper(default=0.1, ge=0)
    seen_elements, seen_sizes = scalar(shared=True), scalar(shared=True)

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr)

    @staticmethod
    def reduce(grad):
        return dict(elements=total(0 * grad + 1.0), own=mean(absolute(grad)), sizes=total(absolute(grad)))

    @staticmethod
    def adapt(elements, sizes, seen_elements, seen_sizes, lr):
        elements, sizes = seen_elements + elements, seen_sizes + sizes
        return dict(seen_elements=elements, seen_sizes=sizes, average=sizes / elements, rate=lr)

    @staticmethod
    def update(grad, c):
        return dict(step=c.rate * grad / c.average + 0 * c.own)


def _params(*dtypes: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)) for dtype in dtypes]


def _give(params: list[nn.Parameter], step: int, *, absent: int = -1) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step + 1)
    grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in params]
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        param.grad = None if i == absent else grad
    return [p.grad for p in params]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_total_is_of_all_plans_and_a_shared_scalar_of_all_steps(lowering: str) -> None:
    """Plans of two dtypes; a parameter without a gradient adds nothing, and takes part in the shared scalars."""
    params = _params(torch.float64, torch.float32, torch.float64)
    optimizer = Shared(params, lr=0.3, lowering=lowering)
    starts, count, size = [p.detach().double() for p in params], 0.0, 0.0
    for step in range(4):
        grads = _give(params, step, absent=step)
        optimizer.step()
        count += sum(g.numel() for g in grads if g is not None)
        size += sum(g.double().abs().sum().item() for g in grads if g is not None)
        for start, grad in zip(starts, grads, strict=True):
            if grad is not None:
                start -= 0.3 * grad.double() / (size / count)
        for param in params:
            assert optimizer.state[param]["seen_elements"].item() == count
            assert optimizer.state[param]["seen_sizes"].item() == pytest.approx(size, rel=1e-14)
    for param, start in zip(params, starts, strict=True):
        torch.testing.assert_close(param.detach().double(), start, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_one_that_joins_shares_at_once(lowering: str) -> None:
    """Its first step uses the estimate of the others, as if it had been there without a gradient."""
    ours, theirs = _params(*[torch.float64] * 2), _params(*[torch.float64] * 2)
    late = co.Prodigy(ours[:1], **OPTIONS, lowering=lowering)
    reference = naive(co.Prodigy)(theirs, **OPTIONS)
    for step in range(6):
        if step == 3:
            late.add_param_group({"params": ours[1:]})
        for params in (ours, theirs):
            for i, param in enumerate(params):
                param.grad = torch.full_like(param, 1.0 + i) if i == 0 or step >= 3 else None
        late.step()
        reference.step()
    for param, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-13, atol=1e-13)
    assert late.state[ours[1]]["d"].item() == late.state[ours[0]]["d"].item() > 1e-4


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_skipped_step_changes_nothing_that_is_shared(lowering: str) -> None:
    params = _params(*[torch.float32] * 2)
    optimizer = co.Prodigy(params, **OPTIONS, lowering=lowering, skip_nonfinite=True)
    for step in range(2):
        _give(params, step)
        optimizer.step()
    before = copy.deepcopy([{**optimizer.state[p], "param": p.detach()} for p in params])
    _give(params, 2)
    params[1].grad.fill_(torch.inf)  # type: ignore[union-attr]
    optimizer.step()
    after = [{**optimizer.state[p], "param": p.detach()} for p in params]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_step_without_gradients_keeps_the_estimate(lowering: str) -> None:
    params = _params(*[torch.float32] * 2)
    optimizer = co.Prodigy(params, **OPTIONS, lowering=lowering)
    _give(params, 0)
    optimizer.step()
    before = optimizer.state[params[0]]["d"].item(), optimizer.state[params[0]]["d_numerator"].item()
    optimizer.zero_grad()
    optimizer.step()
    assert (optimizer.state[params[0]]["d"].item(), optimizer.state[params[0]]["d_numerator"].item()) == before


def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    ours, theirs = _params(*[torch.float32] * 2), _params(*[torch.float32] * 2)
    first, second = co.Prodigy(ours, **OPTIONS), co.Prodigy(theirs, **OPTIONS)
    for step in range(3):
        _give(ours, step)
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for param, other in zip(ours, theirs, strict=True):
        other.data.copy_(param)
    for step in range(3, 6):
        for params, optimizer in ((ours, first), (theirs, second)):
            _give(params, step)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("optimizer", [co.LAMB, co.Prodigy])
@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor"])
def test_compiled_steps_equal_called_ones(optimizer: type[co.CompiledOptimizer], lowering: str) -> None:
    """Sums over all parameters make the step an operator of the graph."""
    torch._dynamo.reset()
    ours, theirs = _params(*[torch.float32] * 3), _params(*[torch.float32] * 3)
    first, second = optimizer(ours, lowering=lowering), optimizer(theirs, lowering=lowering)
    step_of = torch.compile(first.step, fullgraph=True)
    for step in range(4):
        for params, run in ((ours, step_of), (theirs, second.step)):
            _give(params, step, absent=step % 4)
            run()
    for param, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-6, atol=1e-7)
    is_operator = lowering == "multi_tensor" or optimizer is co.Prodigy
    assert ("an operator" in str(co.compile_report(first))) == is_operator


def test_what_totals_do_not_go_with() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="gradient release does not go with Prodigy, which sums over all parameters"):
        co.prepare_for_gradient_release(model, co.Prodigy(model.named_parameters()))
    with pytest.raises(ValueError, match="differentiable=True does not go with Prodigy, which sums over all parameters"):
        co.Prodigy(model.named_parameters(), differentiable=True)
