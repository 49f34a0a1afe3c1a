"""The line of progress of tools/test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from new_process import environment

# The clock stands still: what is left is told from the durations that are known alone.
CONFTEST = """
import types
import progress, time_left

time_left.time = types.SimpleNamespace(monotonic=lambda: 0.0)

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(time_left.TimeLeft(config, progress.Line(every=0)))
"""
TESTS = """
def test_slow():
    pass

def test_wrong():
    assert False

def test_other():
    pass
"""


def _run(folder: Path, workers: int) -> list[str]:
    """Return the lines of progress of a run of the three tests."""
    options = [f"--numprocesses={workers}", "--dist=loadfile", "--override-ini=console_output_style=classic"]
    command = [sys.executable, "-m", "pytest", f"--rootdir={folder}", *options]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED test_a.py::test_wrong" in done.stdout.partition("short test summary")[2]
    run = done.stdout.partition("FAILURES")[0].splitlines()
    assert not [line for line in run if re.match(r"(test_a.py )?[.F]", line)]
    return [line for line in run if " left: " in line or line.startswith("failed")]


@pytest.mark.parametrize(("workers", "left"), [(0, ("1:40", "0:06", "0:00")), (2, ("0:50", "0:05", "0:00"))])
def test_durations_of_the_last_run_tell_how_long_this_one_takes(workers: int, left: tuple[str, ...], tmp_path: Path) -> None:
    """Tell them from known durations alone: beside them, 10 seconds count that took each worker 10 seconds."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(TESTS)
    first = _run(tmp_path, workers)
    assert first[0] == f"0 of 3 tests, 0:0{0 if workers else 1} left: test_a.py"  # a quarter of a second each
    cache = tmp_path / ".pytest_cache" / "v" / "durations"
    durations = json.loads(cache.read_text())
    assert {*durations} == {"test_a.py::test_slow", "test_a.py::test_wrong", "test_a.py::test_other"}
    cache.write_text(json.dumps(dict(zip(sorted(durations), (0.0, 60.0, 40.0), strict=True))))
    assert _run(tmp_path, workers) == [
        f"0 of 3 tests, {left[0]} left: test_a.py",
        f"1 of 3 tests, {left[1]} left: test_a.py",
        "failed: test_a.py::test_wrong",
        f"2 of 3 tests, 1 failed, {left[2]} left: test_a.py",
    ]
