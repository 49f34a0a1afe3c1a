"""What a profiler sees of a step, and that nobody pays for it who does not profile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catalog import COMBINED, registry, required
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import profiler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import compiled_optim as co
from compiled_optim.capture.graph import CudaGraph
from compiled_optim.memory.torch_internals import in_range
from compiled_optim.optimizer import CompiledOptimizer

PREFIX = "compiled_optim::"


def _made(kind: type[CompiledOptimizer], **kwargs: Any) -> CompiledOptimizer:
    params = {"a": nn.Parameter(torch.full((4, 3), 0.5)), "b": nn.Parameter(torch.full((3, 5), -0.5))}
    for param in params.values():
        param.grad = torch.full_like(param, 0.25)
        if kind is co.SparseAdam:
            param.grad = param.grad.to_sparse(1)
    return kind(params.items(), **required(kind), **kwargs)


def _step_of(optimizer: CompiledOptimizer) -> Callable[[], Any]:
    """A step, with a closure where one is needed."""
    if not isinstance(optimizer, co.LBFGS):
        return optimizer.step
    params = optimizer.param_groups[0]["params"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def _ranges(step: Callable[[], Any]) -> list[str]:
    """The ranges of the package in a ``step``, which others came before, in the order of their beginnings."""
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name.removeprefix(PREFIX) for event in events if event.name.startswith(PREFIX)]


@pytest.mark.parametrize("kind", [*registry(), *COMBINED], ids=lambda kind: kind.__name__)
def test_each_optimizer_updates_in_a_range(kind: type[CompiledOptimizer]) -> None:
    found = _ranges(_step_of(_made(kind)))
    assert found == ["update"] * max(len(found), 1)  # one of each lowering


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor", "eager"])
def test_the_norm_is_measured_before_the_update(lowering: str) -> None:
    assert _ranges(_made(co.AdamW, max_grad_norm=1.0, lowering=lowering).step) == ["measure", "update"]


def test_a_compiled_step_has_its_operator_around_the_update() -> None:
    optimizer = _made(co.AdamW)
    assert _ranges(torch.compile(lambda: optimizer.step())) == ["step", "update"]


@pytest.mark.parametrize("kind", ["operator", "inlined", "LBFGS"])
def test_who_begins_to_profile_has_nothing_traced_again(kind: str) -> None:
    params = [nn.Parameter(torch.ones(3, 3))]
    if kind == "LBFGS":
        optimizer: CompiledOptimizer = co.LBFGS(params, fixed_iterations=True, max_iter=3)
    else:
        optimizer = co.AdamW(params, lowering="inductor" if kind == "inlined" else "auto")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        step = torch.compile(lambda: optimizer.step(closure), backend="eager")
        for _ in range(3):
            step()
        before = counters["stats"]["unique_graphs"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            step()
        step()
        assert counters["stats"]["unique_graphs"] == before > 0


def test_updates_in_backward_are_ranges() -> None:
    model = nn.Linear(3, 2)
    optimizer = co.AdamW(model.named_parameters())
    co.prepare_for_gradient_release(model, optimizer)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    assert "update" in _ranges(step)


def test_a_replay_is_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaGraph, "__init__", lambda self: None)
    graph = CudaGraph()  # type: ignore[call-arg]
    replayed: list[bool] = []
    graph._graph = SimpleNamespace(replay=lambda: replayed.append(True))  # type: ignore[assignment]
    assert _ranges(graph.replay) == ["replay"]
    assert len(replayed) == 3


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (co.AdamW, ["measure", "all_reduce", "update"]),
        (co.LAMB, ["measure", "all_reduce", "update", "all_reduce"]),
        (co.Muon, ["measure", "all_reduce", "update", "gather", "scatter"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_processes_send_is_in_ranges(kind: type[CompiledOptimizer], expected: list[str]) -> None:
    mesh = init_device_mesh("cpu", (1,))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    assert _ranges(kind([param], max_grad_norm=1.0).step) == expected


def test_nvtx_gets_the_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's ``emit_nvtx`` hands NVTX the ranges of ``record_function``, and sets what steps look at."""
    named: list[str] = []
    original = profiler.record_function.__enter__
    monkeypatch.setattr(profiler.record_function, "__enter__", lambda self: (named.append(self.name), original(self))[1])
    monkeypatch.setattr(profiler, "_enable_profiler", lambda *args: None)  # which needs CUDA
    monkeypatch.setattr(profiler, "_disable_profiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    optimizer = _made(co.AdamW)
    with profiler.emit_nvtx():
        optimizer.step()
    assert f"{PREFIX}update" in named


def _calls(step: Callable[[], Any]) -> list[tuple[str, Any]]:
    """The calls of a ``step``: those of functions in Python, and those that functions in Python make of others."""
    calls: list[tuple[str, Any]] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append((event, frame.f_code))

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("gradients", ["same", "new"])
def test_a_step_of_dtensors_calls_no_more_than_one_of_plain_tensors(gradients: str) -> None:
    """Whatever their number: each of them, and each new gradient, is looked at in the one call that reads addresses."""
    mesh = init_device_mesh("cpu", (1,))

    def calls(count: int, wrap: Callable[[torch.Tensor], torch.Tensor]) -> int:
        params = [wrap(torch.randn(4, 3)).requires_grad_() for _ in range(count)]  # a Parameter may get an equal mesh
        optimizer = co.AdamW(params)
        kept_alive = []  # so that all have other addresses
        for index in range(4):
            for param in params if gradients == "new" or not index else []:
                kept_alive.append(param.grad)
                param.grad = wrap(torch.randn(4, 3))
            found = _calls(optimizer.step)
        return len(found)

    plain = calls(3, lambda tensor: tensor)
    for count in (3, 30):
        assert calls(count, lambda tensor: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)) == plain


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_nobody_pays_who_does_not_profile(max_grad_norm: float | None) -> None:
    """A range costs one call of Python, which asks one question."""
    step = _made(co.AdamW, max_grad_norm=max_grad_norm).step
    for _ in range(2):
        step()
    calls = _calls(step)
    in_ranges = [event for event, code in calls if code is in_range.__code__]
    assert in_ranges == ["call"] * (1 if max_grad_norm is None else 2)
    assert not any("profiler" in code.co_filename for _, code in calls)
    assert len([event for event, _ in calls if event == "call"]) <= (
        56 if max_grad_norm is None else 65
    )  # as before there were any


def test_a_range_ends_with_an_error() -> None:
    def fail() -> None:
        raise ValueError("here")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(ValueError, match="here"):
            in_range("update", fail)
        assert in_range("measure", lambda number: number + 1, 2) == 3
    first, second = (event for event in profile.events() if event.name.startswith(PREFIX))
    assert first.time_range.end <= second.time_range.start
