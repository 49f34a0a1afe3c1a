"""What the package needs of a system, and of Python's own modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib
from new_process import printed_by
from without_unix import OF_UNIX

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "compiled_optim"


def _modules() -> list[str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


def test_no_module_imports_what_windows_lacks() -> None:
    assert len(names := _modules()) > 100
    assert int(printed_by("without_unix", *names)) == len(names)


@pytest.mark.parametrize("name", OF_UNIX)
def test_no_module_names_them_at_its_start(name: str) -> None:
    """An import in a function is for systems that have it."""
    wanted = re.compile(rf"^(import|from) {name}\b", re.MULTILINE)
    assert [path.name for path in PACKAGE.rglob("*.py") if wanted.search(path.read_text())] == []


def test_torch_compile_works_with_the_oldest_typing_extensions() -> None:
    """Inductor fails with 4.10 on Python 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (floor,) = [each for each in project["dependencies"] if each.startswith("typing-extensions")]
    assert tuple(map(int, re.findall(r"\d+", floor))) >= (4, 12)


def test_the_readme_for_contributors_says_how_budgets_move() -> None:
    """They are raised where a commit says why."""
    for path in (ROOT / "tests" / "README.md", ROOT / "README.md", ROOT / "tests" / "project" / "test_layout.py"):
        assert not re.search(r"limits\s+only\s+go\s+down", path.read_text())
