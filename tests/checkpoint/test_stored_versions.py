"""What an earlier version saved is loaded by name, and training goes on: every optimizer, every form of storage."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import COMBINED, registry
from data import make
from torch import nn

import compiled_optim as co
from compiled_optim.rule.storage import MODES

FILES = {
    "format_version_1.pt": "60e361d4bc1a5b28f5f8c3dacdbec37e9c829bffb136169323dac34c9fdc8581",
    "pickled_optimizer.pt": "adf73327eced05ac743a39d14fa249bf7826180c59b67ef6b2b9dea5840c7103",
    "version_0_1_further.pt.xz": "1ecca2d98c4a700ce3be4e45bfcaf638b40c00db1a78d5aa504f53c67eeb1385",
    "version_0_1.pt.xz": "1021f25384f5a1559072d116c9ebc6fd3c2d86152a29bc3f1874ba1b0f71c834",
}
"""SHA-256 of each file, which a release has written. A line may be added; one that changes is a promise broken."""

KEPT = make.kept()
ALIKE = ("Muon", "MuonAdamW", "NorMuon", "Muon in the fewest bytes")
"""Those whose matrices are multiplied in bfloat16, in an order that machines choose."""


def test_the_files_are_those_that_were_saved() -> None:
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in make.HERE.iterdir() if ".pt" in p.suffixes}
    assert found == FILES


def test_every_optimizer_and_every_form_of_storage_is_kept() -> None:
    """``python tests/data/make.py NAME`` writes a file with those that are new."""
    mup = {f"mup.{name}" for name in ("Adam", "AdamW", "SGD")}
    assert {kind.__name__ for kind in (*registry(), *COMBINED)} | mup <= KEPT.keys()
    assert {f"AdamW torch.{dtype} {mode}" for dtype in ("bfloat16", "float16") for mode in MODES} <= KEPT.keys()
    assert KEPT.keys() == {name for name, *_ in make.cases()}


def test_a_new_file_has_what_is_new_and_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "HERE", tmp_path)
    every = [case for case in make.cases() if case[0] in ("SGD", "Lion")]
    monkeypatch.setattr(make, "cases", lambda: iter(every[:1]))
    make.write("first")
    monkeypatch.setattr(make, "cases", lambda: iter(every))
    with pytest.raises(FileExistsError):
        make.write("first")
    make.write("second")
    assert [[*make._load(path)] for path in sorted(tmp_path.iterdir())] == [["Lion"], ["SGD"]]
    for case, entry in make.kept().items():
        for name, after in entry["after"].items():
            torch.testing.assert_close(after, KEPT[case]["after"][name])


def _flat(state_dict: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {(str(param), name): value for param, entries in state_dict["state"].items() for name, value in entries.items()}


@pytest.mark.parametrize("case", KEPT)
def test_training_goes_on(case: str) -> None:
    stored, begin = KEPT[case], reversed if case != "LBFGS" else iter  # its state is the first parameter's
    params, twins = ({n: nn.Parameter(p.clone()) for n, p in begin(stored["params"].items())} for _ in range(2))
    optimizer, fresh = make.optimizer(case, params), make.optimizer(case, twins)
    assert co.load_named_state_dict(optimizer, stored["state_dict"]) == co.LoadReport([], [], [], [])
    found, wanted = _flat(co.named_state_dict(optimizer)), _flat(stored["state_dict"])
    assert found.keys() == wanted.keys()
    for entry, value in found.items():
        torch.testing.assert_close(value, wanted[entry], rtol=0, atol=0, msg=str(entry))
    make.train(optimizer, params, 3, 5)
    make.train(fresh, twins, 3, 5)
    few = next(iter(params.values())).dtype != torch.float64
    bound = 0.02 if case in ALIKE else 1e-3 if few else 1e-11
    for name, after in stored["after"].items():
        moved = (after.double() - stored["params"][name].double()).norm()
        assert (params[name].double() - after.double()).norm() <= bound * moved, name
    assert any((twins[name].double() - after.double()).norm() > 0.01 for name, after in stored["after"].items())
