"""torchao's training in low precision: parameters that wrap other tensors, in eager and compiled models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import OPTIONS, assert_trained_alike, batches, loss_of, needs
from torch import nn
from torch.optim import lr_scheduler

import compiled_optim as co

pytestmark = [pytest.mark.full, needs("torchao")]


def _int8_mixed(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig())


def _int8_weights(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model, int8_weight_only_quantized_training())


def _ternary(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import bitnet_training
    from torchao.quantization import quantize_

    quantize_(model, bitnet_training())


def _float8(model: nn.Module, **options: Any) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, **options))


def _float8_gathered(model: nn.Module) -> None:
    _float8(model, enable_fsdp_float8_all_gather=True)


CONVERSIONS = [_float8, _float8_gathered, _int8_mixed, _ternary, _int8_weights]


def _model(convert: Callable[[nn.Module], None]) -> nn.Sequential:
    """Three layers, the inner two of which are converted."""
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16))
    convert(inner)
    return nn.Sequential(nn.Linear(8, 16), *inner, nn.Linear(16, 1))


def _train(optim: Any, convert: Callable[[nn.Module], None], **options: Any) -> list[float]:
    model = _model(convert)
    optimizer = optim.AdamW(model.named_parameters(), **OPTIONS, **options)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
    if convert is _int8_weights:  # every operation rounds at random: torch.optim's weight decay is one of its own
        optimizer.param_groups[0]["weight_decay"] = 0.0
    losses = []
    for x in batches(16, size=16, dtype=torch.float32):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("convert", CONVERSIONS, ids=lambda f: f.__name__[1:])
def test_training(convert: Callable[[nn.Module], None]) -> None:
    def train(optim: Any) -> list[float]:
        said = convert is not _float8 and optim is co
        with pytest.warns(RuntimeWarning, match="has no memory of its own") if said else contextlib.nullcontext():
            return _train(optim, convert)

    assert_trained_alike(train, rtol=1e-5)


def test_converted_weights_are_saved_and_loaded() -> None:
    """In the middle, and into an optimizer of either package."""
    model = _model(_int8_mixed)
    optimizer = co.AdamW(model.named_parameters(), lowering="eager", **OPTIONS)
    loss_of(model, batches(1, 16, torch.float32)[0]).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    for optim in (co, torch.optim):
        resumed = optim.AdamW(model.named_parameters(), lr=0.7, **({"lowering": "eager"} if optim is co else {}))
        resumed.load_state_dict(saved)
        for p in model.parameters():
            torch.testing.assert_close(resumed.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
            assert resumed.state[p]["step"] == 1
