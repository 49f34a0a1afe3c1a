"""The tests that ``tools/test`` and ``tools/versions`` run, and the command that runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from environment import ROOT

COMPILED = [
    "tests/step/test_traced.py",
    "tests/step/test_in_graphs.py",
    "tests/step/test_inlined.py",
    "tests/step/test_inlined_code.py",
    "tests/capture/test_graphs.py",
    "tests/lowering/test_cuda_graphs.py",
    *(
        f"tests/lowering/test_code_for_gpus.py::test_code_for_a_gpu_does_what_eager_steps_do[{c}]"
        for c in ("Lion", "rotating")
    ),
    "tests/optimizers/test_torch_names.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/project/test_readme.py::test_code_runs",
]
"""Tests of compiled code, which depend on the version of torch: ``tools/test --torch`` runs all their cases."""

SENSITIVE = [
    *COMPILED,
    "tests/lowering/test_triton.py",
    "tests/lowering/test_launches.py",
    "tests/memory/test_addresses.py",
    "tests/memory/test_private_names.py",
    "tests/step/test_module.py",
]
"""Tests that run with every torch, a few cases of each function: also those of Triton's compiler, of addresses in torch's
objects, and of the step as a module."""


def pytest(*arguments: str) -> list[str]:
    """Return the command after ``python -m``."""
    workers = ["--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile", "--no-loadscope-reorder"]
    return ["pytest", *workers, "--time-left", "--override-ini=console_output_style=classic", *arguments]


def run(python: Path, commands: Sequence[Sequence[str]]) -> int:
    """Run modules with ``python`` in the repository's root until one fails. Return the exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads free their cores, which the workers share
    for command in commands:
        print(f"$ {' '.join(command)}", flush=True)
        if code := subprocess.run([python, "-m", *command], cwd=ROOT).returncode:
            return code
    return 0
