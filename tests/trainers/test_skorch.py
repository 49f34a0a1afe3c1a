"""skorch: its scheduler's rates are in the history, which is saved, loaded and gone on with, as with torch.optim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import OPTIONS, assert_trained_alike, batches, needs, network, weights
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

pytestmark = [pytest.mark.full, needs("skorch")]

POLICIES: dict[str, tuple[type, dict[str, Any]]] = {
    "cosine": (CosineAnnealingLR, {"T_max": 9, "step_every": "batch"}),
    "plateau": (ReduceLROnPlateau, {"monitor": "train_loss", "patience": 0, "threshold": 0.9, "factor": 0.3}),
}


def _data() -> tuple[np.ndarray, np.ndarray]:
    x = torch.cat(batches()).numpy()
    return x, np.sin(x).sum(1, keepdims=True)


def _net(optim: Any, policy: str, **options: Any) -> Any:
    from skorch import NeuralNetRegressor
    from skorch.callbacks import LRScheduler

    cls, arguments = POLICIES[policy]
    chosen = {f"optimizer__{name}": value for name, value in OPTIONS.items() if name != "lr"}
    return NeuralNetRegressor(
        network,
        optimizer=optim.AdamW,
        lr=OPTIONS["lr"],
        **chosen,
        batch_size=6,
        train_split=None,
        verbose=0,
        callbacks=[("rates", LRScheduler(cls, **arguments))],
        **options,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_history_with_rates_is_saved(policy: str, tmp_path: Path) -> None:
    def train(optim: Any) -> Any:
        net = _net(optim, policy, max_epochs=4).fit(*_data())
        files = {f"f_{what}": tmp_path / f"{what}.{optim.__name__}" for what in ("params", "optimizer", "history")}
        net.save_params(**files)
        rows = json.loads(files["f_history"].read_text())
        rates = [[batch["event_lr"] for batch in row["batches"] if "event_lr" in batch] or row["event_lr"] for row in rows]
        again = _net(optim, policy).initialize()
        again.load_params(**files)
        assert again.history == net.history
        for each in (net, again):
            each.partial_fit(*_data(), epochs=2)
        torch.testing.assert_close(weights(again.module_), weights(net.module_), rtol=0, atol=0)
        return rates, weights(net.module_)

    rates, _ = assert_trained_alike(train)
    assert len(set(map(str, rates))) > 1
