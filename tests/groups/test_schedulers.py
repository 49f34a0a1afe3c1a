"""torch's schedulers: bit-equal sequences to torch.optim with Python floats, without a recompilation."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import LOWERINGS
from round_trips import through_a_file
from torch.optim import Optimizer, lr_scheduler
from torch_schedulers import GROUPS, OPTIMIZERS, SCHEDULERS, STEPS, advance, live, make, moved, step, typed

import compiled_optim as co

pytestmark = pytest.mark.usefixtures("one_thread")

schedulers = pytest.mark.parametrize("scheduler", SCHEDULERS)
groupings = pytest.mark.parametrize("groups", GROUPS)
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def train(optimizer: Optimizer, scheduler: Any, steps: range) -> list[Any]:
    history = []
    with contextlib.ExitStack() as guard:
        for t in steps:
            step(optimizer, t)
            history.append(moved(optimizer))
            advance(scheduler, t)
            if t == steps[0]:
                guard.enter_context(co.no_recompiles())
    return [*history, moved(optimizer)]


@functools.cache
def expected(name: str, scheduler: str, groups: str) -> list[Any]:
    """The sequences of torch.optim with Python floats, and their types, whose scheduler is made at the start."""
    _, cls, kwargs = OPTIMIZERS[name]
    reference = make(cls, groups, kwargs)
    history = train(reference, SCHEDULERS[scheduler](reference), range(STEPS))
    assert all(type(group["lr"]) is float for group in reference.param_groups)
    assert history[0] != history[-1] or history[0] != history[1], "nothing moved"
    return history


REFUSED = r"(lr|betas\[0\]|momentum) of param_groups\[0\] must be"
PAST_THE_END: dict[str, Callable[[Optimizer, int], Any]] = {
    "linear": lambda o, n: lr_scheduler.OneCycleLR(o, 0.07, total_steps=n, anneal_strategy="linear", cycle_momentum=False),
    "three phases": lambda o, n: lr_scheduler.OneCycleLR(
        o, 0.07, total_steps=n, anneal_strategy="linear", three_phase=True, cycle_momentum=False
    ),
    "momentum": lambda o, n: lr_scheduler.OneCycleLR(
        o, 0.07, total_steps=n, anneal_strategy="linear", base_momentum=0.2, max_momentum=0.999
    ),
    "lambda": lambda o, n: lr_scheduler.LambdaLR(o, lambda t: 1 - t / (n - 1)),
}


@optimizers
@pytest.mark.parametrize("scheduler", PAST_THE_END)
def test_what_a_scheduler_writes_after_the_last_step_ends_no_training(scheduler: str, name: str) -> None:
    """It may be out of range, as with torch.optim; no step is taken with it, and checkpoints hold it.

    A step warns of a rate, unless that comes from a checkpoint.
    """
    cls, reference, kwargs = OPTIMIZERS[name]
    ours, theirs = make(cls, "one-group", kwargs), make(reference, "one-group", kwargs)
    histories = [train(o, PAST_THE_END[scheduler](o, 10), range(10)) for o in (ours, theirs)]
    assert histories[0] == histories[1]
    resumed = make(cls, "one-group", kwargs)
    resumed.load_state_dict(ours.state_dict())
    for optimizer in (ours, resumed):
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        is_rate = optimizer is ours and (scheduler, name) != ("momentum", "AdamW")
        verdict = pytest.warns(UserWarning, match="take 0") if is_rate else pytest.raises(ValueError, match=REFUSED)
        with verdict:
            step(optimizer, 10)
        assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
        optimizer.param_groups[0].update(lr=0.1, **({"betas": (0.9, 0.99)} if "betas" in kwargs else {"momentum": 0.5}))
        with co.no_recompiles():
            step(optimizer, 10)


def test_every_scheduler_of_torch_is_tested() -> None:
    public = set(lr_scheduler.__all__) - {"LRScheduler"}
    assert public == {key.split("-")[0] for key in SCHEDULERS}


@optimizers
@pytest.mark.parametrize(
    ("made", "groups"), [("before", "one-group"), ("after", "shared-lr"), ("after", "own-lr"), ("before", "24-groups")]
)
@schedulers
def test_sequences_are_bit_equal_to_torch(scheduler: str, made: str, groups: str, name: str) -> None:
    cls, _, kwargs = OPTIMIZERS[name]
    optimizer = make(cls, groups, kwargs)
    if made == "after":
        step(optimizer, 0)
    history = train(optimizer, SCHEDULERS[scheduler](optimizer), range(STEPS))
    assert history == expected(name, scheduler, groups)
    assert live(optimizer) == history[-1]
    assert co.compile_report(optimizer).recompiles == 0


@schedulers
def test_what_schedulers_keep_is_what_they_keep_with_torch(scheduler: str) -> None:
    """In the groups (``initial_lr``, ``max_lr``, ``base_momentum``, ...), in ``get_last_lr()`` and in their own state."""
    kept = []
    for cls in OPTIMIZERS["AdamW"][:2]:
        optimizer = make(cls, "own-lr", OPTIMIZERS["AdamW"][2])
        made = SCHEDULERS[scheduler](optimizer)
        train(optimizer, made, range(5))
        saved = made.state_dict()
        for state in (saved, *saved.get("_schedulers", ())):
            for key in ("lr_lambdas", "_scale_fn_ref", "_scale_fn_custom"):
                state.pop(key, None)
        groups = [{k: typed(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        kept.append((groups, typed(made.get_last_lr()), json.dumps(saved, sort_keys=True)))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("lowering", LOWERINGS)
@optimizers
@pytest.mark.parametrize("scheduler", ["CyclicLR-momentum", "OneCycleLR", "SequentialLR", "ChainedScheduler"])
def test_the_step_uses_what_the_scheduler_wrote(scheduler: str, name: str, lowering: str) -> None:
    cls, reference_cls, kwargs = OPTIMIZERS[name]
    ours, theirs = make(cls, "own-lr", kwargs | {"lowering": lowering}), make(reference_cls, "own-lr", kwargs)
    for group in theirs.param_groups:
        for param in group["params"]:
            param.data = param.data.double()
    for optimizer in (ours, theirs):
        train(optimizer, SCHEDULERS[scheduler](optimizer), range(STEPS))
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for param, twin in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(param.detach().double(), twin.detach(), rtol=1e-6, atol=1e-6)
    assert co.compile_report(ours).recompiles == 0


@optimizers
@groupings
@schedulers
def test_save_and_resume_goes_on_bit_equal(scheduler: str, groups: str, name: str) -> None:
    cls, _, kwargs = OPTIMIZERS[name]
    first = make(cls, groups, kwargs)
    first_scheduler = SCHEDULERS[scheduler](first)
    half = STEPS // 2
    history = train(first, first_scheduler, range(half))
    saved = through_a_file({"optimizer": first.state_dict(), "scheduler": first_scheduler.state_dict()})
    second = make(cls, groups, kwargs)
    second_scheduler = SCHEDULERS[scheduler](second)
    second.load_state_dict(saved["optimizer"])
    second_scheduler.load_state_dict(saved["scheduler"])
    assert moved(second) == live(second) == history[-1]
    history[-1:] = train(second, second_scheduler, range(half, STEPS))
    assert history == expected(name, scheduler, groups)


@optimizers
@schedulers
def test_resume_from_a_torch_checkpoint_goes_on_bit_equal(scheduler: str, name: str) -> None:
    cls, reference_cls, kwargs = OPTIMIZERS[name]
    first = make(reference_cls, "own-lr", kwargs)
    first_scheduler = SCHEDULERS[scheduler](first)
    half = STEPS // 2
    train(first, first_scheduler, range(half))
    second = make(cls, "own-lr", kwargs)
    second_scheduler = SCHEDULERS[scheduler](second)
    second.load_state_dict(first.state_dict())
    second_scheduler.load_state_dict(first_scheduler.state_dict())
    history = train(second, second_scheduler, range(half, STEPS))
    assert history == expected(name, scheduler, "own-lr")[half:]


@pytest.mark.parametrize("form", ["StepLR", "ExponentialLR", "CosineAnnealingLR", "PolynomialLR", "LinearLR"])
def test_stepping_to_an_epoch_is_bit_equal(form: str) -> None:
    histories = []
    for cls in OPTIMIZERS["AdamW"][:2]:
        optimizer = make(cls, "own-lr", OPTIMIZERS["AdamW"][2])
        made = SCHEDULERS[form](optimizer)
        history = []
        for epoch in (3, 1, 10, 4):
            step(optimizer, epoch)
            with pytest.warns(UserWarning, match="epoch parameter"):
                made.step(epoch)
            history.append(moved(optimizer))
        histories.append(history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize("cls", [co.AdamW, torch.optim.AdamW], ids=["ours", "torch"])
def test_scheduler_before_optimizer_warns(cls: type[Optimizer]) -> None:
    optimizer = make(cls, "one-group", {})
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


@schedulers
def test_the_usual_order_does_not_warn(scheduler: str) -> None:
    optimizer = make(co.AdamW, "one-group", {})
    made = SCHEDULERS[scheduler](optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(3):
            step(optimizer, t)
            advance(made, t)
    assert not caught


def test_a_scheduler_made_after_the_first_step_does_not_warn() -> None:
    optimizer = make(co.AdamW, "one-group", {"lr": 0.1})
    step(optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        scheduler.step()
    assert moved(optimizer)[0][0] == typed(0.05)


def test_a_scheduler_calls_nothing_but_reads_and_writes_of_entries() -> None:
    """The number reaches the device's memory in the write itself."""
    optimizer = co.AdamW([{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(5)])
    scheduler, called = lr_scheduler.CosineAnnealingLR(optimizer, 10), Counter[str]()
    for _ in range(2):  # the first writes find that memory
        optimizer.step()
        scheduler.step()

    def see(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and os.path.join("compiled_optim", "groups") in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1

    sys.setprofile(see)
    try:
        scheduler.step()
    finally:
        sys.setprofile(None)
    assert called.keys() == {"__getitem__", "__setitem__"}
    assert called["__setitem__"] == 5


def test_step_stays_a_bound_method() -> None:
    optimizer = make(co.AdamW, "one-group", {})
    lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert optimizer.step.__func__ is co.AdamW.step


class RexLR(lr_scheduler.LRScheduler):
    """A scheduler that keeps ``initial_lr`` itself and returns products with it, as axolotl's does."""

    def __init__(self, optimizer: Optimizer, total: int) -> None:
        self.total = total
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        z = self.last_epoch / self.total
        return [group["initial_lr"] * ((1 - z) / (1 - 0.9 * z)) for group in self.optimizer.param_groups]


class Assigning:
    """A scheduler outside torch's classes that assigns ``initial_lr`` times a factor."""

    def __init__(self, optimizer: Optimizer, total: int) -> None:
        self.optimizer, self.total, self.t = optimizer, total, 0
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self) -> None:
        self.t += 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - self.t / self.total)


@optimizers
@groupings
@pytest.mark.parametrize("cls", [RexLR, Assigning])
def test_schedulers_of_others(cls: Callable[[Optimizer, int], Any], groups: str, name: str) -> None:
    ours, theirs, kwargs = OPTIMIZERS[name]
    histories = []
    for optimizer in (make(ours, groups, kwargs), make(theirs, groups, kwargs)):
        histories.append(train(optimizer, cls(optimizer, STEPS + 5), range(STEPS)))
        initial = [typed(group["initial_lr"]) for group in optimizer.param_groups]
        assert initial == [group[0] for group in histories[-1][0]], "initial_lr moved"
    assert histories[0] == histories[1]
