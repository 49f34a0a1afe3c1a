"""The virtual environments of the tools, without installing anything."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import environment
import progress
import pytest


@pytest.mark.parametrize(
    ("torch", "pins", "absent"),
    [
        ("", ["torch==2.13.0", "triton==3.7.1", "numpy==2.4.6"], []),
        ("2.11.0", ["torch==2.11.0", "triton==3.6.0"], ["torch==2.13.0", "triton==3.7.1", "numpy==2.4.6"]),
        ("2.99.0", ["torch==2.99.0"], ["torch==2.13.0", "triton==3.7.1", "triton==", "numpy==2.4.6"]),
    ],
)
def test_an_environment_has_the_torch_that_is_named(
    torch: str, pins: list[str], absent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/constraints.txt"):
        (tmp_path / name).write_text((environment.ROOT / name).read_text())
    commands: list[list[str]] = []

    def run_quietly(given: list[list[Any]], title: str, log: Path) -> None:
        assert title == f"installing into {log.parent.name} (once)"
        commands.extend([*map(str, command)] for command in given)

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "_run_quietly", run_quietly)
    monkeypatch.setattr(environment, "interpreters", lambda: {"3.12": "/a/python"})
    for _ in range(2):
        python = environment.python_with("full", torch)
    directory = python.parent.parent
    assert directory.name == (f".venv-full-{torch}" if torch else ".venv-full")
    made, install = commands.pop(0), commands.pop(0)
    assert made == ["/a/python" if torch == "2.11.0" else sys.executable, "-m", "venv", str(directory)]
    constraints = Path(install[install.index("-c") + 1]).read_text().splitlines()
    assert {*pins, "pytest==9.2.0"} <= {*constraints}
    assert not {*absent} & {*constraints}
    assert ("numpy<2.4" in install) == bool(torch)
    assert any("timm" in command for command in commands) == (not torch)
    assert len(commands) == (not torch)
    with (tmp_path / "tools" / "constraints.txt").open("a") as file:
        file.write("late==1.0\n")
    environment.python_with("full", torch)
    assert any("-e" in command for command in commands)


def _links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let environments be made in a folder, of which nothing is there but the link to a Python; the commands for it."""
    commands: list[list[str]] = []

    def run_quietly(given: list[list[Any]], title: str, log: Path) -> None:
        commands.append([*map(str, given[0])])
        link = log.parent / "bin" / "python"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(commands[-1][0])

    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/constraints.txt"):
        (tmp_path / name).write_text((environment.ROOT / name).read_text())
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "_run_quietly", run_quietly)
    return commands


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_another_python_makes_an_environment_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = _links(tmp_path, monkeypatch)
    for name in ("one", "other"):
        (tmp_path / name).touch()
        for _ in range(2):
            environment.python_with("test", "2.11.0", str(tmp_path / name))
    directory = str(tmp_path / ".venv-test-2.11.0")
    assert commands == [
        [str(tmp_path / "one"), "-m", "venv", directory],
        [str(tmp_path / "other"), "-m", "venv", "--clear", directory],
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_the_torch_of_the_constraints_has_no_other_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = _links(tmp_path, monkeypatch)
    assert environment.python_with("test", "2.13.0", "/a/python") == environment.python_with("test")
    assert [command[0] for command in commands] == [sys.executable]


def _printing(text: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.stderr.write('noise'); sys.exit({status})"]


def test_what_an_installation_prints_is_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "install.log"
    environment._run_quietly([_printing("Collecting a"), _printing("Collecting b")], "installing", log)
    assert capfd.readouterr() == ("installing\n", "")
    assert re.findall("Collecting .|noise", log.read_text()) == ["Collecting a", "noise", "Collecting b", "noise"]


def test_what_an_installation_prints_is_shown_when_it_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "install.log"
    commands = [_printing("Collecting a"), _printing("no such version", status=1), _printing("Collecting b")]
    with pytest.raises(SystemExit, match=r"Collecting a(.|\n)*no such version(.|\n)*installing failed") as raised:
        environment._run_quietly(commands, "installing", log)
    assert str(log) in str(raised.value)
    assert capfd.readouterr() == ("installing\n", "")
    assert "Collecting b" not in log.read_text()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_rewritten_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "11")
    terminal = _Terminal()
    line = progress.Line(terminal)
    line.show("much too long for it")
    line.show("short")
    line.clear()
    assert terminal.getvalue() == "much too l\rshort     \r          \r"


def test_a_log_has_a_line_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", iter([5.0, 34.0, 35.0, 36.0, 80.0]).__next__)
    log = io.StringIO()
    line = progress.Line(log, every=30)
    for text in "abcde":
        line.show(text)
        line.clear()
    assert log.getvalue() == "a\nc\ne\n"
