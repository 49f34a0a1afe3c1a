"""The tests of a run without ``--full``: a few cases of each function, the same ones on every day and machine.

Of a parametrized function they are up to :data:`MOST`, chosen so that they have every value of each parameter as far as so
few can. Three things are said where a test is:

* ``@pytest.mark.full``, at a function or a parameter's value: it takes long, and runs with ``--full`` or where it is named;
* ``@pytest.mark.quick``, at a function: all of its other cases run;
* a parameter that is ``"inductor"``: it takes seconds to compile, and counts as marked ``full`` unless its function is
  marked ``quick``.

With ``--full`` everything runs, and so does a file or a test that is named. With ``--quick`` a few cases of it run, also of
functions that take long.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

MOST = 3
"""Cases of one function."""


def quick(items: Sequence[pytest.Item], *, with_long: bool = False) -> list[pytest.Item]:
    """Return those of ``items`` that a run without ``--full`` takes, in their order.

    Args:
        items: all tests.
        with_long: whether to take a few cases of what is marked ``full``, too.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_quick = bool(item.get_closest_marker("quick"))
        if (with_long or not item.get_closest_marker("full")) and (is_quick or not _is_compiled(item)):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {
        item
        for name, cases in functions.items()
        for item in (cases if cases[0].get_closest_marker("quick") and not with_long else _covering(name, cases))
    }
    return [item for item in items if item in chosen]


def _covering(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return at most :data:`MOST` of the ``cases`` of the function ``name``, with every value of its parameters if they can.

    The name decides which of equal ones, so that functions with the same parameters have other cases.
    """
    order = random.Random(name).sample(cases, len(cases))
    taken: list[pytest.Item] = []
    covered: set[tuple[str, int]] = set()
    while order and len(taken) < MOST:
        item = max(order, key=lambda item: len(_indices(item) - covered))  # the first of the best
        if not _indices(item) - covered:
            break
        covered |= _indices(item)
        taken.append(item)
        order.remove(item)
    return taken


def _is_compiled(item: pytest.Item) -> bool:
    """Return whether a parameter of ``item`` chooses Inductor."""
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    return any(isinstance(value, str) and value == "inductor" for value in values)


def _indices(item: pytest.Item) -> set[tuple[str, int]]:
    """Return the index of each parameter's value among its values."""
    return {*getattr(getattr(item, "callspec", None), "indices", {"": 0}).items()}
