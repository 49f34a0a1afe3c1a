"""The shape of the code: imports point one way, a rule is short, the engine names no optimizer."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import re
import textwrap
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from catalog import COMBINED, registry, ruled, stacked

import compiled_optim as co
from compiled_optim import rule
from compiled_optim.rule import symbols, vocabulary

PACKAGE = Path(co.__file__).parent
ROOT = Path(__file__).resolve().parents[2]

# A folder, or a module of the package itself, imports from itself and from rows above its own.
FLOORS = [
    {"memory"},
    {"rule"},
    {"groups"},
    {"state"},
    {"checkpoint", "plan"},
    {"lowering.kernels"},
    {"lowering"},
    {"step"},
    {"saved_optimizer", "model"},
    {"optimizer"},
    {"by_name", "optimizers", "release", "step_module"},
    {"capture", "catalogue", "full_precision", "reports", "simulated"},
    {"interop"},
    {"cli"},
    {"__main__"},
    {""},
]

WINGS = {"cli", "interop", "simulated"}
"""The floors that the core, which is all others, works without."""
IMPORTS_OF_WINGS = {("__main__", "cli"), ("", "interop.from_torch"), ("", "interop.optimi")}
"""The only modules of the core that import a wing, and what they import of it; the package does for type checkers alone."""


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def _floor(module: str) -> tuple[int, str]:
    """The row of the floor whose name ``module`` begins with, the longest such name, and the name."""
    known = {name: row for row, names in enumerate(FLOORS) for name in names}
    parts = module.split(".")
    return next((known[name], name) for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in known)


def _sources() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.read_text().strip()]


def _imported(path: Path) -> set[str]:
    """The modules of the package that a module imports, at its top or in its functions."""
    modules = {_module(p) for p in PACKAGE.rglob("*.py")}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names if a.name.startswith("compiled_optim.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "compiled_optim":
            parent = node.module.partition(".")[2]
            full = {a.name: f"{parent}.{a.name}".removeprefix(".") for a in node.names}
            found |= {name if name in modules else parent for name in full.values()}
    return found


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_imports_point_one_way(path: Path) -> None:
    own, here = _floor(_module(path))
    for imported in _imported(path):
        row, there = _floor(imported)
        assert row < own or there == here, f"{_module(path)} imports {imported}"


def test_no_import_circle() -> None:
    sorter = graphlib.TopologicalSorter({_module(p): _imported(p) for p in _sources()})
    sorter.prepare()  # raises CycleError, which names the circle


def test_the_core_imports_no_wing() -> None:
    core = [path for path in _sources() if _floor(_module(path))[1] not in WINGS]
    imports = {(_module(path), name) for path in core for name in _imported(path) if _floor(name)[1] in WINGS}
    assert imports == IMPORTS_OF_WINGS


def test_one_module_of_the_core_imports_a_wing_by_name() -> None:
    calls = [f'import_module("compiled_optim.{wing}' for wing in WINGS]
    assert [_module(p) for p in _sources() if any(call in p.read_text() for call in calls)] == ["checkpoint.read"]


def test_every_floor_has_modules() -> None:
    assert {_floor(_module(p))[1] for p in _sources()} == set().union(*FLOORS)


def test_the_floor_plan_lists_every_floor_from_the_top() -> None:
    listed = [
        name.removesuffix("/").removesuffix(".py") for name in re.findall(r"^    (\S+)  +\S", co.__doc__, re.MULTILINE)
    ]
    assert sorted(listed) == sorted({_module(p).partition(".")[0] for p in _sources()} - {""})
    rows = [_floor(name)[0] for name in listed]
    assert rows == sorted(rows, reverse=True)


BUDGET = {
    "": 2770,
    "capture": 1135,
    "checkpoint": 1268,
    "cli": 1189,
    "groups": 1809,
    "interop": 2193,
    "lowering": 5530,
    "memory": 1340,
    "optimizers": 2061,
    "plan": 1272,
    "reports": 942,
    "rule": 3202,
    "simulated": 755,
    "step": 1923,
}
"""Lines of each folder's modules; "" are those beside the folders. A commit of its own raises one, and says why."""


def test_no_floor_is_over_its_budget() -> None:
    lines = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        lines[path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""] += len(path.read_text().splitlines())
    assert lines.keys() == BUDGET.keys()
    assert {name: count for name, count in lines.items() if count > BUDGET[name]} == {}
    assert {name: count for name, count in lines.items() if count < BUDGET[name] - 100} == {}  # it follows downwards


_DECORATED = (property, classmethod, staticmethod, functools.cached_property)


def _documented(methods: dict[str, object]) -> set[str]:
    return {name for name, method in methods.items() if inspect.getdoc(getattr(method, "__func__", method))}


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_every_public_method_says_what_it_does(path: Path) -> None:
    """In its class, in a class that it derives from, or in a protocol of the package. A rule's functions need not."""
    module = importlib.import_module(f"compiled_optim.{_module(path)}".rstrip("."))
    for cls in (c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__):
        own = {name for name, member in vars(cls).items() if callable(member) or isinstance(member, _DECORATED)}
        public = set() if cls.__name__.startswith("_") else {name for name in own if not name.startswith("_")}
        said = set().union(*(_documented(dict(vars(base))) for base in (*cls.__mro__, *_protocols())))
        assert public - said <= ({"coefficients", "reduce", "adapt", "update"} if hasattr(cls, "_rule") else set()), cls


def _protocols() -> list[type]:
    modules = [importlib.import_module(f"compiled_optim.{_module(p)}".rstrip(".")) for p in _sources()]
    return [c for m in modules for c in vars(m).values() if inspect.isclass(c) and getattr(c, "_is_protocol", False)]


SECOND_NAMES = {"mup.Adam", "mup.AdamW", "mup.SGD"}
"""Classes, by module, that have another one's name: muP's optimizers are called as ``co.mup.AdamW``."""


def test_a_class_or_type_has_a_name_of_its_own() -> None:
    """A leading underscore makes no other name: text and conversations leave it out."""
    named: dict[str, list[str]] = {}
    for path in _sources():
        for node in ast.parse(path.read_text()).body:
            is_alias = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"
            if isinstance(node, ast.ClassDef) or is_alias:
                name = node.name if isinstance(node, ast.ClassDef) else node.target.id
                if (full := f"{path.stem}.{name}") not in SECOND_NAMES:
                    named.setdefault(name.lstrip("_"), []).append(full)
    assert [where for where in named.values() if len(where) > 1] == []


def test_no_module_name_says_nothing() -> None:
    assert not [p for p in _sources() if re.fullmatch(r"utils?|common|helpers?|misc", p.stem)]


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_every_language_has_every_word(language: str) -> None:
    words = symbols.WORDS.keys()
    assert words - symbols.OF_FORMATS.keys() == words & set(rule.__all__)
    assert words & set(rule.__all__) == {n for n, f in vars(vocabulary).items() if _is_own_function(f, vocabulary)}
    module = importlib.import_module(f"compiled_optim.lowering.kernels.{language}")
    dialects = [d for d in vars(module).values() if isinstance(d, symbols.Dialect)]
    (spelled_out,) = {d.spelled_out for d in dialects}
    defined = set(re.findall(r"^(?:def|.*inline [\w]+) ([a-z_0-9]+)_\(", module.WORDS, re.MULTILINE))
    defined |= {name for d in dialects for name, _ in d.calls}
    # A maximum of groups is a loop in C++.
    assert defined - {"shift_right", "group_max"} == words - {"group_max"} - symbols.OF_MATRICES - spelled_out


def _is_own_function(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _code_lines(text: str) -> int:
    """Lines that are neither blank, nor comment, nor inside a docstring."""
    tree = ast.parse(text)
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for n, line in lines if n not in docstrings and line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize("optimizer", [*ruled(), *stacked()], ids=lambda c: c.__name__)
class TestRule:
    def test_is_short(self, optimizer: type[co.CompiledOptimizer]) -> None:
        assert _code_lines(Path(inspect.getfile(optimizer)).read_text()) < 60
        assert _code_lines(textwrap.dedent(inspect.getsource(optimizer.update))) - 1 < 15


@pytest.mark.parametrize("optimizer", [*registry(), *COMBINED], ids=lambda c: c.__name__)
class TestOptimizer:
    def test_cites_its_source(self, optimizer: type[co.CompiledOptimizer]) -> None:
        assert re.search(r"arXiv:\d{4}\.\d{4,5}|ICML|ICLR|JMLR|NeurIPS|Coursera|doi:", optimizer.__doc__)

    def test_engine_does_not_name_it(self, optimizer: type[co.CompiledOptimizer]) -> None:
        assert not [path for path, words in _words_of_engine().items() if optimizer.__name__ in words]

    def test_constructor_is_explicit(self, optimizer: type[co.CompiledOptimizer]) -> None:
        signature = inspect.signature(optimizer)
        assert next(iter(signature.parameters)) == "params"
        assert signature.parameters["lr"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert signature.parameters["lowering"].kind is inspect.Parameter.KEYWORD_ONLY


@functools.cache
def _words_of_engine() -> dict[Path, set[str]]:
    """The words of each module's code, but of those that have optimizers, or know another package's."""
    sources = [
        p
        for p in _sources()
        if not _module(p).startswith(("optimizers.", "interop.")) and _module(p) not in ("", "catalogue")
    ]
    return {p: set(re.findall(r"\w+", ast.unparse(_without_docstrings(ast.parse(p.read_text()))))) for p in sources}


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def test_every_file_of_the_package_is_installed() -> None:
    """setuptools takes Python files by itself, and others only where ``pyproject.toml`` lists them. READMEs stay here."""
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    listed = re.search(r"package-data\]\ncompiled_optim = (\[.*\])", text)
    files = (p for p in PACKAGE.rglob("*.*") if p.suffix not in (".py", ".pyc") and p.name != "README.md")
    others = {str(p.relative_to(PACKAGE)) for p in files}
    assert set(ast.literal_eval(listed[1])) == others
