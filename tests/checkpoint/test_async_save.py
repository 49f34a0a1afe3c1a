"""``torch.distributed.checkpoint.async_save`` beside steps: what is written is what was when it was asked."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import compiled_optim as co

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.filterwarnings("ignore")]

X = torch.linspace(-1, 1, 24).view(6, 4)


class _Waiting(dcp.FileSystemWriter):
    """Writes files only after a word."""

    def __init__(self, path: Path, may_write: threading.Event) -> None:
        super().__init__(path)
        self._may_write = may_write

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        assert self._may_write.wait(60)
        return super().write_data(*args, **kwargs)


WAYS: dict[str, Callable[[nn.Module, Any], dict[str, Any]]] = {
    "own": lambda model, optimizer: {"optimizer": optimizer.state_dict()["state"]},
    "by name": lambda model, optimizer: {"optimizer": co.named_state_dict(optimizer)["state"]},
    "torch's": lambda model, optimizer: {"optimizer": get_optimizer_state_dict(model, optimizer)["state"]},
}
OPTIMIZERS: dict[str, tuple[type[co.CompiledOptimizer], dict[str, Any]]] = {
    "AdamW": (co.AdamW, {}),
    "AdamW, int8": (co.AdamW, {"state_dtype": "int8"}),
    "ASGD": (co.ASGD, {}),
    "Prodigy": (co.Prodigy, {}),
    "SGD": (co.SGD, {"momentum": 0.9}),
}


def _flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    if not isinstance(state, dict):
        return {}
    return {k: v for key, each in state.items() for k, v in _flat(each, f"{prefix}.{key}").items()}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_after_the_call_are_not_in_it(name: str, way: str, tmp_path: Path) -> None:
    kind, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 96), nn.Tanh(), nn.Linear(96, 64))
    optimizer = kind(model.named_parameters(), lr=0.1, **options)
    for _ in range(3):
        _train(model, optimizer)
    asked = WAYS[way](model, optimizer)
    expected = {key: tensor.clone() for key, tensor in _flat(asked).items()}
    may_write = threading.Event()
    future = dcp.async_save(asked, storage_writer=_Waiting(tmp_path / "saved", may_write))
    try:
        for _ in range(3):
            _train(model, optimizer)
    finally:
        may_write.set()
    future.result()
    now = _flat(WAYS[way](model, optimizer))
    assert any(not torch.equal(now[key], tensor) for key, tensor in expected.items())
    loaded = copy.deepcopy(WAYS[way](model, optimizer))
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    found = _flat(loaded)
    assert found.keys() == expected.keys()
    assert len(expected) >= 4
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
