"""timm: its factory of optimizers, groups, schedulers and Lookahead, with torch.optim's results."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_training import OPTIONS, PAIR_IDS, PAIRS, assert_trained_alike, batches, loss_of, needs, network, weights

pytestmark = [pytest.mark.full, needs("timm")]


@pytest.fixture(scope="module")
def timm() -> Iterator[Any]:
    """The package without its models, which need a torchvision that fits torch."""
    before = set(sys.modules)
    package, models = importlib.util.module_from_spec(importlib.util.find_spec("timm")), types.ModuleType("timm.models")
    models.group_parameters = None  # for models that say how their parameters are grouped
    sys.modules |= {"timm": package, "timm.models": models}
    importlib.import_module("timm.optim")
    importlib.import_module("timm.scheduler")
    yield package
    for name in {n for n in sys.modules if n.partition(".")[0] == "timm"} - before:
        del sys.modules[name]


def _optimizer(timm: Any, optim: Any, model: torch.nn.Module, wrapper: str = "", **options: Any) -> Any:
    """Made by timm from a model, with an optimizer class that it was told of."""
    registry = timm.optim._optim_factory.default_registry
    name = optim.__name__.replace("_", "").replace(".", "") + "adamw"
    if name not in registry.list_optimizers():
        registry.register(timm.optim.OptimInfo(name, optim.AdamW, has_betas=True))
    return timm.optim.create_optimizer_v2(model, wrapper + name, **OPTIONS, **options)


def _train(model: torch.nn.Module, optimizer: Any, scheduler: Any = None, epochs: range = range(4)) -> list[Any]:
    seen = []
    for epoch in epochs:
        for index, x in enumerate(batches()):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step_update(epoch * 6 + index + 1, metric=loss.item())
            seen.append((loss.item(), [float(g["lr"]) for g in optimizer.param_groups]))
        if scheduler is not None:
            scheduler.step(epoch + 1, metric=1.0)
    return seen


SCHEDULES = ["tanh", "step", "multistep", "poly", "wsd"]
CASES = [
    *(("cosine", True, groups) for groups in ({}, {"layer_decay": 0.6}, {"filter_bias_and_bn": False})),
    *((schedule, per_update, {}) for schedule in SCHEDULES for per_update in (False, True)),
    ("plateau", False, {"layer_decay": 0.6}),
]


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")
@pytest.mark.parametrize(("schedule", "per_update", "groups"), CASES)
def test_groups_and_schedules(timm: Any, schedule: str, per_update: bool, groups: dict[str, Any]) -> None:
    updates = {"step_on_epochs": not per_update, "updates_per_epoch": 6, "noise": [0.3, 0.9], "noise_seed": 3}
    warmup = {"warmup_epochs": 1, "warmup_lr": 1e-4}
    decay = {"decay_epochs": 1, "decay_milestones": [1, 2], "decay_rate": 0.5, "patience_epochs": 0}

    def train(optim: Any) -> Any:
        model = network()
        optimizer = _optimizer(timm, optim, model, **groups)
        scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, schedule, 4, **warmup, **decay, **updates)
        seen = _train(model, optimizer, scheduler)
        assert len({rates[0] for _, rates in seen}) > 1
        return seen, weights(model)

    assert_trained_alike(train)


@pytest.mark.parametrize("steps", [2, 5])
def test_lookahead(timm: Any, steps: int) -> None:
    def train(optim: Any) -> Any:
        model = network()
        optimizer = _optimizer(timm, optim, model, "lookahead_")
        for group in optimizer.param_groups:
            group["lookahead_k"] = steps
        return _train(model, optimizer), weights(model)

    assert_trained_alike(train)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=PAIR_IDS)
def test_lookahead_resumes(timm: Any, first: Any, second: Any) -> None:
    """Its slow weights lie in the state of the optimizer that it wraps."""
    begun, whole, resumed = network(), network(), network()
    saved = _optimizer(timm, first, begun, "lookahead_")
    _train(begun, saved, epochs=range(2))
    expected = _optimizer(timm, second, whole, "lookahead_")
    _train(whole, expected, epochs=range(2))
    optimizer = _optimizer(timm, second, resumed, "lookahead_")
    resumed.load_state_dict(begun.state_dict())
    optimizer.load_state_dict(saved.state_dict())
    alike = {"rtol": 1e-10, "atol": 1e-12}
    results = [_train(resumed, optimizer, epochs=range(2, 4)), _train(whole, expected, epochs=range(2, 4))]
    torch.testing.assert_close(*results, **alike)
    torch.testing.assert_close(weights(resumed), weights(whole), **alike)
