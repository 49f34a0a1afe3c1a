"""tools/versions and what tools/test does with other versions of torch, without installing anything."""

from __future__ import annotations

import csv
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import environment
import pytest
import suite
import torch_versions
from environment import RELEASES, Release
from torch_versions import Outcome

PYPROJECT = (environment.ROOT / "pyproject.toml").read_text()
PYTHONS = {r.python: sys.executable for r in RELEASES}

TESTS = """
import pytest
def test_right(): pass
def test_skipped(): pytest.skip("no")
class TestGroup:
    @pytest.mark.parametrize("x", [1, 2])
    def test_wrong(self, x): assert x == 2, "too bad"
@pytest.fixture
def broken(): raise ValueError("never made")
def test_without(broken): pass
"""


def _report(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    options = ["-p", "no:cacheprovider", "-q", "-n", "1", f"--junitxml={report}", "--override-ini=junit_family=xunit1"]
    subprocess.run([sys.executable, "-m", "pytest", *options, "test_it.py"], cwd=tmp_path, capture_output=True)
    return report


def test_the_table_is_what_the_package_says_it_supports() -> None:
    assert f'"torch>={RELEASES[0].torch.rpartition(".")[0]}"' in PYPROJECT
    assert f'"triton>={RELEASES[0].triton.rpartition(".")[0]};' in PYPROJECT
    named = {*re.findall(r"Python :: (3\.\d+)", PYPROJECT)}
    assert {r.python for r in RELEASES} == named
    assert f'requires-python = ">={min(named, key=torch_versions._numbers)}"' in PYPROJECT
    assert [*RELEASES] == sorted(RELEASES, key=lambda r: torch_versions._numbers(r.torch))


@pytest.mark.parametrize(
    ("asked", "available", "expected"),
    [
        ([], [], [r.torch for r in RELEASES]),
        ([], [RELEASES[-1].torch, "2.10.0"], [r.torch for r in RELEASES]),
        ([], ["2.99.0", "2.98.0"], [*(r.torch for r in RELEASES), "2.99.0"]),
        (["2.11", "2.98"], ["2.99.0", "2.98.1", "2.98.0"], ["2.11.0", "2.98.1"]),
        (["2.99.0"], ["2.99.1", "2.99.0"], ["2.99.0"]),
    ],
)
def test_versions_are_the_tables_and_the_newest_or_those_asked_for(
    asked: list[str], available: list[str], expected: list[str]
) -> None:
    assert [r.torch for r in torch_versions.chosen(asked, available)] == expected


def test_a_version_that_is_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch_versions, "on_index", lambda python: ["2.12.1"])
    assert torch_versions.main(["2.1"]) == 2
    assert "nor the package index has a torch 2.1\n" in capsys.readouterr().err


def test_a_release_that_is_not_in_the_table_has_the_triton_that_it_asks_for() -> None:
    assert environment.release("2.99.0") == Release("2.99.0", "", RELEASES[-1].python)
    assert environment.release("2.11.1") == RELEASES[0]._replace(torch="2.11.1")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0\n", ["2.15.0", "2.13.0"]), ("", [])],
)
def test_the_index_is_asked(printed: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pip = tmp_path / "python"
    pip.write_text(
        f"#!{sys.executable}\nimport sys\nassert sys.argv[1:5] == ['-m', 'pip', 'index', 'versions']\nprint({printed!r})"
    )
    pip.chmod(0o700)
    assert torch_versions.on_index(str(pip)) == expected
    assert ("could not be searched" in capsys.readouterr().err) == (not expected)


def test_pythons_are_found_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(place: str, text: str) -> str:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        return str(path)

    put("bin/python3.28", "echo 3.28 /on/path")
    put("bin/python3.27", "exit 127")  # one of pyenv's that is not chosen here
    for patch in (2, 10):
        put(f"pyenv/versions/3.29.{patch}/bin/python", f"echo 3.29 /pyenv/{patch}")
    monkeypatch.setattr(
        environment.shutil, "which", lambda name: str(p) if (p := tmp_path / "bin" / name).exists() else None
    )
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    given = put("mine", "echo 3.28 /given")
    found = environment.interpreters()
    own = ".".join(map(str, sys.version_info[:2]))
    assert found == {own: sys.executable, "3.28": "/on/path", "3.29": "/pyenv/10"}
    assert environment.interpreters([given])["3.28"] == "/given"
    with pytest.raises(ValueError, match="nothing is no Python"):
        environment.interpreters([str(tmp_path / "nothing")])


def test_what_a_report_says(tmp_path: Path) -> None:
    *counts, first = torch_versions.counted(_report(tmp_path))
    assert counts == [2, 2, 1]
    assert first.startswith("test_it.py::TestGroup::test_wrong[1]: AssertionError: too bad")


def _tested(monkeypatch: pytest.MonkeyPatch, report: str, status: int = 0) -> list[list[str]]:
    """Stand-ins for what installs and runs; returns pytest's commands, to which there is a ``report``, if any."""
    commands: list[list[str]] = []

    def python_with(extra: str, torch: str, interpreter: str) -> Path:
        assert (extra, interpreter) == ("test", sys.executable)
        if torch == "2.12.1":
            sys.exit("installing failed")
        return Path(sys.executable)

    def run(python: Path, given: list[list[str]]) -> int:
        commands.extend(given)
        place = Path(next(a for a in given[0] if a.startswith("--junitxml=")).partition("=")[2])
        assert not place.exists()
        if report:
            place.parent.mkdir(exist_ok=True)
            place.write_text(report)
        return status

    monkeypatch.setattr(torch_versions, "python_with", python_with)
    monkeypatch.setattr(torch_versions, "interpreters", lambda given: PYTHONS)
    monkeypatch.setattr(torch_versions, "on_index", lambda python: ["2.99.0"])
    monkeypatch.setattr(suite, "run", run)
    return commands


GOOD = "<testsuites><testsuite><testcase/><testcase><skipped/></testcase></testsuite></testsuites>"
BAD = '<t><testcase/><testcase file="tests/a.py" classname="tests.a" name="b"><failure message="E"/></testcase></t>'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch_versions, "ROOT", tmp_path)
    monkeypatch.setattr(torch_versions, "RESULTS", tmp_path / "versions.csv")
    return tmp_path


def test_every_version_is_tested(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands = _tested(monkeypatch, GOOD)
    assert torch_versions.main(["2.11", "2.99"]) == 0
    assert len(commands) == 2
    assert all("--quick" in command and command[-1] == suite.SENSITIVE[-1] for command in commands)
    head, first, other, remark = capsys.readouterr().out.splitlines()[-4:]
    assert head.split() == ["torch", "triton", "python", "passed", "failed", "skipped", "seconds"]
    assert first.split()[3:6] == other.split()[3:6] == ["1", "0", "1"]
    assert remark.endswith(": not in the table")
    assert not (place / "versions.csv").exists()


@pytest.mark.parametrize(
    ("version", "report", "said"),
    [
        ("2.11", BAD, "tests/a.py::b: E"),
        ("2.11", "", "did not run: pytest's status is 3"),
        ("2.12", GOOD, "did not run: it could not be installed"),
        ("2.15", GOOD, "did not run: no Python 3.13"),
    ],
)
def test_what_goes_wrong_is_said_and_the_status_is_1(
    version: str, report: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tested(monkeypatch, report, status=3)
    monkeypatch.delitem(PYTHONS, "3.13")
    assert torch_versions.main([version]) == 1
    printed = capsys.readouterr()
    assert said in printed.out
    assert ("not found: Python 3.13; --python names its path" in printed.out) == (version == "2.15")
    assert ("installing failed" in printed.err) == (version == "2.12")


def test_results_are_added_to_the_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "revision", lambda: "1234567")
    _tested(monkeypatch, GOOD)
    for _ in range(2):
        torch_versions.main(["--record", "2.11"])
    _tested(monkeypatch, "")
    torch_versions.main(["--record", "2.11"])  # of what did not run there is nothing to say
    with (place / "versions.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row.pop("date")[:2] for row in rows] == ["20", "20"]
    assert rows[0] == rows[1]
    assert {name: rows[0][name] for name in ("passed", "failed", "skipped", "commit")} == {
        "passed": "1",
        "failed": "0",
        "skipped": "1",
        "commit": "1234567",
    }


def test_columns_are_aligned() -> None:
    outcomes = [Outcome("2.9.0", "3.6.0", "3.12.1", 9, 10, 0, 1, "x"), Outcome("2.10.0", "3.10.0", "3.9.0", 200, 0, 0, 1)]
    assert torch_versions.table(outcomes).splitlines() == [
        "torch   triton  python  passed  failed  skipped  seconds",
        "2.9.0   3.6.0   3.12.1       9      10        0        1",
        "2.10.0  3.10.0  3.9.0      200       0        0        1",
        "2.9.0: x",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--full"], [("full", "", "--full"), ("test", "2.11.0", suite.COMPILED[-1])]),
        (["--full", "tests/plan"], [("full", "", "tests/plan")]),
        ([], [("test", "", "--override-ini=console_output_style=classic")]),
        (["--torch", "2.14.1"], [("test", "2.14.1", suite.COMPILED[-1])]),
    ],
)
def test_the_oldest_torch_is_part_of_all_tests(
    arguments: list[str], expected: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = importlib.machinery.SourceFileLoader("tools_test", str(environment.ROOT / "tools" / "test"))
    module: Any = importlib.util.module_from_spec(importlib.util.spec_from_loader("tools_test", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    runs: list[tuple[str, str, str]] = []
    monkeypatch.setattr(module, "python_with", lambda extra, torch="": (extra, torch))
    monkeypatch.setattr(module, "run", lambda python, commands: runs.append((*python, commands[-1][-1])))
    monkeypatch.setattr(sys, "argv", ["tools/test", *arguments])
    assert not module.main()
    assert runs == expected
    monkeypatch.setattr(module, "run", lambda python, commands: runs.clear() or 5)
    assert module.main() == 5
