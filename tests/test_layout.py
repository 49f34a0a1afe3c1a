"""The shape of the code: imports point one way, a rule is short, the engine names no optimizer."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from catalog import registry, ruled, stacked

import compiled_optim as co
from compiled_optim import rule
from compiled_optim.rule import vocabulary

PACKAGE = Path(co.__file__).parent

# A module imports only from rows above its own.
LAYERS = [
    {
        "arguments",
        "watched",
        "traced",
        "torch_internals",
        "static_inputs",
        "referenced_modules",
        "curvature",
        "line_search",
    }
    | {"rule.symbols", "rule.fields", "lowering.entries", "lowering.recent"},
    {"graphs", "kept_graphs", "rule.vocabulary", "rule.rule", "lowering.cache", "lowering.layout", "lowering.partial_sums"}
    | {"sharding"},
    {"rule.__init__", "lowering.cpp_library", "saved_values"},
    {"addresses", "formats"},
    {"hyperparameters", "lowering.rule_step", "lowering.gradient"},
    {"state", "controls"},
    {"plan", "lowering.symbols"},
    {"signature", "parameters", "checkpoint", "schedule", "lowering.coefficients", "lowering.kernel_table"},
    {"events", "lowering.cpp", "lowering.triton"},
    {"lowering.address_rows"},
    {"lowering.interface"},
    {"lowering.square_sums"},
    {"lowering.staged"},
    {"lowering.multi_tensor", "lowering.inductor", "lowering.eager", "lowering.coefficient_table"},
    {"lowering.sparse_rows", "lowering.gathered_rows", "lowering.stacked"},
    {"lowering.choice"},
    {"optimizer"},
    {"optimizers.*", "guards", "named", "staleness"},
    {"recorded_step"},
    {"capture"},
    {"__init__"},
]


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return "optimizers.*" if name.startswith("optimizers.") else name


def _layer(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if module in layer)


def _sources() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.read_text().strip()]


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_imports_point_one_way(path: Path) -> None:
    module = _module(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("compiled_optim"):
            continue
        parent = node.module.removeprefix("compiled_optim").removeprefix(".")
        names = [f"{parent}.{a.name}".removeprefix(".") for a in node.names] if parent in ("", "lowering") else [parent]
        names = ["rule.__init__" if name == "rule" else name for name in names]
        for imported in names:
            target = "optimizers.*" if imported.startswith("optimizers.") else imported
            allowed = _layer(target) < _layer(module) or target == module == "optimizers.*"
            assert allowed, f"{module} imports {imported}"  # an optimizer may be another one with a choice made


def test_every_module_has_a_layer() -> None:
    assert {_module(p) for p in _sources()} == set().union(*LAYERS)


def test_no_module_name_says_nothing() -> None:
    assert not [p for p in _sources() if re.fullmatch(r"utils?|common|helpers?|misc", p.stem)]


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_every_language_has_every_word(language: str) -> None:
    words = {n for n, f in vars(vocabulary).items() if inspect.isfunction(f) and f.__module__ == vocabulary.__name__}
    assert set(vocabulary.__all__) == words == words & set(rule.__all__)
    text = (PACKAGE / "lowering" / f"{language}.py").read_text()
    assert set(re.findall(r"\b([a-z_]+)_\((?:T|x|bool|condition|beta)\b", text)) == words


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


@pytest.mark.parametrize("optimizer", registry(), ids=lambda c: c.__name__)
class TestOptimizer:
    def test_cites_its_source(self, optimizer: type[co.CompiledOptimizer]) -> None:
        assert re.search(r"arXiv:\d{4}\.\d{4,5}|ICML|ICLR|JMLR|NeurIPS|Coursera|doi:", optimizer.__doc__)

    def test_engine_does_not_name_it(self, optimizer: type[co.CompiledOptimizer]) -> None:
        for path in _sources():
            if not _module(path).startswith(("optimizers", "__init__")):
                code = ast.unparse(_without_docstrings(ast.parse(path.read_text())))
                assert optimizer.__name__ not in re.findall(r"\w+", code), path

    def test_constructor_is_explicit(self, optimizer: type[co.CompiledOptimizer]) -> None:
        signature = inspect.signature(optimizer)
        assert next(iter(signature.parameters)) == "params"
        assert signature.parameters["lr"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert signature.parameters["lowering"].kind is inspect.Parameter.KEYWORD_ONLY


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@pytest.mark.parametrize("optimizer", [c for c in registry() if hasattr(torch.optim, c.__name__)], ids=lambda c: c.__name__)
def test_signature_begins_like_torchs(optimizer: type[co.CompiledOptimizer]) -> None:
    """Names, order, defaults and kinds of torch.optim's parameters; ours add only keyword-only ones."""
    torch_class = getattr(torch.optim, optimizer.__name__)
    theirs = list(inspect.signature(torch_class).parameters.values())
    ours = inspect.signature(optimizer).parameters
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for parameter in theirs:
        assert ours[parameter.name].default == parameter.default, parameter.name
        assert ours[parameter.name].kind == parameter.kind, parameter.name


def test_a_type_checker_sees_the_constructor(tmp_path: Path) -> None:
    from mypy import api

    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nimport compiled_optim as co\n"
        "p = [torch.nn.Parameter(torch.zeros(1))]\n"
        "co.AdamW(p, 1e-3, betas=(0.9, 0.99), lowering='eager')\n"
        "co.AdamW(p, beta=(0.9, 0.99))\n"
        "co.SGD(p, lr=0.1, momentum='much')\n"
    )
    output, _, _ = api.run([str(program), "--no-error-summary", f"--cache-dir={tmp_path}/cache"])
    errors = [line for line in output.splitlines() if "error" in line]
    assert len(errors) == 2, output
    assert 'Unexpected keyword argument "beta"' in errors[0]
    assert '"momentum"' in errors[1]
