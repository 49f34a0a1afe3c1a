"""The docstrings of the optimizers explain every argument, for ``help``."""

from __future__ import annotations

import inspect
import re

import pytest
from catalog import registry

import compiled_optim as co


def _explained(kind: type) -> list[str]:
    """The names below ``Args:``, each name of a list of several too."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n)+)", inspect.cleandoc(kind.__doc__ or "") + "\n", re.MULTILINE)
    assert section is not None, kind
    listed = re.findall(r"^    (\w[\w, ]*): \S", section[1], re.MULTILINE)
    return [name for names in listed for name in names.split(", ")]


@pytest.mark.parametrize("kind", [*registry(), co.mup.Adam, co.mup.AdamW, co.mup.SGD], ids=lambda c: c.__qualname__)
def test_every_argument_is_explained(kind: type[co.CompiledOptimizer]) -> None:
    common = _explained(co.CompiledOptimizer)
    own = [name for name in inspect.signature(kind).parameters if name not in common]
    assert sorted(_explained(kind)) == sorted(own)
    assert "CompiledOptimizer" in kind.__doc__


def test_the_common_arguments_are_those_of_an_elementwise_optimizer_that_decays_by_the_gradient() -> None:
    assert set(_explained(co.CompiledOptimizer)) <= set(inspect.signature(co.SGD).parameters)
