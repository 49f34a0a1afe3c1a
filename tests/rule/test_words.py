"""The words of the vocabulary compute in the dtype of the values, in every language, whatever torch's default dtype is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import word_rules
from in_triton import interpret

from compiled_optim import rule
from compiled_optim.rule import symbols

TOLERANCE = 1e-14  # far above rounding errors in float64, far below those of numbers in float32

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@pytest.fixture(params=DTYPES)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(DTYPES[request.param])
    try:
        yield DTYPES[request.param]
    finally:
        torch.set_default_dtype(torch.float32)


def _wrong(errors: dict[str, float]) -> dict[str, float]:
    assert len(errors) == 2 * len(word_rules.expressions())
    return {name: error for name, error in errors.items() if not error < TOLERANCE}


@pytest.mark.parametrize("lowering", ["eager", "inductor", "multi_tensor", "inlined"])
def test_numbers_have_the_dtype_of_the_values(lowering: str, default_dtype: torch.dtype) -> None:
    inlined = lowering == "inlined"
    assert _wrong(word_rules.run("inductor" if inlined else lowering, inlined=inlined)) == {}


def test_numbers_have_the_dtype_of_the_values_in_triton() -> None:
    pytest.importorskip("triton")
    assert _wrong(interpret("word_rules")) == {}


def test_every_word_of_numbers_is_in_an_expression() -> None:
    words = (symbols.WORDS.keys() & set(rule.__all__)) - symbols.OF_MATRICES
    read: set[str] = set()

    class Reading(word_rules.Words):
        def __getattr__(self, name: str) -> object:
            read.add(name)
            return super().__getattr__(name)

    for expression in word_rules.expressions().values():
        expression(Reading(True), (1.0, 0.5))
    assert read == words
