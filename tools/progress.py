"""A line of progress: rewritten in a terminal, repeated from time to time in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO


class Line:
    """The line.

    Args:
        file: the file that it is printed to; None for the standard output.
        every: the least seconds between two lines in a log.
    """

    def __init__(self, file: TextIO | None = None, every: float = 30.0) -> None:
        self._file = file or sys.stdout
        self._every = 0.0 if self._file.isatty() else every
        self._next = 0.0

    def show(self, text: str) -> None:
        """Print ``text``; in a log only if ``every`` seconds have passed."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            width = shutil.get_terminal_size().columns - 1
            self._file.write(f"{text[:width]:{width}}\r" if self._file.isatty() else f"{text}\n")
            self._file.flush()

    def clear(self) -> None:
        """Erase the line in a terminal, before something else is printed."""
        if self._file.isatty():
            self.show("")
