"""What a run without --full takes of the tests."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import selection
from catalog import Case, ruled


def _items(name: str, **axes: int) -> list[Any]:
    """The items of a function whose parameters have so many values each; one item without parameters."""
    if not axes:
        return [SimpleNamespace(nodeid=name)]
    found = itertools.product(*map(range, axes.values()))
    return [
        SimpleNamespace(nodeid=f"{name}[{i}]", callspec=SimpleNamespace(indices=dict(zip(axes, values, strict=True))))
        for i, values in enumerate(found)
    ]


def _values(items: list[Any]) -> set[tuple[str, int]]:
    return {value for item in items for value in item.callspec.indices.items()}


@pytest.mark.parametrize("seed", [1, 20_260_101])
def test_every_value_of_every_parameter_is_taken(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST", 12)
    items = _items("tests/a.py::test_f", first=4, second=3, third=2)
    taken = selection.selected(items, seed)
    assert _values(taken) == _values(items)
    assert 4 <= len(taken) <= 7


def test_of_many_values_some_are_taken_and_others_on_another_day() -> None:
    items = _items("tests/a.py::test_f", first=200, second=3)
    days = [selection.selected(items, seed) for seed in range(20_260_101, 20_260_131)]
    assert {len(taken) for taken in days} == {selection.MOST}
    assert len({item.nodeid for taken in days for item in taken}) > 10 * selection.MOST


def test_a_seed_says_everything() -> None:
    items = [*_items("tests/a.py::test_f", first=9, second=9), *_items("tests/b.py::test_g", first=9, second=9)]
    assert selection.selected(items, 7) == selection.selected(items[::-1], 7)[::-1] == selection.selected(items, 7)
    assert selection.selected(items, 7) != selection.selected(items, 8)


def test_a_function_without_parameters_is_taken_unless_its_file_is_for_full_runs() -> None:
    items = [*_items("tests/a.py::test_f"), *_items(selection.FULL_ONLY[0] + "b.py::test_g")]
    assert selection.selected(items, 7) == items[:1]


def test_slow_functions_are_drawn_as_far_as_seconds_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {f"tests/a.py::test_{i}": 30.0 for i in range(8)}
    monkeypatch.setattr(selection, "slow", lambda cold=False: costs if cold else {})
    monkeypatch.setattr(selection, "SECONDS", 100.0)
    items = [item for i in range(9) for item in _items(f"tests/a.py::test_{i}")]
    days = [{item.nodeid for item in selection.selected(items, seed)} for seed in range(30)]
    assert {len(taken) for taken in days} == {4}
    assert all("tests/a.py::test_8" in taken for taken in days)
    assert set().union(*days) == {item.nodeid for item in items}


def test_with_full_slow_functions_take_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All seeds together take everything; what is quick is taken with every seed."""
    monkeypatch.setattr(selection, "slow", lambda **_: {"tests/a.py::test_f": 6.0})  # of three items
    monkeypatch.setattr(selection, "WHOLE_SECONDS", 20.0)
    items = [*_items("tests/a.py::test_f", first=8, second=3), *_items("tests/a.py::test_g", first=8, second=3)]
    slow, quick = items[:24], items[24:]
    days = [selection.full(items, seed) for seed in range(20)]
    for taken in days:
        assert [item for item in taken if item in quick] == quick
        assert len(taken) == 24 + 10
        assert _values([item for item in taken if item in slow]) == _values(slow)
    assert {item.nodeid for taken in days for item in taken} == {item.nodeid for item in items}
    assert {item.nodeid for item in selection.selected(items, 3)} <= {item.nodeid for item in days[3]}


def test_with_full_what_inductor_compiles_is_taken_of_every_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "slow", lambda **_: {"tests/a.py::test_f[inductor]": 60.0})
    cases = [Case(optimizer, (("lr", lr),)) for optimizer in ruled() for lr in (0.1, 0.2, 0.3)]
    items = [
        SimpleNamespace(
            nodeid=f"tests/a.py::test_f[{case}-{lowering}]",
            callspec=SimpleNamespace(indices={"case": i, "lowering": j}, params={"case": case, "lowering": lowering}),
        )
        for i, case in enumerate(cases)
        for j, lowering in enumerate(("eager", "inductor"))
    ]
    taken = [item.callspec.params for item in selection.full(items, 7)]
    assert [params["case"] for params in taken if params["lowering"] == "eager"] == cases
    compiled = [params["case"].optimizer for params in taken if params["lowering"] == "inductor"]
    assert compiled == ruled()


def test_every_rule_is_taken_in_every_language(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--selection=7"]
    listed = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True).stdout.splitlines()
    taken = {name: [line for line in listed if line.startswith(name)] for name in selection.OF_EACH_OPTIMIZER}
    for name, lines in taken.items():
        for optimizer in ruled():
            own = [line for line in lines if re.search(rf"[\[-]{optimizer.__name__}[]-]", line)]
            assert [line for line in own if "float64" not in line], (name, optimizer)


def test_slow_functions_are_there(pytestconfig: pytest.Config) -> None:
    for name in [*selection.slow(cold=True), *selection.EVERY_CASE]:
        file, *_, function = name.removesuffix("[inductor]").split("::")
        assert f"def {function}(" in (pytestconfig.rootpath / file).read_text(), name


def test_files_for_full_runs_are_there(pytestconfig: pytest.Config) -> None:
    assert all((pytestconfig.rootpath / name.partition("::")[0]).exists() for name in selection.FULL_ONLY)


def test_what_is_named_runs_whole(pytestconfig: pytest.Config) -> None:
    """Or a developer would not see what a change broke."""
    command = [sys.executable, "-m", "pytest", "--numprocesses=1", "-q", "--time-left", "tests/project/test_public.py"]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 10 * selection.MOST
    assert f"0 of {passed[1]} tests, " in done.stdout


def test_what_is_named_with_a_seed_does_not() -> None:
    items = [item for i in range(9) for item in _items(f"tests/trainers/a.py::test_{i}", first=9)]
    assert len(selection.selected(items, 7, left_out=())) == 9 * selection.MOST
    assert selection.selected(items, 7) == []


def test_a_seed_holds_for_what_is_named_in_every_process(pytestconfig: pytest.Config) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--numprocesses=1",
        "-q",
        "--selection=7",
        "--slow=1",
        "tests/project/test_public.py",
    ]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) < 14  # of more than fifty
