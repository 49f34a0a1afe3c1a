"""A release: what its archives hold, what PyPI shows of it, and what it says of itself."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import distribution
import pytest

import compiled_optim as co

ROOT = distribution.ROOT
CHANGELOG = ROOT / "compiled_optim" / "CHANGELOG.md"
HEADER = "compiled_optim/lowering/kernels/words.h"
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"


def _checkout(to: Path) -> None:
    """A copy of what is under version control, and what lies in a folder where somebody works."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in (
        "compiled_optim/memory/watch.so",
        "compiled_optim/__pycache__/model.pyc",
        "tests/step/test_mine.py",
        *listed,
    ):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file() and name in listed:
            shutil.copy(ROOT / name, to / name)
        else:
            (to / name).touch()


@pytest.mark.parametrize(("forgotten", "missing"), [("", []), ('"lowering/kernels/words.h", ', [f"-{HEADER}"])])
def test_archives_hold_the_package_and_nothing_else(forgotten: str, missing: list[str], tmp_path: Path) -> None:
    _checkout(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text(project.read_text().replace(forgotten, ""))
    (tmp_path / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, check=True)
    wheel, source = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix == ".gz")
    assert wheel.name == f"compiled_optim-{co.__version__}-py3-none-any.whl"
    assert distribution.differences(wheel) == distribution.differences(source) == missing
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"compiled_optim-{co.__version__}.dist-info/METADATA"))
    assert metadata["Version"] == co.__version__
    assert metadata["License-Expression"] == "MIT"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_version_is_written_once() -> None:
    sources = [ROOT / "pyproject.toml", *(ROOT / "compiled_optim").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    holders = [path for path in sources if re.search(rf"(?<![\d.]){re.escape(co.__version__)}(?![\d.])", path.read_text())]
    assert holders == [ROOT / "compiled_optim" / "__init__.py"]


def test_the_changelog_begins_with_this_version() -> None:
    releases = re.findall(r"^## (\d+\.\d+\.\d+) - (unreleased|\d{4}-\d\d-\d\d)$", CHANGELOG.read_text(), re.MULTILINE)
    assert releases[0][0] == co.__version__
    assert [date for _, date in releases[1:] if date == "unreleased"] == []


def test_the_changelog_lists_every_optimizer() -> None:
    words = {*re.findall(r"\w+", CHANGELOG.read_text())}
    assert {co.optimizer_info(name).cls.__name__ for name in co.list_optimizers()} <= words


@pytest.mark.full
def test_a_release_can_be_installed_and_used() -> None:
    done = subprocess.run(["tools/package"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^\w.* (yes|no) ", done.stdout, re.MULTILINE) == ["yes"] * 6
