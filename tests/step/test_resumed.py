"""Steps after which nothing moved: what they ask of Python, and what they still notice."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import simulated_graph
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.optim import optimizer as torch_optimizer

import compiled_optim as co
from compiled_optim.capture.graph import GRAPHS
from compiled_optim.lowering.kernels.table import HyperPointers
from compiled_optim.memory import torch_internals
from compiled_optim.optimizer import engine_of
from compiled_optim.step.rule_step import RuleStep


def _params(count: int = 3) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.full((4,), 1.0 + i)) for i in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def _made(**options: Any) -> tuple[co.CompiledOptimizer, co.CompiledOptimizer]:
    """Two equal optimizers after two steps. The second one's step is rebuilt before each step."""
    both = []
    for rebuilds in (False, True):
        made = co.SGD(_params(), lr=0.1, momentum=0.9, lowering="multi_tensor", **options)
        if rebuilds:
            made.register_step_pre_hook(lambda optimizer, *_: engine_of(optimizer).changes.outdate("it always is"))
        made.step()
        made.step()
        both.append(made)
    return both[0], both[1]


def _values(optimizer: co.CompiledOptimizer) -> list[Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def test_a_step_that_finds_all_as_it_was_reads_no_numbers_and_compiles_nothing() -> None:
    optimizer, _ = _made()
    again = mock.Mock(side_effect=AssertionError("it prepares again"))
    with mock.patch.object(RuleStep, "_compile", again), mock.patch.object(HyperPointers, "refresh", again):
        for _ in range(2):
            for param in engine_of(optimizer).params:
                param.grad = torch.ones_like(param)  # which lie elsewhere
            optimizer.step()
        engine_of(optimizer).params[0].grad = None
        optimizer.step()
    assert engine_of(optimizer).steps == 5


def test_a_tensor_that_was_handed_out_may_move_after_memory_was_made_for_graphs() -> None:
    ours, other = _made()
    for optimizer in (ours, other):
        handed_out = optimizer.hyperparameter("lr")
        engine_of(optimizer).preallocate()  # which reads the tensors too, as before a compiled step is traced
        optimizer.step()
        handed_out.data = torch.tensor(0.5, dtype=torch.float64)
        optimizer.step()
    assert all(map(torch.equal, _values(ours), _values(other)))


def test_a_number_whose_storage_was_freed_is_refused_in_every_step() -> None:
    optimizer, _ = _made()
    optimizer.hyperparameter("lr").untyped_storage().resize_(0)
    for _ in range(3):
        with pytest.raises(ValueError, match="its storage was freed"):
            optimizer.step()


def test_a_preparation_that_was_interrupted_is_made_again() -> None:
    ours, other = _made()
    step = engine_of(ours).step
    for optimizer in (ours, other):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    with mock.patch.object(HyperPointers, "refresh", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        ours.step()
    ours.step()
    other.step()
    assert engine_of(ours).step is step
    assert all(map(torch.equal, _values(ours), _values(other)))


def test_a_write_past_a_group_is_noticed_when_the_key_is_read_and_by_no_step() -> None:
    optimizer, _ = _made()
    step = engine_of(optimizer).step
    dict.__setitem__(optimizer.param_groups[0], "lr", 0.5)
    optimizer.skip_nonfinite = True  # so that the step is prepared anew
    optimizer.step()
    assert step.live[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert step.live[0]["lr"] == 0.5


def test_what_somebody_else_follows_in_between_is_noticed() -> None:
    """A runner of a whole step hands over a scaler's tensors, which the next called step must not use."""
    ours, other = _made(skip_nonfinite=True)
    for optimizer in (ours, other):
        engine = engine_of(optimizer)
        assert engine.step is not None
        engine.step.follow((None, torch.tensor(1000.0), torch.tensor(1.0), True))
        engine.clipping.take(engine.clip_args)
        optimizer.step()
    assert optimizer.skipped_steps == 0
    assert all(map(torch.equal, _values(ours), _values(other)))


def test_clipping_that_is_switched_on_measures_rows_of_as_many_entries_as_before() -> None:
    """Whose kernel's launch was prepared when there were no sums of squares."""
    param = nn.Parameter(torch.ones(5, 3))
    optimizer = co.SparseAdam([param], lowering="multi_tensor")
    for norm in (None, 0.5):
        optimizer.max_grad_norm = norm
        for _ in range(2):
            param.grad = torch.sparse_coo_tensor([[1, 2]], torch.ones(2, 3), (5, 3), check_invariants=True)
            optimizer.step()
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.item() == pytest.approx(6**0.5)


def test_a_capture_holds_no_number_of_a_group_on_a_device_of_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks for captures of the devices of what it updates; these parameters are frozen."""
    simulated_graph.install(monkeypatch)
    optimizer = co.SGD([p.requires_grad_(requires_grad=False) for p in map(Tensor.detach, _params())], lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    graph = simulated_graph.SimulatedGraph(torch.device("cpu"))
    with graph.capturing():
        optimizer.step()
    assert graph.nodes == []
    assert engine_of(optimizer).step.live[0]["lr"] == 0.5


def test_a_step_asks_once_whether_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from perf.no_device import EmptyGraph

    asked: list[None] = []
    optimizer = co.AdamW(_params(), lowering="multi_tensor")
    params = engine_of(optimizer).params
    compiled = torch.compile(lambda: optimizer.step(), fullgraph=True)
    compiled()
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: asked.append(None))
    monkeypatch.setitem(GRAPHS, "cpu", EmptyGraph)
    runner = co.CUDAGraphRunner(optimizer, warmup=1)
    runner.step()
    runner.step()
    for step in (optimizer.step, compiled, runner.step):
        for change in (lambda: None, lambda: optimizer.param_groups[0].update(lr=0.2)):
            change()
            for param in params:
                param.grad = torch.ones_like(param)
            asked.clear()
            step()
            assert len(asked) == 1
    optimizer.max_grad_norm = torch.tensor(1.0)  # the step is prepared anew
    asked.clear()
    optimizer.step()
    assert len(asked) == 1


class TestObservers:
    def test_a_profiler_sees_a_step(self) -> None:
        optimizer = co.AdamW(_params())
        optimizer.step()
        with torch.profiler.profile() as profile:
            optimizer.step()
        assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}

    def test_a_profiler_of_all_threads_sees_a_step_of_another(self) -> None:
        optimizer = co.AdamW(_params())
        optimizer.step()
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=everywhere) as profile:
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
        assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}

    def test_hooks_are_called(self) -> None:
        optimizer, calls = co.AdamW(_params()), []
        handles = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("behind")),
        ]
        optimizer.step()
        for handle in handles:
            handle.remove()
        optimizer.step()
        assert calls == ["before", "behind"]
        everywhere = [
            torch_optimizer.register_optimizer_step_pre_hook(lambda *_: calls.append("before each")),
            torch_optimizer.register_optimizer_step_post_hook(lambda *_: calls.append("behind each")),
        ]
        try:
            optimizer.step()
        finally:
            for handle in everywhere:
                handle.remove()
        optimizer.step()
        assert calls[2:] == ["before each", "behind each"]

    def test_gradients_are_recorded_afterwards_as_before(self) -> None:
        optimizer = co.AdamW(_params())
        for recording in (True, False):
            with torch.set_grad_enabled(recording):
                optimizer.step()
                assert torch.is_grad_enabled() is recording
        engine_of(optimizer).params[0].grad = torch.zeros(4).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        assert torch.is_grad_enabled()
