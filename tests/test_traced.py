"""Steps inside the user's own torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from catalog import ruled
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import compiled_optim as co
from compiled_optim.fields import Hyper

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler.*")

X = torch.linspace(-1, 1, 24).view(6, 4)
Y = X.sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def traced_backward() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _loss(model: nn.Module) -> torch.Tensor:
    return (model(X) - Y).square().mean()


def _move_hyperparameters(optimizer: co.CompiledOptimizer, step: int) -> None:
    """Change every hyperparameter a little, within its range, by assignment on even steps and in place on odd ones."""
    group = optimizer.param_groups[0]
    for hyper in optimizer.fields_of(Hyper):
        default = optimizer.defaults[hyper.name]
        values = default if hyper.is_tuple else (default,)
        moved = tuple(v * (1 - 0.01 * (step % 7)) for v in values)
        if step % 2:
            group[hyper.name] = moved if hyper.is_tuple else moved[0]
        else:
            for tensor, value in zip(group.tensors(hyper.name), moved, strict=True):
                tensor.fill_(value)


def _train(optimizer_class: type[co.CompiledOptimizer], wrap: Callable[..., Any], part: str) -> tuple[nn.Module, Any]:
    model = _model()
    optimizer = optimizer_class(model.named_parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    step = wrap(optimizer.step) if part == "step" else optimizer.step

    def train_step() -> torch.Tensor:
        loss = _loss(model)
        loss.backward()
        step()
        optimizer.zero_grad()
        return loss.detach()

    run = wrap(train_step) if part == "whole" else train_step
    for i in range(20):
        run()
        scheduler.step()
        _move_hyperparameters(optimizer, i)
    assert all(s["step"] == 20 for s in optimizer.state.values())
    return model, optimizer


@pytest.mark.parametrize("part", ["step", "whole"])
@pytest.mark.parametrize("optimizer", ruled("dense"), ids=lambda c: c.__name__)
def test_one_graph_while_every_hyperparameter_moves(optimizer: type[co.CompiledOptimizer], part: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled, _ = _train(optimizer, lambda f: torch.compile(f, backend=counter, fullgraph=True), part)
    eager, _ = _train(optimizer, lambda f: f, part)
    assert counter.frame_count == 1
    for ours, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lowering", ["auto", "inductor"])
def test_whole_step_through_inductor_equals_torch(lowering: str) -> None:
    model, reference = _model(), _model()
    optimizer = co.AdamW(model.named_parameters(), lr=0.03, weight_decay=0.2, lowering=lowering)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.03, weight_decay=0.2)

    @torch.compile(fullgraph=True)
    def train_step() -> torch.Tensor:
        loss = _loss(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(10):
        train_step()
        _loss(reference).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        expected.step()
        expected.zero_grad()
    for param, twin in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


def test_gradient_accumulation_and_reading_parameters_after_the_step() -> None:
    model, reference = _model(), _model()
    optimizer = co.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for _ in range(2):
            (_loss(model) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return model[0].weight.detach().sum()  # the new value, not the one the forward saw

    compiled = torch.compile(lambda: train_step(model, optimizer), backend="aot_eager", fullgraph=True)
    for _ in range(4):
        torch.testing.assert_close(compiled(), train_step(reference, expected))


def test_closure_and_compiled_model() -> None:
    model = torch.compile(_model(), backend="aot_eager")
    reference = _model()
    optimizer, expected = co.AdamW(model.named_parameters(), lr=0.1), torch.optim.AdamW(reference.parameters(), lr=0.1)

    def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        return loss

    for _ in range(4):
        ours = optimizer.step(lambda: closure(model, optimizer))
        torch.testing.assert_close(ours, expected.step(lambda: closure(reference, expected)))


def test_operator_is_well_formed() -> None:
    model = _model()
    optimizer = co.AdamW(model.named_parameters(), lr=0.1)
    params = [p.detach() for p in model.parameters()]
    grads = [torch.ones_like(p) for p in params]
    arguments = (params, grads, list(range(len(params))), optimizer._number)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.compiled_optim.step.default, arguments, test_utils=checks)


def test_copies_of_parameters_get_the_new_values() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = co.SGD([weight, other], lr=0.5)
    kept = other.grad = torch.ones(2)
    stand_in = weight.detach().clone()
    torch.ops.compiled_optim.step([stand_in], [torch.ones(3)], [0], optimizer._number)
    assert torch.equal(stand_in, torch.full((3,), 0.5))
    assert torch.equal(weight, stand_in)
    assert torch.equal(other, torch.ones(2))
    assert other.grad is kept
    assert weight.grad is None


def test_operator_counts_a_version_of_every_parameter_once() -> None:
    """Autograd finds out by it that a tensor it saved was overwritten."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = co.SGD(params, lr=0.5)
    versions = [p._version for p in params]
    with torch.no_grad():
        torch.ops.compiled_optim.step([params[1]], [torch.ones(3)], [1], optimizer._number)
    assert [p._version for p in params] == [versions[0], versions[1] + 1]
    assert all(p.grad is None for p in params)
