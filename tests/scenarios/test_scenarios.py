"""Every change that a user can make, in every way to run a step: what is made anew, traced or captured again, and why.

``outcomes.csv`` has what each leads to, and ``record.py`` writes it.
"""

from __future__ import annotations

import pandas
import pytest

from scenarios.changes import CHANGES
from scenarios.record import PATH
from scenarios.ways import COMPILED, WAYS, outcome

EXPECTED = pandas.read_csv(PATH, keep_default_na=False).set_index(["change", "way"])["outcome"]


def test_each_scenario_is_in_the_file_once() -> None:
    assert [*EXPECTED.index] == [(change, way) for change in CHANGES for way in WAYS]


@pytest.mark.quick
@pytest.mark.parametrize("way", [way for way in WAYS if way not in COMPILED])
def test_a_change_leads_to_what_it_led_to(way: str) -> None:
    found = {change: outcome(change, way) for change in CHANGES}
    assert found == {change: EXPECTED[change, way] for change in CHANGES}


@pytest.mark.full
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_is_compiled_leads_to_what_it_led_to(change: str, way: str) -> None:
    assert outcome(change, way) == EXPECTED[change, way]


def test_no_step_is_silently_stale() -> None:
    """Numbers differ only where compiled code or a graph holds backward, to which a hook was added that neither sees."""
    stale = EXPECTED[EXPECTED.str.endswith("OTHER NUMBERS") & ~EXPECTED.str.contains("raises")]
    assert [*stale.index] == [("gradients are absent", way) for way in ("whole", "whole, inlined", "runner")]
