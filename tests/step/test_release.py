"""Gradient release: the same training bit for bit, with few gradients at a time; what cannot be so is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from capture_scenarios import Side, make, make_tables
from catalog import LOWERINGS, registry
from round_trips import copied
from simulated_graph import install
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint

import compiled_optim as co
from compiled_optim import release
from compiled_optim.memory import torch_internals
from compiled_optim.optimizer import CompiledOptimizer, engine_of

RELEASING = [kind for kind in registry() if hasattr(kind, "_rule") and not kind._rule.has_totals()]


def layers(count: int = 4, size: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(count)))


def adamw(model: nn.Module, **kwargs: Any) -> co.AdamW:
    return co.AdamW(model.named_parameters(), lr=0.1, **kwargs)


def test_torchs_clipping_finds_no_gradients() -> None:
    model = layers()
    optimizer = adamw(model)
    co.prepare_for_gradient_release(model, optimizer)
    model(torch.ones(3, 8)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
    optimizer.step()


def released(cap: float | None = 0.0) -> tuple[nn.Sequential, co.AdamW]:
    model = layers()
    optimizer = adamw(model)
    co.prepare_for_gradient_release(model, optimizer, bucket_cap_mb=cap)
    return model, optimizer


def inputs(count: int = 6, size: int = 8) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(3, size, generator=generator) for _ in range(count))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours: list[Tensor] | nn.Module, theirs: list[Tensor] | nn.Module) -> None:
    pairs = [list(m.parameters()) if isinstance(m, nn.Module) else m for m in (ours, theirs)]
    for a, b in zip(*pairs, strict=True):
        assert torch.equal(a, b)


class TestSameTraining:
    """With release and without."""

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("kind", RELEASING, ids=lambda c: c.__name__)
    def test_of_every_optimizer(self, kind: type[CompiledOptimizer], lowering: str) -> None:
        """In updates of one parameter, of several, and of all together."""
        sparse = kind._gradients == "sparse"
        sides = [make_tables(lowering=lowering) if sparse else make(kind, lowering=lowering) for _ in range(4)]
        for side, cap in zip(sides[1:], (0.0, 200 / 2**20, None), strict=True):
            co.prepare_for_gradient_release(side.model, side.optimizer, bucket_cap_mb=cap)
        schedulers = [StepLR(side.optimizer, 2, 0.3) for side in sides]
        generator = torch.Generator().manual_seed(1)
        for i in range(6):
            x = torch.randint(50, (6,), generator=generator) if sparse else torch.randn(4, 5, generator=generator)
            for side, scheduler in zip(sides, schedulers, strict=True):
                options = {} if sparse else {"side": i % 3 == 1}
                side.model(x, **options).square().mean().backward()
                assert side is sides[0] or all(p.grad is None for p in side.model.parameters())
                side.optimizer.step()
                side.optimizer.zero_grad()
                scheduler.step()
            for side in sides[1:]:
                assert_same(side.tensors(), sides[0].tensors())
        assert [co.compile_report(side.optimizer).steps for side in sides] == [6] * 4

    def test_on_schedules_in_the_step(self) -> None:
        """Which are evaluated once per step, before any of its updates counts it."""
        plain, ours = layers(), layers()
        optimizers = [adamw(plain), adamw(ours)]
        co.prepare_for_gradient_release(ours, optimizers[1], bucket_cap_mb=0)
        for optimizer in optimizers:
            optimizer.schedule(lr=lambda step: 0.1 / step)
        for x in inputs():
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                train(model, optimizer, x)
            assert_same(ours, plain)
            assert float(optimizers[1].param_groups[0]["lr"]) == float(optimizers[0].param_groups[0]["lr"])

    def test_as_plain_torch_trains(self) -> None:
        ours, theirs = layers().double(), layers().double()
        optimizer, reference = adamw(ours), torch.optim.AdamW(theirs.parameters(), lr=0.1)
        co.prepare_for_gradient_release(ours, optimizer)
        for x in inputs():
            train(ours, optimizer, x.double())
            train(theirs, reference, x.double())
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)

    def test_resumed_as_uninterrupted(self) -> None:
        def begun() -> tuple[nn.Module, co.AdamW, OneCycleLR]:
            model, optimizer = released()
            return model, optimizer, OneCycleLR(optimizer, 0.1, total_steps=10)

        model, optimizer, scheduler = begun()
        for i, x in enumerate(inputs(8)):
            if i == 4:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
                model, optimizer, scheduler = begun()
                for part, state in zip((model, optimizer, scheduler), saved, strict=True):
                    part.load_state_dict(state)
            train(model, optimizer, x)
            scheduler.step()
        whole = layers()
        reference = adamw(whole)
        schedule = OneCycleLR(reference, 0.1, total_steps=10)
        for x in inputs(8):
            train(whole, reference, x)
            schedule.step()
        assert_same(model, whole)

    def test_of_tied_parameters(self) -> None:
        """Whose gradients are whole when all their uses have added to them."""
        models = [layers(), layers()]
        for model in models:
            model[2][0].weight = model[0][0].weight
        optimizers = [adamw(model) for model in models]
        co.prepare_for_gradient_release(models[0], optimizers[0], bucket_cap_mb=0)
        for x in inputs():
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, x)
        assert_same(*models)

    def test_of_parts_in_several_backwards(self) -> None:
        models = [layers(), layers()]
        optimizers = [adamw(model) for model in models]
        co.prepare_for_gradient_release(models[0], optimizers[0])
        for x in inputs():
            for model, optimizer in zip(models, optimizers, strict=True):
                for part in (model[:2], model[2:]):
                    part(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(*models)

    def test_of_gradients_of_another_dtype(self) -> None:
        models = [layers(), layers()]
        for model in models:
            for param in model.parameters():
                param.data = param.data.bfloat16()
                param.grad_dtype = torch.float32
        optimizers = [adamw(model) for model in models]
        co.prepare_for_gradient_release(models[0], optimizers[0], bucket_cap_mb=0)
        steps = set()
        for x in inputs():
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, x.bfloat16())
            steps.add(engine_of(optimizers[0]).step)
        assert_same(*models)
        assert len(steps) == 1  # tables for the expected dtypes were made once

    def test_of_a_closure(self) -> None:
        models = [layers(), layers()]
        optimizers = [adamw(model) for model in models]
        co.prepare_for_gradient_release(models[0], optimizers[0])
        for x in inputs():
            for model, optimizer in zip(models, optimizers, strict=True):

                def closure(model: nn.Module = model, optimizer: co.AdamW = optimizer, x: Tensor = x) -> Tensor:
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
        assert_same(*models)

    @pytest.mark.parametrize(
        "options", [{"weights": "kahan"}, {"weights": "split8", "state_dtype": "int8"}, {"weights": "stochastic"}], ids=str
    )
    def test_in_fewer_bytes(self, options: dict[str, Any]) -> None:
        models = [layers(2, 64).bfloat16(), layers(2, 64).bfloat16()]
        optimizers = [adamw(model, **options) for model in models]
        co.prepare_for_gradient_release(models[0], optimizers[0], bucket_cap_mb=0)
        for x in inputs(size=64):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, x.bfloat16())
        assert_same(*models)

    @pytest.mark.usefixtures("one_process")
    def test_of_a_sharded_model(self) -> None:
        """FSDP2 calls the hooks itself when it has reduced gradients."""
        from torch.distributed.fsdp import fully_shard

        models = [layers(), layers()]
        optimizers = []
        for model in models:
            for layer in model:
                fully_shard(layer)
            optimizers.append(adamw(fully_shard(model)))
        co.prepare_for_gradient_release(models[0], optimizers[0], bucket_cap_mb=0)
        for x in inputs():
            for model, optimizer in zip(models, optimizers, strict=True):
                model(x).square().mean().backward()
                assert model is models[1] or all(p.grad is None for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local())


class TestMemory:
    @pytest.mark.parametrize("cap", [0.0, 600 / 2**20])
    def test_few_gradients_are_there_at_a_time(self, cap: float) -> None:
        model = layers(12)
        optimizer = adamw(model)
        most = 0

        def count(param: Tensor) -> None:
            nonlocal most
            most = max(most, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(count)
        whole = sum(p.nbytes for p in model.parameters())
        for x in inputs(2):
            train(model, optimizer, x)
        assert most == whole
        most = 0
        co.prepare_for_gradient_release(model, optimizer, True, bucket_cap_mb=cap)
        for x in inputs(2):
            train(model, optimizer, x)
        assert 8 * 8 * 4 <= most <= cap * 2**20 + 8 * 8 * 4 < whole / 4

    def test_freed_gradients_are_gone(self) -> None:
        model, optimizer = released()
        seen: list[weakref.ref[Any]] = []
        for param in model.parameters():
            param.register_hook(lambda grad: seen.append(weakref.ref(grad.untyped_storage())))
        alive = []
        model[0][0].weight.register_hook(lambda grad: alive.append(sum(ref() is not None for ref in seen[:4])))
        train(model, optimizer, next(inputs()))
        assert len(seen) == 8
        assert alive == [0]

    def test_updates_make_no_plans_and_compile_nothing(self) -> None:
        model, optimizer = released()
        train(model, optimizer, next(inputs()))
        step = engine_of(optimizer).step
        with co.no_recompiles():
            for x in inputs():
                train(model, optimizer, x)
        assert engine_of(optimizer).step is step

    def test_the_optimizer_is_freed_at_once(self) -> None:
        model, optimizer = released()
        train(model, optimizer, next(inputs()))
        gone = weakref.ref(optimizer)
        gc.disable()
        try:
            del optimizer
            assert gone() is None
        finally:
            gc.enable()
        before = copies(model)
        model(next(inputs())).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert_same(model, before)
        co.prepare_for_gradient_release(model, adamw(model))

    def test_the_model_is_freed(self) -> None:
        model, optimizer = released()
        train(model, optimizer, next(inputs()))
        gone = weakref.ref(model[0][0].weight)
        del model, optimizer
        gc.collect()
        assert gone() is None


class TestSwitching:
    def test_off_and_on(self) -> None:
        plain, ours = layers(), layers()
        optimizers = [adamw(plain), adamw(ours)]
        for i, x in enumerate(inputs(8)):
            if i in (2, 6):
                co.prepare_for_gradient_release(ours, optimizers[1])
                co.prepare_for_gradient_release(ours, optimizers[1], bucket_cap_mb=0)  # another cap
            elif i == 4:
                co.remove_gradient_release(ours)
                co.remove_gradient_release(ours)
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                model(x).square().mean().backward()
                assert (model[0][0].weight.grad is None) == (model is ours and i in (2, 3, 6, 7))
                optimizer.step()
                optimizer.zero_grad()
        assert_same(ours, plain)

    def test_of_one_model_of_two(self) -> None:
        first, second = layers(1), layers(1)
        optimizer = co.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for model in (first, second):
            co.prepare_for_gradient_release(model, optimizer)
        co.remove_gradient_release(first)
        first(next(inputs())).sum().backward()
        second(next(inputs())).sum().backward()
        assert first[0][0].weight.grad is not None
        assert second[0][0].weight.grad is None
        optimizer.step()  # of what no backward took
        assert_same(first, second)
        co.remove_gradient_release(second)
        assert engine_of(optimizer).release is None

    def test_of_several_optimizers_for_one_model(self) -> None:
        models = [layers(), layers()]
        pairs = [[co.SGD(m[:2].parameters(), lr=0.1), co.Lion(m[2:].parameters(), lr=0.01)] for m in models]
        for optimizer in pairs[0]:
            co.prepare_for_gradient_release(models[0], optimizer)
        for x in inputs():
            for model, pair in zip(models, pairs, strict=True):
                model(x).square().mean().backward()
                for optimizer in pair:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_same(*models)
        with pytest.raises(ValueError, match="is released for another optimizer"):
            co.prepare_for_gradient_release(models[0], adamw(models[0]), True)

    def test_frozen_parameters_step_as_without_it(self) -> None:
        models = [layers(), layers()]
        for model in models:
            model[0].requires_grad_(False)
        optimizers = [adamw(model) for model in models]
        co.prepare_for_gradient_release(models[0], optimizers[0])
        for i, x in enumerate(inputs()):
            for model, optimizer in zip(models, optimizers, strict=True):
                if i == 2:
                    model[0].requires_grad_(True)
                    model[3].requires_grad_(False)
                if i == 4 and model is models[0]:
                    co.prepare_for_gradient_release(model, optimizer)
                model(x).square().mean().backward()
                assert model is models[1] or (model[0][0].weight.grad is not None) == (i in (2, 3))
                optimizer.step()
                optimizer.zero_grad()
        assert_same(*models)

    @copied
    def test_copies_do_not_release(self, copied: Callable[[Any], Any]) -> None:
        model, optimizer = released()
        train(model, optimizer, next(inputs()))
        other_model, other = copied((model, optimizer))
        x = next(inputs())
        other_model(x).square().mean().backward()
        assert other_model[0][0].weight.grad is not None
        other.step()
        train(model, optimizer, x)
        assert_same(model, other_model)
        other.max_grad_norm = 1.0

    def test_a_group_that_comes_and_goes(self) -> None:
        model, optimizer = released()
        added = nn.Linear(8, 8)
        for i, x in enumerate(inputs()):
            if i == 1:
                optimizer.add_param_group({"params": list(added.named_parameters())})
            elif i == 3:
                del optimizer.param_groups[0]["params"][:2], optimizer.param_groups[0]["param_names"][:2]
            before = copies(model) + copies(added)
            added(model(x)).square().mean().backward()
            optimizer.step()
            moved = [not torch.equal(a, b) for a, b in zip(before, [*model.parameters(), *added.parameters()], strict=True)]
            assert moved == [i < 3] * 2 + [True] * 6 + [i >= 1] * 2
            model.zero_grad()
            added.zero_grad()

    def test_schedulers_find_the_step(self, recwarn: pytest.WarningsRecorder) -> None:
        model, optimizer = released()
        scheduler = StepLR(optimizer, 1)
        train(model, optimizer, next(inputs()))
        scheduler.step()
        assert not recwarn.list
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)


class TestFailures:
    def test_a_second_backward_before_the_step(self) -> None:
        model, optimizer = released(None)
        x = next(inputs())
        model(x).sum().backward()
        before = copies(model)
        with pytest.raises(
            RuntimeError, match=r"'3\.0\.\w+' was updated in backward and has another gradient .* accumulate"
        ):
            model(x).sum().backward()
        assert_same(model, before)
        optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, x)

    def test_parameters_of_reentrant_checkpoints(self) -> None:
        """Which call backward inside of backward, so that gradients of a shared parameter come in parts."""
        model, optimizer = released()
        x = next(inputs()).requires_grad_()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True)
        train(lambda x: x, optimizer, x)
        x = next(inputs()).requires_grad_()
        for _ in range(2):
            x = checkpoint(model[0], x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="has another gradient before"):
            x.sum().backward()

    def test_a_backward_that_fails(self) -> None:
        """Updates nothing after the failure; the next one finds everything in order."""

        def fail(grad: Tensor) -> None:
            raise OverflowError

        model, optimizer = released(None)
        before = copies(model)
        handle = model[1][0].weight.register_hook(fail)
        with pytest.raises(OverflowError):
            model(next(inputs())).sum().backward()
        handle.remove()
        assert_same(model, before)
        optimizer.zero_grad()
        twin = layers()
        reference = adamw(twin)
        for x in inputs():
            train(model, optimizer, x)
            train(twin, reference, x)
        assert_same(model, twin)

    def test_an_update_that_fails(self) -> None:
        """Leaves its gradients, so that a step can do it again."""
        model, optimizer = released(None)
        optimizer.param_groups[0]["params"].append("no parameter")
        x = next(inputs())
        with pytest.raises((TypeError, AttributeError)):
            model(x).square().mean().backward()
        assert model[0][0].weight.grad is not None
        optimizer.param_groups[0]["params"].pop()
        optimizer.step()
        assert model[0][0].weight.grad is None
        twin = layers()
        train(twin, adamw(twin), x)
        assert_same(model, twin)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    @pytest.mark.parametrize("cap", [None, 0.0])
    def test_zero_grad_after_an_update_that_failed(
        self, error: type[BaseException], cap: float | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = released(cap)

        def fail(*_: Any, **__: Any) -> None:
            raise error

        before = copies(model)
        with monkeypatch.context() as patch:
            patch.setattr(engine_of(optimizer), "update", fail)
            with pytest.raises(error):
                model(next(inputs())).sum().backward()
        assert_same(model, before)
        twin = layers()
        reference = adamw(twin)
        optimizer.zero_grad()
        for x in inputs():
            train(model, optimizer, x)
            train(twin, reference, x)
        assert_same(model, twin)

    def test_no_zero_grad_after_a_backward_that_failed(self) -> None:
        model, optimizer = released()

        def fail(grad: Tensor) -> None:
            raise OverflowError

        handle = model[1][0].weight.register_hook(fail)
        with pytest.raises(OverflowError):
            model(next(inputs())).sum().backward()
        handle.remove()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"after a backward that failed, call opt\.zero_grad\(\)"):
            model(next(inputs())).sum().backward()
        with pytest.raises(RuntimeError, match=r"a backward failed and opt\.zero_grad\(\) was not called"):
            optimizer.step()

    @pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 1.0), ("skip_nonfinite", True)])
    def test_what_needs_all_gradients(self, name: str, value: object) -> None:
        model = layers()
        with pytest.raises(ValueError, match=f"{name} does not go with gradient release: "):
            co.prepare_for_gradient_release(model, adamw(model, **{name: value}))
        optimizer = adamw(model)
        co.prepare_for_gradient_release(model, optimizer)
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match=f"{name} does not go with gradient release: "):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) == before
        setattr(optimizer, name, before)
        train(model, optimizer, next(inputs()))
        co.remove_gradient_release(model)
        setattr(optimizer, name, value)

    def test_a_gradient_scaler(self) -> None:
        model, optimizer = released()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(next(inputs())).sum()).backward()
        with pytest.raises(ValueError, match="a gradient scaler"):
            scaler.step(optimizer)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: {"model": m.state_dict()}, "model must be a torch"),
            (lambda m: {"optimizer": torch.optim.SGD(m.parameters())}, "optimizer must be one of compiled_optim"),
            (lambda m: {"optimizer": co.LBFGS(m.parameters())}, "LBFGS computes a step from all gradients at once"),
            (lambda m: {"optimizer": adamw(m, differentiable=True)}, "differentiable=True"),
            (lambda m: {"optimizer": adamw(layers())}, "has none of the model's parameters"),
            (lambda m: {"bucket_cap_mb": -1.0}, "bucket_cap_mb must be >= 0"),
            (lambda m: {"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be >= 0, got nan"),
            (lambda m: {"bucket_cap_mb": "4"}, "bucket_cap_mb must be a number or None, got '4'"),
        ],
    )
    def test_arguments(self, change: Callable[[nn.Module], dict[str, Any]], message: str) -> None:
        model = layers()
        with pytest.raises((TypeError, ValueError), match=message):
            co.prepare_for_gradient_release(**{"model": model, "optimizer": adamw(model), **change(model)})
        assert not model[0][0].weight._post_accumulate_grad_hooks
        with pytest.raises(TypeError, match="must be a torch"):
            co.remove_gradient_release(list(model.parameters()))

    def test_hooks_of_somebody_else(self) -> None:
        model = layers()
        optimizer, seen = adamw(model), []
        model[1][0].bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad is not None))
        with pytest.raises(ValueError, match=r"'1\.0\.bias' has a post-accumulate-grad hook.*ignore_existing_hooks=True"):
            co.prepare_for_gradient_release(model, optimizer)
        assert not model[0][0].weight._post_accumulate_grad_hooks
        co.prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)
        train(model, optimizer, next(inputs()))
        assert seen == [True]
        co.remove_gradient_release(model)
        assert len(model[1][0].bias._post_accumulate_grad_hooks) == 1

    @pytest.mark.usefixtures("one_process")
    def test_data_parallel(self) -> None:
        model = layers()
        with pytest.raises(ValueError, match=r"DistributedDataParallel \('' is one\).*fully_shard"):
            co.prepare_for_gradient_release(DistributedDataParallel(model), adamw(model))
        co.prepare_for_gradient_release(model, optimizer := adamw(model))
        parallel = DistributedDataParallel(model)
        parallel(next(inputs())).sum().backward()
        with pytest.raises(RuntimeError, match=r"such as DistributedDataParallel.*; load model and optimizer again"):
            optimizer.step()


class TestThreads:
    def test_backwards_on_several_threads(self) -> None:
        """Which update parts of one optimizer, one at a time."""
        models = [layers(8), layers(8)]
        optimizers = [adamw(model) for model in models]
        co.prepare_for_gradient_release(models[0], optimizers[0], bucket_cap_mb=0)
        failures: list[BaseException] = []

        def part(layer: nn.Module, x: Tensor) -> None:
            try:
                layer(x).square().mean().backward()
            except BaseException as error:
                failures.append(error)

        for x in inputs(12):
            threads = [threading.Thread(target=part, args=(layer, x)) for layer in models[0]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for layer in models[1]:
                part(layer, x)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert not failures
        assert_same(*models)

    def test_an_update_waits_for_the_streams_of_its_gradients_and_of_the_last_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And memory that another stream gave is not used again before it; streams are recorded here."""
        happened: list[tuple[str, str, str]] = []
        current = ["caller"]

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and other.name == self.name

            __hash__ = None  # type: ignore[assignment]

            def wait_stream(self, other: Stream) -> None:
                happened.append((self.name, "waits for", other.name))

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            current.append(stream.name)
            yield
            current.pop()

        monkeypatch.setattr(release, "_current_stream", lambda device: Stream(current[-1]))
        monkeypatch.setattr(torch.cuda, "stream", on)

        def after_backward(function: Callable[[], object]) -> None:
            torch_internals.after_backward(lambda: (current.__setitem__(-1, "caller"), function()))

        monkeypatch.setattr(release, "after_backward", after_backward)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: happened.append(("gradient", "used by", s.name)))
        model = layers(4)
        optimizer = adamw(model)
        co.prepare_for_gradient_release(model, optimizer, bucket_cap_mb=(8 * 8 + 8) * 4 / 2**20)
        for i, layer in enumerate(model):

            def switch(grad: Tensor, name: str = f"layer {i}") -> None:
                current[-1] = name

            layer[0].weight.register_hook(switch)
            layer[0].bias.register_hook(switch)
        model(next(inputs())).square().mean().backward()
        # Every third gradient exceeds the cap; those of the first layer are left for the end.
        assert set(happened[:4]) == {("layer 2", "waits for", "layer 3"), ("gradient", "used by", "layer 2")}
        assert ("layer 1", "waits for", "layer 2") in happened
        at_end = [event for event in happened if "caller" in (event[0], event[2])]
        others = {("caller", "waits for", "layer 0"), ("caller", "waits for", "layer 1")}
        assert set(at_end) == {("gradient", "used by", "caller"), *others}
        optimizer.step()
        happened.clear()
        model(next(inputs())).square().mean().backward()
        waited_for = {other for _, what, other in happened if what == "waits for"}
        assert waited_for == {"layer 3", "layer 2", "layer 1", "layer 0"}  # a graph cannot wait for what is outside


class TestCompiled:
    def test_a_compiled_model(self) -> None:
        plain, ours = layers(), layers()
        optimizers = [adamw(plain), adamw(ours)]
        co.prepare_for_gradient_release(ours, optimizers[1])
        compiled = [torch.compile(m, backend="aot_eager") for m in (plain, ours)]
        for x in inputs(3):
            for model, optimizer in zip(compiled, optimizers, strict=True):
                train(model, optimizer, x)
        assert_same(ours, plain)

    @pytest.mark.parametrize("first", [True, False], ids=["released", "compiled"])
    @torch._dynamo.config.patch(trace_autograd_ops=True)
    def test_a_compiled_step_is_refused_or_left_out(self, first: bool) -> None:
        """Compiled backwards run no hooks."""
        torch._dynamo.reset()  # which leaves out functions that it once ran uncompiled
        model = layers()
        optimizer = adamw(model)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        whole = torch.compile(step, backend="eager", fullgraph=True)
        x, *more = inputs()
        twin = layers()
        reference = adamw(twin)
        if not first:
            whole(x)
            train(twin, reference, x)
        co.prepare_for_gradient_release(model, optimizer)
        with pytest.raises(Exception, match="compiled code cannot hold a step with gradient release"):
            whole(x)
        parts = torch.compile(step, backend="eager")
        for x in more:
            parts(x)
            train(twin, reference, x)
        assert_same(model, twin)


class TestCaptured:
    @pytest.fixture(autouse=True)
    def simulated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch)

    @staticmethod
    def function(side: Side, x: Tensor) -> Tensor:
        loss = side.model(x).square().mean()
        loss.backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss

    @pytest.mark.full
    @pytest.mark.parametrize("kind", [co.AdamW, co.StableAdamW, co.Muon], ids=lambda c: c.__name__)
    @pytest.mark.parametrize("cap", [0.0, None])
    def test_a_whole_step(self, kind: type[CompiledOptimizer], cap: float | None) -> None:
        ours, twin = make(kind), make(kind)
        for side in (ours, twin):
            side.optimizer.schedule(group=0, lr=lambda step: 0.1 / step)
        co.prepare_for_gradient_release(ours.model, ours.optimizer, bucket_cap_mb=cap)
        runner = co.CUDAGraphRunner(
            lambda x: self.function(ours, x), optimizers=ours.optimizer, modules=ours.model, warmup=1
        )
        for i, x in enumerate(inputs(8, 5)):
            for side in (ours, twin):
                side.optimizer.param_groups[1]["lr"] = 0.1 / (i + 1)
            assert torch.equal(runner(x), self.function(twin, x).detach())
            for a, b in zip(ours.tensors(), twin.tensors(), strict=True):
                assert torch.equal(a, b)
        reports = [co.compile_report(side.optimizer) for side in (ours, twin)]
        assert reports[0].replays == 7
        assert reports[0].recaptures == 0
        assert reports[0].steps == reports[1].steps == 8

    def test_a_step_alone_is_refused(self) -> None:
        side = make()
        runner = co.CUDAGraphRunner(side.optimizer)
        co.prepare_for_gradient_release(side.model, side.optimizer)
        side.model(next(inputs(1, 5))).sum().backward()
        with pytest.raises(RuntimeError, match="give the runner the whole training step"):
            runner.step()
