"""Interrupts that wait until what was timed is saved."""

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
    if len(_waiting) > 1:  # somebody is impatient
        raise KeyboardInterrupt


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Let an interrupt wait for the end of this, or for :func:`let_in`; a second one waits for nothing."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
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
    """Be interrupted at once, also inside of :func:`postponed`: what is lost then is dealt with around this."""
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
