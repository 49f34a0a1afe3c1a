"""The files of a release: those of its wheel and of its source distribution."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path

from environment import ROOT


def contents(archive: Path) -> set[str]:
    """Return the files in a wheel or in a source distribution, without the version in the names of folders."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = wheel.namelist()
    else:
        with tarfile.open(archive) as source:
            names = [member.name.partition("/")[2] for member in source if member.isfile()]
    version = archive.name.split("-")[1].removesuffix(".tar.gz")
    return {name.replace(f"-{version}.dist-info", ".dist-info") for name in names}


def expected(archive: Path) -> set[str]:
    """Return the expected :func:`contents`: the package's files under version control except READMEs, and metadata."""
    listed = subprocess.run(["git", "ls-files", "compiled_optim"], cwd=ROOT, capture_output=True, text=True, check=True)
    package = {name for name in listed.stdout.split() if not name.endswith("README.md")}
    both = ["entry_points.txt", "top_level.txt"]
    if archive.suffix == ".whl":
        folder, names = "compiled_optim.dist-info", ["METADATA", "RECORD", "WHEEL", "licenses/LICENSE"]
        return package | {f"{folder}/{name}" for name in [*names, *both]}
    folder, names = "compiled_optim.egg-info", ["PKG-INFO", "SOURCES.txt", "dependency_links.txt", "requires.txt"]
    beside = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    return package | beside | {f"{folder}/{name}" for name in [*names, *both]}


def differences(archive: Path) -> list[str]:
    """Return the differences from :func:`expected`: ``+`` before unexpected files, ``-`` before missing ones."""
    packed, wanted = contents(archive), expected(archive)
    return [*(f"+{name}" for name in sorted(packed - wanted)), *(f"-{name}" for name in sorted(wanted - packed))]
