"""The demo, short, as ``tools/run`` starts it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
import torch

import compiled_optim as co

ROOT = Path(__file__).resolve().parents[2]


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    warnings = ["-W", "error::RuntimeWarning", "-W", "error::UserWarning"]
    command = [sys.executable, *warnings, "-m", "tools.demo", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other crawl on a busy machine
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_demo(tmp_path: Path) -> None:
    options = ["--mode", "eager", "--compare", "eager", "whole-step"]
    result = _demo("--epochs", "2", "--out", str(tmp_path), "--min-accuracy", "0", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    names = report["resumption"]["names"]

    assert report["recompiles"] == 0
    assert [m["mode"] for m in report["modes"]] == ["eager", "whole-step"]
    assert [m["graphs"] for m in report["modes"]] == [0, 1]
    assert all(m["recompiles"] == 0 for m in report["modes"])
    assert all(m["seconds"] > 0 for m in report["modes"])
    assert "position_embedding" in names
    assert len(names) == len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"])
    assert report["resumption"]["moved"] > len(names) // 2
    assert report["resumption"]["step"] == 22

    loss, rate = report["history"]["loss"], report["history"]["learning_rate"]
    assert len(loss) == len(rate) == 44
    assert sum(loss[-5:]) < sum(loss[:5])
    warm_up = rate.index(max(rate))
    assert all(a < b for a, b in pairwise(rate[: warm_up + 1]))
    assert all(a > b for a, b in pairwise(rate[warm_up:]))

    assert all(ratio > 0 for ratio in report["time_ratios"].values())
    assert matplotlib.image.imread(tmp_path / "training.png").std() > 0


def test_missed_accuracy_is_an_error(tmp_path: Path) -> None:
    result = _demo("--epochs", "1", "--out", str(tmp_path), "--min-accuracy", "100", "--mode", "eager", "--compare")
    assert result.returncode == 1
    assert "is below the minimum of 100 %" in result.stderr


def test_state_that_was_not_resumed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    checkpoint = importlib.import_module("tools.demo.checkpoint")
    training = importlib.import_module("tools.demo.training").Training(steps=4)
    images = importlib.import_module("tools.demo.data").load()[0]
    training.train_step(*images)
    checkpoint.save(training, tmp_path / "checkpoint.pt")
    checkpoint.resume(tmp_path / "checkpoint.pt", steps=4)
    monkeypatch.setattr(co.AdamW, "load_state_dict", lambda self, state_dict: None)
    with pytest.raises(RuntimeError, match="was resumed with another"):
        checkpoint.resume(tmp_path / "checkpoint.pt", steps=4)
