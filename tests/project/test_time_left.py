"""The line of progress of tools/test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from new_process import environment

CONFTEST = """
import progress, time_left

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(time_left.TimeLeft(config, progress.Line(every=0)))
"""
TESTS = """
import time

def test_slow():
    time.sleep(1.6)

def test_wrong():
    assert False

def test_other():
    pass
"""


@pytest.mark.parametrize(("workers", "guess", "known"), [(0, "0:03", "0:02"), (2, "0:02", "0:01")])
def test_durations_of_the_last_run_tell_how_long_this_one_takes(
    workers: int, guess: str, known: str, tmp_path: Path
) -> None:
    """The first run guesses a second for each test; neither knows at first how quick it is itself."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(TESTS)
    options = [f"--numprocesses={workers}", "--dist=loadfile", "--override-ini=console_output_style=classic"]
    lines = []
    for _ in range(2):
        command = [sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", *options]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "FAILED test_a.py::test_wrong" in done.stdout.partition("short test summary")[2]
        run = done.stdout.partition("FAILURES")[0].splitlines()
        assert not [line for line in run if re.match(r"(test_a.py )?[.F]", line)]
        lines.append([line for line in run if " left: " in line or line.startswith("failed")])
    first, second = lines
    assert first[0] == f"0 of 3 tests, {guess} left: test_a.py"
    assert second == [
        f"0 of 3 tests, {known} left: test_a.py",
        "1 of 3 tests, 0:00 left: test_a.py",
        "failed: test_a.py::test_wrong",
        "2 of 3 tests, 1 failed, 0:00 left: test_a.py",
    ]
