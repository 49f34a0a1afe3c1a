"""``tools/mutants``: what it changes at random, and that it sees whether a test notices."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A text: 1 + 1."""

from typing import Any


def kept(x: Any = 3, *, is_on: bool = True) -> int:
    """Return 2."""
    if x > 1 and is_on:
        print(x)
        return x + 1
    assert x, "no 1"
    if not x:
        raise ValueError(f"{x + 1} is not {x == 2}")
    return x * 2
'''


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    return runpy.run_path(str(ROOT / "tools" / "mutants"), {"ROOT": ROOT})


def test_each_mutant_is_another_program(tool: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    found = [*tool["mutants"](path)]
    for mutant in found:
        text = SOURCE[: mutant.offset] + mutant.new + SOURCE[mutant.offset + len(mutant.old) :]
        assert SOURCE[mutant.offset :].startswith(mutant.old)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))
    changes = {(mutant.old, mutant.new) for mutant in found}
    assert changes == {
        ("3", "(4)"),
        ("True", "(False)"),
        ("x > 1 and is_on", "(x > 1 or is_on)"),
        ("x > 1 and is_on", "(not (x > 1 and is_on))"),
        ("x > 1", "(x >= 1)"),
        ("1", "(2)"),
        ("print(x)", "(None)"),
        ("x + 1", "(x - 1)"),
        ("x + 1", "(None)"),
        ("not x", "(x)"),
        ("not x", "(not not x)"),
        ("x * 2", "(x / 2)"),
        ("x * 2", "(None)"),
        ("2", "(3)"),
    }


def test_every_floor_has_mutants(tool: dict[str, Any]) -> None:
    for floor in (ROOT / "compiled_optim").iterdir():
        if floor.is_dir() and any(floor.glob("[a-z]*.py")):
            paths = [path.relative_to(ROOT) for path in floor.rglob("*.py")]
            assert len([mutant for path in paths for mutant in tool["mutants"](path)]) >= 50


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "seconds", "failure"), [("assert 1 == 1", 300, ""), ("assert 1 == 2", 300, "FAILED"), ("assert 1 == 2", 0, "")]
)
def test_a_change_is_noticed_in_time_or_alive(
    tool: dict[str, Any], tmp_path: Path, line: str, seconds: float, failure: str
) -> None:
    (tmp_path / "tests" / "floor").mkdir(parents=True)
    (tmp_path / "tests" / "floor" / "test_it.py").write_text(f"def test_it():\n    {line}\n")
    options = "def pytest_addoption(parser):\n    parser.addoption('--quick', action='store_true')\n"
    (tmp_path / "tests" / "conftest.py").write_text(options)
    tool["_fails"].__globals__["python_with"] = lambda kind: sys.executable  # this environment, not one of its own
    assert tool["_fails"](tmp_path, "floor", seconds).partition(" ")[0] == failure
