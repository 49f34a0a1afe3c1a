"""Runs commands one after another, each until a time that was set before, whatever becomes of it."""

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
"""Seconds between the interrupt of a command that is late, for it to write what it has, and its end."""
INTERRUPTED = "interrupted"
"""The failure of a part where somebody interrupted the whole."""

LEFT = "LEFT"
"""In a command: the seconds that it has until it is interrupted."""


class Deadline:
    """The end of a command's time. Another piece of it may begin if one as long as the longest would end before."""

    def __init__(self, seconds: float = math.inf, started: float = STARTED) -> None:
        self._end = started + seconds
        self._longest = 0.0

    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() > self._end

    def allows_another(self) -> bool:
        """Whether another piece may begin."""
        return time.monotonic() + self._longest <= self._end

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Count a piece, which happens inside; one that fails early says nothing about others."""
        begun = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - begun)


@dataclass(frozen=True)
class Part:
    """A command of Python's and the seconds it may take, ``GRACE`` among them; by default it is its own name.

    ``shows_fault`` is whether it is there to show a fault, so that its failure is none of the whole.
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
    """What became of a part; ``failure`` is empty if there was none."""

    part: Part
    seconds: float
    failure: str
    printed: str

    def __str__(self) -> str:
        return f"{self.failure or 'succeeded':<15} {self.seconds:5.0f} s of {self.part.seconds:.0f}  {self.part}"


def run(parts: Sequence[Part], log: Path, started: float, grace: float = GRACE) -> Iterator[Outcome]:
    """Run ``parts``, one for each outcome that is asked for, and append what they print to ``log``.

    A part may use what the parts before it left of their time; it never takes time from those behind it. An interrupt is
    handed on to the part that runs, and no other part begins.

    Args:
        parts: to run in this order.
        log: the file.
        started: when the time of the first part began, by ``time.monotonic``.
        grace: see ``GRACE``.
    """
    # A shell has commands in its background ignore interrupts, and they would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = started
    for part in parts:
        end += part.seconds
        outcome = _run(part, log, end, grace)
        yield outcome
        if outcome.failure == INTERRUPTED:
            return


def _run(part: Part, log: Path, end: float, grace: float) -> Outcome:
    begun = time.monotonic()
    limit = max(0.0, end - grace - begun)
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
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.wait()
    printed = log.read_bytes()[printed_before:].decode(errors="replace")
    return Outcome(part, time.monotonic() - begun, failure, printed)


def _path(part: Part) -> str:
    """This checkout, before whatever else the part may import from."""
    return os.pathsep.join(filter(None, [str(ROOT), part.environment.get("PYTHONPATH", os.getenv("PYTHONPATH", ""))]))
