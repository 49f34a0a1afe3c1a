"""A later process finds what earlier ones compiled, and steps at once."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from cached_steps import WAYS
from new_process import printed_by
from quick_start import OPTIMIZERS

from compiled_optim.memory import cache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C++ is compiled on Linux only")


@pytest.fixture(scope="module")
def later_process() -> tuple[dict[str, Any], dict[str, Any]]:
    """What two processes found, the second of which finds the cache filled."""
    first, second = (json.loads(printed_by("quick_start")) for _ in range(2))
    return first, second


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestALaterProcess:
    def test_does_not_import_the_compiler(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        assert later_process[1][name]["compiler"] == []

    def test_gets_the_same_numbers(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        first, second = later_process
        assert second[name]["result"] == first[name]["result"]

    def test_reports_what_it_loaded(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        found = later_process[1][name]
        assert found["loaded"] == found["compiles"] > 0
        assert found["reported"] > 0
        assert f"{found['loaded']} loaded from the cache" in found["report"]
        assert len(re.findall(r"loaded in \d+\.\d\d s", found["report"])) == found["loaded"]

    def test_steps_at_once(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Start the compiler's ``--version`` at most, make nothing, and call fewer functions than an import would."""
        found = later_process[1][name]
        assert found["started"] in ([], [[*cache.compiler(), "--version"]])
        assert found["made"] == 0
        assert found["calls"] <= 30_000


CACHED = [way for way in WAYS if "scheduled" not in way]
"""Steps that a later process finds: all but those with functions of users, whose code no cache can compare."""


@pytest.fixture(scope="module")
def compiled_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What processes found, by name: the first; a later one; one that loads artifacts; one with another rule of the user."""
    shared, other = (str(tmp_path_factory.mktemp("cache")) for _ in range(2))
    file = str(tmp_path_factory.mktemp("artifacts") / "artifacts")
    return {
        "first": json.loads(printed_by("cached_steps", "--save", file, TORCHINDUCTOR_CACHE_DIR=shared)),
        "later": json.loads(printed_by("cached_steps", "--all", TORCHINDUCTOR_CACHE_DIR=shared)),
        "loaded": json.loads(printed_by("cached_steps", "--load", file, TORCHINDUCTOR_CACHE_DIR=other)),
        "changed": json.loads(printed_by("cached_steps", "--all", TORCHINDUCTOR_CACHE_DIR=shared, FACTOR="2")),
    }


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
class TestCompiledSteps:
    def test_are_right(self, way: str, compiled_steps: dict[str, dict[str, Any]]) -> None:
        """Also where an earlier process cached the same program with another number in the user's rule or schedule."""
        for found in compiled_steps.values():
            assert found[way]["result"] == pytest.approx(found[way]["uncompiled"], rel=1e-4, abs=1e-6)
        first, later, loaded = (compiled_steps[name][way]["result"] for name in ("first", "later", "loaded"))
        assert first == later == loaded

    def test_differ_where_the_user_changed_them(self, way: str, compiled_steps: dict[str, dict[str, Any]]) -> None:
        is_changed = compiled_steps["first"][way]["result"] != compiled_steps["changed"][way]["result"]
        assert is_changed == ("of a user" in way or "scheduled" in way)

    def test_bypass_no_cache(self, way: str, compiled_steps: dict[str, dict[str, Any]]) -> None:
        assert [found[way]["autograd_cache_bypass"] for found in compiled_steps.values()] == [0, 0, 0, 0]

    def test_are_found_by_a_later_process(self, way: str, compiled_steps: dict[str, dict[str, Any]]) -> None:
        for name in ("later", "loaded"):
            found = compiled_steps[name][way]
            hits, misses = found["autograd_cache_hit"], found["autograd_cache_miss"]
            assert (hits, misses) == ((1, 0) if way in CACHED else (0, 1))
            assert found["fxgraph_cache_miss"] == 0
