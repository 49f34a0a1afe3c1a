"""The demo: as a newcomer starts it, and short."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

import compiled_optim as co

ROOT = Path(__file__).resolve().parents[2]


EPOCH = 22  # batches


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tools/run`` leaves behind that a newcomer starts: in its own environment, as long and good as by default."""
    directory = tmp_path_factory.mktemp("out")
    done = _run("tools/run", "--out", str(directory))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (warning,) = re.findall("(?:Runtime|User)Warning: (.*)", done.stderr)
    assert "CUDAGraphRunner runs AdamW uncaptured" in warning
    return directory


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other crawl on a busy machine
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def _check(out: Path, epochs: int) -> dict[str, Any]:
    """What holds of a run of any length in any mode."""
    report = json.loads((out / "report.json").read_text())
    names = report["resumption"]["names"]
    assert report["recompiles"] == 0
    assert "position_embedding" in names
    assert len(names) == len(torch.load(out / "checkpoint.pt", weights_only=True)["model"])
    assert report["resumption"]["moved"] > len(names) // 2
    assert report["resumption"]["step"] == EPOCH * epochs // 2

    loss, rate = report["history"]["loss"], report["history"]["learning_rate"]
    assert len(loss) == len(rate) == EPOCH * epochs
    assert sum(loss[-5:]) < sum(loss[:5])
    warm_up = rate.index(max(rate))
    assert all(a < b for a, b in pairwise(rate[: warm_up + 1]))
    assert all(a > b for a, b in pairwise(rate[warm_up:]))

    assert all(ratio > 0 for ratio in report["time_ratios"].values())
    assert matplotlib.image.imread(out / "training.png").std() > 0
    return report


def test_demo(out: Path) -> None:
    report = _check(out, epochs=25)
    modes = report["modes"]
    assert report["mode"] == "whole-step"
    assert report["test_accuracy"] >= 97
    assert [m["mode"] for m in modes] == ["eager", "model", "whole-step", "captured"]
    assert [m["graphs"] for m in modes] == [0, 1, 1, 0]
    assert all(m["recompiles"] == 0 for m in modes)
    assert all(m["seconds"] > 0 for m in modes)


def test_missed_accuracy_is_an_error(tmp_path: Path) -> None:
    """It is told when all is done. Steps are run eagerly here, and warnings are errors."""
    warnings = ["-W", "error::RuntimeWarning", "-W", "error::UserWarning"]
    options = ["--epochs", "2", "--out", str(tmp_path), "--min-accuracy", "100", "--mode", "eager", "--compare", "eager"]
    result = _run(sys.executable, *warnings, "-m", "tools.demo", *options)
    assert result.returncode == 1
    assert "is below the minimum of 100 %" in result.stderr
    (eager,) = _check(tmp_path, epochs=2)["modes"]
    assert (eager["mode"], eager["graphs"], eager["recompiles"]) == ("eager", 0, 0)


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
