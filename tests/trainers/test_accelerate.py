"""Accelerate: prepared optimizers train, accumulate, clip, skip, save and load as those of torch.optim."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import OPTIONS, PAIR_IDS, PAIRS, assert_trained_alike, batches, loss_of, needs, network, weights
from torch.optim import lr_scheduler

pytestmark = [pytest.mark.full, needs("accelerate")]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Accelerators share their settings until they are told to forget them."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _prepared(optim: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    model = network(dtype)
    optimizer = optim.AdamW(model.named_parameters(), **OPTIONS)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30)
    loader = torch.utils.data.DataLoader(batches(dtype=dtype), batch_size=None)
    return accelerator, *accelerator.prepare(model, optimizer, schedule, loader)


def _train(prepared: Any, epochs: int = 2) -> list[Any]:
    accelerator, model, optimizer, schedule, loader = prepared
    seen = []
    for x in (x for _ in range(epochs) for x in loader):
        with accelerator.accumulate(model):
            loss = loss_of(model, x)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates = [float(g["lr"]) for g in optimizer.param_groups]
        seen.append(
            (loss.item(), rates, norm is None or norm.item(), float(schedule.get_last_lr()[0]), optimizer.step_was_skipped)
        )
    return seen


@pytest.mark.parametrize("accumulated", [1, 2])
def test_training(accumulated: int) -> None:
    def train(optim: Any) -> Any:
        prepared = _prepared(optim, gradient_accumulation_steps=accumulated)
        assert "initial_lr" in repr(prepared[2])
        return _train(prepared), weights(prepared[1])

    assert_trained_alike(train)


def test_mixed_precision() -> None:
    def train(optim: Any) -> Any:
        return [row[:2] for row in _train(_prepared(optim, torch.float32, mixed_precision="bf16"))]

    assert_trained_alike(train, rtol=2e-2)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=PAIR_IDS)
def test_saved_states(first: Any, second: Any, tmp_path: Path) -> None:
    """Within a package bit by bit, and across to torch.optim and back."""
    whole, begun, resumed = (_prepared(optim) for optim in (second, first, second))
    _train(begun)
    begun[0].save_state(tmp_path)
    _train(whole)
    resumed[0].load_state(tmp_path)
    exact = {"rtol": 0, "atol": 0} if first is second else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(_train(resumed), _train(whole), **exact)
    torch.testing.assert_close(weights(resumed[1]), weights(whole[1]), **exact)


def test_a_prepared_optimizer_is_pickled() -> None:
    def train(optim: Any) -> Any:
        prepared = _prepared(optim)
        _train(prepared)
        model, optimizer = pickle.loads(pickle.dumps((prepared[1], prepared[2])))
        loss_of(model, batches()[0]).backward()
        optimizer.step()
        return weights(model)

    assert_trained_alike(train)
