"""A later process finds what earlier ones compiled, and steps at once."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
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
