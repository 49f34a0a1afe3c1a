"""Wheels of other packages for a machine without a network. They are copied with the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "out" / "wheels"
"""The folder of the wheels; git ignores it."""

PACKAGES = ("torch-optimi", "heavyball", "schedulefree", "torchao", "pytorch_optimizer", "flashoptim", "opt-einsum")
"""A few MB together. Other requirements come with torch, triton and pandas; bitsandbytes would be 60 MB and more."""

_FOR = ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux2014_x86_64")


def download() -> int:
    """Fill :data:`FOLDER` for Linux and Python 3.12, with the versions of the tests. Return pip's exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()  # two versions of one package could not be installed
    options = ["--no-deps", "--only-binary=:all:", *_FOR, "-d", str(FOLDER)]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, *_pinned()]
    code = subprocess.run(command).returncode
    for wheel in sorted(FOLDER.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e6:5.1f} MB  {wheel.relative_to(ROOT)}")
    return code


def _pinned() -> list[str]:
    """Return the packages, with their versions if the tests' constraints have them."""
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    versions = {line.partition("==")[0].strip().lower().replace("_", "-"): line.strip() for line in lines if "==" in line}
    return [versions.get(name.replace("_", "-"), name) for name in PACKAGES]


def install(site: Path) -> dict[str, str]:
    """Install the wheels of :data:`FOLDER` into ``site``, without a network. Return the environment with that path."""
    files = sorted(map(str, FOLDER.glob("*.whl")))
    if not files:
        return {}
    options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *files], stderr=subprocess.PIPE, text=True)
    if done.returncode:  # rows of measurements name the packages that are not installed
        print(f"the wheels in {FOLDER} were not installed: {done.stderr.strip()}", file=sys.stderr)
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.getenv("PYTHONPATH", "")]))}
