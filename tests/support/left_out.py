"""A plugin that names the tests which an interrupt left without a result."""

from __future__ import annotations

import pytest

_collected: dict[str, None] = {}
_done: set[str] = set()


def pytest_collection_finish(session: pytest.Session) -> None:
    _collected.update(dict.fromkeys(item.nodeid for item in session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """With pytest-xdist it is other processes that collect."""
    _collected.update(dict.fromkeys(ids))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _done.add(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    left = [name for name in _collected if name not in _done]
    if exitstatus == pytest.ExitCode.INTERRUPTED and left:
        terminalreporter.section(f"{len(left)} tests left out")
        for name in left:
            terminalreporter.write_line(name)
