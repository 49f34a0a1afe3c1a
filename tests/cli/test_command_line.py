"""The program: its commands, help, errors and exit statuses, and what it imports."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_optim as co
from compiled_optim.cli import COMMANDS, main

FOLDER = Path(co.__file__).parent / "cli"
ROOT = FOLDER.parents[1]
BELOW = {"cli", "simulated", "interop"}
"""Folders that commands may import from: their own, and two that have no public name in ``compiled_optim`` itself."""


@pytest.fixture(autouse=True)
def _uncolored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def _process(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compiled_optim", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables)


def test_every_command_is_there() -> None:
    assert COMMANDS == ("convert", "diff", "doctor", "explain", "inspect", "list", "lowering")
    assert {path.stem for path in FOLDER.glob("*.py") if "\ndef run(" in path.read_text()} == {*COMMANDS}


def test_help_lists_the_commands_and_imports_little() -> None:
    code = (
        "import sys\nfrom compiled_optim.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'matplotlib', 'pandas', 'rich', 'safetensors', 'torchao', 'torch._inductor'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n    {name} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--json" in said
    assert "--traceback" in said


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["lowering", "--arch", "sm_10"], ["inspect"]])
def test_wrong_options_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: compiled-optim")


ERRORS = {
    "list adamm": "no optimizer is called 'adamm'; did you mean adam",
    "explain nowhere": "'nowhere' is not package.module:name, such as torch.nn:Transformer",
    "explain torch.nn:Lineal": "torch.nn:Lineal: AttributeError: module 'torch.nn' has no attribute 'Lineal'",
    "explain torch.nn:Linear": "torch.nn:Linear: TypeError: Linear.__init__() missing 2 required positional arguments",
    "explain torch.nn:Linear(f())": "'f()' is not a plain value",
    "explain torch.nn:functional": "torch.nn:functional is a module, not a torch.nn.Module",
    "explain torch.nn:Linear(4,4) --set lr=-1 --optimizer sgd": "Invalid learning rate: -1 (the argument lr must be >= 0",
    "explain torch.nn:Linear(4,4) --set lr --optimizer sgd": "--set takes name=value, got 'lr'",
    "lowering adamm --arch cpu --shapes 4": "no optimizer is called 'adamm'",
    "lowering adamw --shapes 4x": "--shapes must be gpt2, vit-tiny, or such as 768x3072,768*12; got '4x'",
    "lowering adamw --shapes 0": "--shapes must be gpt2, vit-tiny, or such as 768x3072,768*12; got '0'",
    "inspect nowhere.pt": "[Errno 2] No such file or directory: 'nowhere.pt'",
    "diff adamw nowhere/a.pt": "[Errno 2] No such file or directory: 'adamw'",
}


@pytest.mark.parametrize("given", ERRORS)
def test_errors_are_one_line_that_says_what(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = given.split(" ")
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"compiled-optim {arguments[0]}: {ERRORS[given]}")
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_traceback() -> None:
    with pytest.raises(ValueError, match="no optimizer is called"):
        main(["list", "adamm", "--traceback"])


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("rich", ["list"], "a table needs rich: pip install 'compiled-optim[cli]'"),
        ("triton", ["lowering"], "compiling for a GPU needs triton: pip install triton"),
    ],
)
def test_a_missing_package_is_named(
    module: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _hide(module, monkeypatch)
    assert main(arguments) == 2
    assert f"compiled-optim {arguments[0]}: {said}" in capsys.readouterr().err


def test_json_needs_no_other_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _hide("rich", monkeypatch)
    for arguments in (["list", "adamw"], ["explain", "torch.nn:Linear(4,4)"]):
        assert main([*arguments, "--json"]) in (0, 1)
        assert json.loads(capsys.readouterr().out)


def _hide(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])


def test_a_command_imports_public_names_alone() -> None:
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for name in [name for name in names if name.partition(".")[0] == "compiled_optim" and "." in name]:
                assert name.split(".")[1] in BELOW, f"{path.name} imports {name}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "co":
                assert node.attr in {*co.__all__, "__version__"}, f"{path.name} uses co.{node.attr}"


@pytest.mark.full
def test_in_a_process() -> None:
    done = _process("list", "*muon*", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [each["name"] for each in json.loads(done.stdout)] == ["muon", "muon_adamw", "nor_muon"]
    done = _process("list", "nothing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.full
def test_whoever_reads_may_stop(tmp_path: Path) -> None:
    command = f"{sys.executable} -m compiled_optim list sgd --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[\n", "")


README = FOLDER / "README.md"
EXAMPLES = dict.fromkeys(re.findall(r"(?:^    |`)compiled-optim ([^`\n]+)", README.read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_readme_is_true(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("A", "B", "IN", "CHECKPOINT"):
        torch.save(co.AdamW({"weight": torch.ones(2, requires_grad=True)}).state_dict(), name)
    arguments = ["named" if word == "FORM" else word for word in shlex.split(command)]
    assert main(arguments) == (1 if "torch.adamw" in arguments else 0)
    assert capsys.readouterr().err == ""


def test_the_readme_has_every_command() -> None:
    assert {command.split()[0] for command in EXAMPLES} == {*COMMANDS}
