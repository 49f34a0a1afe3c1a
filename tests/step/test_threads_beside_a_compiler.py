"""Calls while another thread compiles, which torch says of the whole process: they are not traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catalog import registry, required

import compiled_optim as co


@pytest.fixture
def compiling() -> Iterator[None]:
    """Let another thread hold the flag that ``torch.compiler.is_compiling`` reads, as Dynamo does while it compiles."""
    begun, ended = threading.Event(), threading.Event()

    def compile_() -> None:
        torch.compiler._is_compiling_flag = True
        begun.set()
        ended.wait(60)
        torch.compiler._is_compiling_flag = False

    thread = threading.Thread(target=compile_, daemon=True)
    thread.start()
    assert begun.wait(60)
    yield
    ended.set()
    thread.join()


def _trained(kind: Any, **options: Any) -> tuple[torch.Tensor, int]:
    torch.manual_seed(3)
    param = torch.nn.Parameter(torch.randn(6, 5))
    optimizer = kind([param], **required(kind), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.sin() ** 2).sum()
        loss.backward()
        if kind._gradients == "sparse":
            param.grad = param.grad.to_sparse(1)
        return loss.detach()

    for _ in range(3):
        if kind is not co.LBFGS:
            closure()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.step(closure)
    return param.detach(), optimizer._engine.runs


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("kind", registry(), ids=lambda k: k.__name__)
def test_steps_and_zero_grad_run_as_ever(kind: type[co.CompiledOptimizer]) -> None:
    assert torch.compiler.is_compiling()
    found, runs = _trained(kind, **({} if kind in (co.LBFGS, co.SparseAdam) else {"lowering": "eager"}))
    assert runs == 3
    torch.compiler._is_compiling_flag = False
    assert torch.equal(found, _trained(kind, **({} if kind in (co.LBFGS, co.SparseAdam) else {"lowering": "eager"}))[0])


@pytest.mark.usefixtures("compiling")
def test_gradients_are_released_as_ever() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    model = torch.nn.ParameterList([param])
    optimizer = co.SGD(model.parameters(), lr=0.5, lowering="eager")
    co.prepare_for_gradient_release(model, optimizer)
    param.square().sum().backward()
    optimizer.step()
    assert param.tolist() == [0.0] * 4
