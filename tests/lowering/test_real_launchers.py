"""Triton's own launchers, with their C code, over a driver that only notes what it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from new_process import SUPPORT, environment

pytest.importorskip("triton")

LAUNCHED = {
    "AdamW": {"evaluate", "update"},
    "AdamW clipped": {"square_sums", "evaluate", "update"},
    "AdamW stored": {"evaluate", "update"},
    "LAMB": {"square_sums", "evaluate", "sums0", "average", "update"},
    "Prodigy": {"evaluate", "sums0", "average", "update"},
    "Adafactor": {"evaluate", "loop0", "add", "loop6"},
    "Muon": {"evaluate", "loop0", "add", "loop7"},
    "Muon in parts": {"evaluate", "loop0", "add", "loop7"},
    "Muon symmetric": {"evaluate", "loop0", "add", "symmetric_product"},
    "NorMuon stored": {"evaluate", "loop0", "add", "loop11"},
}
"""Some of the kernels that each case launches."""


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds that launches the cases that this run takes."""
    cases = [item.callspec.params["case"] for item in request.session.items if item.fspath.basename == Path(__file__).name]
    command = [sys.executable, SUPPORT / "real_launchers.py", tmp_path_factory.mktemp("driver"), *cases]
    variables = environment(TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", LAUNCHED)
def test_direct_launches_are_tritons_own(case: str, launched: dict[str, Any]) -> None:
    """Grid, block, shared memory, stream and each parameter; and addresses are what a kernel was compiled for."""
    assert launched["obstacle"] == ""
    assert LAUNCHED[case] <= {*launched["cases"][case]["launches"]}
    assert launched["cases"][case]["wrong"] == []
