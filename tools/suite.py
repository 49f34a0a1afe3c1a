"""Which tests ``tools/test`` and ``tools/versions`` run, and how."""

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
"""Tests of compiled code, whose surroundings in torch change with its versions: ``tools/test --torch`` runs them whole."""

SENSITIVE = [
    *COMPILED,
    "tests/lowering/test_triton.py",
    "tests/lowering/test_launches.py",
    "tests/memory/test_addresses.py",
    "tests/memory/test_private_names.py",
    "tests/step/test_module.py",
]
"""Files that a few cases of each function run of with every torch: also Triton's compiler, where torch's objects
lie, and the step as a module."""


def pytest(*arguments: str) -> list[str]:
    """The command after ``python -m``."""
    workers = ["--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile", "--no-loadscope-reorder"]
    return ["pytest", *workers, "--time-left", "--override-ini=console_output_style=classic", *arguments]


def run(python: Path, commands: Sequence[Sequence[str]]) -> int:
    """Run modules with ``python`` in the repository's root, until one fails; the exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # the workers share the cores: who waits leaves his to others
    for command in commands:
        print(f"$ {' '.join(command)}", flush=True)
        if code := subprocess.run([python, "-m", *command], cwd=ROOT).returncode:
            return code
    return 0
