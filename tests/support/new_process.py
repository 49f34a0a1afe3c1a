"""Programs of the tests in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent


def environment(**variables: str) -> dict[str, str]:
    """This process's, with the modules that tests import where a new process finds them."""
    before = [path] if (path := os.environ.get("PYTHONPATH")) else []
    places = [str(ROOT), str(SUPPORT.parent), str(SUPPORT), str(ROOT / "tools"), *before]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables}


def printed_by(program: str, *arguments: str, **variables: str) -> str:
    """What a program of this folder prints; one that fails is an error."""
    command = [sys.executable, SUPPORT / f"{program}.py", *arguments]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
