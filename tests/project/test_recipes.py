"""The recipes: each is short, is listed, and prints what it ends with."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from readme import PRINTED, RECIPES, ROOT, needed_extra
from small_training import needs

NUMBER = re.compile(r"\d+\.\d+")
LONG = {"follow_weights", "fsdp2", "low_memory", "kept_step", "whole_step"}
"""Those that start processes, train for long, or compile a whole training step."""

ALONE = [path for path in RECIPES if path.stem not in LONG and needed_extra(path) != "trainers"]
OTHERS = [
    pytest.param(
        path, marks=needs("transformers", "lightning", "peft") if needed_extra(path) == "trainers" else (), id=path.stem
    )
    for path in RECIPES
    if path not in ALONE
]
WARNINGS = [
    "error",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # torch's own import of its compiler
    "ignore:invalid escape sequence:DeprecationWarning",  # torchao's sources, where they are compiled for the first time
]


def _stem(path: Path) -> str:
    return path.stem


def _alike(printed: str, wanted: str) -> bool:
    """Whether all is equal, but for the last digits of numbers with a point: processors round differently."""
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(wanted), strict=False)
    close = all(abs(float(a) - float(b)) <= 2.001 * 10.0 ** -len(b.partition(".")[2]) for a, b in pairs)
    return close and NUMBER.sub("#", printed) == NUMBER.sub("#", wanted)


def _prints_what_it_ends_with(path: Path, directory: Path) -> None:
    wanted = PRINTED.search(path.read_text())
    assert wanted is not None, "a recipe ends with what it prints"
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # threads that wait for each other crawl
    command = [sys.executable, *(option for said in WARNINGS for option in ("-W", said)), str(path)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert _alike(done.stdout, re.sub("^# ", "", wanted["lines"], flags=re.MULTILINE)), done.stdout
    if needed_extra(path) != "trainers":  # transformers tells of packages that it does not find
        assert done.stderr == ""
    assert list(directory.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("path", ALONE, ids=_stem)
def test_a_recipe_prints_what_it_ends_with(path: Path, tmp_path: Path) -> None:
    _prints_what_it_ends_with(path, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("path", OTHERS)
def test_a_long_recipe_prints_what_it_ends_with(path: Path, tmp_path: Path) -> None:
    _prints_what_it_ends_with(path, tmp_path)


@pytest.mark.parametrize("path", RECIPES, ids=_stem)
def test_a_recipe_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    summary, blank, *rest = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert summary.endswith(".")
    assert blank == ""
    assert 1 <= len(re.findall(r"\.(?=\s|$)", " ".join(rest))) <= 4


def test_numbers_may_differ_in_their_last_digit_only() -> None:
    assert _alike("loss 0.123, 5 steps", "loss 0.125, 5 steps")
    assert not _alike("loss 0.123, 5 steps", "loss 0.126, 5 steps")
    assert not _alike("loss 0.123, 6 steps", "loss 0.123, 5 steps")
    assert not _alike("loss 0.123", "loss 0.123\nloss 0.123")
