"""Each program of the project finds what it imports in the environment that it runs in."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from readme import RECIPES, needed_extra

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

EXTRAS = {
    "compiled_optim": "",
    "perf": "perf",
    "tests": "test",
    "tests/trainers": "full",
    "compiled_optim/interop": "convert",
    "compiled_optim/cli": "cli",
    "compiled_optim/reports/explain.py": "tables",
    "tools": "",
    "tools/demo": "demo",
    "tools/manual": "docs",
    "tools/recipes": "",
    **{f"tools/recipes/{path.name}": extra for path in RECIPES if (extra := needed_extra(path))},
}
"""What of the repository runs with which extra; without one where that is empty."""

WITHOUT = {
    (
        "compiled_optim/reports/explain.py",
        "rich",
    ): "m = torch.nn.Linear(2, 2); co.explain(m, co.SGD(m.named_parameters())).__rich__()",
    (
        "compiled_optim/cli",
        "rich",
    ): "from compiled_optim.cli import main; raise SystemExit(main(['list']))",
    ("compiled_optim/interop", "safetensors"): "from compiled_optim.interop.convert import convert; import tempfile; "
    "f = tempfile.mkdtemp(); torch.save(co.SGD([torch.nn.Parameter(torch.ones(2))]).state_dict(), f + '/a.pt'); "
    "convert(f + '/a.pt', f + '/a.safetensors', 'safetensors')",
}
"""By place and module, what reaches an import in the package that needs an extra."""


def _programs(place: str) -> Iterator[Path]:
    """The Python files of a place, but for those that another place lists."""
    top = ROOT / place
    others = [ROOT / other for other in EXTRAS if other.startswith(f"{place}/")]
    for path in [top] if top.is_file() else sorted(top.rglob("*")):
        is_python = path.is_file() and (path.suffix == ".py" or (not path.suffix and path.read_bytes()[:2] == b"#!"))
        if is_python and not any(path == other or other in path.parents for other in others):
            yield path


def _imported(path: Path) -> set[str]:
    """The packages that a file imports anywhere, without those of Python and of the repository."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    tops = {name.partition(".")[0] for name in found}
    local = [ROOT, ROOT / "tools", ROOT / "tests", ROOT / "tests" / "support", path.parent]
    own = {p.stem for directory in local for p in directory.iterdir() if p.is_dir() or p.suffix == ".py"}
    return tops - own - sys.stdlib_module_names


def _declared(extra: str) -> set[str]:
    """The distributions that the package or an extra asks for, and those of the extras that this one names."""
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found = set() if not extra else _declared("")
    for requirement in listed:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        found |= set().union(*map(_declared, extras.split(","))) if extras else {name}
    return found


@pytest.mark.full
@pytest.mark.parametrize("place", EXTRAS)
def test_every_import_is_declared(place: str) -> None:
    providers = importlib.metadata.packages_distributions()
    declared = set().union(*map(_declared, EXTRAS[place].split(",")))
    assert list(_programs(place))
    for path in _programs(place):
        for module in _imported(path):
            names = {module.replace("_", "-"), *providers.get(module, ())}
            assert declared & names, f"{path.relative_to(ROOT)} imports {module}"


def _optional() -> set[tuple[str, str]]:
    """The places of the package, with what they import that is neither required nor Python's."""
    providers = importlib.metadata.packages_distributions()
    required = _declared("")
    return {
        (place, module)
        for place in EXTRAS
        if place.startswith("compiled_optim")
        for path in _programs(place)
        for module in _imported(path)
        if not required & {module.replace("_", "-"), *providers.get(module, ())}
    }


def test_every_import_that_needs_an_extra_is_tried_without_it() -> None:
    assert _optional() == WITHOUT.keys()


@pytest.mark.full
@pytest.mark.parametrize(("place", "module"), WITHOUT)
def test_an_error_names_the_extra_that_has_what_is_missing(place: str, module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None\nimport torch, compiled_optim as co\n{WITHOUT[place, module]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    *_, last = done.stderr.splitlines()
    named = re.search(rf"\b{module}\b.*pip install 'compiled-optim\[(\w+)\]'", last)
    assert done.returncode
    assert named is not None, done.stderr
    providers = {module, *importlib.metadata.packages_distributions().get(module, ())}
    assert providers & (_declared(named[1]) - _declared(""))
