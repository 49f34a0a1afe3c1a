"""What a release holds: the files of its wheel and of its source distribution."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path

from environment import ROOT


def contents(archive: Path) -> set[str]:
    """The files in a wheel or in a source distribution, without the version that folders and metadata are named after."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = wheel.namelist()
    else:
        with tarfile.open(archive) as source:
            names = [member.name.partition("/")[2] for member in source if member.isfile()]
    version = archive.name.split("-")[1].removesuffix(".tar.gz")
    return {name.replace(f"-{version}.dist-info", ".dist-info") for name in names}


def expected(archive: Path) -> set[str]:
    """What :func:`contents` should return: the package as it is under version control, without its guides, and metadata."""
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
    """What is in one of the two only: ``+`` before files that should not be there, ``-`` before those that are missing."""
    found, wanted = contents(archive), expected(archive)
    return [*(f"+{name}" for name in sorted(found - wanted)), *(f"-{name}" for name in sorted(wanted - found))]
