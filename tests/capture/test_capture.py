"""The CUDA-graph runner on the CPU, where graphs are simulated: never a stale replay, and N calls are N updates."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import os
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from capture_scenarios import (
    IN_16_BITS,
    KINDS,
    LOW_PRECISION,
    SCENARIOS,
    Scenario,
    Side,
    assert_equal,
    every_hyperparameter,
    give,
    kind_name,
    lr_assigned,
    make,
    overflow,
    recaptures_of,
    state_rebound,
    unchanged,
    written_in_some_way,
)
from catalog import cases, ruled, stacked
from simulated_graph import SimulatedGraph, install
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.groups import numbers
from compiled_optim.memory import torch_internals
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import storage

STEPS = 24


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(storage, "MINIMUM", 1)


def train(side: Side, x: Tensor, side_used: bool = False) -> Tensor:
    """A training step that drops its gradients first."""
    side.optimizer.zero_grad()
    loss = side.model(x.to(side.model.outer.weight.dtype), side=side_used).square().mean()
    loss.backward()
    side.optimizer.step()
    return loss


def batch(i: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 + i))


def _names(scenario: Any) -> str | None:
    return getattr(scenario, "__name__", None)


@pytest.mark.usefixtures("simulated")
class TestStep:
    """The runner of an optimizer's step alone."""

    def run(self, scenario: Scenario, steps: int = STEPS, gradients: Callable[..., None] = give, **kwargs: Any) -> Any:
        ours, twin = make(**kwargs), make(**kwargs)
        runner = co.CUDAGraphRunner(ours.optimizer)
        for i in range(steps):
            for side in (ours, twin):
                scenario(side, i)
                gradients(side, i)
            runner.step()
            twin.optimizer.step()
            assert_equal(ours, twin, i)
        assert engine_of(ours.optimizer).steps == engine_of(twin.optimizer).steps
        return co.compile_report(ours.optimizer)

    def test_numbers_that_wait_are_sent_before_the_capture_begins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numbers, "beside_graphs", lambda *args: pytest.fail("sent in the capture"))
        self.run(lr_assigned)

    @pytest.mark.full
    @pytest.mark.parametrize("kind", KINDS, ids=kind_name)
    @pytest.mark.parametrize("scenario", SCENARIOS, ids=_names)
    def test_equals_uncaptured(self, scenario: Scenario, kind: dict[str, Any]) -> None:
        report = self.run(scenario, gradients=functools.partial(give, absent=3), **kind)
        thawed = scenario.__name__ == "frozen_and_thawed"
        assert report.recaptures == recaptures_of(scenario, kind) + thawed - (scenario.__name__ == "clip_norm") * 2
        assert len(report.captures) == 1 + report.recaptures
        assert report.replays >= STEPS - 3 - 2 * report.recaptures
        assert all(report.captures[1:])

    @pytest.mark.parametrize("kind", LOW_PRECISION, ids=kind_name)
    @pytest.mark.parametrize("scenario", IN_16_BITS, ids=_names)
    def test_low_precision_equals_uncaptured(self, scenario: Scenario, kind: dict[str, Any]) -> None:
        self.test_equals_uncaptured(scenario, kind)

    @pytest.mark.parametrize("case", cases("dense"), ids=str)
    def test_two_hundred_steps_of_every_optimizer(self, case: Any) -> None:
        report = self.run(unchanged, 200, functools.partial(give, absent=5), optimizer=case.optimizer, **case.kwargs)
        assert report.replays == 197
        assert report.recaptures == 0

    def test_a_replay_calls_as_little_with_many_tensors(self) -> None:
        numbers = []
        for count in (10, 148):
            params = [nn.Parameter(torch.ones(3)) for _ in range(count)]
            runner = co.CUDAGraphRunner(co.AdamW(params))
            for param in params:
                param.grad = torch.ones_like(param)
            for _ in range(5):
                runner.step()
            files: list[str] = []
            gc.collect()  # here, not while calls are counted
            sys.setprofile(lambda frame, event, _, files=files: files.append(frame.f_code.co_filename * (event == "call")))
            try:
                runner.step()
            finally:
                sys.setprofile(None)
            numbers.append(sum(file.startswith(f"{Path(co.__file__).parent}{os.sep}") for file in files))
        assert numbers[0] == numbers[1] <= 60

    @pytest.mark.full
    @pytest.mark.parametrize("optimizer", [*ruled("dense"), *stacked()], ids=lambda c: c.__name__)
    def test_fifty_steps_while_every_hyperparameter_moves(self, optimizer: type[co.CompiledOptimizer]) -> None:
        nonzero = dict.fromkeys(optimizer._rule.structural_hypers, 0.8)
        assert self.run(every_hyperparameter, 50, optimizer=optimizer, **nonzero).replays == 47

    @pytest.mark.full
    @pytest.mark.parametrize("kind", KINDS[1:], ids=kind_name)
    def test_two_hundred_steps_of_stacks(self, kind: dict[str, Any]) -> None:
        report = self.run(unchanged, 200, functools.partial(give, absent=5), **kind)
        assert report.replays == 197
        assert report.recaptures == 0

    @pytest.mark.full
    @pytest.mark.parametrize("kind", KINDS, ids=kind_name)
    @pytest.mark.parametrize("keep", [False, True], ids=["new gradients", "same gradients"])
    @pytest.mark.parametrize("absent", [0, 2, 3])
    def test_gradients_come_and_go(self, absent: int, keep: bool, kind: dict[str, Any]) -> None:
        report = self.run(unchanged, STEPS, functools.partial(give, absent=absent, keep=keep), **kind)
        assert report.recaptures == 0
        assert report.replays == STEPS - 3

    @pytest.mark.parametrize("set_to_none", [False, True])
    def test_zero_grad(self, set_to_none: bool) -> None:
        def gradients(side: Side, i: int) -> None:
            side.optimizer.zero_grad(set_to_none)
            side.model(batch(i), side=i % 2 == 0).sum().backward()

        assert self.run(unchanged, gradients=gradients).recaptures == 0

    def test_gradient_values_are_read_at_the_replay(self) -> None:
        ours = make(co.SGD, groups=1, lr=1.0)
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
        give(ours, 0)
        for _ in range(4):
            before = [p.detach().clone() for p in ours.params]
            runner.step()
            for p, old in zip(ours.params, before, strict=True):
                if p.grad is not None:
                    torch.testing.assert_close(p.detach(), old - p.grad)
                    p.grad.add_(1.0)

    @pytest.mark.parametrize("with_copies", [False, True], ids=["float64", "float32 lr"])
    def test_adopted_learning_rate(self, with_copies: bool) -> None:
        def scenario(side: Side, i: int) -> None:
            side.kept["lr"].fill_(0.1 / (i + 1))

        sides = []
        for _ in range(2):
            lr = torch.tensor(0.1, dtype=torch.float32 if with_copies else torch.float64)
            side = make(groups=1, lr=lr)
            side.kept["lr"] = lr
            sides.append(side)
        ours, twin = sides
        runner = co.CUDAGraphRunner(ours.optimizer)
        for i in range(12):
            for side in sides:
                scenario(side, i)
                give(side, i)
            runner.step()
            twin.optimizer.step()
            assert_equal(ours, twin, i)

    def test_gradient_scaler(self) -> None:
        """The scale grows, and steps with an infinite gradient are left out, in one graph."""
        ours, twin = make(), make()
        runner = co.CUDAGraphRunner(ours.optimizer)
        for side in (ours, twin):
            side.kept["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        for i in range(STEPS):
            for side, steps in ((ours, runner), (twin, twin.optimizer)):
                scaler = side.kept["scaler"]
                side.optimizer.zero_grad()
                scaler.scale(side.model(batch(i)).square().mean()).backward()
                if i % 5 == 3:
                    side.model.outer.weight.grad[0, 0] = torch.inf
                scaler.step(steps)
                scaler.update()
            assert_equal(ours, twin, i)
        assert ours.optimizer.skipped_steps == len(range(3, STEPS, 5))
        assert co.compile_report(ours.optimizer).recaptures == 0
        assert not hasattr(ours.optimizer, "grad_scale")

    def test_a_step_without_scaler_is_not_scaled(self) -> None:
        ours, twin = make(), make()
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
        for i in range(8):
            for side, steps in ((ours, runner), (twin, twin.optimizer)):
                give(side, i)
                if i % 3 == 0:
                    steps.grad_scale, steps.found_inf = torch.tensor(4.0), torch.tensor(0.0)
                steps.step()
                if i % 3 == 0:
                    del steps.grad_scale, steps.found_inf
            assert_equal(ours, twin, i)

    def test_closure_hooks_and_scheduler(self) -> None:
        ours = make(lr=0.1)
        calls = []
        ours.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        ours.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(ours.optimizer, 0.5)

        def closure() -> Tensor:
            ours.optimizer.zero_grad()
            loss = ours.model(batch(0)).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(5):
            losses.append(runner.step(closure).item())
            scheduler.step()
        assert calls == ["pre", "post"] * 5
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 5

    def test_several_optimizers_have_a_runner_each(self) -> None:
        sides = [make(), make(), make(co.SGD, momentum=0.9), make(co.SGD, momentum=0.9)]
        runners = [co.CUDAGraphRunner(s.optimizer) for s in sides[::2]]
        for i in range(10):
            for side in sides:
                give(side, i)
            for runner, twin in zip(runners, sides[1::2], strict=True):
                runner.step()
                twin.optimizer.step()
        for ours, twin in zip(sides[::2], sides[1::2], strict=True):
            assert_equal(ours, twin, 10)

    def test_model_loaded_by_assignment_leaves_the_optimizer_its_tensors(self) -> None:
        """As without a runner: the optimizer's parameters have no gradients any more, so nothing is updated."""
        ours, twin = make(), make()
        runner = co.CUDAGraphRunner(ours.optimizer)
        for i in range(10):
            for side, step in ((ours, runner.step), (twin, twin.optimizer.step)):
                if i == 6:
                    side.model.load_state_dict(copy.deepcopy(side.model.state_dict()), assign=True)
                side.optimizer.zero_grad()
                side.model(batch(i)).sum().backward()
                step()
            assert_equal(ours, twin, i)

    @pytest.mark.parametrize("warmup", [1, 2])
    @pytest.mark.parametrize("calls", [1, 2, 4])
    def test_a_group_that_is_added_before_the_capture(self, calls: int, warmup: int) -> None:
        ours, twin = make(), make()
        runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=warmup)
        for i in range(8):
            if i == calls:
                for side in (ours, twin):
                    side.optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(3)))], "lr": 0.5})
            runner(batch(i))
            train(twin, batch(i))
            assert_equal(ours, twin, i)
        assert co.compile_report(ours.optimizer).replays >= 8 - warmup - 3

    def test_a_failed_capture_leaves_nothing_to_replay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, twin = make(), make()
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
        original = SimulatedGraph.capture

        def refuse(graph: SimulatedGraph, work: Any) -> Any:
            original(graph, work)
            graph.release()
            raise RuntimeError("out of memory")

        for i in range(6):
            for side in (ours, twin):
                give(side, i)
            if i == 1:
                monkeypatch.setattr(SimulatedGraph, "capture", refuse)
                with pytest.raises(RuntimeError, match="out of memory"):
                    runner.step()
                monkeypatch.setattr(SimulatedGraph, "capture", original)
                assert not co.compile_report(ours.optimizer).captures
            runner.step()
            twin.optimizer.step()
            assert_equal(ours, twin, i)

    def test_the_budget_names_what_changed(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1, recaptures=1)
        weight = ours.model.outer.weight
        for i in range(9):
            if i in (3, 6):
                weight.data = weight.data.clone()
            give(ours, i)
            before = [p.detach().clone() for p in ours.params]
            if i == 6:
                old = weight.detach().clone()
                expected = r"after 1 times: 'outer.weight' moved"
                with pytest.raises(RuntimeError, match=expected):
                    runner.step()
                with pytest.raises(RuntimeError, match="larger recaptures="):
                    runner.step()
                assert torch.equal(weight, old)
                break
            runner.step()
            assert not all(torch.equal(p, b) for p, b in zip(ours.params, before, strict=True))

    def test_the_guard_covers_captures_and_has_a_budget(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
        with co.no_recompiles():
            for i in range(4):  # the first capture is no re-capture
                give(ours, i)
                runner.step()
        ours.optimizer.max_grad_norm = 1.0
        state = [t.clone() for t in ours.tensors()]
        with co.no_recompiles(), pytest.raises(co.RecompileError, match="again: max_grad_norm or skip_nonfinite off -> on"):
            runner.step()
        assert all(torch.equal(a, b) for a, b in zip(state, ours.tensors(), strict=True))
        with co.no_recompiles(budget=1):
            for _ in range(3):
                runner.step()
            ours.optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(2)))]})
            with pytest.raises(co.RecompileError, match=r"param_groups\[2\] was added"):
                runner.step()
        runner.step()
        runner.step()
        report = co.compile_report(ours.optimizer)
        assert report.recaptures == 2
        assert "3 captures, 2 re-captures" in str(report)
        assert "captured again: max_grad_norm or skip_nonfinite off -> on" in str(report)

    def test_structural_hyperparameter(self) -> None:
        def scenario(side: Side, i: int) -> None:
            if i == 6:
                side.optimizer.param_groups[0]["momentum"] = 0.8

        report = self.run(scenario, optimizer=co.SGD)
        assert report.captures == ("", "param_groups[0]['momentum'] 0 -> another number than 0")

    def test_table_refreshes_are_counted(self) -> None:
        ours = make(groups=1)
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
        give(ours, 0)
        for _ in range(3):
            runner.step()
        before = co.compile_report(ours.optimizer).table_refreshes
        runner.step()
        assert co.compile_report(ours.optimizer).table_refreshes == before
        held = [p.grad for p in ours.params]
        give(ours, 1)
        runner.step()
        assert co.compile_report(ours.optimizer).table_refreshes == before + 1
        ours.optimizer.param_groups[0]["lr"] = 0.5
        runner.step()
        assert co.compile_report(ours.optimizer).table_refreshes == before + 1  # where the number lies is known
        assert held


@pytest.mark.usefixtures("simulated")
class TestTrainingStep:
    """The runner of a whole training step."""

    def run(
        self, scenario: Scenario, steps: int = STEPS, function: Callable[..., Any] = train, warmup: int = 3, **kwargs: Any
    ) -> Any:
        ours, twin = make(**kwargs), make(**kwargs)
        runner = co.CUDAGraphRunner(
            functools.partial(function, ours), optimizers=ours.optimizer, warmup=warmup, modules=ours.model
        )
        for i in range(steps):
            for side in (ours, twin):
                scenario(side, i)
            loss, expected = runner(batch(i)), function(twin, batch(i))
            assert torch.equal(loss.nan_to_num(), expected.nan_to_num()), i
            assert not loss.requires_grad
            assert_equal(ours, twin, i)
            for a, b in zip(ours.params, twin.params, strict=True):
                assert (a.grad is None) == (b.grad is None), i
                assert a.grad is None or torch.equal(a.grad.nan_to_num(), b.grad.nan_to_num()), i
        assert engine_of(ours.optimizer).steps == engine_of(twin.optimizer).steps
        return co.compile_report(ours.optimizer)

    def test_a_number_out_of_range_is_refused_by_the_replay(self) -> None:
        side = make()
        runner = co.CUDAGraphRunner(functools.partial(train, side), optimizers=side.optimizer, modules=side.model)
        for i in range(6):
            runner(batch(i))
        before = [p.detach().clone() for p in side.params]
        side.optimizer.param_groups[0]["lr"] = math.nan
        with pytest.raises(ValueError, match=r"lr of param_groups\[0\] must be >= 0"):
            runner(batch(6))
        assert all(map(torch.equal, before, side.params))
        side.optimizer.param_groups[0]["lr"] = 0.1
        runner(batch(6))
        assert co.compile_report(side.optimizer).recaptures == 0

    def test_parameters_to_evaluate_are_refused_by_the_replay(self) -> None:
        """And a change of view captures nothing anew."""
        side, twin = (make(optimizer=co.AdamWScheduleFree) for _ in range(2))
        runner = co.CUDAGraphRunner(functools.partial(train, side), optimizers=side.optimizer, modules=side.model)
        for i in range(9):
            assert torch.equal(runner(batch(i)), train(twin, batch(i)))
            for each in (side, twin):
                each.optimizer.eval()
            assert all(map(torch.equal, side.params, twin.params))
            before = [p.detach().clone() for p in side.params]
            with pytest.raises(RuntimeError, match="are in evaluation mode"):
                runner(batch(i))
            assert all(map(torch.equal, before, side.params))
            for each in (side, twin):
                each.optimizer.train()
        assert co.compile_report(side.optimizer).recaptures == 0
        assert co.compile_report(side.optimizer).replays > 0

    @pytest.mark.parametrize("kind", KINDS, ids=kind_name)
    @pytest.mark.parametrize("scenario", SCENARIOS, ids=_names)
    def test_equals_uncaptured(self, scenario: Scenario, kind: dict[str, Any]) -> None:
        report = self.run(scenario, **kind)
        assert report.recaptures == recaptures_of(scenario, kind) + 2 * (scenario.__name__ == "frozen_and_thawed")
        assert report.replays >= STEPS - 3 - 2 * report.recaptures
        assert len(report.captures) == 1 + report.recaptures

    @pytest.mark.parametrize("kind", LOW_PRECISION, ids=kind_name)
    @pytest.mark.parametrize("scenario", IN_16_BITS, ids=_names)
    def test_low_precision_equals_uncaptured(self, scenario: Scenario, kind: dict[str, Any]) -> None:
        self.test_equals_uncaptured(scenario, kind)

    @pytest.mark.parametrize("optimizer", [*ruled("dense"), *stacked()], ids=lambda c: c.__name__)
    def test_fifty_steps_while_every_hyperparameter_moves(self, optimizer: type[co.CompiledOptimizer]) -> None:
        nonzero = dict.fromkeys(optimizer._rule.structural_hypers, 0.8)
        report = self.run(every_hyperparameter, 50, optimizer=optimizer, **nonzero)
        assert report.replays == 47
        assert report.recaptures == 0

    @pytest.mark.parametrize("warmup", [1, 2, 5])
    def test_two_hundred_steps(self, warmup: int) -> None:
        report = self.run(unchanged, 200, warmup=warmup, max_grad_norm=0.1, weight_decay=0.3)
        assert report.replays == 200 - warmup

    def test_gradients_are_zeroed_where_users_zero_them(self) -> None:
        def at_end(side: Side, x: Tensor) -> Tensor:
            loss = side.model(x).square().mean()
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
            return loss

        def in_place(side: Side, x: Tensor) -> Tensor:
            loss = side.model(x).square().mean()
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)
            return loss

        def by_the_model(side: Side, x: Tensor) -> Tensor:
            side.model.zero_grad()
            loss = side.model(x).square().mean()
            loss.backward()
            side.optimizer.step()
            return loss

        def never(side: Side, x: Tensor) -> Tensor:
            loss = side.model(x).square().mean()
            loss.backward()
            side.optimizer.step()
            return loss

        def halved(side: Side, x: Tensor) -> Tensor:
            """Reads what it replaces."""
            for p in side.params:
                if p.grad is not None:
                    p.grad = p.grad * 0.5
            return never(side, x)

        def delayed(side: Side, x: Tensor) -> Tensor:
            """Steps with the gradients that the call before left."""
            side.optimizer.step()
            side.optimizer.zero_grad()
            loss = side.model(x).square().mean()
            loss.backward()
            return loss

        def measured(side: Side, x: Tensor) -> Tensor:
            """Adds to the gradients of the call before, and reads them before it drops them."""
            side.model(x).sum().backward()
            norm = side.model.outer.weight.grad.norm()
            return train(side, x) + norm

        for function in (at_end, in_place, by_the_model, never, halved, delayed, measured):
            report = self.run(unchanged, function=function)
            assert report.recaptures == 0, function.__name__

        def outside(side: Side, i: int) -> None:
            side.optimizer.zero_grad()

        def outside_in_place(side: Side, i: int) -> None:
            side.optimizer.zero_grad(set_to_none=False)

        for scenario in (outside, outside_in_place):
            assert self.run(scenario, function=never).recaptures == 0, scenario.__name__

    @pytest.mark.parametrize("change", ["none", "new"])
    def test_gradients_changed_between_calls(self, change: str) -> None:
        """A step that accumulates reads them: another gradient is copied to where the graph does, none is not there."""

        def accumulate(side: Side, x: Tensor) -> Tensor:
            loss = side.model(x).square().mean()
            loss.backward()
            side.optimizer.step()
            return loss

        def scenario(side: Side, i: int) -> None:
            if i in (8, 13):
                weight = side.model.outer.weight
                weight.grad = None if change == "none" else torch.full_like(weight, 0.3)

        report = self.run(scenario, function=accumulate)
        assert report.recaptures == (2 if change == "none" else 0)
        assert all("gradient of 'outer.weight'" in cause for cause in report.captures[1:])

    def test_dropped_gradients_may_be_anything(self) -> None:
        def scenario(side: Side, i: int) -> None:
            for k, p in enumerate(side.params):
                p.grad = None if (i + k) % 2 else torch.full_like(p, 3.0)

        assert self.run(scenario).recaptures <= 1

    def test_accumulation_inside(self) -> None:
        def two_halves(side: Side, x: Tensor) -> Tensor:
            losses = [side.model(half).square().mean() for half in x.chunk(2)]
            for loss in losses:
                loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
            return torch.stack([loss.detach() for loss in losses]).sum()

        assert self.run(unchanged, function=two_halves).recaptures == 0

    def test_clip_and_scaler_inside(self) -> None:
        def scaled(side: Side, x: Tensor) -> Tensor:
            scaler = side.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))
            side.optimizer.zero_grad()
            loss = side.model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(side.optimizer)
            scaler.update()
            return loss

        def changing(side: Side, i: int) -> None:
            """Weights whose loss is infinite, for two steps, and a step outside of the runner without a scaler."""
            overflow(side, i)
            if i == 15:
                give(side, i)
                side.optimizer.step()
            elif i == 17:
                side.optimizer.max_grad_norm = 0.2

        report = self.run(changing, function=scaled, max_grad_norm=0.5)
        assert report.recaptures == 0
        assert report.replays == STEPS - 3

    def test_several_optimizers(self) -> None:
        def make_two() -> tuple[Side, co.CompiledOptimizer]:
            side = make(groups=1)
            other = nn.Linear(5, 3)
            with torch.no_grad():
                other.weight.fill_(0.1)
                other.bias.zero_()
            side.kept["other"] = other
            return side, co.SGD(other.named_parameters(), lr=0.1, momentum=0.9)

        def step(side: Side, second: co.CompiledOptimizer, x: Tensor) -> Tensor:
            loss = (side.model(x) - side.kept["other"](x)).square().mean()
            loss.backward()
            for optimizer in (side.optimizer, second):
                optimizer.step()
                optimizer.zero_grad()
            return loss

        (ours, second), (twin, twin_second) = make_two(), make_two()
        runner = co.CUDAGraphRunner(lambda x: step(ours, second, x), optimizers=[ours.optimizer, second])
        for i in range(STEPS):
            for optimizer in (second, twin_second):
                optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            assert torch.equal(runner(batch(i)), step(twin, twin_second, batch(i)))
            assert_equal(ours, twin, i)
        assert co.compile_report(second).replays == STEPS - 3
        assert engine_of(second).steps == STEPS

    def test_a_frozen_tensor_of_the_module_that_moves_is_noticed(self) -> None:
        def scenario(side: Side, i: int) -> None:
            if i == 6:
                side.model.gate.data = side.model.gate.data * 2
            elif i == 10:
                side.model.gate = nn.Parameter(torch.full((7,), 0.5), requires_grad=False)

        ours, twin = make(), make()
        for side in (ours, twin):
            gate = side.model.gate
            del side.model.gate
            side.model.register_buffer("gate", gate.detach())
            side.optimizer.param_groups[1]["params"][:] = [
                p for p in side.optimizer.param_groups[1]["params"] if p is not gate
            ]
            side.optimizer.param_groups[0]["params"][:] = [
                p for p in side.optimizer.param_groups[0]["params"] if p is not gate
            ]
            for group in side.optimizer.param_groups:
                group["param_names"] = [n for n in group["param_names"] if n != "gate"]

        def function(x: Tensor) -> Tensor:
            return train(ours, x)

        runner = co.CUDAGraphRunner(function, optimizers=ours.optimizer, modules=ours.model)
        for i in range(14):
            for side in (ours, twin):
                if i == 6:
                    side.model.gate.data = side.model.gate.data * 2
                elif i == 10:
                    side.model.gate = torch.full((7,), 0.5)
            assert torch.equal(runner(batch(i)), train(twin, batch(i))), i
        causes = co.compile_report(ours.optimizer).captures
        assert len(causes) == 3
        assert "parameter 'gate' (7,) float32 on cpu at 0x" in causes[1]
        assert causes[2] == "'gate' of the module Tensor -> another Tensor"

    def test_modules_may_hold_tensors_without_an_address(self) -> None:
        def scenario(side: Side, i: int) -> None:
            if i == 0:
                side.model.register_buffer("mask", torch.eye(3).to_sparse())

        assert self.run(scenario, 8).recaptures == 0

    def test_a_refused_change_is_refused_again(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(
            functools.partial(train, ours), optimizers=ours.optimizer, warmup=1, recaptures=0, modules=ours.model
        )
        for i in range(3):
            runner(batch(i))
        weight = ours.model.outer.weight
        memory = weight.data
        weight.data = memory.clone()
        before = [t.clone() for t in ours.tensors()]
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"parameter 'outer.weight' .*0x\w+ -> .*0x\w+; .*larger recaptures="):
                runner(batch(3))
        assert all(torch.equal(a, b) for a, b in zip(before, ours.tensors(), strict=True))
        weight.data = memory
        runner(batch(3))
        assert not torch.equal(weight, before[2])

    def test_a_parameter_that_left_the_optimizer_is_refused(self) -> None:
        """Training would go on with tensors that nobody updates."""
        ours = make()
        runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, modules=ours.model)
        for i in range(5):
            runner(batch(i))
        ours.model.load_state_dict(copy.deepcopy(ours.model.state_dict()), assign=True)
        before = [p.detach().clone() for p in ours.params]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'gate' of the module is no longer .*load_state_dict\(assign=True\)"):
                runner(batch(5))
        assert all(torch.equal(a, b) for a, b in zip(before, ours.params, strict=True))

    def test_modules_are_found_by_themselves(self) -> None:
        ours, twin = make(), make()

        class Trainer:
            def __init__(self, side: Side) -> None:
                self.model, self.side = side.model, side

            def step(self, x: Tensor) -> Tensor:
                return train(self.side, x)

        model = ours.model

        def closure(x: Tensor) -> Tensor:
            assert model is not None
            return train(ours, x)

        for function in (Trainer(ours).step, closure, functools.partial(lambda m, x: train(ours, x), ours.model)):
            runner = co.CUDAGraphRunner(function, optimizers=ours.optimizer, warmup=1)
            for i in range(6):
                for side in (ours, twin):
                    side.model.train(i < 4)
                assert torch.equal(runner(batch(i)), train(twin, batch(i)))
            assert co.compile_report(ours.optimizer).captures[-1] == "training mode of 'Net' True -> False"
            runner.release()

    def test_ambient_modes_are_noticed(self) -> None:
        ours, twin = make(), make()
        runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=1)
        for i in range(9):
            mode = torch.autocast("cpu", torch.bfloat16) if 3 <= i < 6 else contextlib.nullcontext()
            with mode:
                assert torch.equal(runner(batch(i)), train(twin, batch(i))), i
            assert_equal(ours, twin, i)
        assert co.compile_report(ours.optimizer).captures == (
            "",
            "autocast False -> torch.bfloat16",
            "autocast torch.bfloat16 -> False",
        )

    def test_schedulers_outside_need_no_complaint_and_inside_are_refused(self) -> None:
        ours = make()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(ours.optimizer, 0.9)
        runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=1)
        for i in range(4):
            runner(batch(i))
            scheduler.step()  # a warning that it came before the optimizer's step would be an error

        def inside(x: Tensor) -> Tensor:
            loss = train(ours, x)
            scheduler.step()
            return loss

        runner = co.CUDAGraphRunner(inside, optimizers=ours.optimizer, warmup=1)
        runner(batch(0))
        steps, before = engine_of(ours.optimizer).steps, [p.detach().clone() for p in ours.params]
        with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['lr'\] is assigned while a CUDA graph is being"):
            runner(batch(1))
        assert engine_of(ours.optimizer).steps == steps
        assert all(torch.equal(a, b) for a, b in zip(before, ours.params, strict=True))

    def test_a_load_inside_is_refused_before_it_copies(self) -> None:
        ours = make()
        saved = {**ours.optimizer.state_dict(), "state": {}}  # without tensors that reading would wait for
        for group in saved["param_groups"]:
            group.update(
                {name: 0.5 for name, value in group.items() if isinstance(value, (float, Tensor))}, betas=(0.5, 0.5)
            )

        def inside(x: Tensor) -> Tensor:
            loss = train(ours, x)
            before = [state["exp_avg"].clone() for state in ours.optimizer.state.values()]
            try:
                ours.optimizer.load_state_dict(saved, strict=False)
            finally:
                unchanged.append(all(map(torch.equal, before, (s["exp_avg"] for s in ours.optimizer.state.values()))))
            return loss

        runner, unchanged = co.CUDAGraphRunner(inside, optimizers=ours.optimizer, warmup=1), list[bool]()
        runner(batch(1))
        with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['\w+'\] is assigned while a CUDA graph is being"):
            runner(batch(2))
        assert unchanged == [False, True]

    def test_a_failed_capture_leaves_nothing_to_replay(self) -> None:
        ours, twin = make(), make()
        fail = []

        def function(x: Tensor) -> Tensor:
            loss = train(ours, x)
            if fail:
                raise KeyError("in the middle")
            return loss

        runner = co.CUDAGraphRunner(function, optimizers=ours.optimizer, warmup=1)
        for i in range(6):
            if i == 1:
                fail.append(1)
                grads = [p.grad for p in ours.params]
                with pytest.raises(KeyError, match="in the middle"):
                    runner(batch(i))
                assert all(p.grad is g for p, g in zip(ours.params, grads, strict=True))
                assert engine_of(ours.optimizer).steps == 1
                fail.clear()
            assert torch.equal(runner(batch(i)), train(twin, batch(i)))
            assert_equal(ours, twin, i)
        assert co.compile_report(ours.optimizer).replays == 4

    def test_a_function_that_reads_the_device_is_refused_by_the_capture(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(lambda x: train(ours, x).item(), optimizers=ours.optimizer, warmup=1)
        assert isinstance(runner(batch(0)), float)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            runner(batch(1))

    def test_the_optimizers_must_be_stepped(self) -> None:
        ours, idle = make(), make()
        runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=[ours.optimizer, idle.optimizer], warmup=1)
        runner(batch(0))
        with pytest.raises(RuntimeError, match="did not step AdamW"):
            runner(batch(1))

    def test_inputs(self) -> None:
        ours, twin = make(), make()

        def function(side: Side, batch: dict[str, Any], scale: float, *rest: Any, flag: bool = False) -> Any:
            side.optimizer.zero_grad()
            loss = (side.model(batch["x"], side=flag) * scale).square().mean()
            loss.backward()
            side.optimizer.step()
            return {"loss": loss, "scale": scale, "rest": rest}

        runner = co.CUDAGraphRunner(functools.partial(function, ours), optimizers=ours.optimizer, warmup=1)

        def call(run: Callable[..., Any], i: int, scale: Any = 1.0, **kwargs: Any) -> Any:
            return run({"x": batch(i)}, scale, None, batch(i), **{"flag": False, **kwargs})

        for i in range(10):
            scale, flag = (2.0 if i > 5 else 1.0), i > 8
            ours_out = call(runner, i, scale, flag=flag)
            expected = call(functools.partial(function, twin), i, scale, flag=flag)
            assert torch.equal(ours_out["loss"], expected["loss"]), i
            assert torch.equal(ours_out["rest"][1], batch(i))
            assert ours_out["scale"] == scale
        assert co.compile_report(ours.optimizer).captures[1] == "scale 1.0 -> 2.0"
        state = [t.clone() for t in ours.tensors()]
        x = batch(0)
        for bad, message in (
            (
                ({"x": x[:2]}, 2.0, None, x),
                r"batch\['x'\] must be a float32 tensor of shape \(4, 5\) on cpu .*shape \(2, 5\)",
            ),
            (({"x": x.double()}, 2.0, None, x), r"batch\['x'\] must be a float32 .*got a float64"),
            (({"x": x}, x, None, x), r"scale must be a float as in the first call, got a float32 tensor"),
            (({"x": x}, 2.0, None, 3), r"args\[3\] must be a float32 tensor .*got a int"),
            (({"y": x}, 2.0, None, x), "structured as in the first call"),
            (({"x": x}, 2.0, None), "structured as in the first call"),
            (({"x": x.clone().requires_grad_()}, 2.0, None, x), r"batch\['x'\] requires grad"),
        ):
            with pytest.raises(ValueError, match=message):
                runner(*bad, flag=True)
        with pytest.raises(TypeError, match=r"args\[3\] must be a tensor, a number, a string or None, got object"):
            runner({"x": x}, 2.0, None, object(), flag=True)
        assert all(torch.equal(a, b) for a, b in zip(state, ours.tensors(), strict=True))

    def test_inputs_and_outputs_are_not_shared(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(lambda x: (train(ours, x), x), optimizers=ours.optimizer, warmup=1)
        given = [batch(i) for i in range(4)]
        results = [runner(x) for x in given]
        assert len({r[0].item() for r in results}) == 4
        for (_, echoed), x in zip(results, given, strict=True):
            assert torch.equal(echoed, x)
        static = co.CUDAGraphRunner(lambda x: (train(ours, x), x), optimizers=ours.optimizer, warmup=1, clone_outputs=False)
        first = [static(x) for x in given][1]
        assert torch.equal(first[1], given[-1])

    def test_release_and_context_manager(self) -> None:
        ours = make()
        with co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=1) as runner:
            for i in range(3):
                loss = runner(batch(i))
            grad = ours.model.outer.weight.grad
        kept = grad.clone()
        with pytest.raises(RuntimeError, match="was released"):
            runner(batch(3))
        runner.release()
        assert torch.equal(grad, kept)
        assert loss.isfinite()
        train(ours, batch(3))  # the optimizer is free again

    def test_a_release_inside_a_step_comes_after_it(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(ours.optimizer)
        for i in range(4):
            give(ours, i)
            runner.step()
        runner.step(runner.release)
        assert {float(state["step"]) for state in ours.optimizer.state.values()} == {5.0}
        assert not hasattr(runner, "param_groups")

    def test_finalizer_releases_the_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released = []
        original = SimulatedGraph.release
        monkeypatch.setattr(SimulatedGraph, "release", lambda g: (released.append(g), original(g))[1])
        ours = make()
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)
        for i in range(3):
            give(ours, i)
            runner.step()
        released.clear()
        gone, graph = weakref.ref(runner), runner._run._graph
        del runner
        gc.collect()
        assert gone() is None
        assert sum(g is graph for g in released) == 1

    @pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
    def test_copying_is_refused(self, copier: Callable[[Any], Any]) -> None:
        with pytest.raises(TypeError, match="cannot be copied or pickled; make a new one"):
            copier(co.CUDAGraphRunner(make().optimizer))

    def test_the_guard_explains(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=1)
        for i in range(3):
            runner(batch(i))
        ours.optimizer.param_groups[0]["amsgrad"] = True
        with co.no_recompiles(), pytest.raises(co.RecompileError, match=r"param_groups\[0\]\['amsgrad'\] was written"):
            runner(batch(3))
        with co.no_recompiles(budget=2):  # the graph, and the kernel
            for i in range(3):
                runner(batch(i))
        assert co.compile_report(ours.optimizer).recaptures == 1

    def test_an_unrelated_frequent_change_is_an_error(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(lambda x, k: train(ours, x * k), optimizers=ours.optimizer, warmup=1, recaptures=2)
        for i in range(9):
            runner(batch(i), i // 3 + 1)
        with pytest.raises(RuntimeError, match=r"after 2 times: k 3 -> 7; avoid this change between calls"):
            runner(batch(9), 7)


def _capture_by_hand(work: Callable[[], Any]) -> SimulatedGraph:
    graph = SimulatedGraph(torch.device("cpu"))
    graph.capture(work)
    return graph


@pytest.mark.usefixtures("simulated")
class TestByHand:
    """A step in a graph that the user captures."""

    @pytest.mark.parametrize("kind", [*KINDS, *LOW_PRECISION], ids=kind_name)
    def test_replays_follow_writes_in_place_and_eager_steps_between(self, kind: dict[str, Any]) -> None:
        ours, twin = make(**kind), make(**kind)
        for side in (ours, twin):
            give(side, 0)
            side.optimizer.step()
        graph = _capture_by_hand(ours.optimizer.step)
        grads = [p.grad for p in ours.params]
        for i in range(1, 10):
            for side in (ours, twin):
                side.optimizer.hyperparameter("lr").fill_(0.1 / i)
                for p, grad in zip(side.params, grads, strict=True):
                    p.grad = None if grad is None else grad.clone() if side is twin else grad
            graph.replay()
            twin.optimizer.step()
            assert_equal(ours, twin, i)
            if i % 3 == 0:  # with the same gradients each time, which the table must find again after a replay
                for side in (ours, twin):
                    if "grads" not in side.kept:
                        give(side, i)
                        side.kept["grads"] = [p.grad for p in side.params]
                    for p, grad in zip(side.params, side.kept["grads"], strict=True):
                        p.grad = grad
                    side.optimizer.step()
                assert_equal(ours, twin, i)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("optimizer", [*ruled("dense"), *stacked()], ids=lambda c: c.__name__)
    def test_replays_follow_every_write(self, optimizer: type[co.CompiledOptimizer], dtype: torch.dtype) -> None:
        nonzero = dict.fromkeys(optimizer._rule.structural_hypers, 0.8)
        rates = [torch.tensor(0.05, dtype=dtype) for _ in range(2)]
        ours, twin = (make(optimizer, **nonzero, lr=rate) for rate in rates)
        for side, rate in zip((ours, twin), rates, strict=True):
            side.kept["adopted"] = rate
            give(side, 0)
            side.optimizer.step()
        graph = _capture_by_hand(ours.optimizer.step)
        for i in range(50):
            for side in (ours, twin):
                written_in_some_way(side, random.Random(i))
            graph.replay()
            twin.optimizer.step()
            assert_equal(ours, twin, i)

    def test_a_capture_after_an_assignment(self) -> None:
        ours, twin = make(), make()
        for side in (ours, twin):
            give(side, 0)
            side.optimizer.step()
            side.optimizer.param_groups[0]["lr"] = 0.5
        graph = _capture_by_hand(ours.optimizer.step)
        for i in range(4):
            for side in (ours, twin):
                if i == 2:
                    side.optimizer.param_groups[0]["lr"] = 0.25  # which no replay may undo
            graph.replay()
            twin.optimizer.step()
            assert_equal(ours, twin, i)

    @pytest.mark.parametrize("change", ["group", "first gradient", "clipping on", "clipping off", "schedule", "state"])
    @pytest.mark.parametrize("kind", KINDS, ids=kind_name)
    def test_a_graph_outlives_the_tables_of_its_step(self, kind: dict[str, Any], change: str) -> None:
        """Its memory is not given to others, and the optimizer says that the two part."""
        ours = make(**kind, max_grad_norm=0.5 if change == "clipping off" else None)
        optimizer = ours.optimizer
        optimizer.schedule(lr=lambda step: 0.1 / step)
        give(ours, 0)
        optimizer.step()
        graph = _capture_by_hand(optimizer.step)
        changes: dict[str, Callable[[], object]] = {
            "group": lambda: optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(2, 2)))]}),
            "first gradient": lambda: setattr(ours.model.gate, "grad", torch.ones_like(ours.model.gate)),
            "clipping on": lambda: setattr(optimizer, "max_grad_norm", 0.1),
            "clipping off": lambda: setattr(optimizer, "max_grad_norm", None),
            "schedule": lambda: optimizer.schedule(lr=lambda step: 0.2 / step),
            "state": lambda: state_rebound(ours, 7),
        }

        def go_on() -> None:
            changes[change]()
            optimizer.step()

        with pytest.warns(RuntimeWarning, match=r"changed after step\(\) was captured in a CUDA graph") as warned:
            go_on()
        assert len(warned) == 1
        gc.collect()
        for _ in range(2):
            graph.replay()  # fails where memory that it uses belongs to nobody else
            optimizer.step()

    def test_a_graph_and_the_step_share_the_state_after_a_group_was_added(self) -> None:
        """Step counts too, on which the bias corrections depend."""
        ours, twin = make(), make()
        for side in (ours, twin):
            give(side, 0)
            side.optimizer.step()
        graph = _capture_by_hand(ours.optimizer.step)
        for side in (ours, twin):
            with pytest.warns(RuntimeWarning) if side is ours else contextlib.nullcontext():
                side.optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(2, 2)))]})
        for i in range(6):
            ours.optimizer.step() if i % 2 else graph.replay()
            twin.optimizer.step()
            assert_equal(ours, twin, i)

    def test_a_runner_is_not_by_hand(self) -> None:
        ours = make()
        runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer, warmup=1)
        for i in range(3):
            runner(batch(i))
            ours.optimizer.param_groups[0]["lr"] = 0.1  # a warning would be an error

    def test_an_interrupt_does_not_lose_the_warning_of_a_stale_graph(self) -> None:
        ours = make()
        give(ours, 0)
        ours.optimizer.step()
        graph = _capture_by_hand(ours.optimizer.step)
        ours.optimizer.param_groups[0]["maximize"] = True
        interrupted = mock.patch.object(type(engine_of(ours.optimizer)), "_take_name", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            ours.optimizer.step()
        with pytest.warns(RuntimeWarning, match="captured in a CUDA graph, which still uses the old"):
            ours.optimizer.step()
        graph.release()

    @pytest.mark.parametrize("kind", KINDS, ids=kind_name)
    @pytest.mark.parametrize("change", ["first step", "group", "parameter", "clip", "thawed"])
    def test_what_cannot_be_captured_is_refused_before_anything_changes(self, change: str, kind: dict[str, Any]) -> None:
        ours = make(**kind)
        give(ours, 0)
        if change != "first step":
            ours.optimizer.step()
        expected = {
            "first step": "its kernels are not compiled yet",
            "group": "its kernels are not compiled yet",
            "parameter": "'outer.weight' moved",
            "clip": "max_grad_norm or skip_nonfinite off -> on",
            "thawed": "'gate' got its first gradient",
        }
        if change == "group":
            ours.optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(2, 2)))]})
        elif change == "parameter":
            ours.model.outer.weight.data = ours.model.outer.weight.data.clone()
        elif change == "clip":
            ours.optimizer.max_grad_norm = 1.0
        elif change == "thawed":
            ours.model.gate.grad = torch.ones_like(ours.model.gate)
        before, steps = [t.clone() for t in ours.tensors()], engine_of(ours.optimizer).steps
        with pytest.raises(RuntimeError, match=f"{expected[change]}.*take one step before capturing"):
            _capture_by_hand(ours.optimizer.step)
        assert all(torch.equal(a, b) for a, b in zip(before, ours.tensors(), strict=True))
        assert engine_of(ours.optimizer).steps == steps
        ours.optimizer.step()
        _capture_by_hand(ours.optimizer.step)

    def test_a_second_capture_needs_a_step_in_between(self) -> None:
        ours = make()
        give(ours, 0)
        ours.optimizer.step()
        _capture_by_hand(ours.optimizer.step)
        with pytest.raises(RuntimeError, match="captured a second time"):
            _capture_by_hand(ours.optimizer.step)


class TestArguments:
    def test_bad_ones(self) -> None:
        optimizer = make().optimizer
        for arguments, kind, message in (
            ((optimizer, optimizer), TypeError, "takes neither optimizers nor modules"),
            ((3, optimizer), TypeError, "target must be an optimizer of compiled_optim or a function, got int"),
            ((print,), TypeError, "optimizers must be the optimizers of compiled_optim"),
            ((print, torch.optim.SGD([nn.Parameter(torch.ones(1))])), TypeError, "optimizers must be"),
            ((optimizer, None, 0), ValueError, "warmup must be >= 1, got 0"),
            ((optimizer, None, 1.5), TypeError, "warmup must be an int, got 1.5"),
        ):
            with pytest.raises(kind, match=message):
                co.CUDAGraphRunner(*arguments)
        with pytest.raises(ValueError, match="recaptures must be >= 0, got -1"):
            co.CUDAGraphRunner(optimizer, recaptures=-1)
        with pytest.raises(ValueError, match="budget must be >= 0, got -1"), co.no_recompiles(budget=-1):
            pass

    @pytest.mark.usefixtures("simulated")
    @pytest.mark.parametrize("kind", KINDS[:3], ids=kind_name)
    @pytest.mark.parametrize("lowering", ["inductor", "eager"])
    def test_a_lowering_without_tables_is_refused(self, lowering: str, kind: dict[str, Any]) -> None:
        side = make(lowering=lowering, **kind)
        with pytest.raises(ValueError, match=rf"{kind_name(kind)} updates 'inner.weight' in another way"):
            co.CUDAGraphRunner(side.optimizer)

    @pytest.mark.usefixtures("simulated")
    def test_the_kinds_are_not_mixed_up(self) -> None:
        side = make()
        with pytest.raises(TypeError, match="call its step"):
            co.CUDAGraphRunner(side.optimizer)(batch(0))
        runner = co.CUDAGraphRunner(functools.partial(train, side), optimizers=side.optimizer)
        with pytest.raises(TypeError, match="call it with the step's inputs"):
            runner.step()
        assert not hasattr(runner, "param_groups")

    @pytest.mark.usefixtures("simulated")
    def test_parameters_on_several_devices_are_refused(self) -> None:
        there = nn.Parameter(torch.ones(2, device="meta"))
        optimizer = co.SGD([("a", nn.Parameter(torch.ones(2)))])
        optimizer.param_groups[0]["params"].append(there)
        optimizer.param_groups[0]["param_names"].append("b")
        with pytest.raises(ValueError, match="on 2: 'a' on cpu, 'b' on meta"):
            co.CUDAGraphRunner(optimizer)


class TestWithoutGraphs:
    """On a CPU, without the simulation."""

    def test_it_runs_the_compiled_step_and_says_so_once(self) -> None:
        ours, twin = make(), make()
        with pytest.warns(RuntimeWarning, match="CUDAGraphRunner runs AdamW uncaptured: cpu has no CUDA graphs") as told:
            step = co.CUDAGraphRunner(ours.optimizer)
        assert told[0].filename == __file__  # not a line of the package
        whole = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer)  # a second one: an error
        for i in range(STEPS):
            for side in (ours, twin):
                every_hyperparameter(side, i)
                give(side, i)
            step.step()
            twin.optimizer.step()
            assert torch.equal(whole(batch(i)), train(twin, batch(i)))
            assert_equal(ours, twin, i)
        report = co.compile_report(ours.optimizer)
        assert report.captures == ()
        assert report.replays == 0
        assert "uncaptured" in str(report)
        with pytest.raises(ValueError, match=r"x must be a float32 tensor of shape \(4, 5\)"):
            whole(batch(0)[:1])
        whole.release()
        with pytest.raises(RuntimeError, match="was released"):
            whole(batch(0))

    @pytest.mark.parametrize("lowering", ["inductor", "eager"])
    def test_any_lowering_will_do(self, lowering: str) -> None:
        ours, twin = make(lowering=lowering), make(lowering=lowering)
        with pytest.warns(RuntimeWarning, match="uncaptured"):
            runner = co.CUDAGraphRunner(functools.partial(train, ours), optimizers=ours.optimizer)
        for i in range(3):
            assert torch.equal(runner(batch(i)), train(twin, batch(i)))


def test_only_cuda_has_graphs_and_captures() -> None:
    from compiled_optim.capture import graph as graphs

    assert set(graphs.GRAPHS) == set(torch_internals.CAPTURING) == {"cuda"}


def test_the_simulation_does_nothing_while_it_captures_and_bakes_addresses(simulated: None) -> None:
    x, y = torch.ones(3), torch.zeros(3)
    graph = SimulatedGraph(torch.device("cpu"))
    out = graph.capture(lambda: y.add_(x) * 2)
    assert y.sum() == 0
    graph.replay()
    assert torch.equal(out, torch.full((3,), 2.0))
    y.data = torch.full((3,), 10.0)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 4.0))  # the old memory
    assert torch.equal(y, torch.full((3,), 10.0))


@pytest.mark.full
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
def test_the_list_holds_for_the_interpreted_triton_kernel() -> None:
    pytest.importorskip("triton")
    sparse = str(Path(__file__).with_name("test_capture_sparse.py"))
    parts = [
        "AdamW and TestStep and equals_uncaptured and not lr_ and not scheduled-",  # every_hyperparameter moves lr both ways
        "AdamW and TestStep and come_and_go and (2-new or 3-same)",
        "AdamW and TestTrainingStep and equals_uncaptured and (clip_norm or checkpoint or parameter_rebound)",
        "TestStep and equals_uncaptured and (clip_norm or every_hyperparameter-Adafactor)",
        "TestByHand and replays and in_place",
        # Of each kind of rule one: where a replay reads what was written does not depend on what a rule computes with it.
        "TestByHand and replays and float32 and (AdamW- or NAdam or LAMB or Prodigy or Adafactor)",
        "TestByHand and replays and float64 and AdamW-",
        "a_step_equals_an_uncaptured_one and (maximize or False]) and not max_grad_norm and not skip_nonfinite",
        "a_training_step_equals_an_uncaptured_one and max_grad_norm",
    ]
    modes = [kind["weights"] for kind in LOW_PRECISION]
    selected = f"({' or '.join(f'({part})' for part in parts)}) and not ({' or '.join(modes)})"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, sparse, "-k", selected]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


class Mixed(nn.Linear):
    """A layer with a parameter beside that no step updates."""

    def __init__(self) -> None:
        super().__init__(5, 1)
        self.frozen = nn.Parameter(torch.arange(3, dtype=torch.uint8), requires_grad=False)


@pytest.mark.full
@pytest.mark.usefixtures("simulated")
@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
@pytest.mark.parametrize("whole", [False, True])
def test_a_parameter_that_is_skipped_and_one_that_is_there_twice(whole: bool) -> None:
    torch.manual_seed(0)
    models = [Mixed(), Mixed()]
    models[1].weight.data.copy_(models[0].weight)
    models[1].bias.data.copy_(models[0].bias)
    ours, twin = (co.AdamW([*m.parameters(), m.weight], max_grad_norm=0.1) for m in models)

    def step(x: Tensor, model: nn.Module, optimizer: Any, update: Callable[[], Any]) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        update()

    runner = (
        co.CUDAGraphRunner((lambda x: step(x, models[0], ours, ours.step)), optimizers=ours)
        if whole
        else co.CUDAGraphRunner(ours)
    )
    for i in range(8):
        runner(batch(i)) if whole else step(batch(i), models[0], ours, runner.step)
        step(batch(i), models[1], twin, twin.step)
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(models[0].bias, models[1].bias)
    assert co.compile_report(ours).replays == 5
