"""The tests that a run takes where it names no file: a few of each function, or most with ``--full``; others on other days.

Of a parametrized function the selected items take every value of every parameter once, as far as :data:`MOST` items can; the
seed decides which values meet. Of the functions that take long, the seed draws as many as :data:`SECONDS` allow.

With ``--full`` each function is taken, with all its items if they take no longer than :data:`WHOLE_SECONDS`. Of the others
it takes as many as take that long, at least one of each optimizer.

What Inductor compiles of a function, which takes seconds for each item, counts as a function of its own. With ``--full`` the
seed draws of the slow ones as many as :data:`COMPILED_SECONDS` allow: they compute what eager steps do.

A file or a test that is named runs whole, unless ``--selection`` names the seed.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
import sys
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
"""Seconds of :data:`MOST` items from which on a function is slow. The quicker ones are always taken."""

SECONDS = 100.0
"""What the functions of ``slow.csv`` may take together, of one processor."""

WHOLE_SECONDS = 10.0
"""What one function may take with ``--full``, of one processor. ``slow.csv`` lists those that take longer, and slow ones."""

COMPILED_SECONDS = 400.0
"""What the slow functions that Inductor compiles may take together with ``--full``, of one processor."""

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

EVERY_CASE = (
    "tests/optimizers/test_reference.py::test_equals_torch",
    "tests/lowering/test_kernel_stacks.py::test_interpreted_loops_equal_eager_steps",
    "tests/lowering/test_triton.py::test_interpreted_kernels_equal_eager",
    "tests/checkpoint/test_distributed.py::test_on_two_processes",
    "tests/checkpoint/test_low_precision_distributed.py::test_on_two_processes",
    "tests/lowering/test_owners.py::test_on_processes",
    "tests/lowering/test_stored_in_triton.py::test_interpreted_kernels_equal_eager_bit_by_bit",
    "tests/storage/test_shards.py::test_on_two_processes",
    "tests/trainers/test_two_processes.py::test_on_two_processes",
)
"""What takes no case less with ``--full``: the catalogue, what runs kernels for GPUs on a CPU, and what other processes
compute for all cases at once."""

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


def slow(*, cold: bool = False) -> dict[str, float]:
    """The seconds of the functions that take long; ``cold`` if nothing that other tests compile is there."""
    with Path(__file__).with_name("slow.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("seconds", "cold") if cold else ("seconds",)
    return {row["function"]: seconds for row in rows if (seconds := max(float(row[c]) for c in columns))}


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
    functions = _by_function(item for item in items if not item.nodeid.startswith(left_out))
    drawn = _drawn(functions.keys() - WHOLE.keys() - OF_EACH_OPTIMIZER.keys(), random.Random(seed), seconds)
    chosen = {id(item) for name in drawn for item in _covering(functions[name], random.Random(f"{seed} {name}"))}
    for name in (WHOLE.keys() | OF_EACH_OPTIMIZER.keys()) & functions.keys():
        chosen |= {id(item) for item in _named(name, functions[name], random.Random(f"{seed} {name}"))}
    return [item for item in items if id(item) in chosen]


def full(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Those of ``items`` that a run with ``--full`` and ``seed`` takes, in their order."""
    costs, left, chosen = slow(), COMPILED_SECONDS, set[int]()
    functions = _by_function(items)
    for name in random.Random(seed).sample(sorted(functions), len(functions)):
        own = functions[name]
        most, each = len(own), costs.get(name, 0.0) / min(MOST, len(own))
        if each and name not in EVERY_CASE:
            optimizers = {optimizer for item in own if (optimizer := _optimizer(item))}
            most = min(most, max(int(WHOLE_SECONDS / each), MOST, len(optimizers)))
        if name.endswith(_COMPILED) and name.removesuffix(_COMPILED) not in EVERY_CASE:
            if most * each > left:
                continue
            left -= most * each
        order = random.Random(f"{seed} {name}")
        taken = _covering(own, order, most)
        rest = [item for item in own if item not in taken]
        taken += order.sample(rest, min(len(rest), most - len(taken)))
        chosen |= {id(item) for item in taken}
    return [item for item in items if id(item) in chosen]


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """``items`` by file, first the files that take longest, so that no worker has long ones alone at the end."""
    seconds = slow()
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)

    def cost(file: str) -> float:
        counts = Counter(map(_function, files[file]))
        return sum(seconds.get(name, 0.02) / min(MOST, n) * n for name, n in counts.items())

    return [item for file in sorted(files, key=cost, reverse=True) for item in files[file]]


def _drawn(functions: Iterable[str], order: random.Random, seconds: float | None) -> list[str]:
    """All of ``functions`` that are quick, and some of the slow ones."""
    costs, left, taken = slow(cold=True), SECONDS if seconds is None else seconds, []
    for name in order.sample(names := sorted(functions), len(names)):
        cost = max(costs.get(name, 0.0), SLOW * name.endswith(_COMPILED))  # with caches that hold nothing yet
        if cost < SLOW or cost <= left:
            left -= cost * (cost >= SLOW)
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


def _covering(items: list[pytest.Item], order: random.Random, most: int | None = None) -> list[pytest.Item]:
    """Some of one function's ``items`` that have every value of each of its parameters, at most ``most`` or :data:`MOST`.

    The first ones have every optimizer.
    """
    taken: list[pytest.Item] = []
    covered: set[tuple[str, Any]] = set()
    shuffled = order.sample(sorted(items, key=lambda item: item.nodeid), len(items))
    for values_of in (lambda item: {"optimizer": _optimizer(item)}, _indices):
        for item in shuffled:
            values = {*values_of(item).items()}
            if not values <= covered and item not in taken and len(taken) < (most or MOST):
                covered |= values | {*_indices(item).items()}
                taken.append(item)
    return taken


def _indices(item: pytest.Item) -> dict[str, int]:
    """The place of each parameter's value among its values."""
    return getattr(getattr(item, "callspec", None), "indices", {"": 0})


def _optimizer(item: pytest.Item) -> str:
    """The name of the optimizer that a parameter of ``item`` is, or that a case of the catalogue has; empty without one."""
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    classes = (getattr(value, "optimizer", value) for value in values)
    return next((c.__name__ for c in classes if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)), "")


_COMPILED = "[inductor]"


def _function(item: pytest.Item) -> str:
    """The name of the function, and whether Inductor compiles for this item of it."""
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    compiled = any(isinstance(value, str) and value == "inductor" for value in values)
    return item.nodeid.partition("[")[0] + _COMPILED * compiled


def _by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(_function(item), []).append(item)
    return functions


def _write_slow(*, cold: bool) -> None:
    """Write ``slow.csv`` anew from the durations that the last runs left in pytest's cache.

    Those of ``cold`` runs, without ``--full``, only grow: who comes first compiles for others.
    """
    by_function: dict[str, list[float]] = {}
    root = Path(__file__).parents[2]
    for name, seconds in json.loads((root / ".pytest_cache" / "v" / "durations").read_text()).items():
        function, _, case = name.partition("[")
        by_function.setdefault(function + _COMPILED * ("inductor" in case), []).append(seconds)
    path = Path(__file__).with_name("slow.csv")
    with path.open(newline="") as file:
        costs = {row["function"]: [float(row["seconds"]), float(row["cold"])] for row in csv.DictReader(file)}
    for name, times in by_function.items():
        cost, known = fmean(times) * min(MOST, len(times)), costs.setdefault(name, [0.0, 0.0])
        if cold:
            known[1] = max(known[1], cost if cost >= SLOW else 0.0)
        else:  # what is listed already takes no longer than it may
            known[0] = cost if cost >= SLOW or sum(times) > WHOLE_SECONDS / 2 else 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("function", "seconds", "cold"))
        writer.writerows((name, *(f"{s:.1f}" for s in own)) for name, own in sorted(costs.items()) if any(own))


if __name__ == "__main__":
    _write_slow(cold="cold" in sys.argv)
