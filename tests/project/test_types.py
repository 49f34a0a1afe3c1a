"""What type checkers and editors see: every public name, with its types, in mypy and in Pyright."""

from __future__ import annotations

import ast
import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_overloads, get_type_hints

import pytest
from catalog import COMBINED, registry

import compiled_optim as co

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "every_public_name.py"


def _mypy(path: Path, *options: str) -> str:
    """Return what mypy says, with a cache for this file's tests alone, in which torch's own files are read once."""
    from mypy import api

    cache = ROOT / ".pytest_cache" / "mypy"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process could not open the cache meanwhile
        options += "--no-error-summary", f"--config-file={ROOT}/pyproject.toml", f"--cache-dir={cache}"
        return api.run([str(path), *options])[0]


@pytest.mark.full
def test_a_type_checker_sees_the_constructor(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nimport compiled_optim as co\n"
        "p = [torch.nn.Parameter(torch.zeros(1))]\n"
        "co.AdamW(p, 1e-3, betas=(0.9, 0.99), lowering='eager')\n"
        "co.AdamW(p, beta=(0.9, 0.99))\n"
        "co.SGD(p, lr=0.1, momentum='much')\n"
    )
    output = _mypy(program)
    errors = [line for line in output.splitlines() if "error" in line]
    assert len(errors) == 2, output
    assert 'Unexpected keyword argument "beta"' in errors[0]
    assert '"momentum"' in errors[1]


def _by_mypy(tmp_path: Path) -> list[tuple[int, str]]:
    errors = re.findall(rf"{SCRIPT.name}:(\d+): error: (.*)", _mypy(SCRIPT, "--strict"))
    return [(int(line), said) for line, said in errors]


def _by_pyright(tmp_path: Path) -> list[tuple[int, str]]:
    """By basedpyright, which brings all that it runs on, in Pyright's own strict mode."""
    settings = {"include": [str(SCRIPT)], "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    settings |= {"pythonVersion": "{}.{}".format(*sys.version_info), "enableTypeIgnoreComments": True}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    errors = [each for each in told["generalDiagnostics"] if each["severity"] == "error"]
    return [(each["range"]["start"]["line"] + 1, each["message"]) for each in errors]


@pytest.mark.full
@pytest.mark.parametrize("check", [_by_mypy, _by_pyright])
def test_type_checkers_find_the_mistakes_and_nothing_else(
    check: Callable[[Path], list[tuple[int, str]]], tmp_path: Path
) -> None:
    wanted = {n for n, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith("# error")}
    found = check(tmp_path)
    assert [(line, said) for line, said in found if line not in wanted] == []
    assert wanted - {line for line, _ in found} == set()


def test_the_script_uses_every_public_name() -> None:
    nodes = [node for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "co"}
    assert {*co.__all__} - used == set()


def test_overloads_say_what_is_declared() -> None:
    """Of a name that is a tuple of numbers in one optimizer and one number in another, they say nothing."""
    *named, _ = map(get_type_hints, get_overloads(co.CompiledOptimizer.hyperparameter))
    told = {name: "tuple" in str(hints["return"]) for hints in named for name in get_args(hints["name"])}
    declared = [(h.name, h.is_tuple) for kind in (*registry(), *COMBINED) for h in kind._declaration.hypers]
    assert told.keys() <= {name for name, _ in declared}
    assert [name for name, is_tuple in declared if told.get(name, is_tuple) != is_tuple] == []
