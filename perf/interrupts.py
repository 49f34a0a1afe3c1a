"""Interrupts that wait until measurements are saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_waiting: list[int] = []
"""Interrupts that came while they were postponed."""


def _wait(number: int, frame: FrameType | None) -> None:
    _waiting.append(number)
    if len(_waiting) > 1:  # the user insists
        raise KeyboardInterrupt


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Delay an interrupt until the end of the block, or until :func:`let_in`. A second one is not delayed."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets interrupts
        yield
        return
    before = signal.signal(signal.SIGINT, _wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        interrupted = bool(_waiting)
        _waiting.clear()
    if interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def let_in() -> Iterator[None]:
    """Allow interrupts at once in the block, also inside of :func:`postponed`: the caller handles what is lost."""
    if signal.getsignal(signal.SIGINT) is not _wait or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _waiting:
            _waiting.clear()
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, _wait)
