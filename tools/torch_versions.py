"""Test runs with each version of torch. Only the standard library is used, since nothing else is installed."""

from __future__ import annotations

import argparse
import csv
import datetime
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import suite
from environment import RELEASES, ROOT, Release, interpreters, python_with, release

RESULTS = ROOT / "perf" / "results" / "versions.csv"
_DISTRIBUTIONS = """
import platform
from importlib import metadata
for name in ("torch", "triton"):
    try:
        print(metadata.version(name))
    except metadata.PackageNotFoundError:
        print("none")
print(platform.python_version())
"""


class Outcome(NamedTuple):
    """The result of the tests with one version of torch, a row of the table."""

    torch: str
    triton: str
    python: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: int = 0
    remark: str = ""  # the first failure, or why nothing ran; also if the version is not in the table

    @property
    def is_good(self) -> bool:
        """True if tests ran, and none failed."""
        return self.passed > 0 and not self.failed


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse ``arguments``. ``--help`` and mistakes end the program."""
    table = ", ".join(f"{r.torch} (Python {r.python})" for r in RELEASES)
    parser = argparse.ArgumentParser(
        prog="tools/versions",
        description="Run, with each version of torch, a few cases of each test that depends on the version: compiled steps, "
        "graphs, checkpoints, Triton's kernels, private names of torch. The versions are the table's and the newest on the "
        f"package index, if that is newer. The table has {table}.",
        epilog="Each version has a virtual environment, .venv-test-VERSION, which the first run makes; with torch for CUDA, "
        "from PyPI, one takes about 5 GB. Pythons are found on PATH and among pyenv's. The exit status is 1 if tests "
        "failed or could not run with any of the versions.",
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="such as 2.14 or 2.14.1; all by default")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="a Python to use; may be repeated")
    parser.add_argument("--record", action="store_true", help="add the results to perf/results/versions.csv")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Test with each requested version, and print a table. Return the exit status."""
    options = parse(arguments)
    try:
        pythons = interpreters(options.python)
        releases = chosen(options.versions, on_index(pythons[max(pythons, key=_numbers)]))
    except ValueError as error:
        print(f"tools/versions: {error}", file=sys.stderr)
        return 2
    if missing := sorted({r.python for r in releases} - pythons.keys(), key=_numbers):
        print(f"not found: Python {', '.join(missing)}; --python names its path", flush=True)
    commit, outcomes = revision(), []
    for wanted in releases:
        outcomes.append(outcome := tested(wanted, pythons))
        if options.record and outcome.passed + outcome.failed:
            record(outcome, commit)
    print(f"\n{table(outcomes)}")
    return int(not all(outcome.is_good for outcome in outcomes))


def on_index(python: str) -> list[str]:
    """Return the versions of torch in the package index for ``python``, the newest first. Warn if it cannot be reached."""
    ask = [python, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    done = subprocess.run(ask, capture_output=True, text=True)
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if listed is None:
        print(f"the package index could not be searched for a newer torch: {done.stderr.strip()[-200:]}", file=sys.stderr)
        return []
    return list(dict.fromkeys(version.partition("+")[0] for version in listed[1].split(", ")))


def chosen(requested: Sequence[str], available: Sequence[str]) -> list[Release]:
    """Return the ``requested`` versions, or the table's and the newest of ``available`` if it is newer.

    Raises:
        ValueError: neither the table nor the index has one.
    """
    known = [r.torch for r in RELEASES]
    if not requested:
        newer = [version for version in available[:1] if _numbers(version) > _numbers(known[-1])]
        return [*map(release, [*known, *newer])]
    matches = {text: [v for v in (*known, *available) if v == text or v.startswith(f"{text}.")] for text in requested}
    if unknown := [text for text, versions in matches.items() if not versions]:
        raise ValueError(f"neither the table ({', '.join(known)}) nor the package index has a torch {', '.join(unknown)}")
    return [release(versions[0]) for versions in matches.values()]


def tested(wanted: Release, pythons: Mapping[str, str]) -> Outcome:
    """Make an environment with one version, and run a few cases of each test in it."""
    unknown = "" if wanted in RELEASES else "not in the table"
    if wanted.python not in pythons:
        return Outcome(wanted.torch, "", wanted.python, remark=f"did not run: no Python {wanted.python}")
    print(f"\ntorch {wanted.torch}", flush=True)
    started = time.monotonic()
    try:
        python = python_with("test", wanted.torch, pythons[wanted.python])
    except SystemExit as error:
        print(error, file=sys.stderr)
        return Outcome(wanted.torch, "", wanted.python, remark=_joined(unknown, "did not run: it could not be installed"))
    versions = subprocess.run([python, "-c", _DISTRIBUTIONS], capture_output=True, text=True, check=True).stdout.split()
    report = ROOT / ".pytest_cache" / f"torch-{wanted.torch}.xml"
    report.unlink(missing_ok=True)
    options = [f"--junitxml={report}", "--override-ini=junit_family=xunit1"]
    status = suite.run(python, [suite.pytest("--quick", *options, *suite.SENSITIVE)])
    seconds = round(time.monotonic() - started)
    if not report.exists():
        return Outcome(*versions, seconds=seconds, remark=_joined(unknown, f"did not run: pytest's status is {status}"))
    passed, failed, skipped, first = counted(report)
    return Outcome(*versions, passed, failed, skipped, seconds, _joined(unknown, first))


def _joined(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


def counted(report: Path) -> tuple[int, int, int, str]:
    """Return the numbers of passed, failed and skipped tests in pytest's report, and the first failure with its error."""
    cases = [*ElementTree.parse(report).iter("testcase")]
    failures = {case: child for case in cases for child in case if child.tag in ("failure", "error")}
    skipped = sum(case.find("skipped") is not None for case in cases)
    first = next((f"{_name(case)}: {child.get('message', '').splitlines()[0]}" for case, child in failures.items()), "")
    return len(cases) - len(failures) - skipped, len(failures), skipped, first


def _name(case: ElementTree.Element) -> str:
    """Return a test's name for pytest's command line."""
    file = case.get("file", "")
    classes = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join(filter(None, (file, classes.replace(".", "::"), case.get("name"))))


def table(outcomes: Iterable[Outcome]) -> str:
    """Return ``outcomes`` in aligned columns, with the remarks in lines below."""
    head = Outcome._fields[:-1]
    rows = [head, *(tuple(map(str, outcome[:-1])) for outcome in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]).rstrip()
        for row in rows
    ]
    remarks = [f"{outcome.torch}: {outcome.remark}" for outcome in outcomes if outcome.remark]
    return "\n".join([*lines, *remarks])


def record(outcome: Outcome, commit: str) -> None:
    """Append ``outcome`` to the file of results."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row = {**outcome._asdict(), "commit": commit, "date": now}
    columns = ["torch", "triton", "python", "passed", "failed", "skipped", "commit", "date"]
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def revision() -> str:
    """Return the short hash of the checkout, with ``-dirty`` if any file but the results differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!perf/results")
        return git("rev-parse", "--short", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _numbers(version: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", version))]
