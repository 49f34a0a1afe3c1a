"""A line of progress in place of pytest's dots: what runs, how many tests are done, and how long the others will take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import progress
import pytest

GUESS = 10.0
"""Seconds of work for which the durations of earlier runs weigh as much as the pace of this one."""

USUAL = 0.25
"""Seconds of a test where no duration is known."""


class TimeLeft:
    """A plugin of the process that reports.

    Durations of tests are kept in pytest's cache. A test that never ran is taken to last as long as others do.
    """

    def __init__(self, config: pytest.Config, line: progress.Line) -> None:
        self._config, self._line = config, line
        self._known: dict[str, float] = config.cache.get("durations", {})
        self._measured: Counter[str] = Counter()
        self._left: dict[str, float] = {}  # the tests that are not done, with their expected durations
        self._workers = self._total = self._failed = 0
        self._done = self._started = 0.0

    def pytest_sessionstart(self) -> None:
        self._config.pluginmanager.get_plugin("terminalreporter").showfspath = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._begin(ids)

    def _begin(self, tests: list[str]) -> None:
        """A worker takes some of ``tests``, which are all."""
        usual = fmean(self._known.values()) if self._known else USUAL
        self._left = {test: self._known.get(test, usual) for test in tests}
        self._workers, self._total, self._started = self._workers + 1, len(tests), time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Iterator[None]:
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._line.show(f"{self}: {nodeid.partition('::')[0]}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured[report.nodeid] += report.duration
        if report.failed:
            self._failed += 1
            self._line.clear()
            self._config.get_terminal_writer().line(f"failed: {report.nodeid}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._done += self._left.pop(nodeid, 0.0)

    def pytest_sessionfinish(self) -> None:
        self._line.clear()
        self._config.cache.set("durations", {**self._known, **self._measured})

    def __str__(self) -> str:
        elapsed = time.monotonic() - self._started
        pace = (elapsed + GUESS) / (self._done + GUESS * self._workers)  # seconds for a second of work
        minutes, seconds = divmod(round(pace * sum(self._left.values())), 60)
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._total - len(self._left)} of {self._total} tests{failed}, {minutes}:{seconds:02} left"
