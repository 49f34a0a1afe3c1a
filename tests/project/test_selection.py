"""What a run without --full takes of the tests, and what ends a test that hangs."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import selection
from catalog import LOWERINGS, registry, ruled
from new_process import ROOT, environment

HANGING = """
import ctypes

def test_before():
    pass

def test_hangs():
    ctypes.PyDLL(None).pause()  # in C, and no other thread of Python's can run

def test_behind():
    pass
"""


class Item(SimpleNamespace):
    """What a selection asks of an item, which is equal to itself alone."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _items(name: str, *marks: str, values: dict[str, list[Any]] | None = None) -> list[Any]:
    """Return the items of a function with ``marks`` whose parameters have such values; one item without parameters."""

    def item(nodeid: str, **more: Any) -> Any:
        return Item(nodeid=nodeid, get_closest_marker=lambda mark: mark in marks, **more)

    if not values:
        return [item(name)]
    found = []
    for number, chosen in enumerate(itertools.product(*map(enumerate, values.values()))):
        indices = {axis: index for axis, (index, _) in zip(values, chosen, strict=True)}
        params = {axis: value for axis, (_, value) in zip(values, chosen, strict=True)}
        found.append(item(f"{name}[{number}]", callspec=SimpleNamespace(indices=indices, params=params)))
    return found


def _names(items: list[Any]) -> list[str]:
    return [item.nodeid for item in items]


def _numbers(**counts: int) -> dict[str, list[Any]]:
    return {axis: [*range(count)] for axis, count in counts.items()}


def test_every_value_of_every_parameter_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST", 12)
    items = _items("a.py::test_f", values=_numbers(first=4, second=3, third=2))
    taken = selection.quick(items)
    indices = [{value for item in some for value in item.callspec.indices.items()} for some in (taken, items)]
    assert indices[0] == indices[1]
    assert len(taken) == 4


def test_of_many_values_each_function_takes_its_own() -> None:
    functions = [_items(f"a.py::test_{i}", values=_numbers(first=200, second=3)) for i in range(30)]
    taken = [selection.quick(items) for items in functions]
    assert {len(cases) for cases in taken} == {selection.MOST}
    assert len({case.callspec.indices["first"] for cases in taken for case in cases}) > 10 * selection.MOST
    assert [_names(selection.quick(items)) for items in functions] == [*map(_names, taken)]


def test_marks_say_which_cases() -> None:
    values: dict[str, list[Any]] = {"lowering": ["eager", "inductor"], "n": [*range(9)]}
    plain, quick, full = (
        _items("a.py::test_plain", values=values),
        _items("a.py::test_quick", "quick", values=values),
        _items("a.py::test_full", "quick", "full", values=values),
    )
    alone = [*_items("a.py::test_alone"), *_items("a.py::test_long", "full")]
    taken = selection.quick([*plain, *quick, *full, *alone])
    assert [item for item in taken if item in quick] == quick
    assert [item for item in taken if item in full] == []
    assert [item for item in taken if item in alone] == alone[:1]
    cases = [item for item in taken if item in plain]
    assert len(cases) == selection.MOST
    assert {item.callspec.params["lowering"] for item in cases} == {"eager"}
    assert len(selection.quick(full, with_long=True)) == len(selection.quick(quick, with_long=True)) == selection.MOST


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest) -> list[str]:
    """Return the names of the tests of the package in a run without ``--full``: of this one, if it is one of all files."""
    option, items = request.config.option, request.session.items
    names = [*_listed()] if option.named else _names(selection.quick(items) if option.full else items)
    return [name for name in names if not name.startswith("tests/project/")]


def _listed(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    return (line for line in done.stdout.splitlines() if "::" in line)


FORMS = ("torch", "compiled_optim", "named", "optimi", "safetensors", "dcp", "deepspeed", "bitsandbytes", "FlashOptim")
IN_IT = {
    **{c.__name__: rf"[\[-]{c.__name__}[]-]" for c in registry()},
    **{f"{c.__name__} in C++": rf"test_equals_torch\[torch.float32-{c.__name__}-.*-multi_tensor\]" for c in ruled()},
    **{f"{c.__name__} in Triton": rf"test_interpreted_kernels_equal_eager\[{c.__name__}[]-]" for c in ruled()},
    **{lowering: rf"[\[-]{lowering}[]-]" for lowering in LOWERINGS},
    **{mode: rf"[\[-]{mode}[]-]" for mode in ("kahan", "stochastic", "split8", "split16", "int8")},
    **{f"{form} files": rf"(TestFiles|tests/interop/).*[\[-]{form}[] -]" for form in FORMS},
}


@pytest.mark.quick
@pytest.mark.parametrize("name", IN_IT)
def test_a_run_has_every(name: str, quick: list[str]) -> None:
    """Optimizer, lowering, way to store weights and state, and form of files."""
    assert [test for test in quick if re.search(IN_IT[name], test)]


def test_what_is_named_runs_whole_unless_only_a_few_cases_are_asked_for() -> None:
    """Or a developer would not see what a change broke."""
    whole, few = ([*_listed("tests/plan/test_norm.py", *options)] for options in ((), ("--quick",)))
    assert {name.partition("[")[0] for name in few} == {name.partition("[")[0] for name in whole}
    assert len([name for name in whole if "test_gradients_of_every_size[" in name]) > selection.MOST
    assert len([name for name in few if "test_gradients_of_every_size[" in name]) == selection.MOST


def test_a_test_that_hangs_fails_and_those_behind_it_run(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-p", "conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "--numprocesses=1", "--seconds=5", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_hanging.py::test_hangs'" in done.stdout
    assert re.search(r'test_hanging\.py", line \d+ in test_hangs', done.stderr)  # where it was
