"""The virtual environments of the tools, without installing anything."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path
from typing import Any

import environment
import pytest


@pytest.mark.parametrize(
    ("torch", "pins", "absent"),
    [
        ("", ["torch==2.13.0", "triton==3.7.1", "numpy==2.4.6"], []),
        ("2.11.0", ["torch==2.11.0", "triton==3.6.0"], ["torch==2.13.0", "triton==3.7.1", "numpy==2.4.6"]),
    ],
)
def test_an_environment_has_the_torch_that_is_named(
    torch: str, pins: list[str], absent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/constraints.txt"):
        (tmp_path / name).write_text((environment.ROOT / name).read_text())
    commands: list[list[str]] = []

    def run(command: list[Any], **_: Any) -> None:
        commands.append([*map(str, command)])

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(venv, "create", lambda directory, **_: directory.mkdir(exist_ok=True))
    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        python = environment.python_with("test", torch)
    directory = python.parent.parent
    assert directory.name == (f".venv-test-{torch}" if torch else ".venv-test")
    install = commands.pop(0)
    constraints = Path(install[install.index("-c") + 1]).read_text().splitlines()
    assert {*pins, "pytest==9.2.0"} <= {*constraints}
    assert not {*absent} & {*constraints}
    assert ("numpy<2.4" in install) == bool(torch)
    assert any("timm" in command for command in commands) == (not torch)
    assert len(commands) == (not torch)
    with (tmp_path / "tools" / "constraints.txt").open("a") as file:
        file.write("late==1.0\n")
    environment.python_with("test", torch)
    assert any("-e" in command for command in commands)
