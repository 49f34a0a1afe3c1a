"""What Inductor decides for ``mode="reduce-overhead"`` on a GPU: one CUDA graph holds all, and copies only the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catalog import required, ruled, stacked
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.lowering import stack_code
from compiled_optim.optimizer import engine_of
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import Decisions, deciding

pytest.importorskip("triton")


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decisions]:
    torch._dynamo.reset()
    monkeypatch.setattr(stack_code, "_make", lambda key: lambda tensors: tensors)  # Inductor's, which are tried out
    monkeypatch.setattr(stack_code, "_kernels", {})
    with fake_cuda(90), deciding() as decisions:
        yield decisions
    torch._dynamo.reset()


class Training:
    """A linear model, whose backward is written out: autograd's needs a GPU that is there."""

    def __init__(
        self, optimizer: Any, groups: int = 1, dtype: torch.dtype = torch.float32, wrapped: bool = True, **options: Any
    ) -> None:
        shapes = [(8, 4), (6, 8), (2, 6)]
        self.weights = [torch.empty(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
        if wrapped:
            self.weights = list(map(nn.Parameter, self.weights))
        split = [{"params": self.weights[:1]}, {"params": self.weights[1:]}] if groups > 1 else self.weights
        self.optimizer = optimizer(split, **options)
        engine_of(self.optimizer).preallocate()
        self.batch = torch.empty(16, 4, device="cuda", dtype=dtype)

    def step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = [x]
            for weight in self.weights:
                seen.append(seen[-1] @ weight.t())
            grad = 2 * seen[-1]
            for weight, before in zip(reversed(self.weights), reversed(seen[:-1]), strict=True):
                weight.grad = grad.t() @ before
                grad = grad @ weight
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen[-1].square().sum()

    def compile(self) -> None:
        with contextlib.suppress(NotImplementedError):
            torch.compile(self.step, mode="reduce-overhead", fullgraph=True)(self.batch)


OPTIMIZERS = [*ruled("dense"), *stacked()]


def one_graph(decisions: Decisions, inputs: int, copied: int) -> None:
    assert decisions.skipped == []
    assert len(decisions.sources) == 1
    (recorded,) = decisions.partitions
    assert (recorded.inputs, recorded.copied) == (inputs, copied)
    assert {*recorded.written} <= {*recorded.static}
    assert recorded.source.count("def partition_") == 1
    assert recorded.source.count("torch.ops.compiled_optim.step_in_graph.default(") == 1
    assert "auto_functionalized" not in recorded.source


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda c: c.__name__)
def test_one_graph_holds_forward_backward_and_step(optimizer: Any, decisions: Decisions) -> None:
    Training(optimizer, 1 if optimizer is co.AdamW else 2, **required(optimizer)).compile()
    one_graph(decisions, 4, copied=1)  # the batch


def test_tensors_that_are_no_parameters_of_a_module_stay_too(decisions: Decisions) -> None:
    Training(co.AdamW, wrapped=False).compile()
    one_graph(decisions, 4, copied=1)


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5, "skip_nonfinite": True}, {"weights": "master"}], ids=str)
def test_one_graph_holds_clipping_and_low_precision(options: Any, decisions: Decisions) -> None:
    dtype = torch.bfloat16 if "weights" in options else torch.float32
    Training(co.AdamW, 2, dtype, **options).compile()
    one_graph(decisions, 4, copied=1)


def test_a_step_alone_copies_gradients_which_backward_puts_anywhere(decisions: Decisions) -> None:
    training = Training(co.AdamW)
    for weight in training.weights:
        weight.grad = torch.empty_like(weight)
    with contextlib.suppress(NotImplementedError):
        torch.compile(training.optimizer.step, mode="reduce-overhead", fullgraph=True)()
    one_graph(decisions, 6, copied=3)


def test_a_step_that_no_graph_can_hold_runs_between_graphs(decisions: Decisions) -> None:
    Training(co.AdamW, lowering="eager").compile()
    (recorded,) = decisions.partitions
    part = recorded.source[recorded.source.index("def partition_0") :].partition("async_compile.wait")[0]
    assert "torch.ops.compiled_optim" not in part
    assert recorded.source.count("torch.ops.compiled_optim.step.default(") == 1


def test_a_step_with_a_gradient_scaler_runs_between_graphs(decisions: Decisions) -> None:
    training = Training(co.AdamW)
    training.optimizer.grad_scale, training.optimizer.found_inf = (torch.ones((), device="cuda") for _ in range(2))
    training.compile()
    (recorded,) = decisions.partitions
    assert recorded.source.count("torch.ops.compiled_optim.step.default(") == 1
