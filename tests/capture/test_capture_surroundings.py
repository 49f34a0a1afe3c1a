"""What goes on around captured steps: other parameters' gradients, other modules, failures, several steps and runners."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from capture_scenarios import KINDS, Side, assert_equal, give, kind_name, make, make_tables
from cuda_device import DEVICE, needs_cuda
from simulated_graph import SimulatedGraph, install
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import compiled_optim as co
from compiled_optim.memory import torch_internals
from compiled_optim.optimizer import engine_of


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=needs_cuda(), id="cuda")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where graphs are simulated, and where they are real and sums have one order."""
    if request.param == "cuda":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return str(request.param)


@pytest.fixture(autouse=True)
def simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "device" not in request.fixturenames or request.getfixturevalue("device") == "cpu":
        install(monkeypatch)


def batch(i: int, count: int = 4, device: str = "cpu") -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(100 + i), device="cpu").to(device)


def train(side: Side, x: Tensor) -> Tensor:
    side.optimizer.zero_grad()
    loss = side.model(x).square().mean()
    loss.backward()
    side.optimizer.step()
    return loss


def runner_of(side: Side, function: Callable[..., Any] = train, **kwargs: Any) -> co.CUDAGraphRunner:
    arguments = {"optimizers": side.optimizer, "modules": side.model, "warmup": 1, **kwargs}
    return co.CUDAGraphRunner(functools.partial(function, side), **arguments)


class Halves(nn.Module):
    """Two layers, for an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.between: nn.Module = nn.Tanh()
        self.second = nn.Linear(5, 3)
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.between(self.first(x)))
        return out if self.scale is None else out * self.scale


def of_first(device: str = "cpu") -> Side:
    """A side whose optimizer updates the first half only."""
    model = Halves().to(device)
    return Side(model, co.SGD(list(model.first.named_parameters()), lr=0.1))


def assert_same_models(ours: nn.Module, twin: nn.Module, step: int) -> None:
    for (name, a), b in zip(ours.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} at step {step}"


class TestConstants:
    @staticmethod
    def scaled(side: Side, x: Tensor, factor: float) -> Tensor:
        return train(side, x * factor)

    @pytest.mark.parametrize("budget", ["guard", "recaptures"])
    def test_one_that_was_refused_is_refused_again(self, budget: str) -> None:
        ours, twin = make(), make()
        runner = runner_of(ours, self.scaled, recaptures=0 if budget == "recaptures" else 8)
        for i in range(3):
            runner(batch(i), 2.0)
            self.scaled(twin, batch(i), 2.0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"factor 2.0 -> 3.0"), co.no_recompiles():
                runner(batch(3), 3.0)
        assert_equal(ours, twin, 3)
        for i, factor in ((4, 2.0), *([] if budget == "recaptures" else [(5, 3.0), (6, 3.0)])):
            assert torch.equal(runner(batch(i), factor), self.scaled(twin, batch(i), factor))
            assert_equal(ours, twin, i)

    def test_one_that_changes_before_the_capture_is_warmed_up(self) -> None:
        ours, seen = make(), []

        def function(x: Tensor, factor: float) -> Tensor:
            seen.append((factor, SimulatedGraph.recording is not None))
            return train(ours, x * factor)

        runner = co.CUDAGraphRunner(function, optimizers=ours.optimizer, warmup=2)
        for i in range(4):
            runner(batch(i), 1.0 + (i >= 2))
        assert seen == [(1.0, False), (1.0, False), (2.0, False), (2.0, True)]

    def test_keywords_come_in_any_order(self) -> None:
        ours, twin = make(), make()
        runner = runner_of(ours, self.scaled)
        for i, call in enumerate((lambda x: runner(x=x, factor=2.0), lambda x: runner(factor=2.0, x=x)) * 2):
            assert torch.equal(call(batch(i)), self.scaled(twin, batch(i), 2.0))


class TestFailures:
    """A capture that fails changes nothing; the next step, with the runner or without, is as if nothing had been."""

    @pytest.mark.full
    @pytest.mark.parametrize("kind", [*KINDS, "tables"], ids=lambda k: k if isinstance(k, str) else kind_name(k))
    def test_a_step_without_the_runner(self, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def gradients(side: Side, i: int) -> None:
            if kind != "tables":
                give(side, i)
            else:
                side.optimizer.zero_grad()
                side.model(torch.randint(0, 77, (6,), generator=torch.Generator().manual_seed(i), device="cpu")).backward()

        ours, twin = ((make_tables() if kind == "tables" else make(**kind)) for _ in range(2))
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1)

        def fail(graph: SimulatedGraph, work: Callable[[], Any]) -> None:
            raise RuntimeError("out of memory")

        for i in range(5):
            for side in (ours, twin):
                gradients(side, i)
            if i == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(SimulatedGraph, "capture", fail)
                    with pytest.raises(RuntimeError, match="out of memory"):
                        runner.step()
                for side in (ours, twin):
                    gradients(side, 77)
            ours.optimizer.step() if i in (1, 2) else runner.step()
            twin.optimizer.step()
            assert_equal(ours, twin, i)

    def test_an_assigned_hyperparameter(self) -> None:
        ours = make(co.SGD)

        def decaying(side: Side, x: Tensor) -> Tensor:
            loss = train(side, x)
            side.optimizer.param_groups[0]["lr"] = 0.5
            return loss

        runner = runner_of(ours, decaying)
        runner(batch(0))
        for _ in range(2):
            expected = r"param_groups\[0\]\['lr'\] is assigned while a CUDA graph is being captured.* outside"
            with pytest.raises(RuntimeError, match=expected):
                runner(batch(1))
            assert ours.optimizer.param_groups[0]["lr"] == 0.5
            train(ours, batch(1))
            assert all(p.isfinite().all() for p in ours.params)
            runner(batch(2))

    def test_a_buffer_that_the_module_replaces(self) -> None:
        class Averaging(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(5, 3)
                self.register_buffer("mean", torch.zeros(3))

            def forward(self, x: Tensor) -> Tensor:
                h = self.layer(x)
                self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
                return h - self.mean

        sides = []
        for _ in range(2):
            model = Averaging()
            sides.append(Side(model, co.AdamW(model.named_parameters())))
        ours, twin = sides
        runner = runner_of(ours)
        assert torch.equal(runner(batch(0)), train(twin, batch(0)))
        with pytest.raises(RuntimeError, match="what a replay cannot change again: 'mean' of the module Tensor -> another"):
            runner(batch(1))
        assert torch.equal(ours.model.mean, twin.model.mean)
        assert torch.equal(train(ours, batch(1)), train(twin, batch(1)))
        assert_equal(ours, twin, 1)

    @pytest.mark.parametrize("change", [{"max_grad_norm": 0.3}, {"skip_nonfinite": True}, {"grad_scale": 4.0}], ids=str)
    def test_a_control_assigned_before_a_capture_by_hand(self, change: dict[str, Any]) -> None:
        ours, twin = (make(max_grad_norm=0.5) for _ in range(2))
        for side in (ours, twin):
            give(side, 0)
            side.optimizer.step()
            for name, value in change.items():
                setattr(side.optimizer, name, value)
            give(side, 1)
        with pytest.raises(RuntimeError, match="max_grad_norm or skip_nonfinite was assigned; take one step before"):
            SimulatedGraph(torch.device("cpu")).capture(ours.optimizer.step)
        ours.optimizer.step()
        twin.optimizer.step()
        assert_equal(ours, twin, 1)
        SimulatedGraph(torch.device("cpu")).capture(ours.optimizer.step)

    def test_gradients_of_other_parameters(self) -> None:
        fail: list[int] = []

        def function(side: Side, x: Tensor) -> Tensor:
            side.model.zero_grad()
            loss = train(side, x)
            if fail:
                raise KeyError("in the middle")
            return loss

        ours = of_first()
        runner = runner_of(ours, function)
        runner(batch(0))
        before = [(p.grad, p.grad.clone()) for p in ours.model.parameters()]
        fail.append(1)
        with pytest.raises(KeyError):
            runner(batch(1))
        for p, (grad, value) in zip(ours.model.parameters(), before, strict=True):
            assert p.grad is grad
            assert torch.equal(grad, value)

    def test_a_function_that_clears_gradients_in_some_calls_only(self) -> None:
        calls: list[int] = []

        def function(side: Side, x: Tensor) -> Tensor:
            calls.append(0)
            if len(calls) % 2:
                side.optimizer.zero_grad()
            loss = side.model(x).square().mean()
            loss.backward()
            side.optimizer.step()
            return loss

        ours = make()
        runner = runner_of(ours, function)
        runner(batch(0))
        grads = [p.grad for p in ours.params]
        with pytest.raises(RuntimeError, match=r"drops the gradient of '\w+.\w+' in some calls and in others does not"):
            runner(batch(1))
        assert all(p.grad is g for p, g in zip(ours.params, grads, strict=True))

    def test_gradients_are_none_where_they_are_dropped_unread(self) -> None:
        def norms(side: Side, x: Tensor) -> tuple[Tensor, Tensor]:
            norm = sum((p.grad.norm() for p in side.params if p.grad is not None), torch.zeros(()))
            return train(side, x), norm

        ours = make()
        runner = runner_of(ours, norms)
        runner(batch(0))
        assert runner(batch(1))[1] == runner(batch(2))[1] == 0


class TestOtherParameters:
    """Parameters of the module that none of the runner's optimizers updates."""

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("every", [1, 3])
    def test_another_optimizer_outside(self, device: str, set_to_none: bool, every: int) -> None:
        ours, twin = of_first(device), of_first(device)
        others = [torch.optim.SGD(s.model.second.parameters(), lr=0.1) for s in (ours, twin)]
        runner = runner_of(ours)
        for i in range(12):
            assert torch.equal(runner(batch(i, device=device)), train(twin, batch(i, device=device)))
            for other in others:
                if i % every == every - 1:
                    other.step()
                    other.zero_grad(set_to_none)
            for a, b in zip(ours.model.parameters(), twin.model.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None), i
                assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-9), i
            torch.testing.assert_close(list(ours.model.parameters()), list(twin.model.parameters()), rtol=1e-6, atol=1e-7)
        expected = 0 if every == 1 or not set_to_none else 6
        assert co.compile_report(ours.optimizer).recaptures <= expected

    def test_a_discriminator(self, device: str) -> None:
        """The generator's step adds to gradients that the discriminator's optimizer drops outside."""

        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.made, self.judge = nn.Linear(5, 5), nn.Linear(5, 1)

        def make_pair() -> tuple[Side, torch.optim.Optimizer]:
            pair = Pair().to(device)
            side = Side(pair, co.Adam(list(pair.made.named_parameters()), lr=0.01))
            return side, torch.optim.Adam(pair.judge.parameters(), lr=0.01)

        def generate(side: Side, x: Tensor) -> Tensor:
            side.optimizer.zero_grad()
            loss = side.model.judge(side.model.made(x)).square().mean()
            loss.backward()
            side.optimizer.step()
            return loss

        def judge(side: Side, other: torch.optim.Optimizer, x: Tensor) -> None:
            other.zero_grad()
            side.model.judge(x).square().mean().backward()
            other.step()

        (ours, other), (twin, other_twin) = make_pair(), make_pair()
        runner = runner_of(ours, generate)
        for i in range(10):
            judge(ours, other, batch(i, device=device))
            judge(twin, other_twin, batch(i, device=device))
            assert torch.equal(runner(batch(i, device=device)), generate(twin, batch(i, device=device)))
            assert_same_models(ours.model, twin.model, i)
            for a, b in zip(ours.model.parameters(), twin.model.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)
        assert co.compile_report(ours.optimizer).recaptures == 0

    def test_what_the_step_does_not_touch_may_be_anything(self, device: str) -> None:
        class Two(Halves):
            def __init__(self) -> None:
                super().__init__()
                self.elsewhere = nn.Linear(2, 2)

        model = Two().to(device)
        ours = Side(model, co.SGD(list(model.first.named_parameters()), lr=0.1))
        runner = runner_of(ours, recaptures=0)
        for i in range(8):
            model.second.zero_grad()
            grad = None if i % 2 else torch.full((2, 2), float(i), device=device)
            model.elsewhere.weight.grad = grad
            runner(batch(i, device=device))
            assert model.elsewhere.weight.grad is grad
            assert grad is None or (grad == i).all()

    def test_switched_on_and_off(self, device: str) -> None:
        ours, twin = of_first(device), of_first(device)
        runner = runner_of(ours)
        for i in range(9):
            for side in (ours, twin):
                side.model.second.weight.requires_grad_(i < 4)
                side.model.second.zero_grad()
            assert torch.equal(runner(batch(i, device=device)), train(twin, batch(i, device=device)))
            grads = [side.model.second.weight.grad for side in (ours, twin)]
            assert (grads[0] is None) == (grads[1] is None) == (i >= 4)
        assert co.compile_report(ours.optimizer).captures[1] == "requires_grad of 'second.weight' True -> False"

    def test_parameters_that_two_optimizers_share(self, device: str) -> None:
        """The second one steps with gradients that the first one clears afterwards."""

        def make_two() -> tuple[nn.Module, co.CompiledOptimizer, co.CompiledOptimizer]:
            model = Halves().to(device)
            model(batch(9, device=device)).sum().backward()
            named = list(model.named_parameters())
            return model, co.SGD(named, lr=0.1), co.Adam(named, lr=0.01)

        def step(model: nn.Module, first: co.CompiledOptimizer, second: co.CompiledOptimizer, x: Tensor) -> Tensor:
            second.step()
            first.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            first.step()
            return loss

        ours, twin = make_two(), make_two()
        runner = co.CUDAGraphRunner(lambda x: step(*ours, x), optimizers=ours[1:], warmup=1, modules=ours[0])
        for i in range(8):
            assert torch.equal(runner(batch(i, device=device)), step(*twin, batch(i, device=device)))
            assert_same_models(ours[0], twin[0], i)
            if i % 2:
                for p in (*ours[0].parameters(), *twin[0].parameters()):
                    p.grad = p.grad * 0.5
        assert co.compile_report(ours[1]).recaptures == 0


class TestModules:
    @pytest.mark.parametrize("what", ["submodule", "frozen layer", "buffer set", "buffer added", "bias removed"])
    def test_changes_of_the_tree_are_noticed(self, device: str, what: str) -> None:
        def change(model: nn.Module) -> None:
            if what == "submodule":
                model.between = nn.ReLU()
            elif what == "frozen layer":
                torch.manual_seed(3)
                model.second = nn.Linear(5, 3).to(device)
            elif what == "buffer set":
                model.scale = torch.full((3,), 2.0, device=device)
            elif what == "buffer added":
                model.register_buffer("unused", torch.ones(1, device=device))
            else:
                model.second.bias = None

        ours, twin = of_first(device), of_first(device)
        runner = runner_of(ours)
        for i in range(7):
            if i == 3:
                change(ours.model)
                change(twin.model)
            for side in (ours, twin):
                side.model.second.zero_grad()
            assert torch.equal(runner(batch(i, device=device)), train(twin, batch(i, device=device))), i
        (_, cause) = co.compile_report(ours.optimizer).captures
        expected = {
            "submodule": "'between' of the module Tanh -> ReLU",
            "frozen layer": "'second' of the module Linear -> another Linear",
            "buffer set": "'scale' of the module NoneType -> Tensor",
            "buffer added": "'unused' of the module absent -> Tensor",
            "bias removed": "'second.bias' of the module Parameter -> NoneType",
        }
        assert cause == expected[what]

    @pytest.mark.parametrize("grad_mode", [True, False])
    def test_weights_that_autocast_cast_before_the_capture(self, device: str, grad_mode: bool) -> None:
        def validated(side: Side, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                with torch.set_grad_enabled(grad_mode):
                    side.model(batch(50, device=device)).square().mean()
                return run(x)

        ours, twin = (make(lr=0.05, device=device) for _ in range(2))
        runner = runner_of(ours, warmup=2)
        for i in range(6):
            assert torch.equal(
                validated(ours, runner, batch(i, device=device)),
                validated(twin, functools.partial(train, twin), batch(i, device=device)),
            )
            assert_equal(ours, twin, i)


class TestSeveral:
    @pytest.mark.full
    @pytest.mark.parametrize("kind", [*KINDS, "tables"], ids=lambda k: k if isinstance(k, str) else kind_name(k))
    def test_steps_in_one_function(self, device: str, kind: Any) -> None:
        def twice(side: Side, x: Tensor) -> None:
            for half in x.chunk(2):
                if kind == "tables":
                    side.optimizer.zero_grad()
                    side.model(half).backward()
                    side.optimizer.step()
                else:
                    train(side, half)

        ours, twin = ((make_tables(device) if kind == "tables" else make(device=device, **kind)) for _ in range(2))
        runner = runner_of(ours, twice)
        for i in range(8):
            x = (
                torch.randint(0, 77, (12,), generator=torch.Generator().manual_seed(i), device="cpu").to(device)
                if kind == "tables"
                else batch(i, device=device)
            )
            runner(x)
            twice(twin, x)
            assert_equal(ours, twin, i)
        assert engine_of(ours.optimizer).steps == engine_of(twin.optimizer).steps == 16
        assert co.compile_report(ours.optimizer).replays == 7

    def test_runners_of_one_optimizer(self, device: str) -> None:
        """One for each size of batch."""
        ours, twin = (make(device=device) for _ in range(2))
        runners = {count: runner_of(ours) for count in (4, 2)}
        for i in range(6):
            for count, runner in runners.items():
                assert torch.equal(runner(batch(i, count, device)), train(twin, batch(i, count, device)))
                assert_equal(ours, twin, i)
        assert co.compile_report(ours.optimizer).recaptures == 0
        assert len(co.compile_report(ours.optimizer).captures) == 2

    def test_an_optimizer_given_twice(self) -> None:
        side = make()
        with pytest.raises(ValueError, match="optimizers holds the same optimizer twice"):
            co.CUDAGraphRunner(functools.partial(train, side), optimizers=[side.optimizer] * 2)

    def test_an_optimizer_that_was_not_given(self, device: str) -> None:
        side = of_first(device)
        other = co.Adam(list(side.model.second.named_parameters()))

        def step(x: Tensor) -> Tensor:
            other.zero_grad()
            loss = train(side, x)
            other.step()
            return loss

        runner = co.CUDAGraphRunner(step, optimizers=side.optimizer, warmup=1)
        runner(batch(0, device=device))
        with pytest.raises(
            RuntimeError, match=r"Adam is stepped in a function .* but is not one of the runner's optimizers"
        ):
            runner(batch(1, device=device))

    def test_an_optimizer_that_was_not_given_on_another_thread(self) -> None:
        """As on autograd's for the device, where hooks of a backward pass run."""
        side = of_first()
        other = co.Adam(list(side.model.second.named_parameters()))
        errors: list[BaseException | None] = []

        def step(x: Tensor) -> Tensor:
            loss = train(side, x)
            with futures.ThreadPoolExecutor() as pool:
                errors.append(pool.submit(other.step).exception())
            return loss

        runner = co.CUDAGraphRunner(step, optimizers=side.optimizer, warmup=1)
        runner(batch(0))
        runner(batch(1))
        before, error = errors
        assert before is None
        assert "Adam is stepped in a function that a CUDAGraphRunner captures" in str(error)

    def test_a_zero_grad_of_the_users_own(self, device: str) -> None:
        ours, twin = (make(device=device) for _ in range(2))
        calls: list[bool] = []
        original = ours.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            original(set_to_none)

        ours.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        runner = runner_of(ours)
        for i in range(4):
            assert torch.equal(runner(batch(i, device=device)), train(twin, batch(i, device=device)))
        assert ours.optimizer.zero_grad is zero_grad
        assert calls == [True, True]


class TestDevices:
    @pytest.mark.parametrize("at", [1, 4])
    @pytest.mark.parametrize("whole", [False, True], ids=["step", "training step"])
    def test_a_group_elsewhere_is_refused_in_every_call(self, whole: bool, at: int) -> None:
        """Before the first capture as after it; without the group the training goes on."""
        ours, twin = make(), make()
        runner = runner_of(ours, warmup=1) if whole else co.CUDAGraphRunner(ours.optimizer, warmup=1)

        def both(i: int) -> None:
            for side in (ours, twin):
                give(side, i)
            if whole:
                assert torch.equal(runner(batch(i)), train(twin, batch(i)))
            else:
                runner.step()
                twin.optimizer.step()
            assert_equal(ours, twin, i)

        for i in range(at):
            both(i)
        there = nn.Parameter(torch.ones(2, device="meta"), requires_grad=False)
        ours.optimizer.add_param_group({"params": [("there", there)]})
        before = [t.clone() for t in twin.tensors()]
        for _ in range(3):
            with pytest.raises(ValueError, match=r"the parameters are on 2: .* on cpu, 'there' on meta"):
                runner(batch(0)) if whole else runner.step()
        ours.optimizer.param_groups.pop()
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), before, strict=True))
        for i in range(at, 8):
            both(i)
        assert co.compile_report(ours.optimizer).recaptures <= 1


class TestLifetime:
    def test_a_runner_kept_by_the_object_that_it_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released: list[SimulatedGraph] = []
        original = SimulatedGraph.release
        monkeypatch.setattr(SimulatedGraph, "release", lambda graph: (released.append(graph), original(graph))[1])

        class Trainer:
            def __init__(self) -> None:
                self.side = make()
                self.runner = co.CUDAGraphRunner(self.step, optimizers=self.side.optimizer, warmup=1)

            def step(self, x: Tensor) -> Tensor:
                return train(self.side, x)

        trainer = Trainer()
        for i in range(3):
            trainer.runner(batch(i))
        graph = trainer.runner._run._graph
        gone = [weakref.ref(x) for x in (trainer, trainer.side.model, trainer.side.optimizer)]
        released.clear()
        del trainer
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3
        assert released == [graph]

    def test_an_error_is_not_hidden_by_that_of_the_release(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After an error of the device everything fails."""

        def fail(graph: SimulatedGraph) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        def work(runner: co.CUDAGraphRunner, error: Exception | None) -> None:
            with runner:
                runner(batch(0))
                if error is not None:
                    raise error

        runner = runner_of(make())
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedGraph, "release", fail)
            with pytest.raises(KeyError, match="first"):
                work(runner, KeyError("first"))
        runner = runner_of(make())
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedGraph, "release", fail)
            with pytest.raises(RuntimeError, match="illegal"):
                work(runner, None)


class TestAutograd:
    @pytest.mark.full
    @pytest.mark.parametrize("kind", KINDS, ids=kind_name)
    @pytest.mark.parametrize("whole", [False, True], ids=["step", "training step"])
    def test_it_learns_of_every_replay(self, whole: bool, kind: dict[str, Any]) -> None:
        ours = make(**kind)
        runner = runner_of(ours) if whole else co.CUDAGraphRunner(ours.optimizer, warmup=1)
        for i in range(5):
            versions = [p._version for p in ours.params]
            if not whole:
                give(ours, i)
            runner(batch(i)) if whole else runner.step()
            counted = [p._version > version for p, version in zip(ours.params, versions, strict=True)]
            assert counted == [p.grad is not None for p in ours.params]
        assert co.compile_report(ours.optimizer).replays == 4


class TestNodes:
    """Of the graphs: a replay does nothing that need not be done again."""

    @pytest.mark.parametrize("kind", [k for k in KINDS if "transposed" not in k], ids=kind_name)  # copies are counted
    def test_the_addresses_of_gradients_are_uploaded_once(self, kind: dict[str, Any]) -> None:
        """After the capture; in one by hand that is part of the graph."""

        def doubled(side: Side, x: Tensor) -> Tensor:
            side.optimizer.step()
            return x * 2

        ours = make(**kind)
        give(ours, 0)
        ours.optimizer.step()
        by_hand = SimulatedGraph(torch.device("cpu"))
        by_hand.capture(lambda: doubled(ours, batch(0)))
        runner = runner_of(ours, doubled)
        for i in range(3):
            runner(batch(i))
        copies = [graph.nodes.count("copy_") for graph in (by_hand, runner._run._graph)]
        assert copies == [len(engine_of(ours.optimizer).step.lowerings), 0]

    def test_the_step_is_one_kernel(self) -> None:
        ours = make(groups=1)
        give(ours, 0)
        runner = runner_of(ours, lambda side, x: side.optimizer.step())
        for i in range(3):
            runner(batch(i))
        assert runner._run._graph.nodes == ["kernel"]


class TestKeptGraphs:
    """Of results of uncaptured steps, whose nodes belong to another stream than the capture's."""

    @pytest.mark.parametrize("between", [False, True])
    def test_a_kept_loss_is_named_before_anything_happens(self, between: bool) -> None:
        ours, twin = of_first(), of_first()
        runner = runner_of(ours)

        def both(i: int) -> None:
            assert torch.equal(runner(batch(i)), train(twin, batch(i)))
            assert_same_models(ours.model, twin.model, i)

        if between:
            both(0)
        kept = [train(ours, batch(1)) + ours.model.second.weight.sum()]
        train(twin, batch(1))
        both(2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"on 'weight', 'bias', 'second.weight' and 1 more.* detach\(\) it"):
                runner(batch(3))
        assert_same_models(ours.model, twin.model, 3)
        kept.clear()
        for i in range(4, 8):
            both(i)
        assert co.compile_report(ours.optimizer).replays == 4

    def check(self, function: Callable[..., Any], **kwargs: Any) -> None:
        ours, twin = make(), make()
        for side in (ours, twin):
            function(side, batch(9))
        runner = runner_of(ours, function, **kwargs)
        for i in range(5):
            assert torch.equal(runner(batch(i)), function(twin, batch(i)).detach())
            assert_equal(ours, twin, i)
        assert co.compile_report(ours.optimizer).replays == 4

    def test_a_detached_loss_may_be_kept(self) -> None:
        def function(side: Side, x: Tensor) -> Tensor:
            side.kept.setdefault("losses", []).append(train(side, x).detach())
            return side.kept["losses"][-1]

        self.check(function)

    def test_the_weights_that_autocast_keeps_are_nobodys(self) -> None:
        def function(side: Side, x: Tensor) -> Tensor:
            side.optimizer.zero_grad()
            loss = side.model(x).float().square().mean()
            loss.backward()
            side.optimizer.step()
            return loss

        ours = make()
        runner = runner_of(ours, function)
        with torch.autocast("cpu", torch.bfloat16):
            for i in range(5):
                ours.model(batch(i))  # fills the cache, with a graph that leads to the weights
                runner(batch(i))
        assert co.compile_report(ours.optimizer).replays == 4

    def test_a_function_may_keep_its_last_loss_and_let_go_of_it(self) -> None:
        def function(side: Side, x: Tensor) -> Tensor:
            side.kept.pop("loss", None)
            side.kept["loss"] = train(side, x)
            return side.kept["loss"]

        self.check(function)

    def test_a_function_may_keep_a_graph_of_its_own(self) -> None:
        """It was made on the stream of the capture."""

        def function(side: Side, x: Tensor) -> Tensor:
            loss = train(side, x)
            if not torch_internals.is_capturing(x.device):
                side.kept["loss"] = loss if "seen" in side.kept else loss.detach()
                side.kept["seen"] = True
            return loss

        self.check(function)

    def test_hooks_on_parameters(self) -> None:
        def halve(param: Tensor) -> None:
            assert param.grad is not None
            param.grad.mul_(0.5)

        def function(side: Side, x: Tensor) -> Tensor:
            if not side.kept:
                weight, bias = side.model.inner.parameters()
                side.kept["hooks"] = [
                    weight.register_post_accumulate_grad_hook(halve),
                    bias.register_hook(lambda grad: grad * 2),
                ]
            return train(side, x)

        self.check(function)

    @pytest.mark.usefixtures("one_process")
    def test_data_parallel_on_the_stream_of_the_runner(self) -> None:
        """It keeps a graph from where it was made, which only its user knows."""

        def function(side: Side, x: Tensor) -> Tensor:
            side.optimizer.zero_grad()
            loss = side.kept["parallel"](x).square().mean()
            loss.backward()
            side.optimizer.step()
            return loss

        ours, twin = of_first(), of_first()
        for side in (ours, twin):
            side.kept["parallel"] = DistributedDataParallel(side.model)
        elsewhere = runner_of(ours, function)
        elsewhere(batch(0))
        function(twin, batch(0))
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel keeps such a graph; wrap .* stream="):
            elsewhere(batch(1))
        runner = runner_of(ours, function, stream=object())
        for i in range(5):
            assert torch.equal(runner(batch(i)), function(twin, batch(i)).detach())
            assert_same_models(ours.model, twin.model, i)
        assert co.compile_report(ours.optimizer).replays == 4


class TestOutputs:
    @pytest.mark.parametrize("captured", [True, False])
    def test_what_cannot_be_copied_is_refused(self, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        @dataclass
        class Result:
            loss: Tensor

        if not captured:
            monkeypatch.undo()
        side = make()
        with pytest.warns(RuntimeWarning, match="uncaptured") if not captured else pytest.MonkeyPatch().context():
            runner = runner_of(side, lambda side, x: {"out": [Result(train(side, x))]})
        with pytest.raises(TypeError, match=r"must return tensors, numbers, strings or None, .* got Result"):
            runner(batch(0))


class TestGradients:
    @pytest.mark.parametrize("absent", [False, True])
    def test_their_alignment_may_change_in_every_step(self, device: str, absent: bool) -> None:
        """As that of a view of a bucket does, which is not always the gradient."""
        ours, twin = (make(max_grad_norm=0.5, device=device) for _ in range(2))
        runner = co.CUDAGraphRunner(ours.optimizer, warmup=1, recaptures=0)
        for i in range(20):
            for side in (ours, twin):
                give(side, i)
                weight = side.model.outer.weight
                if i % 2:
                    weight.grad = torch.cat([weight.new_zeros(1), weight.grad.flatten()])[1:].view_as(weight)
                elif absent:
                    weight.grad = None
            runner.step()
            twin.optimizer.step()
            assert_equal(ours, twin, i)
        assert co.compile_report(ours.optimizer).replays == 19


class TestRandomNumbers:
    def test_every_replay_draws_others(self, device: str) -> None:
        """The ones that the uncaptured step would have drawn."""

        def dropped(side: Side, x: Tensor) -> Tensor:
            side.optimizer.zero_grad()
            loss = F.dropout(side.model(x), 0.5).square().mean()
            loss.backward()
            side.optimizer.step()
            return loss.detach()

        ours, twin = (make(lr=0.0, groups=1, device=device) for _ in range(2))
        x = batch(0, 64, device)
        found = []
        for call in (runner_of(ours, dropped), functools.partial(dropped, twin)):
            torch.manual_seed(3)
            found.append(torch.stack([call(x) for _ in range(12)]).tolist())
        assert found[0] == found[1]
        assert len(set(found[0])) == 12
        assert co.compile_report(ours.optimizer).replays == 11
