"""A line that says what is going on: in a terminal it is rewritten, in a log there is another one from time to time."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO


class Line:
    """The line.

    Args:
        file: where it is printed; the standard output if it is None.
        every: so many seconds at least are between two lines in a log.
    """

    def __init__(self, file: TextIO | None = None, every: float = 30.0) -> None:
        self._file = file or sys.stdout
        self._every = 0.0 if self._file.isatty() else every
        self._next = 0.0

    def show(self, text: str) -> None:
        """Say ``text``, in a log if it is time for that."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            width = shutil.get_terminal_size().columns - 1
            self._file.write(f"{text[:width]:{width}}\r" if self._file.isatty() else f"{text}\n")
            self._file.flush()

    def clear(self) -> None:
        """Take the line from a terminal, before something else is printed."""
        if self._file.isatty():
            self.show("")
