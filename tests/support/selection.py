"""The tests that a run without ``--full`` takes, where it names no file: a few of each function, and others on other days.

Of a parametrized function the selected items take every value of every parameter once, as far as :data:`MOST` items can; the
seed decides which values meet. A file or a test that is named runs whole.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterable

import pytest

MOST = 3
"""Items of one function. What is dropped has another chance with every seed."""

FULL_ONLY = (
    "tests/trainers/",
    "tests/project/test_demo.py::test_a_newcomers_run",
    "tests/project/test_extras.py",
    "tests/lowering/test_code_for_gpus.py",
    "tests/step/test_soak.py",
    "tests/capture/test_capture.py::test_a_parameter_that_is_skipped_and_one_that_is_there_twice",
)
"""What takes minutes: other packages, fresh environments, Inductor's GPU code in Triton's interpreter."""


def today() -> int:
    """The seed of a run that was given none."""
    return int(datetime.date.today().strftime("%Y%m%d"))


def selected(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Those of ``items`` that a run with ``seed`` takes, in their order."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.nodeid.startswith(FULL_ONLY):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {id(item) for name, own in functions.items() for item in _covering(own, random.Random(f"{seed} {name}"))}
    return [item for item in items if id(item) in chosen]


def _covering(items: list[pytest.Item], order: random.Random) -> list[pytest.Item]:
    """Some of one function's ``items`` that have every value of each of its parameters, at most :data:`MOST`."""
    taken: list[pytest.Item] = []
    covered: set[tuple[str, int]] = set()
    for item in order.sample(sorted(items, key=lambda item: item.nodeid), len(items)):
        values = {*getattr(getattr(item, "callspec", None), "indices", {"": 0}).items()}
        if not values <= covered and len(taken) < MOST:
            covered |= values
            taken.append(item)
    return taken
