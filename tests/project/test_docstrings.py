"""The texts of ``help``: a line for each argument, and nothing internal. How sentences begin, and names that say nothing."""

from __future__ import annotations

import ast
import inspect
import io
import pydoc
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from catalog import COMBINED, registry

import compiled_optim as co

ROOT = Path(__file__).resolve().parents[2]
KINDS = [*registry(), *COMBINED, co.mup.Adam, co.mup.AdamW, co.mup.SGD]


def _explained(kind: type) -> dict[str, str]:
    """Return the texts below ``Args:`` by argument; arguments that are listed together share one."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n)+)", inspect.cleandoc(kind.__doc__ or "") + "\n", re.MULTILINE)
    assert section is not None, kind
    listed = re.findall(r"^    (\w[\w, ]*): (\S.*\n(?:     .*\n)*)", section[1], re.MULTILINE)
    return {name: text for names, text in listed for name in names.split(", ")}


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__qualname__)
def test_every_argument_is_explained_in_a_line(kind: type[co.CompiledOptimizer]) -> None:
    common = _explained(co.CompiledOptimizer)
    specific = [name for name in inspect.signature(kind).parameters if name not in common]
    explained = _explained(kind)
    assert sorted(explained) == sorted(specific)
    assert [name for name, text in explained.items() if text.count("\n") > 1] == []
    assert "help(compiled_optim.CompiledOptimizer)" in " ".join(kind.__doc__.split())


def test_the_common_arguments_are_those_of_an_elementwise_optimizer_that_decays_by_the_gradient_and_of_matrices() -> None:
    explained, of_sgd = {*_explained(co.CompiledOptimizer)}, {*inspect.signature(co.SGD).parameters}
    assert explained - of_sgd == {"stacks", "split"} <= {*inspect.signature(co.Muon).parameters}


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__qualname__)
def test_help_shows_functions_and_properties_that_it_explains(kind: type[co.CompiledOptimizer]) -> None:
    """And no attribute that only the package reads; names with two underscores are Python's."""
    attributes = {
        name: category
        for name, category, _, _ in pydoc.classify_class_attrs(kind)
        if pydoc.visiblename(name, obj=kind) and not name.startswith("__") and name not in dir(torch.optim.Optimizer)
    }
    assert {"hyperparameter", "grad_norm"} <= attributes.keys()
    assert [
        name for name, category in attributes.items() if category == "data" or not pydoc.getdoc(getattr(kind, name))
    ] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__qualname__)
def test_help_leads_into_no_module(kind: type[co.CompiledOptimizer]) -> None:
    """Where a user would have to read the package."""
    assert not re.search(r"~compiled_optim\.[a-z]", pydoc.plain(pydoc.render_doc(kind)))


def test_no_relative_clause_hangs_on_nothing() -> None:
    """Sentences name what they are about."""
    package = Path(co.__file__).parent
    found = [
        f"{path.relative_to(package)}: {match[0]}"
        for path in sorted([*package.rglob("*.py"), *package.rglob("*.md")])
        for match in re.finditer(r"\b(of which|that of|what is what)\b.*", path.read_text(), re.IGNORECASE)
    ]
    assert found == []


# A sentence begins at the start of a block, or after the end of another one, which quotes or brackets may close.
_VAGUE = re.compile(r"""(?:^|[.!?][)"'`*_]*\s)["'(*_]*\b(?=(?:What|Whoever|Whatever|Nobody|There)\b)""")
_SENTENCE = re.compile(r"""(?:.*?[.!?][)"'`*_]*(?=\s|$))|.*""", re.DOTALL)
_NEW_BLOCK = re.compile(r"\s*(?:[*+-]|\d+\.)\s+|\s*\|")


def _blocks(lines: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yield the paragraphs, list items and table cells of numbered lines, without the marks that begin them."""
    block: list[tuple[int, str]] = []
    for number, line in lines:
        mark = _NEW_BLOCK.match(line)
        if mark or not line.strip():
            yield block
            block = []
        if mark and mark[0].endswith("|"):
            yield from ([(number, cell.strip())] for cell in line.split("|"))
        elif line.strip():
            block.append((number, line[mark.end() if mark else 0 :].strip()))
    yield block


def _riddles(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each sentence that begins with a word that leaves open what it is about."""
    for block in _blocks(lines):
        text = "\n".join(line for _, line in block)
        for match in _VAGUE.finditer(text):
            yield block[text.count("\n", 0, match.end())][0], " ".join(_SENTENCE.match(text, match.end())[0].split())


def _docstrings(source: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the numbered lines of every docstring, of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield [*enumerate(node.value.value.splitlines(), node.lineno)]


def _comments(source: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the numbered lines of comments. Consecutive ones in one column are one text, which begins in upper case."""
    last, block = (0, 0), list[tuple[int, str]]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (last[0] + 1, last[1]):
                yield block
                block = []
            last = token.start
            line = token.string.lstrip("#: ")
            block.append((token.start[0], line if block else line[:1].upper() + line[1:]))
    yield block


def _prose(page: str) -> list[tuple[int, str]]:
    """Return the numbered lines of a page. Those of code and headings, which may be questions, are empty."""
    lines, is_code = [], False
    for number, line in enumerate(page.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        lines.append((number, "" if is_code or is_fence or line.startswith("#") else line))
    return lines


def _programs() -> list[Path]:
    """Return the Python files of the package, tools and measurements, with scripts whose name has no ending."""
    files = [path for name in ("compiled_optim", "tools", "perf") for path in sorted((ROOT / name).rglob("*"))]
    scripts = [path for path in files if path.is_file() and not path.suffix and path.read_bytes()[:100].startswith(b"#!")]
    are_python = [path for path in scripts if "python3" in path.read_text().partition("\n")[0]]
    return [path for path in files if path.suffix == ".py"] + are_python


def test_no_sentence_begins_with_a_word_that_names_nothing() -> None:
    riddles: list[str] = []
    for path in _programs():
        source = path.read_text()
        texts = [*_docstrings(source), *_comments(source)]
        riddles += [f"{path.relative_to(ROOT)}:{n}: {said}" for lines in texts for n, said in _riddles(lines)]
    for path in (ROOT / name for name in ("README.md", "compiled_optim", "tools", "perf", "tests")):
        pages = [path] if path.is_file() else sorted([*path.rglob("README.md"), *path.rglob("CHANGELOG.md")])
        riddles += [f"{p.relative_to(ROOT)}:{n}: {said}" for p in pages for n, said in _riddles(_prose(p.read_text()))]
    assert not riddles, "\n".join(["", *riddles])


_EMPTY = {"place", "places", "placed", "found", "given", "own"}


def _identifiers(node: ast.AST) -> Iterator[str]:
    """Yield the names in a node itself; of an import, the local name."""
    if isinstance(node, ast.alias):
        yield node.asname or node.name
    else:
        yield from (name for key in ("id", "arg", "attr", "name") if isinstance(name := getattr(node, key, None), str))


def test_names_say_what_they_hold() -> None:
    riddles = {
        (str(path.relative_to(ROOT)), node.lineno, name)
        for path in Path(co.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _identifiers(node)
        if name.lstrip("_") in _EMPTY
    }
    assert not riddles, "\n".join(["", *(f"{path}:{line}: {name}" for path, line, name in sorted(riddles))])


def test_the_checks_of_prose_and_of_names_notice() -> None:
    source = '''"""The first one. What is it?

        * There is one
        """

class A:  # nobody
    found = given.own = place_of(_place=1)
    """Whatever."""
    # first: What no one
    # minds. Whoever
'''
    texts = [*_docstrings(source), *_comments(source)]
    assert [each for lines in texts for each in _riddles(lines)] == [
        *((1, "What is it?"), (3, "There is one"), (8, "Whatever.")),
        *((6, "Nobody"), (10, "Whoever")),
    ]
    page = "# What is it?\n```\nThere\n```\n| a | There is |\n|---|---|\n1. Nobody (yes.) *What* now\nWhat: no"
    assert [*_riddles(_prose(page))] == [(5, "There is"), (7, "Nobody (yes.)"), (7, "What* now What: no")]
    names = [name for node in ast.walk(ast.parse(source)) for name in _identifiers(node)]
    assert {name for name in names if name.lstrip("_") in _EMPTY} == {"found", "given", "own", "_place"}


def test_help_begins_with_one_signature_and_the_arguments() -> None:
    """Python lists the constructor again, far below."""
    first = pydoc.plain(pydoc.render_doc(co.AdamW)).partition("Method resolution order")[0]
    assert first.count(", lr: float") == 1
    assert "betas: how much of the average" in first
