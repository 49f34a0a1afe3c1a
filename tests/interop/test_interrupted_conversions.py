"""A conversion that is interrupted at any moment leaves the old files whole, or the new ones."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import Interruption

from compiled_optim.interop import convert as files

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # an interrupt comes between a file and its block

TARGETS = {"torch": "o.pt", "named": "o.pt", "safetensors": "o.safetensors", "dcp": "o"}
CASES = [(form, is_there) for form in TARGETS for is_there in (False, True) if (form, is_there) != ("dcp", True)]


def _state(number: float) -> dict[str, Any]:
    """A state dict of AdamW of which each tensor, and the groups, tell the ``number``."""
    state = {
        i: {"step": torch.tensor(number)} | {k: torch.full((4,), number) for k in ("exp_avg", "exp_avg_sq")} for i in (0, 1)
    }
    group = {"lr": number, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    return {"state": state, "param_groups": [{**group, "params": [0, 1], "param_names": ["a", "b"]}]}


def _there(folder: Path) -> tuple[list[str], float | None]:
    """The names of what is in a folder, and the one number that all of it tells."""
    names = sorted(each.name for each in folder.iterdir())
    found = next((name for name in names if name != "o.json"), None)
    if found is None:
        return names, None
    saved = files.read(folder / found)
    numbers = {float(n) for entries in saved["state"].values() for value in entries.values() for n in value.flatten()}
    (number,) = numbers | {saved["param_groups"][0]["lr"]}
    return names, number


def _interrupt(form: str, is_there: bool, count: int, folder: Path) -> None:
    """Interrupt a conversion at ``count`` moments, and at each where its files are put in their places."""
    torch.save(_state(1.0), folder / "old.pt")
    torch.save(_state(2.0), folder / "new.pt")
    top = folder / "top"

    def begin() -> None:
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
        if is_there:
            files.convert(folder / "old.pt", top / TARGETS[form], form)

    def convert() -> None:
        files.convert(folder / "new.pt", top / TARGETS[form], form)

    begin()
    old = _there(top)
    passed, replaced = Interruption(1 << 40), []
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        replaced.append((1 << 40) - passed._left)
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", noted)
        assert not passed.run(convert)
    new = _there(top)
    assert (old[1], new[1]) == (1.0 if is_there else None, 2.0)
    points, places = (1 << 40) - passed._left, random.Random(f"{form} {is_there}")
    late = range(replaced[0] - 3, replaced[-1] + 4)
    outcomes = []
    for moment in [*late, *(places.randrange(points) for _ in range(count - len(late)))]:
        begin()
        if not Interruption(moment).run(convert):
            continue
        assert _there(top) in (old, new)
        outcomes.append(_there(top) == new)
    assert len(outcomes) >= count * 3 // 4
    assert not all(outcomes)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.quick
@pytest.mark.parametrize(("form", "is_there"), CASES)
def test_an_interrupted_conversion(form: str, is_there: bool, tmp_path: Path) -> None:
    _interrupt(form, is_there, 15, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("form", "is_there"), CASES)
def test_conversions_interrupted_at_many_moments(form: str, is_there: bool, tmp_path: Path) -> None:
    _interrupt(form, is_there, 200, tmp_path)
