"""What ``help`` says of an optimizer: a line for each of its own arguments, and nothing internal; how sentences are made."""

from __future__ import annotations

import inspect
import pydoc
import re
from pathlib import Path

import pytest
import torch
from catalog import COMBINED, registry

import compiled_optim as co

KINDS = [*registry(), *COMBINED, co.mup.Adam, co.mup.AdamW, co.mup.SGD]


def _explained(kind: type) -> dict[str, str]:
    """By the names below ``Args:``, each name of a list of several too, what is said of them."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n)+)", inspect.cleandoc(kind.__doc__ or "") + "\n", re.MULTILINE)
    assert section is not None, kind
    listed = re.findall(r"^    (\w[\w, ]*): (\S.*\n(?:     .*\n)*)", section[1], re.MULTILINE)
    return {name: said for names, said in listed for name in names.split(", ")}


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__qualname__)
def test_every_argument_is_explained_in_a_line(kind: type[co.CompiledOptimizer]) -> None:
    common = _explained(co.CompiledOptimizer)
    own = [name for name in inspect.signature(kind).parameters if name not in common]
    said = _explained(kind)
    assert sorted(said) == sorted(own)
    assert [name for name, text in said.items() if text.count("\n") > 1] == []
    assert "help(compiled_optim.CompiledOptimizer)" in " ".join(kind.__doc__.split())


def test_the_common_arguments_are_those_of_an_elementwise_optimizer_that_decays_by_the_gradient_and_of_matrices() -> None:
    explained, of_sgd = {*_explained(co.CompiledOptimizer)}, {*inspect.signature(co.SGD).parameters}
    assert explained - of_sgd == {"stacks", "split"} <= {*inspect.signature(co.Muon).parameters}


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__qualname__)
def test_help_shows_functions_and_properties_that_it_explains(kind: type[co.CompiledOptimizer]) -> None:
    """And no attribute that only the package reads; names with two underscores are Python's."""
    own = {
        name: what
        for name, what, _, _ in pydoc.classify_class_attrs(kind)
        if pydoc.visiblename(name, obj=kind) and not name.startswith("__") and name not in dir(torch.optim.Optimizer)
    }
    assert {"hyperparameter", "grad_norm"} <= own.keys()
    assert [name for name, what in own.items() if what == "data" or not pydoc.getdoc(getattr(kind, name))] == []


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


def test_help_begins_with_one_signature_and_the_arguments() -> None:
    """Python lists the constructor again, far below."""
    first = pydoc.plain(pydoc.render_doc(co.AdamW)).partition("Method resolution order")[0]
    assert first.count(", lr: float") == 1
    assert "betas: how much of the average" in first
