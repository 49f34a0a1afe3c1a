"""Training of a small GPT by ``python -m perf train``: losses fall and are torch's, each way is saved, failures are told."""

from __future__ import annotations

import collections
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from simulated_graph import install

from perf import train
from perf.budget import Deadline
from perf.competitors import FUSED, OURS
from perf.loops import Way
from perf.results import NOT_RUN, Row, says_failure

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
EAGER = [Way(FUSED), Way(OURS)]
ADAMW = [str(way) for way in train.WAYS if way.competitor.startswith(("torch ", OURS)) and way.competitor != train.HYBRID]


def command(directory: Path, *arguments: str, limit: float) -> tuple[int, pd.DataFrame]:
    """The exit status of a command of perf and the table that it wrote."""
    words = [sys.executable, "-m", "perf", *arguments, "--results", str(directory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, pd.read_csv(directory / f"{arguments[0]}.csv", dtype={"commit": str})


@pytest.mark.full
def test_every_way_trains_a_small_model(tmp_path: Path) -> None:
    status, table = command(tmp_path, "train", "--rehearse", limit=1500)
    assert status == 0, table[table["unit"].isna()]
    losses = table[table["metric"].str.startswith("loss of step")].pivot(index="competitor", columns="metric", values="p50")
    assert set(ADAMW) <= set(losses.index)
    assert str(Way(train.HYBRID, "model")) in losses.index
    assert (losses["loss of step 80"] < 0.6 * losses["loss of step 1"]).all()
    (least,) = table.loc[table["competitor"] == "the made text", "p50"]
    assert (losses["loss of step 80"] > least).all()
    far = table[table["metric"] == train.DIFFERENCE].set_index("competitor")["p50"]
    assert set(far.index) == set(ADAMW) - {str(Way(FUSED, "model"))}
    assert (far < train.TOLERANCE).all()
    timed = table[table["metric"] == "training step"]
    assert set(losses.index) < set(timed["competitor"])
    assert (timed["n"] == train.MODELS["small"].blocks - 1).all()
    assert {"speed", "the optimizer's share of the step"} < set(table["metric"])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small = train.MODELS["small"]
    monkeypatch.setitem(train.MODELS, "small", dataclasses.replace(small, block=5, blocks=4))


def rows_of(ways: Sequence[Way] = tuple(EAGER), deadline: Deadline | None = None) -> list[list[Row]]:
    return list(train.measure_training("small", CPU, ways=ways, deadline=deadline))


@pytest.mark.usefixtures("tiny")
def test_losses_are_torchs_and_other_hyperparameters_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(map(train.failed, rows_of()[-1]))
    make = train._optimizer
    decayed = {OURS: 0.5, FUSED: 0.0}

    def other(way: Way, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = make(way, model)
        optimizer.param_groups[0]["weight_decay"] = decayed[way.competitor]
        return optimizer

    monkeypatch.setattr(train, "_optimizer", other)
    assert [row.metric for row in rows_of()[-1] if train.failed(row)] == [train.DIFFERENCE]


@pytest.mark.full
@pytest.mark.usefixtures("tiny")
def test_captured_steps_train_as_called_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose optimizer has nothing to update."""
    install(monkeypatch)
    for name in (train.NONE, OURS, train.HYBRID):
        ways = [Way(name), Way(name, runner=True)]
        texts, _ = train.made_texts(train.MODELS["small"])
        called, captured = (train._train(way, train.MODELS["small"], texts).losses for way in ways)
        torch.testing.assert_close(captured, called, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("tiny")
def test_a_way_that_fails_is_named_and_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    make = train._optimizer
    monkeypatch.setattr(train, "_optimizer", lambda way, model: 1 / 0 if way == EAGER[0] else make(way, model))
    _, (absent,), trained = rows_of()
    assert (absent.competitor, absent.metric) == (str(EAGER[0]), f"{NOT_RUN}ZeroDivisionError: division by zero")
    assert {row.competitor for row in trained} == {str(EAGER[1])}


@pytest.mark.usefixtures("tiny")
def test_what_was_trained_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train._train

    def interrupted(way: Way, *args: Any) -> train.Trained:
        if way == EAGER[1]:
            raise KeyboardInterrupt
        return trained(way, *args)

    monkeypatch.setattr(train, "_train", interrupted)
    rows: list[Row] = []
    with pytest.raises(KeyboardInterrupt):
        collections.deque(map(rows.extend, train.measure_training("small", CPU, ways=[*EAGER, EAGER[0]])))
    assert {row.competitor for row in rows if row.metric == "speed"} == {str(EAGER[0])}
    assert (rows[-1].competitor, rows[-1].metric) == (str(EAGER[1]), f"{NOT_RUN}interrupted")


@pytest.mark.usefixtures("tiny")
def test_a_way_that_does_not_train_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.Training, "rate", lambda training, step: 0.0)
    _, (absent,) = rows_of(EAGER[:1])
    assert absent.metric.startswith(f"{NOT_RUN}RuntimeError: it does not train: losses [5.5")


@pytest.mark.usefixtures("tiny")
def test_a_way_that_would_not_fit_does_not_begin() -> None:
    _, *others = rows_of(deadline=Deadline(0.0))
    assert [(row.competitor, row.metric) for (row,) in others] == [(str(w), f"{NOT_RUN}out of time") for w in EAGER]
    assert not any(says_failure(row) for (row,) in others)


def test_the_made_text_is_the_same_again_and_has_structure() -> None:
    training = train.MODELS["small"]
    text, least = train.made_texts(training)
    assert text.equal(train.made_texts(training)[0])
    assert text.shape == (training.steps, training.size.batch, training.size.length + 1)
    pairs = torch.zeros(training.size.words, training.size.words)
    pairs.index_put_((text[..., :-1].flatten(), text[..., 1:].flatten()), torch.ones(()), accumulate=True)
    assert (pairs > 0).sum(1).max() <= train.FOLLOWERS
    after = pairs / pairs.sum(1, keepdim=True).clamp(min=1)
    known = -(pairs * after.clamp(min=1e-9).log()).sum() / pairs.sum()
    assert 0.7 * least < known < least  # less where a word is drawn twice for a place
