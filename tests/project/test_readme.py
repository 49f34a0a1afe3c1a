"""The README is true: its code runs, its commands work, its generated parts are fresh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_generated_parts_are_fresh() -> None:
    from readme import generated

    assert generated(TEXT) == TEXT, "run python tools/readme.py"


@pytest.mark.filterwarnings("ignore:.*Profiler.*", "ignore:.*uncaptured.*:RuntimeWarning")
def test_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 7
    namespace: dict[str, object] = {}
    with torch._dynamo.config.patch(trace_autograd_ops=False):  # put back what the README sets
        for block in blocks:
            before: Any = namespace.get("opt")
            lr = before and float(before.param_groups[0]["lr"])
            exec(block, namespace)
            if "sched.step()" in block:
                opt: Any = namespace["opt"]
                assert float(opt.param_groups[0]["lr"]) != (lr if opt is before else opt.defaults["lr"]), block
    assert "100 steps" in capsys.readouterr().out


# How a test runs each command of the README; ``tools/test`` in its own environment, as a newcomer would, and so does
# test_demo.py with ``tools/run``.
COMMANDS = {
    "tools/run --help": ["tools/run", "--help"],
    "tools/test": ["tools/test", "--collect-only", "-q", "tests/project/test_readme.py"],
    "tools/test --full": ["tools/test", "--full", "--collect-only", "-q", "tests/project/test_readme.py"],
    "tools/test --torch 2.11.0": ["tools/test", "--help"],
    "tools/lowering": [sys.executable, "-m", "perf.lowering", "--lowering", "multi_tensor"],
    "tools/lowering --help": [sys.executable, "tools/lowering", "--help"],
    "python -m perf gates": [sys.executable, "-m", "perf", "gates", "--help"],
    "tools/convert": [sys.executable, "tools/convert", "--help"],
    "tools/soak": [sys.executable, "tools/soak", "--help"],
    "tools/bits": [sys.executable, "tools/bits", "--help"],
    "tools/sanitize": [sys.executable, "tools/sanitize", "--version"],
    "python tools/readme.py": [sys.executable, "tools/readme.py"],
}


def test_every_command_is_known() -> None:
    prose = re.sub(r"```python\n.*?```", "", TEXT, flags=re.DOTALL)
    named = set(re.findall(r"^    (\S+)$", prose, re.MULTILINE)) | set(re.findall(r"`((?:tools/|python )[^`]+)`", prose))
    assert named == {*COMMANDS, "tools/run"}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(command: str) -> None:
    done = subprocess.run(COMMANDS[command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
