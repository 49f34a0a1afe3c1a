"""The tests that a run without ``--full`` takes, where it names no file: a few of each function, and others on other days.

Of a parametrized function the selected items take every value of every parameter once, as far as :data:`MOST` items can; the
seed decides which values meet. Of the functions that take long, the seed draws as many as :data:`SECONDS` allow. A file or a
test that is named runs whole, unless ``--selection`` names the seed.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

MOST = 3
"""Items of one function. What is dropped has another chance with every seed."""

SLOW = 3.0
"""Seconds from which on ``slow.csv`` lists a function. The quicker ones are always taken."""

SECONDS = 100.0
"""What the functions of ``slow.csv`` may take together, of one processor."""

FULL_ONLY = (
    "tests/trainers/",
    "tests/project/test_demo.py::test_a_newcomers_run",
    "tests/project/test_distribution.py::test_a_release",
    "tests/project/test_extras.py::test_every_import_is_declared",
    "tests/project/test_manual.py::test_the_documentation_is_built",
    "tests/project/test_recipes.py::test_a_long_recipe",
    "tests/lowering/test_code_for_gpus.py",
    "tests/step/test_soak.py",
    "tests/capture/test_capture.py::test_a_parameter_that_is_skipped_and_one_that_is_there_twice",
    "tests/capture/test_capture.py::test_the_list_holds_for_the_interpreted_triton_kernel",
)
"""What takes minutes: other packages, fresh environments, kernels and Inductor's GPU code in Triton's interpreter."""

WHOLE: dict[str, Callable[[Any], bool]] = {
    "tests/optimizers/test_reference.py::test_equals_torch": (
        lambda p: (p["dtype"], p["lowering"]) == (torch.float64, "eager")
    ),
}
"""Functions of which every item is taken whose parameters are such: the whole catalogue in float64."""

OF_EACH_OPTIMIZER: dict[str, Callable[[Any], bool]] = {
    "tests/optimizers/test_reference.py::test_equals_torch": (
        lambda p: (p["dtype"], p["lowering"]) == (torch.float32, "multi_tensor")
    ),
    "tests/lowering/test_triton.py::test_interpreted_kernels_equal_eager": lambda p: True,
}
"""Functions of which one such item is taken for each optimizer: each rule once in C++, and once in Triton's interpreter."""


def today() -> int:
    """The seed of a run that was given none."""
    return int(datetime.date.today().strftime("%Y%m%d"))


def slow() -> dict[str, float]:
    """The seconds of the functions that take long."""
    with Path(__file__).with_name("slow.csv").open(newline="") as file:
        return {row["function"]: float(row["seconds"]) for row in csv.DictReader(file)}


def selected(
    items: Iterable[pytest.Item], seed: int, seconds: float | None = None, left_out: tuple[str, ...] = FULL_ONLY
) -> list[pytest.Item]:
    """Those of ``items`` that a run with ``seed`` takes, in their order.

    Args:
        items: all tests.
        seed: which ones.
        seconds: what slow functions may take; :data:`SECONDS` if it is None.
        left_out: how the names of those begin that it never takes.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.nodeid.startswith(left_out):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    drawn = _drawn(functions.keys() - WHOLE.keys() - OF_EACH_OPTIMIZER.keys(), random.Random(seed), seconds)
    chosen = {id(item) for name in drawn for item in _covering(functions[name], random.Random(f"{seed} {name}"))}
    for name in (WHOLE.keys() | OF_EACH_OPTIMIZER.keys()) & functions.keys():
        chosen |= {id(item) for item in _named(name, functions[name], random.Random(f"{seed} {name}"))}
    return [item for item in items if id(item) in chosen]


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """``items`` by file, first the files that take longest, so that no worker has long ones alone at the end."""
    seconds = slow()
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)

    def cost(file: str) -> float:
        counts = Counter(item.nodeid.partition("[")[0] for item in files[file])
        return sum(seconds.get(name, 0.02) / min(MOST, n) * n for name, n in counts.items())

    return [item for file in sorted(files, key=cost, reverse=True) for item in files[file]]


def _drawn(functions: Iterable[str], order: random.Random, seconds: float | None) -> list[str]:
    """All of ``functions`` that are quick, and some of the slow ones."""
    costs, left, taken = slow(), SECONDS if seconds is None else seconds, []
    for name in order.sample(names := sorted(functions), len(names)):
        if (cost := costs.get(name, 0.0)) <= left:
            left -= cost
            taken.append(name)
    return taken


def _named(name: str, items: list[pytest.Item], order: random.Random) -> list[pytest.Item]:
    """What :data:`WHOLE` and :data:`OF_EACH_OPTIMIZER` say of a function."""
    params: dict[int, Any] = {id(item): item.callspec.params for item in items}  # type: ignore[attr-defined]
    taken = [item for item in items if name in WHOLE and WHOLE[name](params[id(item)])]
    by_optimizer: dict[Any, pytest.Item] = {}
    for item in order.sample(items, len(items)):
        if name in OF_EACH_OPTIMIZER and OF_EACH_OPTIMIZER[name](params[id(item)]):
            by_optimizer.setdefault(params[id(item)]["case"].optimizer, item)
    return [*taken, *by_optimizer.values()]


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


def _write_slow() -> None:
    """Write ``slow.csv`` anew from the durations that the last runs left in pytest's cache."""
    by_function: dict[str, list[float]] = {}
    root = Path(__file__).parents[2]
    for name, seconds in json.loads((root / ".pytest_cache" / "v" / "durations").read_text()).items():
        by_function.setdefault(name.partition("[")[0], []).append(seconds)
    found = {name: fmean(times) * min(MOST, len(times)) for name, times in by_function.items()}
    known = slow() | found
    with Path(__file__).with_name("slow.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("function", "seconds"))
        writer.writerows((name, f"{s:.1f}") for name, s in sorted(known.items()) if s >= SLOW)


if __name__ == "__main__":
    _write_slow()
