"""Commands that run one after another, each until a time that was set before, even if others fail."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perf import STARTED

ROOT = Path(__file__).resolve().parent.parent
GRACE = 20.0
"""Seconds between the interrupt of a late command and its end, in which it writes its results."""
INTERRUPTED = "interrupted"
"""The failure of a part if the user interrupted the whole."""

LEFT = "LEFT"
"""The word of a command that stands for the seconds until its interrupt."""


class Deadline:
    """The end of a command's time. A piece may begin if it would end before, were it as long as the longest so far."""

    def __init__(self, seconds: float = math.inf, started: float = STARTED) -> None:
        self._end = started + seconds
        self._longest = 0.0

    def is_over(self) -> bool:
        """Return whether no time is left."""
        return time.monotonic() > self._end

    def allows_another(self) -> bool:
        """Return whether another piece may begin."""
        return time.monotonic() + self._longest <= self._end

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Time a piece, which runs inside. A piece that fails does not count."""
        started = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - started)


@dataclass(frozen=True)
class Part:
    """Arguments of Python, and the seconds they may take, ``GRACE`` included. The name is by default the command.

    ``shows_fault``: it demonstrates a fault, so its failure is no failure of the whole.
    """

    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    shows_fault: bool = False

    def __str__(self) -> str:
        return self.name or " ".join(self.command)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part. ``failure`` is empty if it succeeded."""

    part: Part
    seconds: float
    failure: str
    printed: str

    def __str__(self) -> str:
        return f"{self.failure or 'succeeded':<15} {self.seconds:5.0f} s of {self.part.seconds:.0f}  {self.part}"


def run(parts: Sequence[Part], log: Path, started: float, grace: float = GRACE) -> Iterator[Outcome]:
    """Run the next of ``parts`` for each outcome that is requested, and append their output to ``log``.

    A part may use the time that earlier parts left, but none of later ones. An interrupt goes to the running part, and no
    other part begins.

    Args:
        parts: to run in this order.
        log: the file.
        started: the beginning of the first part's time, by ``time.monotonic``.
        grace: see ``GRACE``.
    """
    # Commands in a shell's background ignore interrupts, and the parts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = started
    for part in parts:
        end += part.seconds
        outcome = _run(part, log, end, grace)
        yield outcome
        if outcome.failure == INTERRUPTED:
            return


def _run(part: Part, log: Path, end: float, grace: float) -> Outcome:
    started = time.monotonic()
    limit = max(0.0, end - grace - started)
    command = [f"{limit:.0f}" if word == LEFT else word for word in part.command]
    with log.open("a") as output:
        print("$ python", *command, file=output, flush=True)
        printed_before = output.tell()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | part.environment | {"PYTHONPATH": _path(part)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(limit)
        failure = f"exit status {code}" if code else ""
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        failure = "out of time" if isinstance(error, subprocess.TimeoutExpired) else INTERRUPTED
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(end, time.monotonic() + grace) - time.monotonic()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
        process.wait()
    printed = log.read_bytes()[printed_before:].decode(errors="replace")
    return Outcome(part, time.monotonic() - started, failure, printed)


def _path(part: Part) -> str:
    """Return the import path of a part, with this checkout first."""
    return os.pathsep.join(filter(None, [str(ROOT), part.environment.get("PYTHONPATH", os.getenv("PYTHONPATH", ""))]))
