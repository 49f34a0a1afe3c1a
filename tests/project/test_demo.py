"""The demo: as a newcomer starts it, and its parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import simulated_graph
import torch

import compiled_optim as co
from tools.demo import __main__ as command
from tools.demo import digits
from tools.demo.training import Training

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 22  # batches


def _run(*command: str, **variables: str) -> tuple[int, list[str], str]:
    """The exit status of a command, the lines that it prints, and its errors and warnings."""
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    environment |= {"COLUMNS": "80", "OMP_NUM_THREADS": "1", **variables}  # threads that wait for each other crawl
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


def _rows(lines: list[str]) -> dict[str, str]:
    """The rows of a report, which has no other line than these, a title and rules."""
    title, *table = lines
    assert title.startswith("compiled_optim on handwritten digits")
    rows = [re.fullmatch(r"│ (.+?) +│ (.+?) +│", line) for line in table if not re.fullmatch("[┌├└][─┬┼┴]+[┐┤┘]", line)]
    assert None not in rows, lines
    return {row[1]: row[2] for row in rows}


@pytest.mark.full
def test_a_newcomers_run() -> None:
    """``tools/run`` in its own environment prints a report and nothing else, but for one line if it installs."""
    status, lines, errors = _run("tools/run")
    assert (status, errors) == (0, ""), lines
    rows = _rows(lines[lines[0] == "installing into .venv-demo (once)" :])
    assert float(rows["test accuracy"].split()[0]) >= 97
    names = list(rows)
    assert names[names.index("training step") + 1 : names.index("optimizer step")] == ["eager", "model", "whole-step"]
    assert rows["resumed by name"] == f"after steps {8 * EPOCH}, {16 * EPOCH}, {24 * EPOCH}"
    assert len(names[names.index("optimizer step") + 1 :]) == 4


@pytest.mark.full
def test_missed_accuracy_is_an_error_after_the_report() -> None:
    options = ["--epochs", "1", "--min-accuracy", "100", "--modes", "eager"]
    status, lines, errors = _run(sys.executable, "-m", "tools.demo", *options)
    assert status == 1
    assert re.fullmatch("tools/run: the test accuracy of .* % is below the minimum of 100 %\n", errors)
    assert "eager" in _rows(lines)


@pytest.mark.full
def test_a_row_is_not_named_after_a_compilation_that_did_not_happen() -> None:
    options = ["--epochs", "1", "--min-accuracy", "0", "--modes", "whole-step"]
    status, lines, errors = _run(sys.executable, "-m", "tools.demo", *options, TORCHDYNAMO_DISABLE="1")
    assert (status, errors) == (0, "")
    assert {"eager", "whole-step"} & {*_rows(lines)} == {"eager"}


def test_nothing_is_captured_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tools/run", "--modes", "eager", "captured"])
    with pytest.raises(SystemExit, match="captured needs a CUDA device"):
        command.main()


def _batches() -> Iterator[digits.Images]:
    yield from digits.batches(digits.load()[0], 1, torch.Generator().manual_seed(0))


@pytest.mark.full
def test_a_captured_step_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Training(EPOCH, "cpu")
    training = expected.resumed()
    with monkeypatch.context() as patch:
        simulated_graph.install(patch)
        captured = training.run("captured", _batches())
    assert captured.mode == "captured"
    assert len(captured.seconds) == EPOCH
    assert captured.losses == expected.run("eager", _batches()).losses


@pytest.mark.filterwarnings("ignore:.*uncaptured.*:RuntimeWarning")
def test_a_step_that_was_not_captured_is_named_so() -> None:
    assert Training(EPOCH, "cpu").run("captured", _batches()).mode == "eager"


def test_a_resumed_training_goes_on() -> None:
    def watched(training: Training) -> Iterator[digits.Images]:
        for batch in _batches():
            rates.append(training.optimizer.param_groups[0]["lr"])
            yield batch

    rates: list[float] = []
    first = Training(2 * EPOCH, "cpu")
    before = first.run("eager", watched(first))
    second = first.resumed()
    after = second.run("eager", watched(second))
    assert sum(after.losses[-5:]) < sum(after.losses[:5]) < sum(before.losses[-5:]) * 1.2 < sum(before.losses[:5])

    peak = rates.index(max(rates))
    assert 0 < peak < EPOCH
    assert all(a < b for a, b in pairwise(rates[: peak + 1]))
    assert all(a > b for a, b in pairwise(rates[peak:]))

    names, others = ([n for g in t.optimizer.param_groups for n in g["param_names"]] for t in (first, second))
    assert sorted(names) == sorted(others) == sorted(first.model.state_dict())
    assert sum(a != b for a, b in zip(names, others, strict=True)) > len(names) // 2


def test_only_weights_of_layers_decay() -> None:
    model = digits.VisionTransformer()
    layers = [m for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    weights = {m.weight for m in layers} | {m.in_proj_weight for m in model.modules() if hasattr(m, "in_proj_weight")}
    undecayed, decayed = digits.parameter_groups(model)
    assert undecayed["weight_decay"] == 0
    assert "weight_decay" not in decayed
    assert {p for _, p in decayed["params"]} == weights
    assert {p for _, p in undecayed["params"]} == {*model.parameters()} - weights


def test_state_that_was_not_resumed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(4, "cpu")
    training.step(*digits.load()[0])
    training.resumed()
    monkeypatch.setattr(co.AdamW, "load_state_dict", lambda self, state_dict: None)
    with pytest.raises(AssertionError, match="exp_avg"):
        training.resumed()


def test_is_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "tools" / "demo").glob("*.py")) <= 300


@pytest.mark.parametrize("mode", ["eager", "whole-step"])
def test_the_bar_says_what_is_slow_and_no_loss_before_there_is_one(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def track(batches: object, text: str, *options: object, **others: object) -> None:
        said.append(text)
        raise InterruptedError

    monkeypatch.setattr(command, "track", track)
    monkeypatch.setattr(sys, "argv", ["tools/run", "--modes", mode])
    monkeypatch.setattr(torch._logging, "set_logs", lambda **levels: None)
    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(InterruptedError):
        command.main()
    assert said == [{"eager": "eager", "whole-step": "whole-step (the first step compiles)"}[mode]]
